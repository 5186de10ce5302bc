"""What watches a run: Lightning callbacks, each usable on any LightningModule."""

from lincorr_lightning.callbacks.prediction_writer import PredictionWriter

__all__ = ["PredictionWriter"]
