"""What is trained of an LM: all weights, or an adapter in it (LoRA with peft)."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lincorr_lightning.errors import ConfigError, LanguageModelError, require, require_one_of
from lincorr_lightning.io import atomic_folder
from lincorr_lightning.lm.finder import adapter_layers, target_layers
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import HALF_PRECISIONS, dtype_name, trained_in_half_precision
from lincorr_lightning.study import LMStudy, as_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class AdapterSettings:
    """A low-rank adapter (LoRA).

    Attributes:
        rank: Rank of the update of each weight matrix.
        alpha: Scale of the update, which is multiplied by alpha / rank.
        target_modules: Names of the adapted linear layers, ``[q_proj]``; null: all but the head.
        seed: Seed of the initial weights.
    """

    rank: int = 8
    alpha: float = 16.0
    target_modules: list[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require("model.adapter.rank", self.rank, above=0)
        require("model.adapter.alpha", self.alpha, above=0)
        if self.target_modules is not None and not self.target_modules:
            raise ConfigError("model.adapter.target_modules is empty; null takes all layers.")


class TrainedLMStudy(LMStudy):
    """A study that trains an LM by AdamW: all of its weights, or adapters."""

    trains_lm = True
    float32_only = False

    def __init__(
        self,
        lm: Any,
        method: str,
        learning_rate: float,
        adapter: Any,
        weight_decay: float = 0.0,
        prefix: str = "",
    ) -> None:
        super().__init__(lm, prefix)
        require_one_of("model.method", method, ("full", "lora"))
        require("model.learning_rate", learning_rate, at_least=0)
        require("model.weight_decay", weight_decay, at_least=0)
        self.method, self.learning_rate, self.weight_decay = method, learning_rate, weight_decay
        self.adapter_settings = as_settings(AdapterSettings, adapter)

    def setup(self, stage: str) -> None:
        """Refuse to train in half precision, before the LM is loaded."""
        self._require_float32()
        super().setup(stage)

    def prepare_lm(self) -> None:
        """Refuse an LM whose own dtype, which may be known only now, is a half precision."""
        self._require_float32()

    def train_lm(self) -> None:
        """Choose all weights of the LM to be trained, or add an adapter to it."""
        if self.method == "lora":
            add_adapter(self.lm.model, self.adapter_settings)
        else:
            self.lm.model.requires_grad_(True)

    def _require_float32(self) -> None:
        precision = "" if self._trainer is None else str(self._trainer.precision)
        is_half = self.method == "full" and self.lm.dtype in HALF_PRECISIONS
        if is_half or precision in ("bf16-true", "16-true"):
            raise ConfigError(
                f"the LM's weights are in {dtype_name(self.lm.dtype)}, with trainer.precision "
                f"{precision}: half precision rounds away updates of a small learning rate such as "
                "5e-6. Set model.lm.dtype to float32 and trainer.precision to 32-true or "
                "bf16-mixed; with model.method lora, model.lm.dtype may be bfloat16."
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over the weights that are trained."""
        # Lightning's gradient scaler for float16 does not support the fused one.
        return torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
            fused=self.trainer.precision != "16-mixed",
        )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Replace the parameter numbers in the optimizer states by names.

        The numbers count the trained parameters on one rank, but all parameters where the LM is
        sharded; names are the same in both.
        """
        super().on_save_checkpoint(checkpoint)
        names = [name for name, p in self.named_parameters() if p.requires_grad]
        for state in checkpoint.get("optimizer_states", []):
            for group in state.get("param_groups", []):  # of a sharded LM, rank 0 alone has states
                by_number = dict(zip(group["params"], names, strict=True))
                group["params"] = list(names)
                state["state"] = {by_number[number]: one for number, one in state["state"].items()}


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
    # peft draws the weights from torch's global generator, whose state is restored afterwards.
    stream = torch.get_rng_state()
    torch.default_generator.manual_seed(settings.seed)
    try:
        inject_adapter_in_model(config, holder)
    finally:
        torch.set_rng_state(stream)
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
        own: Any = dict.fromkeys(("tokenizer", "revision", "adapter"))
        saved = LanguageModel(replace(lm.config, name_or_path=str(new), compile=False, **own))
        saved.load().to(lm.model.device)
        if not lm.has_logits_of(saved):
            raise LanguageModelError(
                f"the trained LM ({type(lm.model).__name__}) cannot be saved: read again, it has "
                "other logits. Set model.save_model to false."
            )
