"""Source-knowledge fine-tune: edits, their training, outcomes and forecasts."""

from lincorr_lightning.finetune.batches import EditBatch, EditDataset, EditTraining, edit_dataset
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edited_lm import EditedLM
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.forecasts import EditForecast
from lincorr_lightning.finetune.module import SourceFinetune

__all__ = [
    "Edit",
    "EditBatch",
    "EditDataset",
    "EditForecast",
    "EditTraining",
    "EditedLM",
    "EditsDataModule",
    "SourceFinetune",
    "edit_dataset",
]
