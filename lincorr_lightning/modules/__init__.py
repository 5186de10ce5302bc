"""The studies: one LightningModule each."""

from lincorr_lightning.modules.linear_probe import LinearProbe
from lincorr_lightning.modules.pretraining import Pretraining

__all__ = ["LinearProbe", "Pretraining"]
