"""AUROC against scikit-learn's."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from lincorr_lightning.functional.auroc import auroc, auroc_within, class_auroc, counted_auroc


def test_counted_auroc_equals_scikit_learn_on_all_cases() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 8, 30) / 8  # with ties
    up, down = random.integers(0, 5, (2, 30))
    cases = np.concatenate([np.repeat(values, up), np.repeat(values, down)])
    labels = np.repeat([1, 0], [up.sum(), down.sum()])
    # NaN is left out, however many cases have it.
    with_unknown = torch.tensor([*values, np.nan])
    counts = [torch.tensor([*count, 99]) for count in (up, down)]
    found = counted_auroc(with_unknown, *counts)
    assert found == pytest.approx(roc_auc_score(labels, cases))
    assert math.isnan(counted_auroc(torch.from_numpy(values), torch.ones(30), torch.zeros(30)))


def test_class_auroc_equals_scikit_learn() -> None:
    random = np.random.default_rng(1)
    values = np.maximum(random.normal(size=(60, 7)), 0)  # as sparse features are: many zeros
    values[:, 6] = 0
    classes = random.integers(0, 4, 60)
    members = np.stack([classes == c for c in range(5)], 1)  # the last one has no case
    found = class_auroc(torch.from_numpy(values), torch.from_numpy(members))
    for c in range(4):
        for feature in range(7):
            expected = roc_auc_score(members[:, c], values[:, feature])
            assert found[c, feature].item() == pytest.approx(expected)
    assert found[4].isnan().all()


@pytest.mark.parametrize("n_levels", [2, 1000])
def test_auroc_equals_scikit_learn(n_levels: int) -> None:
    rng = np.random.default_rng(0)
    positive = rng.random(150) < 0.3
    score = rng.integers(n_levels, size=150) / n_levels + 0.2 * positive * (n_levels > 2)
    ours = auroc(torch.from_numpy(score), torch.from_numpy(positive))
    assert ours == pytest.approx(roc_auc_score(positive, score), abs=1e-12)


def test_auroc_within_groups_is_the_mean_of_scikit_learn_s_over_pairs() -> None:
    random = np.random.default_rng(2)
    scores, positive = random.integers(0, 9, 80) / 9, random.random(80) < 0.4
    groups = [("France", "Peru", "Italy", "Japan")[i] for i in random.integers(4, size=80)]
    positive[[group == "Peru" for group in groups]] = True  # no pair
    total, n_pairs = 0.0, 0
    for group in ("France", "Italy", "Japan"):
        own = np.array([one == group for one in groups])
        n = int(positive[own].sum() * (~positive[own]).sum())
        total, n_pairs = total + n * roc_auc_score(positive[own], scores[own]), n_pairs + n
    found = auroc_within(torch.from_numpy(scores), torch.from_numpy(positive), groups)
    assert found == pytest.approx(total / n_pairs)
    assert found != pytest.approx(roc_auc_score(positive, scores), abs=1e-3)
    alone = auroc_within(torch.from_numpy(scores), torch.from_numpy(positive), range(80))
    assert math.isnan(alone)
