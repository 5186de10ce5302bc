"""Search for the causal LM inside any LightningModule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.head import head_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def causal_lm_of(module: nn.Module, name: str | None = None) -> PreTrainedModel:
    """Return the one Hugging Face causal LM in a module.

    The LM may be at any depth, also inside a `LanguageModel` or a peft wrapper, whose adapters are
    layers of the LM.

    Args:
        module: A LightningModule, or any module.
        name: Name of the LM in ``module.named_modules()``, if there are several.

    Raises:
        LanguageModelError: There is no causal LM, or several and no `name`; or peft prepends a
            learned prompt, which the LM alone does not see.
    """
    from transformers import PreTrainedModel

    searched = module
    if name is not None:
        searched = dict(module.named_modules()).get(name, nn.Module())
    found: dict[str, PreTrainedModel] = {}
    for path, part in searched.named_modules():
        peft_config = getattr(part, "active_peft_config", None)
        if getattr(peft_config, "is_prompt_learning", False):
            raise LanguageModelError(
                f"{type(module).__name__} holds a peft model that prepends a learned prompt "
                f"({type(peft_config).__name__}), which the LM alone does not see. Use an adapter "
                "that changes layers, such as LoRA."
            )
        inside_found = any(path.startswith(f"{outer}.") or outer == "" for outer in found)
        if isinstance(part, PreTrainedModel) and not inside_found and _predicts(part):
            found[path] = part
    if len(found) == 1:
        return next(iter(found.values()))
    where = type(module).__name__ if name is None else f"{name!r} of {type(module).__name__}"
    if not found:
        raise LanguageModelError(
            f"there is no Hugging Face causal LM in {where}. Keep the transformers module (or a "
            "LanguageModel) as an attribute of it."
        )
    listed = ", ".join(f"{path} ({type(part).__name__})" for path, part in found.items())
    raise LanguageModelError(f"there are several LMs in {where}: {listed}. Pass the name of one.")


def _predicts(model: PreTrainedModel) -> bool:
    if getattr(model.config, "is_encoder_decoder", False):
        return False
    return model.can_generate() and head_of(model) is not None
