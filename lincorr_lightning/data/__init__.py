"""Datamodules and readers that several studies share."""

from lincorr_lightning.data.subjects import SubjectBatch, SubjectsDataModule
from lincorr_lightning.data.texts import TextsDataModule, TokenRows
from lincorr_lightning.data.tokenized_texts import TokenBatch, TokenizedTextDataModule

__all__ = [
    "SubjectBatch",
    "SubjectsDataModule",
    "TextsDataModule",
    "TokenBatch",
    "TokenRows",
    "TokenizedTextDataModule",
]
