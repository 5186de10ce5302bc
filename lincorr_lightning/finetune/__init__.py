"""Source-knowledge fine-tune: edits, their training, outcomes, forecasts and repair."""

from lincorr_lightning.finetune.batches import EditBatch, EditDataset, EditTraining, edit_dataset
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.edited.module import EditedLM
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.module import EditForecast, SourceFinetune
from lincorr_lightning.finetune.repair.datamodule import (
    RepairBatch, RepairDataModule, StatementBatch,
)  # fmt: skip
from lincorr_lightning.finetune.repair.module import Repair

__all__ = [
    "Edit", "EditBatch", "EditDataset", "EditForecast", "EditTraining", "EditedLM",
    "EditsDataModule", "Repair", "RepairBatch", "RepairDataModule", "SourceFinetune",
    "StatementBatch", "edit_dataset",
]  # fmt: skip
