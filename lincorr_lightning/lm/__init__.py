"""Any causal LM by folder, hub id, or the packaged tiny world; logits at the last position."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lincorr_lightning.lm.config import LMConfig
    from lincorr_lightning.lm.finder import causal_lm_of
    from lincorr_lightning.lm.language_model import LanguageModel
    from lincorr_lightning.lm.modes import evaluating
    from lincorr_lightning.lm.vocabulary import sample_subjects, sample_up_to, usable_strings

__all__ = [
    "LMConfig",
    "LanguageModel",
    "causal_lm_of",
    "evaluating",
    "sample_subjects",
    "sample_up_to",
    "usable_strings",
]

# Imported on first use, so that a tokenizer can be read without torch.
_MODULES = {
    "LMConfig": "config",
    "LanguageModel": "language_model",
    "causal_lm_of": "finder",
    "evaluating": "modes",
    "sample_subjects": "vocabulary",
    "sample_up_to": "vocabulary",
    "usable_strings": "vocabulary",
}
__dir__ = __all__.copy  # for completion


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
