"""Datamodules and readers that several studies share."""

from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.data.texts import (
    TextsDataModule,
    TokenBatch,
    TokenizedTextDataModule,
    TokenRows,
)

__all__ = [
    "SubjectBatch",
    "SubjectsDataModule",
    "TextsDataModule",
    "TokenBatch",
    "TokenRows",
    "TokenizedTextDataModule",
]
