"""Linear maps between domain logits: the artifact, and fitting it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lincorr_lightning.linear_map.artifact import LinearMap, fit_linear_maps

__all__ = ["LinearMap", "fit_linear_maps"]
__dir__ = __all__.copy  # for completion


def __getattr__(name: str) -> Any:
    if name in __all__:  # on first use, so that weights are shown without torch
        return getattr(importlib.import_module("lincorr_lightning.linear_map.artifact"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
