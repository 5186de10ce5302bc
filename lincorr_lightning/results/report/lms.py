"""Which LM a run was on, and how large it is."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lincorr_lightning.results.paper import paper_lm

_BUILT_IN = "tiny-world"
_SIZES = {
    "gpt2-medium": 355e6,
    "llama-3.2-1b": 1.24e9,
    "llama-3.2-3b": 3.21e9,
    "llama-3-8b": 8.03e9,
    "llama-3-8b-instruct": 8.03e9,
    "llama-3-70b": 70.6e9,
    "mistral-7b-v0.3": 7.25e9,
    "deepseek-r1-distill-qwen-7b": 7.62e9,
    "aya-expanse-8b": 8.03e9,
}
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
_MOST_HEADER = 100_000_000


@dataclass(frozen=True)
class LM:
    """A language model, as far as a run's folder tells.

    Attributes:
        name: Hub id or folder; what a run pre-trained is named by its folder.
        revision: Of a hub id; None for the main branch.
        dtype: Of its weights; None where it is not known.
        n_parameters: None where it is not known.
        guessed: Whether the size is only what the name says.
        fingerprint: Hashes of tokenizer, config and weights; empty where there are none.
    """

    name: str
    revision: str | None
    dtype: str | None
    n_parameters: float | None
    guessed: bool
    fingerprint: Mapping[str, str]

    @property
    def label(self) -> str:
        """Name and revision."""
        return self.name if self.revision is None else f"{self.name} @ {self.revision}"

    @property
    def short(self) -> str:
        """The last part of a hub id, the last two of a longer path."""
        parts = [part for part in re.split(r"[/\\]", self.name) if part]
        name = "/".join(parts[-1:] if len(parts) < 3 else parts[-2:]) or self.name
        return name if self.revision is None else f"{name} @ {self.revision}"

    @property
    def key(self) -> tuple[str, str | None]:
        """What tells it from others by name."""
        return self.name, self.revision

    @property
    def size(self) -> str:
        """How large it is, to be read."""
        if self.n_parameters is None:
            return "not known"
        return ("about " if self.guessed else "") + f"{short_size(self.n_parameters)} parameters"

    @property
    def order(self) -> tuple[float, str]:
        """Small ones first, those of unknown size last."""
        return (math.inf if self.n_parameters is None else self.n_parameters), self.name


def short_size(n_parameters: float) -> str:
    """A number of parameters in three digits.

    Example:
        >>> short_size(8.03e9), short_size(1_350_000)
        ('8.03B', '1.35M')
    """
    for sign, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n_parameters >= unit:
            return f"{n_parameters / unit:.3g}{sign}"
    return f"{n_parameters:.0f}"


def find_lm(
    results: Mapping[str, Any],
    config: Mapping[str, Any],
    linear_map: Mapping[str, Any],
    folder: Path,
) -> LM:
    """Find out about a run's LM.

    Args:
        results: What ``results.json`` says.
        config: What ``config.yaml`` says.
        linear_map: What ``linear_map/config.json`` says.
        folder: The run's.
    """
    settings = _part(results, "settings")
    asked = (
        _part(_part(_part(config, "model"), "init_args"), "lm")
        or _part(settings, "lm")
        or _part(_part(settings, "model"), "lm")
    )
    named = results.get("lm") or asked.get("name_or_path") or results.get("model") or folder
    name = str(named)
    own = results.get("n_parameters")
    size: float | None
    if isinstance(own, (int, float)) and not isinstance(own, bool):
        size, guessed = float(own), False
    else:
        size, guessed = find_size(name)
    fingerprint = (
        _part(_part(linear_map, "lm"), "fingerprint")
        or _part(settings, "fingerprint")
        or _part(settings, "lm_fingerprint")
    )
    revision, dtype = asked.get("revision"), fingerprint.get("dtype") or asked.get("dtype")
    return LM(
        name=name,
        revision=None if revision is None else str(revision),
        dtype=None if dtype is None else str(dtype),
        n_parameters=size,
        guessed=guessed,
        fingerprint={str(key): str(value) for key, value in fingerprint.items()},
    )


def find_size(name: str) -> tuple[float | None, bool]:
    """Parameters of an LM, without loading or downloading it.

    Args:
        name: Hub id, folder or the built-in LM's name.

    Returns:
        Their number, None where nothing tells it; and whether it is only what the name says.
    """
    if name == _BUILT_IN:
        folder = resources.files("lincorr_lightning.lm").joinpath("tiny_world")
        return _count(Path(str(folder))), False
    known = paper_lm(name)
    if known is not None:
        return _SIZES[known], False
    counted = _count(Path(name))
    if counted is not None:
        return counted, False
    said = re.findall(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)([kmb])(?![a-z0-9])", name.lower())
    return (float(said[-1][0]) * _UNITS[said[-1][1]], True) if said else (None, True)


def _count(folder: Path) -> float | None:
    """Add up the shapes that the headers of safetensors files tell."""
    total = 0
    try:
        for path in sorted(folder.glob("model*.safetensors")):
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > _MOST_HEADER:
                    return None
                header = json.loads(file.read(length))
            total += sum(
                math.prod(tensor["shape"])
                for key, tensor in header.items()
                if key != "__metadata__"
            )
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError):
        # It is only a size: a folder that is gone or damaged by now must not stop the page.
        return None
    return float(total) or None


def _part(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = mapping.get(key)
    return found if isinstance(found, Mapping) else {}
