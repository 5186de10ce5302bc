"""The tiny world: its facts, its corpus, and the LM that is trained on it."""

from lincorr_lightning.pretraining.datamodule import CorpusDataModule
from lincorr_lightning.pretraining.module import Pretraining

__all__ = ["CorpusDataModule", "Pretraining"]
