"""Probabilities of outcomes, against scikit-learn and the definition."""

import json
import math
from importlib.resources import files

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from lincorr_lightning.finetune.optimizer_step import STEP_SCALE
from lincorr_lightning.finetune.outcome_model import OutcomeModel, outcome_features, outcome_model


def test_probabilities_are_those_of_the_regression() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 5)), rng.integers(3, size=90)
    theirs = LogisticRegression().fit(x, y)
    ours = OutcomeModel(
        torch.tensor(theirs.coef_), torch.tensor(theirs.intercept_), 90, ("a",), ("b->c",), ""
    )
    found = ours.probabilities(torch.tensor(x)).numpy()
    np.testing.assert_allclose(found, theirs.predict_proba(x), atol=1e-9)


def test_features_equal_the_definition() -> None:
    rng = np.random.default_rng(1)
    before, by_step = rng.normal(scale=3, size=(2, 20, 6))
    mask = rng.random((20, 6)) < 0.3
    mask[:, 0] = True
    found = outcome_features(*map(torch.tensor, (before, by_step, mask)))
    for i in range(20):
        old = max(range(6), key=lambda j, row=before[i]: row[j])
        expected = []
        weights = [math.exp(value) for value in by_step[i]]
        for chosen in ([j for j in range(6) if mask[i, j]], [old]):
            p = sum(weights[j] for j in chosen) / sum(weights)
            expected.append(math.log(p / (1 - p)))
        assert found[i].tolist() == pytest.approx(expected)


def test_certainty_is_bounded() -> None:
    logits = torch.tensor([[1e3, 0.0]])
    found = outcome_features(logits, -logits, torch.tensor([[False, True]]))
    assert found.isfinite().all()
    assert found.abs().max() < 14


@pytest.mark.parametrize("method", ["full", "lora"])
def test_the_shipped_models_agree_with_common_sense(method: str) -> None:
    model = outcome_model(method)
    assert model.n_edits and model.lms and model.relations and model.training
    before = torch.tensor([[4.0, 0.0, 0.0]]).expand(3, -1)
    after = torch.tensor([[0.0, 6.0, 0.0], [0.0, 0.0, 6.0], [6.0, 0.0, 0.0]])
    mask = torch.tensor([[False, True, False]]).expand(3, -1)
    p = model.probabilities(outcome_features(before, after, mask))
    torch.testing.assert_close(p.sum(1), torch.ones(3, dtype=torch.float64))
    # An edit that is seen to reach its reference is the most likely to generalize.
    assert p[:, 0].argmax() == 0
    assert p[2, 2] == p[:, 2].max()


def test_the_models_that_ship_are_of_the_step_that_is_made() -> None:
    file = files("lincorr_lightning.finetune") / "outcome_model.json"
    for model in json.loads(file.read_text(encoding="utf-8")).values():
        assert model["step_scale"] == STEP_SCALE
