"""LoRA on a whole LM, by peft: what is trained, kept and merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import atomic_folder
from lincorr_lightning.lm.linear_layers import target_layers

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from lincorr_lightning.lm.language_model import LanguageModel

_ADAPTER = "default"


@dataclass(frozen=True)
class AdapterSettings:
    """A low-rank adapter (LoRA).

    Attributes:
        rank: Rank of the update of each matrix.
        alpha: The update is scaled by alpha / rank.
        target_modules: Names of the linear layers it changes, such as ``[q_proj, v_proj]``; null
            takes all but the head.
        seed: Of the initial weights.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: list[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no adapter can have."""
        for name, value in (("rank", self.rank), ("alpha", self.alpha)):
            if value <= 0:
                raise ConfigError(f"model.adapter.{name} is {value}; it must be greater than 0.")
        if self.target_modules is not None and not self.target_modules:
            raise ConfigError("model.adapter.target_modules is empty; null takes all layers.")

    def to_peft(self) -> LoraConfig:
        """The same for peft."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]
            target_modules=self.target_modules or "all-linear",
            task_type="CAUSAL_LM",
        )


def add_adapter(model: PreTrainedModel, settings: AdapterSettings) -> None:
    """Put an adapter into an LM, in place; only the adapter is trained from then on.

    Args:
        model: A Hugging Face causal LM.
        settings: Of the adapter.

    Raises:
        LanguageModelError: It has no such layers; the message names those it has.
    """
    from peft import inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    layers = target_layers(model, settings.target_modules)
    config = settings.to_peft()
    config.target_modules = list(layers)
    config.fan_in_fan_out = any(isinstance(layer, Conv1D) for layer in layers.values())
    model.requires_grad_(False)
    # peft draws the weights from torch's own stream, which is to go on as if nothing had been.
    stream = torch.get_rng_state()
    torch.default_generator.manual_seed(settings.seed)
    try:
        inject_adapter_in_model(config, model, adapter_name=_ADAPTER)
    finally:
        torch.set_rng_state(stream)


def adapter_keys(module: L.LightningModule) -> set[str]:
    """Names of the weights that are trained."""
    return {name for name, p in module.named_parameters() if p.requires_grad}


def name_states(checkpoint: dict[str, Any], module: L.LightningModule) -> None:
    """Let the states of an optimizer over all that is trained be found by the weights' names.

    Their numbers count what is trained in one process, but all weights where the LM is in pieces.

    Args:
        checkpoint: As Lightning has it, on any process.
        module: Has been trained.
    """
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    for told in checkpoint.get("optimizer_states", []):
        # Of an LM in pieces, the first process alone has them.
        for group in told.get("param_groups", []):
            by_number = dict(zip(group["params"], names, strict=True))
            group["params"] = names
            told["state"] = {by_number[number]: state for number, state in told["state"].items()}


def check_resumable(
    checkpoint: Mapping[str, Any], settings: Mapping[str, Any], fingerprint: Mapping[str, str]
) -> None:
    """Refuse a checkpoint whose weights mean something else in this run.

    Args:
        checkpoint: Of a source fine-tune.
        settings: This run's.
        fingerprint: Of the LM before training.

    Raises:
        ConfigError: The checkpoint is of another study, LM, protocol, method or adapter.
    """
    stored, lm = checkpoint.get("hyper_parameters", {}), checkpoint.get("lm", {})
    if "protocol" not in stored or "weights" not in lm:
        raise ConfigError("the checkpoint is none of a source fine-tune. Pass one that is.")
    for name in ("protocol", "method", "adapter"):
        if name == "adapter" and settings["method"] == "full":
            continue
        if stored[name] != settings[name]:
            raise ConfigError(
                f"the checkpoint was trained with model.{name} {stored[name]}, this run has "
                f"{settings[name]}. Use the settings of the run that wrote it (its config.yaml), "
                "or begin anew."
            )
    other = [part for part, ours in fingerprint.items() if lm[part] != ours]
    if other:
        raise ConfigError(
            f"the checkpoint was trained from {lm['name_or_path']}, whose {other[0]} differs from "
            "that of this run's LM. Pass the LM it was trained from as model.lm.name_or_path, or "
            "begin anew."
        )


def save_merged(lm: LanguageModel, folder: Path) -> None:
    """Write an LM as a Hugging Face checkpoint, its adapters merged into its weights.

    Args:
        lm: The LM; it stays as it is.
        folder: Where to; the tokenizer goes there as well.

    Raises:
        OutputError: It cannot be written.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = copy.deepcopy(lm.model)
    for name, part in list(model.named_modules()):
        if isinstance(part, BaseTunerLayer):
            part.merge()
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], part.get_base_layer())
    # transformers would take an LM that peft has touched for an adapter, and write that alone.
    model._hf_peft_config_loaded = False
    with atomic_folder(folder, ()) as new:
        model.save_pretrained(new)
        lm.tokenizer.save_pretrained(new)
