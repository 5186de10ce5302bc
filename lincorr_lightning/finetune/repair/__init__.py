"""Repair: a short fine-tune after which edits of the source generalize to the target."""

from lincorr_lightning.finetune.repair.datamodule import (
    RepairBatch,
    RepairDataModule,
    StatementBatch,
)
from lincorr_lightning.finetune.repair.module import Repair

__all__ = ["Repair", "RepairBatch", "RepairDataModule", "StatementBatch"]
