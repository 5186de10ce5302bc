"""Correlations over prompts, against the naive way."""

import numpy as np
import pytest

from lincorr_lightning.geometry.results import correlate


def test_a_correlation_is_pearson_and_spearman_of_the_finite_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    y = x + rng.normal(size=30)
    found = correlate(np.append(x, [np.nan, 1.0, np.inf]), np.append(y, [1.0, np.nan, 2.0]))
    assert found["n"] == 30
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(v)) for v in (x, y)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    z = np.arctanh(found["pearson"])
    half = 1.959964 / np.sqrt(27)
    assert [found["low"], found["high"]] == pytest.approx(np.tanh([z - half, z + half]))
    rhos = [np.corrcoef(x, rng.permutation(y))[0, 1] for _ in range(4000)]
    share = (np.abs(rhos) >= abs(found["pearson"])).mean()
    assert found["pearson_p"] == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("x", [[1, 2, 3], [1, 1, 1, 1], [1, 2, 3, np.nan], []])
def test_too_few_or_constant_points_have_no_correlation(x):
    y = [2, 1, 3, 4][: len(x)]
    assert correlate(x, y) == correlate(y, x) == {}
