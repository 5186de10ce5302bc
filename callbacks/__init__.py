"""Lightning callbacks that show what an LM comes to believe, for any LightningModule."""

from typing import TYPE_CHECKING, Any

from lincorr_lightning.callbacks.feature_movement import FeatureMovement
from lincorr_lightning.callbacks.forecast import Forecast
from lincorr_lightning.callbacks.generalization import Generalization
from lincorr_lightning.callbacks.gradient_correlation import GradientCorrelation
from lincorr_lightning.callbacks.intervention import Intervention
from lincorr_lightning.callbacks.prediction_writer import PredictionWriter
from lincorr_lightning.callbacks.resilience import Resilience
from lincorr_lightning.callbacks.token_geometry_monitor import TokenGeometryMonitor

if TYPE_CHECKING:
    from lincorr_lightning.callbacks.hugging_face import HuggingFaceCallback

__all__ = [
    "FeatureMovement",
    "Forecast",
    "Generalization",
    "GradientCorrelation",
    "HuggingFaceCallback",
    "Intervention",
    "PredictionWriter",
    "Resilience",
    "TokenGeometryMonitor",
]


def __getattr__(name: str) -> Any:
    if name == "HuggingFaceCallback":  # transformers' Trainer takes long to import
        from lincorr_lightning.callbacks.hugging_face import HuggingFaceCallback

        return HuggingFaceCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
