"""LightningDataModules: what the LM is asked about."""

from lincorr_lightning.data.corpus import CorpusDataModule
from lincorr_lightning.data.edits import Edit, EditBatch, EditPlan, EditsDataModule
from lincorr_lightning.data.paired_texts import PairedTexts, PairedTextsDataModule
from lincorr_lightning.data.prompt_inputs import InputBatch, PromptInputs
from lincorr_lightning.data.text_prompts import TextPrompts, TokenBatch
from lincorr_lightning.data.texts import TextsDataModule, TokenRows

__all__ = [
    "CorpusDataModule",
    "Edit",
    "EditBatch",
    "EditPlan",
    "EditsDataModule",
    "InputBatch",
    "PairedTexts",
    "PairedTextsDataModule",
    "PromptInputs",
    "TextPrompts",
    "TextsDataModule",
    "TokenBatch",
    "TokenRows",
]
