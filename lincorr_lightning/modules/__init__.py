"""The studies: one LightningModule each."""

from lincorr_lightning.modules.edit_forecast import EditForecast
from lincorr_lightning.modules.linear_probe import LinearProbe
from lincorr_lightning.modules.pretraining import Pretraining
from lincorr_lightning.modules.source_finetune import SourceFinetune

__all__ = ["EditForecast", "LinearProbe", "Pretraining", "SourceFinetune"]
