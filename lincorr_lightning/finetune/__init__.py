"""Source-knowledge fine-tune: edits, their training, outcomes and forecasts."""

from lincorr_lightning.finetune.batches import EditBatch, EditSchedule
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.forecast_module import EditForecast
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.finetune.sampling import Edit

__all__ = ["Edit", "EditBatch", "EditForecast", "EditSchedule", "EditsDataModule", "SourceFinetune"]
