"""LightningDataModules: what the LM is asked about."""

from lincorr_lightning.data.corpus import CorpusDataModule
from lincorr_lightning.data.prompt_inputs import InputBatch, PromptInputs

__all__ = ["CorpusDataModule", "InputBatch", "PromptInputs"]
