"""Lightning callbacks that show what an LM comes to believe, for any LightningModule."""

from lincorr_lightning.callbacks.agreement import Agreement
from lincorr_lightning.callbacks.feature_movement import FeatureMovement
from lincorr_lightning.callbacks.forecast import Forecast
from lincorr_lightning.callbacks.generalization import Generalization
from lincorr_lightning.callbacks.gradient_correlation import GradientCorrelation
from lincorr_lightning.callbacks.intervention import Intervention
from lincorr_lightning.callbacks.prediction_writer import PredictionWriter
from lincorr_lightning.callbacks.resilience import Resilience
from lincorr_lightning.callbacks.token_geometry_monitor import TokenGeometryMonitor

__all__ = [
    "Agreement",
    "FeatureMovement",
    "Forecast",
    "Generalization",
    "GradientCorrelation",
    "Intervention",
    "PredictionWriter",
    "Resilience",
    "TokenGeometryMonitor",
]
