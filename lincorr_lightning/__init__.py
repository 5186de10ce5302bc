"""Measure, watch and explain the linear correlation between kinds of knowledge in an LM."""

import importlib
import random
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from lincorr_lightning.api import correlate, forecast, score
    from lincorr_lightning.knowledge import Catalogue
    from lincorr_lightning.linear_map.artifact import LinearMap
    from lincorr_lightning.lm.language_model import LanguageModel
    from lincorr_lightning.results import SavedRun

__all__ = [
    "Catalogue",
    "LanguageModel",
    "LinearMap",
    "SavedRun",
    "__version__",
    "correlate",
    "forecast",
    "score",
]

# In an installed package, callbacks and configs are inside it; in a checkout, next to it.
if not _Path(__file__).with_name("callbacks").is_dir():
    __path__.append(str(_Path(__file__).resolve().parents[1]))

# Imported on first use: `import lincorr_lightning` and `lincorr --version` stay fast.
_MODULES = {
    "Catalogue": "knowledge",
    "LanguageModel": "lm",
    "LinearMap": "linear_map.artifact",
    "SavedRun": "results",
    **dict.fromkeys(("correlate", "forecast", "score"), "api"),
}
__dir__ = __all__.copy  # for completion


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        state = random.getstate()  # from which rich draws when it is first imported
        module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
        random.setstate(state)
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
