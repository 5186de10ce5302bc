"""SAEs that a flow study trains when it is given none."""

import pytest

from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.flow.default_saes import train_saes
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.stacked import SAESettings


def test_too_few_tokens_name_the_key_of_the_study() -> None:
    with pytest.raises(ConfigError, match=r"model\.training_tokens is 100, .* blocks of 32768"):
        lm = LanguageModel(LMConfig())
        train_saes(lm, TextsDataModule(lm), 100, SAESettings(), None, 0)
