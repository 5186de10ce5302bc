"""What watches a run: Lightning callbacks, each usable on any LightningModule."""

from lincorr_lightning.callbacks.feature_movement import FeatureMovement
from lincorr_lightning.callbacks.generalization import Generalization
from lincorr_lightning.callbacks.gradient_correlation import GradientCorrelation
from lincorr_lightning.callbacks.prediction_writer import PredictionWriter
from lincorr_lightning.callbacks.resilience import Resilience

__all__ = [
    "FeatureMovement",
    "Generalization",
    "GradientCorrelation",
    "PredictionWriter",
    "Resilience",
]
