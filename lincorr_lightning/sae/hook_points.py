"""Hook points of a transformer: where SAEs read and write, and the features of an SAE there."""

import re
from dataclasses import dataclass
from typing import Literal, Self, get_args

from lincorr_lightning.errors import SparseAutoencoderError

HookKind = Literal["residual", "mlp_out", "attention_out"]
KINDS: tuple[HookKind, ...] = get_args(HookKind)
KIND_NAMES: dict[HookKind, str] = {
    "residual": "residual stream",
    "mlp_out": "MLP",
    "attention_out": "attention",
}
"""Names of the kinds on figures and screens."""


@dataclass(frozen=True, order=True)
class HookPoint:
    """A point of the transformer where an SAE reads and writes activations.

    Layers are counted from 0. The kinds are ``residual``, the residual stream after the layer, and
    ``mlp_out`` and ``attention_out``, what the layer's MLP or attention adds to it.
    """

    layer: int
    kind: HookKind

    def __post_init__(self) -> None:
        if self.layer < 0 or self.kind not in KINDS:
            raise SparseAutoencoderError(
                f"there is no {self.kind} of layer {self.layer}: layers are counted from 0, and "
                f"the kinds of hook points are {', '.join(KINDS)}."
            )

    @property
    def id(self) -> str:
        """Name in files, as ``residual.3``."""
        return f"{self.kind}.{self.layer}"

    @classmethod
    def named(cls, text: str) -> Self | None:
        """Return the hook point that has this `id`, or None if the text is no such id."""
        match = re.fullmatch(r"(\w+)\.(\d+)", text)
        if match is None or match[1] not in KINDS:
            return None
        return cls(int(match[2]), match[1])  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.kind} of layer {self.layer}"


@dataclass(frozen=True, order=True)
class Feature:
    """A feature of the SAE at a hook point; its index is counted from 0."""

    hook_point: HookPoint
    index: int

    @property
    def id(self) -> str:
        """Name in files, as ``residual.3.17``."""
        return f"{self.hook_point.id}.{self.index}"

    @classmethod
    def named(cls, text: str) -> Self:
        """Return the feature that has this `id`."""
        name, _, index = text.strip().rpartition(".")
        hook_point = HookPoint.named(name)
        if hook_point is None or not index.isdecimal():
            raise SparseAutoencoderError(
                f"{text!r} names no feature: write its kind of hook point ({', '.join(KINDS)}), "
                "layer and index, such as residual.1.37."
            )
        return cls(hook_point, int(index))
