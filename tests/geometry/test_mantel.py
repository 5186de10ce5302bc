"""Correlations and their tests, against the naive way."""

import itertools

import numpy as np
import pytest
from scipy.stats import spearmanr

from lincorr_lightning.geometry.closeness import correlation_test, mantel_test, rank_residuals


def symmetric(n: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(n, n))
    return values + values.T


def test_a_correlation_is_pearson_and_spearman_of_the_finite_pairs():
    rng = np.random.default_rng(0)
    x = rng.normal(size=30)
    y = x + rng.normal(size=30)
    found = correlation_test(np.append(x, [np.nan, 1.0, np.inf]), np.append(y, [1.0, np.nan, 2.0]))
    assert found.n == 30
    assert found.pearson == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [np.argsort(np.argsort(v)) for v in (x, y)]
    assert found.spearman == pytest.approx(np.corrcoef(*ranks)[0, 1])
    z, half = np.arctanh(found.pearson), 1.959964 / np.sqrt(27)
    assert (found.low, found.high) == pytest.approx((np.tanh(z - half), np.tanh(z + half)))
    rhos = [np.corrcoef(x, rng.permutation(y))[0, 1] for _ in range(4000)]
    share = (np.abs(rhos) >= abs(found.pearson)).mean()
    assert found.pearson_p == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize(
    ("x", "y"),
    [([1, 2, 3], [1, 2, 3]), ([1, 1, 1, 1], [1, 2, 3, 4]), ([1, 2, 3, np.nan], [1, 2, 3, 4]),
     ([1, 2, 3, 4], [2, 2, 2, 2]), ([], [])],
)  # fmt: skip
def test_no_correlation(x, y):
    assert set(vars(correlation_test(x, y)).values()) == {None}


@pytest.mark.parametrize("missing", [False, True])
def test_all_permutations_of_few_items(missing):
    a, b = symmetric(5, 0), symmetric(5, 1)
    b[0, 1] = b[1, 0] = b[2, 3] = b[3, 2] = np.nan if missing else 0.3  # equal ranks too
    pairs = list(itertools.combinations(range(5), 2))

    def rho(order):
        both = [(a[i, j], b[order[i], order[j]]) for i, j in pairs]
        return spearmanr([x for x, y in both if y == y], [y for x, y in both if y == y]).statistic

    rhos = np.array([rho(order) for order in itertools.permutations(range(5))])
    found = mantel_test(a, b, n_permutations=120)
    assert found.spearman == pytest.approx(rhos[0])
    assert found.p == pytest.approx((np.abs(rhos) >= abs(rhos[0]) - 1e-12).mean())
    assert found.n_permutations == 120
    assert found.n_pairs == (8 if missing else 10)


def test_random_permutations_approximate_all_of_them():
    a, b = symmetric(6, 3), symmetric(6, 4)
    every = mantel_test(a, b, n_permutations=720)
    some = mantel_test(a, b, n_permutations=719)
    assert (every.n_permutations, some.n_permutations) == (720, 719)
    assert some.p == pytest.approx(every.p, abs=0.06)
    assert some.p == mantel_test(a, b, 719).p != mantel_test(a, b, 719, seed=1).p


def test_the_order_of_the_items_and_the_diagonal_do_not_matter():
    a, b = symmetric(9, 0), symmetric(9, 0) + 0.5 * symmetric(9, 1)
    found = mantel_test(a, b, 199)
    assert found.p == pytest.approx(1 / 200)
    order = np.random.default_rng(0).permutation(9)
    again = mantel_test(a[np.ix_(order, order)], b[np.ix_(order, order)], 199)
    assert again.spearman == pytest.approx(found.spearman)
    np.fill_diagonal(a, np.nan)
    assert mantel_test(a, b, 199) == found


def test_p_is_uniform_if_nothing_is_correlated():
    p = [mantel_test(symmetric(6, s), symmetric(6, s + 1000), 99, seed=s).p for s in range(200)]
    assert 0.02 <= (np.array(p) <= 0.1).mean() <= 0.18
    assert np.mean(p) == pytest.approx(0.5, abs=0.08)


def test_no_correlation_of_matrices():
    assert mantel_test(symmetric(3, 0), symmetric(3, 1)) is None
    assert mantel_test(symmetric(5, 0), np.full((5, 5), np.nan)) is None
    assert mantel_test(symmetric(5, 0), np.ones((5, 5))) is None


def test_residuals_give_the_partial_correlation():
    from sklearn.linear_model import LinearRegression

    c = symmetric(8, 0)
    a, b = c + 0.1 * symmetric(8, 1), c + 0.1 * symmetric(8, 2)
    a[1, 4] = a[4, 1] = np.nan
    upper = np.triu_indices(8, 1)
    known = np.isfinite(a[upper])
    ranks = [np.argsort(np.argsort(m[upper][known])) for m in (a, c)]
    x = ranks[1][:, None]
    expected = ranks[0] - LinearRegression().fit(x, ranks[0]).predict(x)
    left = rank_residuals(a, c)
    assert left[upper][known] == pytest.approx(expected)
    assert np.isnan(left[upper][~known]).all()
    assert (np.isfinite(left) == np.isfinite(left.T)).all()
    first_rank = np.argsort(np.argsort(b[upper]))[0]
    assert rank_residuals(b, np.ones((8, 8)))[0, 1] == pytest.approx(first_rank - 13.5)
    assert np.isnan(rank_residuals(np.full((8, 8), np.nan), c)).all()


def test_what_a_third_matrix_explains_is_not_a_correlation():
    with_it, without_it = [], []
    for seed in range(0, 300, 3):
        c = symmetric(8, seed)
        a, b = c + 0.5 * symmetric(8, seed + 1), c + 0.5 * symmetric(8, seed + 2)
        with_it.append(mantel_test(a, b, 99, seed).p)
        without_it.append(mantel_test(rank_residuals(a, c), rank_residuals(b, c), 99, seed).p)
    assert (np.array(with_it) <= 0.05).mean() > 0.95
    assert (np.array(without_it) <= 0.05).mean() < 0.12
