"""Vocabulary ablation: one feed-forward network between frozen token embeddings."""

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import VocabularyAblation

__all__ = ["PairedTextsDataModule", "VocabularyAblation"]
