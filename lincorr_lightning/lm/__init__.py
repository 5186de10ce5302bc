"""Any causal LM by folder, hub id, or the packaged tiny world; logits at the last position."""

from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.finder import causal_lm_of
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.lm.vocabulary import sample_subjects, sample_up_to, usable_strings

__all__ = [
    "LMConfig", "LanguageModel", "causal_lm_of", "evaluating", "sample_subjects", "sample_up_to",
    "usable_strings",
]  # fmt: skip
