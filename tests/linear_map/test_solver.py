"""Maps of all pairs and their scores from moments, against scikit-learn and scipy on the rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.linear_model import LinearRegression, Ridge

from lincorr_lightning.functional import HALF_DECADES, moments_of
from lincorr_lightning.linear_map.fitting import choose_ridges, split_rows
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.linear_map.scores import score_maps
from lincorr_lightning.linear_map.solver import fit_layout

SIZES = {"a": 6, "b": 4, "c": 5}


def layout_of(sizes: dict[str, int], *pairs: tuple[str, str], **more: Any) -> JointLayout:
    domains: Any = {
        name: SimpleNamespace(
            labels=range(n), token_ids=[10 * i + k for k in range(n)], completeness=[]
        )
        for i, (name, n) in enumerate(sizes.items())
    }
    return JointLayout(domains, pairs, **more)


def test_scores_of_maps_equal_scikit_learn_and_scipy_on_the_rows() -> None:
    pairs = (("a", "b"), ("c", "a"), ("a", "c"))
    reference = np.random.default_rng(1).random((4, 6)) < 0.3
    references: Any = {("a", "b"): reference, ("c", "a"): None, ("a", "c"): np.zeros((5, 6), bool)}
    layout = layout_of(
        SIZES, *pairs, control="One day, {} saw a", references=references, permuted=True
    )
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(500, 8))
    noise = rng.normal(size=(500, layout.n_read))
    rows = np.tanh(hidden @ rng.normal(size=(8, layout.n_read))) * 3 + noise + 20
    rows[:, 7] = 0.1  # a label of b that never changes
    ridges = {("a", "b"): 0.0, ("c", "a"): 10.0, ("a", "c"): 300.0}
    fit, test = (
        moments_of(layout.with_permuted(torch.from_numpy(part)), layout.blocks)
        for part in (rows[:300], rows[300:])
    )
    fitted = fit_layout(fit, layout, ridges)
    scores = {score.ends: score for score in score_maps(fitted, test)}
    assert tuple(scores) == pairs
    weights, control_r = fitted.weights(), fitted.label_r(test, "control")
    for (source, target), found in scores.items():
        x, y = layout.columns(source).numpy(), layout.columns(target).numpy()
        control = layout.control_columns(source).numpy()
        ridge = ridges[source, target]
        for columns, r in ((x, found.label_r), (control, control_r[source, target])):
            oracle = Ridge(alpha=ridge) if ridge else LinearRegression()
            oracle.fit(rows[:300][:, columns], rows[:300][:, y])
            predicted = oracle.predict(rows[300:][:, columns])
            expected = [
                np.nan if y[j] == 7 else stats.pearsonr(predicted[:, j], rows[300:, y[j]])[0]
                for j in range(len(y))
            ]
            np.testing.assert_allclose(r, expected, atol=1e-9)
            if columns is x:
                varying = y != 7
                weight = weights[source, target][varying]
                np.testing.assert_allclose(weight, oracle.coef_[varying], atol=1e-9)
            else:
                assert found["control_label_mean"] == pytest.approx(np.nanmean(expected))
        assert found["label_mean"] == pytest.approx(np.nanmean(found.label_r))
        assert found["permuted_label_mean"] < found["label_mean"] - 0.2
    hits = scores["a", "b"]
    assert scores["c", "a"]["influenced_n"] is scores["a", "c"]["influenced_n"] is None
    best = weights["a", "b"].argmax(0).numpy()
    judged = reference.any(0)
    assert hits["influenced_1"] == pytest.approx(reference[best, np.arange(6)][judged].mean())
    assert hits["influencing_n"] == reference.any(1).sum()
    layout = layout_of(SIZES, *pairs)
    fitted = fit_layout(moments_of(torch.from_numpy(rows[:300])), layout, 0.0)
    plain = score_maps(fitted, test)[0]
    assert plain["permuted_label_mean"] is plain["control_label_mean"] is None
    np.testing.assert_allclose(plain.label_r, scores["a", "b"].label_r)


def test_auto_is_the_strongest_ridge_that_costs_little_on_every_fifth_row() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(140, 12))
    source = hidden @ rng.normal(size=(12, 12)) + rng.normal(size=(140, 12))
    target = np.tanh(hidden @ rng.normal(size=(12, 6))) + rng.normal(size=(140, 6))
    rows = torch.from_numpy(np.hstack([source, target]))
    judging = [i for i in range(140) if i % 5 == 4]
    fitting = [i for i in range(140) if i % 5 != 4]
    means = []
    for ridge in HALF_DECADES:
        oracle = Ridge(alpha=ridge) if ridge else LinearRegression()
        predicted = oracle.fit(source[fitting], target[fitting]).predict(source[judging])
        r = [stats.pearsonr(predicted[:, j], target[judging][:, j])[0] for j in range(6)]
        means.append(np.mean(r))
    pairs = zip(HALF_DECADES, means, strict=True)
    allowed = [ridge for ridge, r in pairs if r >= max(means) - 0.02]
    parts = split_rows(rows)
    assert parts[1].tolist() == judging
    moments = [moments_of(rows[part]) for part in parts]
    layout = layout_of({"a": 12, "b": 6}, ("a", "b"))
    assert choose_ridges(*moments, layout) == {("a", "b"): allowed[-1]}
    assert 0 < allowed[-1] < HALF_DECADES[-1], "the choice is one between others"
