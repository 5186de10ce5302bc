"""Any causal LM by folder, hub id, or the packaged tiny world; logits at the last position."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lincorr_lightning.lm.config import LMConfig
    from lincorr_lightning.lm.language_model import LanguageModel
    from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

__all__ = ["LMConfig", "LanguageModel", "sample_subjects", "usable_strings"]

# Imported on first use, so that a tokenizer can be read without torch.
_MODULES = {
    "LMConfig": "config",
    "LanguageModel": "language_model",
    "sample_subjects": "vocabulary",
    "usable_strings": "vocabulary",
}
__dir__ = __all__.copy  # for completion


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
