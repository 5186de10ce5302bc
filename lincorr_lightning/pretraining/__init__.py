"""Pre-training of a tiny LM on statements about a tiny world."""

from lincorr_lightning.pretraining.datamodule import CorpusDataModule
from lincorr_lightning.pretraining.module import Pretraining

__all__ = ["CorpusDataModule", "Pretraining"]
