"""A low-rank adapter in an LM (LoRA with peft), and the LM saved with it."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from lincorr_lightning.errors import ConfigError, LanguageModelError, require
from lincorr_lightning.io import atomic_folder
from lincorr_lightning.lm.finder import adapter_layers, target_layers
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import trained_in_half_precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class AdapterSettings:
    """A low-rank adapter (LoRA)."""

    rank: int = 8
    """Rank of the update of each weight matrix."""
    alpha: float = 16.0
    """Scale of the update, which is multiplied by alpha / rank."""
    target_modules: list[str] | None = None
    """Names of the adapted linear layers, ``[q_proj]``; null: all but the head."""
    seed: int = 0
    """Seed of the initial weights."""

    def __post_init__(self) -> None:
        require("model.adapter.rank", self.rank, above=0)
        require("model.adapter.alpha", self.alpha, above=0)
        if self.target_modules is not None and not self.target_modules:
            raise ConfigError("model.adapter.target_modules is empty; null takes all layers.")


def add_adapter(model: "PreTrainedModel", settings: AdapterSettings) -> None:
    """Add an adapter to an LM, in place, and freeze all other weights."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers.pytorch_utils import Conv1D

    layers = target_layers(model, settings.target_modules)
    # By the LM's configuration, peft replaces the targets of some types (mixtures of experts) by
    # others, which have these names in older checkpoints. A holder has no configuration.
    holder = nn.ModuleDict({"lm": model})
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]
        target_modules=[f"lm.{name}" for name in layers],
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),
    )
    model.requires_grad_(False)
    with torch.random.fork_rng([]):  # peft draws the weights from torch's global generator
        torch.default_generator.manual_seed(settings.seed)
        inject_adapter_in_model(config, holder)
    if changed := sorted(adapter_layers(model).keys() ^ layers.keys()):
        raise LanguageModelError(
            f"LoRA is not possible: peft adapts other layers of {type(model).__name__} than the "
            f"target modules ({changed[0]}). Set model.method to full, or name other layers."
        )
    # Half-precision adapters would round small updates away.
    for parameter in trained_in_half_precision(model):
        parameter.data = parameter.data.float()


def save_merged(lm: LanguageModel, folder: Path) -> None:
    """Save an LM and its tokenizer as a Hugging Face checkpoint, adapters merged into the weights.

    Raises:
        LanguageModelError: The saved LM has other logits, so that it is not kept.
    """
    model = copy.deepcopy(lm.model)
    for name, layer in adapter_layers(model).items():
        layer.merge()
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], layer.get_base_layer())
    # Otherwise transformers takes the LM for an adapter, and saves that alone.
    model._hf_peft_config_loaded = False
    with atomic_folder(folder, ()) as new:
        model.save_pretrained(new)
        lm.tokenizer.save_pretrained(new)
        del model
        config = replace(
            lm.config,
            name_or_path=str(new),
            compile=False,
            tokenizer=None,
            revision=None,
            adapter=None,
        )
        saved = LanguageModel(config)
        saved.load().to(lm.model.device)
        if not lm.has_logits_of(saved):
            raise LanguageModelError(
                f"the trained LM ({type(lm.model).__name__}) cannot be saved: read again, it has "
                "other logits. Set model.save_model to false."
            )
