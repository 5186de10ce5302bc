"""Linear maps between domain logits: the artifact, and fitting it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lincorr_lightning.linear_map.artifact import LinearMap
    from lincorr_lightning.linear_map.fitting import fit_linear_map

__all__ = ["LinearMap", "fit_linear_map"]
# Imported on first use, so that weights are shown without torch.
_MODULES = {"LinearMap": "artifact", "fit_linear_map": "fitting"}
__dir__ = __all__.copy  # for completion


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
