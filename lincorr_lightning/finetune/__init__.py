"""Source-knowledge fine-tune: edits, their training, outcomes and forecasts."""

from lincorr_lightning.finetune.batches import EditBatch, EditDataset, EditSchedule, edit_dataset
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.forecast_module import EditForecast
from lincorr_lightning.finetune.module import SourceFinetune

__all__ = [
    "Edit",
    "EditBatch",
    "EditDataset",
    "EditForecast",
    "EditSchedule",
    "EditsDataModule",
    "SourceFinetune",
    "edit_dataset",
]
