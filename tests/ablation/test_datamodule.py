"""The data module: settings, a file of texts, and what it needs of the study."""

import pytest

from lincorr_lightning.ablation.datamodule import PairedTextsDataModule
from lincorr_lightning.ablation.module import VocabularyAblation
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.lm.config import LMConfig


def test_a_file_brings_its_own_source_labels(small_lm, tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text(
        "phase,subject,source\ncompose,name1,Paris\ncompose,name2,Rome\nlearn,name3,Rome\n"
    )
    plan = VocabularyAblation(LMConfig(small_lm), seeds=[0, 5]).plan
    data = PairedTextsDataModule(plan, texts_file=str(file))
    data.setup()
    corpus = data.corpus
    assert {corpus.labels.source_text(i) for i in range(len(corpus.labels))} == {"Paris", "Rome"}
    assert corpus.texts[0] == corpus.texts[1]
    assert corpus.texts[0].subjects == ("name1", "name2", "name3")
    file.write_text("phase,subject,source\ncompose,name1,Paris\nlearn,name2,Gotham\n")
    with pytest.raises(SubjectsError, match=r"no single token.*'Gotham'"):
        PairedTextsDataModule(plan, texts_file=str(file)).setup()


def test_it_needs_a_study():
    with pytest.raises(ConfigError, match=r"plan=module\.plan"):
        PairedTextsDataModule().setup()
    with pytest.raises(ConfigError, match=r"call its setup\(\) first"):
        _ = PairedTextsDataModule().corpus


@pytest.mark.parametrize(
    "bad", [{"n_paired": 0}, {"n_new": 0}, {"max_source_labels": 1}, {"seed": -1}]
)
def test_unusable_settings_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        PairedTextsDataModule(**bad)
