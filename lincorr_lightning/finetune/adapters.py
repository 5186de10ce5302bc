"""LoRA on a whole LM with peft: adding, saving and merging an adapter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.io import atomic_folder
from lincorr_lightning.lm.finder import target_layers
from lincorr_lightning.lm.modes import HALF_PRECISIONS, dtype_name, trained_in_half_precision

if TYPE_CHECKING:
    import lightning as L
    from transformers import PreTrainedModel

    from lincorr_lightning.lm.language_model import LanguageModel


@dataclass(frozen=True)
class AdapterSettings:
    """A low-rank adapter (LoRA).

    Attributes:
        rank: Rank of the update of each weight matrix.
        alpha: Scale of the update, which is multiplied by alpha / rank.
        target_modules: Names of the linear layers with an adapter, such as ``[q_proj, v_proj]``;
            null takes all but the head.
        seed: Seed of the initial weights.

    Raises:
        ConfigError: A value is out of range.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: list[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        require("model.adapter.rank", self.rank, above=0)
        require("model.adapter.alpha", self.alpha, above=0)
        if self.target_modules is not None and not self.target_modules:
            raise ConfigError("model.adapter.target_modules is empty; null takes all layers.")


def add_adapter(model: PreTrainedModel, settings: AdapterSettings) -> None:
    """Add an adapter to an LM, in place, and freeze all other weights.

    Raises:
        LanguageModelError: The LM has no such layers; the message names those it has.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    layers = target_layers(model, settings.target_modules)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=list(layers),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    model.requires_grad_(False)
    # peft draws the weights from torch's global generator, whose state is restored afterwards.
    stream = torch.get_rng_state()
    torch.default_generator.manual_seed(settings.seed)
    try:
        inject_adapter_in_model(config, model)
    finally:
        torch.set_rng_state(stream)
    # Half-precision adapters would round small updates away.
    for parameter in trained_in_half_precision(model):
        parameter.data = parameter.data.float()


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Disable the adapters of `add_adapter` inside a ``with`` block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def trained_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters that are trained."""
    return [name for name, p in module.named_parameters() if p.requires_grad]


def name_optimizer_states(checkpoint: dict[str, Any], names: Sequence[str]) -> None:
    """Replace the parameter numbers in a checkpoint's optimizer states by names, in place.

    The numbers count the trained parameters on one rank, but all parameters where the LM is
    sharded; names are the same in both.

    `names` are those of the trained parameters, in the optimizer's order.
    """
    for state in checkpoint.get("optimizer_states", []):
        # Of a sharded LM, rank 0 alone has states.
        for group in state.get("param_groups", []):
            by_number = dict(zip(group["params"], names, strict=True))
            group["params"] = list(names)
            state["state"] = {by_number[number]: one for number, one in state["state"].items()}


def check_resumable(
    checkpoint: Mapping[str, Any], settings: Mapping[str, Any], fingerprint: Mapping[str, str]
) -> None:
    """Refuse a checkpoint whose weights mean something else in this run.

    Raises:
        ConfigError: The checkpoint is of another study, LM, protocol, method or adapter.
    """
    stored, lm = checkpoint.get("hyper_parameters", {}), checkpoint.get("lm", {})
    if "protocol" not in stored or "weights" not in lm:
        raise ConfigError(
            "Not a SourceFinetune checkpoint. Pass one that `lincorr fit` wrote with this study."
        )
    for name in ("protocol", "method", "adapter"):
        if name == "adapter" and settings["method"] == "full":
            continue
        require_same_settings("model", {name: stored[name]}, settings)
    other = [part for part, ours in fingerprint.items() if lm[part] != ours]
    if other:
        raise ConfigError(
            f"the checkpoint was trained from {lm['name_or_path']}, whose {other[0]} differs from "
            "that of this run's LM. Pass the LM it was trained from as model.lm.name_or_path, or "
            "start a new run."
        )


def require_same_settings(
    section: str, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Refuse a checkpoint some of whose settings differ from those of this run.

    `section` is ``model`` or ``data``, for the message.
    """
    for name, value in stored.items():
        if value != settings[name]:
            raise ConfigError(
                f"the checkpoint was trained with {section}.{name} {value}, this run has "
                f"{settings[name]}. Use the settings of the run that wrote it (its config.yaml), "
                "or start a new run."
            )


def require_float32_training(lm: LanguageModel, method: str, trainer: L.Trainer | None) -> None:
    """Refuse to train half-precision weights, which round small updates away.

    `trainer` is None outside of a run.
    """
    dtype = dtype_name(lm.dtype)
    if method == "full" and lm.dtype in HALF_PRECISIONS:
        raise ConfigError(
            f"model.method is full, but the LM's weights are in {dtype}, which rounds away "
            "updates of a small learning rate such as 5e-6. Set model.lm.dtype to float32 "
            "(with trainer.precision bf16-mixed it computes in bfloat16), or model.method to "
            "lora."
        )
    precision = "" if trainer is None else str(trainer.precision)
    if precision in ("bf16-true", "16-true"):
        raise ConfigError(
            f"trainer.precision is {precision}, which rounds the trained weights and loses "
            "small updates. Set it to bf16-mixed or 32-true; with model.method lora, "
            "model.lm.dtype may be bfloat16."
        )


def save_merged(
    lm: LanguageModel, folder: Path, config: Mapping[str, object] | None = None
) -> None:
    """Save an LM and its tokenizer as a Hugging Face checkpoint, adapters merged into the weights.

    `config` has additional keys of its config.json.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(lm.model)
    for name, part in list(model.named_modules()):
        if isinstance(part, BaseTunerLayer):
            part.merge()
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], part.get_base_layer())
    # Otherwise transformers takes the LM for an adapter, and saves that alone.
    model._hf_peft_config_loaded = False
    model.config.update(dict(config or {}))
    with atomic_folder(folder, ()) as new:
        model.save_pretrained(new)
        lm.tokenizer.save_pretrained(new)
