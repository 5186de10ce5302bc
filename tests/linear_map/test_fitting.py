"""Maps of one relation, fitted in memory, against scikit-learn and against a probe's run."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge

from lincorr_lightning import LanguageModel, LinearMap
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map.fitting import fit_linear_map, sample_fitted_subjects
from lincorr_lightning.lm.vocabulary import sample_subjects
from tests.probe.test_module import TEMPLATES, read_alone, run_probe
from tests.toys import word_tokenizer

PAIR = "city->country"


@pytest.fixture(scope="module")
def lm(small_lm: str) -> LanguageModel:
    return LanguageModel.from_pretrained(small_lm)


@pytest.fixture(scope="module")
def relation(lm: LanguageModel) -> TokenizedRelation:
    return TokenizedRelation.of(PAIR, Catalogue.load(), lm.tokenizer)


@pytest.fixture(scope="module")
def naive(
    lm: LanguageModel, relation: TokenizedRelation
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Subjects, and the logits of source and target, one prompt at a time."""
    subjects = sample_subjects(lm.tokenizer, 200, seed=1)
    source, target = (
        read_alone(
            lm, [TEMPLATES[domain.knowledge.name].format(x) for x in subjects], domain.token_ids
        )
        for domain in (relation.source, relation.target)
    )
    return subjects, source, target


def test_equal_scikit_learn(
    lm: LanguageModel,
    relation: TokenizedRelation,
    naive: tuple[list[str], np.ndarray, np.ndarray],
) -> None:
    subjects, source, target = naive
    maps = [fit_linear_map(lm, relation, subjects, ridge) for ridge in (0.0, 10.0, 1000.0)]
    oracles = [LinearRegression(), Ridge(alpha=10.0), Ridge(alpha=1000.0)]
    assert [fitted.ridge for fitted in maps] == [{PAIR: ridge} for ridge in (0.0, 10.0, 1000.0)]
    for fitted, oracle in zip(maps, oracles, strict=True):
        theirs = oracle.fit(source, target).predict(source)
        ours = fitted.predict(PAIR, torch.from_numpy(source)).numpy()
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
    assert maps[0].token_ids("city") == relation.source.token_ids
    assert maps[0].labels("country") == relation.target.texts
    assert maps[0].label_set("city").template == "{} lives in the city of"
    assert maps[0].fingerprint == lm.fingerprint
    np.testing.assert_allclose(maps[1].weight(PAIR), oracles[1].coef_, atol=1e-5)
    np.testing.assert_allclose(maps[1].bias(PAIR), oracles[1].intercept_, atol=1e-5)


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
