"""Maps of one relation, fitted in memory, against scikit-learn and against a probe's run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lincorr_lightning import LanguageModel, LinearMap
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.fitting import fit_linear_map, sample_fitted_subjects
from tests.probe.test_module import run_probe
from tests.toys import word_tokenizer

PAIR = "city->country"


@pytest.fixture(scope="module")
def lm(small_lm: str) -> LanguageModel:
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def relation(lm: LanguageModel) -> TokenizedRelation:
    return TokenizedRelation.of(PAIR, Catalogue.load(), lm.tokenizer)


@pytest.mark.parametrize("ridge", [0.0, "auto"])
def test_equal_a_run_of_the_probe_on_the_same_subjects(
    small_lm: str,
    lm: LanguageModel,
    relation: TokenizedRelation,
    ridge: Any,
    tmp_path: Path,
) -> None:
    data = {"n_subjects": 250}
    _, trainer, run = run_probe(tmp_path, small_lm, data=data, pairs=[PAIR], ridge=ridge)
    theirs = LinearMap.from_pretrained(run / "linear_map")
    fitted_on = trainer.datamodule.halves["fit"]  # type: ignore[attr-defined]
    ours = fit_linear_map(lm, relation, fitted_on, ridge)
    assert ours.ridge[PAIR] == theirs.ridge[PAIR]
    # The LM's own digits differ between batches; ridge 0 magnifies them.
    torch.testing.assert_close(ours.weight(PAIR), theirs.weight(PAIR), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.bias(PAIR), theirs.bias(PAIR), rtol=1e-4, atol=1e-4)


def test_subjects_to_fit_on_are_others_than_those_that_the_map_is_applied_to() -> None:
    tokenizer = word_tokenizer([f"w{i}" for i in range(60)])
    applied_to = [f"w{i}" for i in range(50)]
    fitted = sample_fitted_subjects(tokenizer, 30, applied_to)
    assert sorted(fitted) == sorted(f"w{i}" for i in range(50, 60))
    assert sample_fitted_subjects(tokenizer, 5, applied_to) == fitted[:5]
    with pytest.raises(SubjectsError, match=r"the 55 subjects.* only 5 others remain; it needs 10"):
        sample_fitted_subjects(tokenizer, 30, [f"w{i}" for i in range(55)])
