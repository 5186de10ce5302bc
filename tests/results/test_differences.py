"""Differences of means, against scipy and formulas of the literature."""

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import ttest_ind, ttest_rel

from lincorr_lightning.results.differences import difference_of_means

FLOATS = npt.NDArray[np.float64]


def disjoint(first: FLOATS, second: FLOATS) -> tuple[FLOATS, FLOATS]:
    sums = np.zeros((len(first) + len(second), 2))
    sums[: len(first), 0], sums[len(first) :, 1] = first, second
    counts = np.zeros_like(sums)
    counts[: len(first), 0] = counts[len(first) :, 1] = 1
    return sums, counts


@pytest.mark.parametrize("n", [2, 9, 200])
def test_pairs_have_the_interval_of_the_paired_t_test(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(n, 2)) @ np.array([[1.0, 0.8], [0.0, 0.3]])
    found = difference_of_means(values, np.ones_like(values))
    test = ttest_rel(values[:, 1], values[:, 0])
    low, high = test.confidence_interval()
    assert found == pytest.approx((np.diff(values.mean(0))[0], found.error, low, high))
    assert found.difference / found.error == pytest.approx(test.statistic)


def test_different_units_have_the_error_of_welch() -> None:
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=12), rng.normal(2, 3, size=30)
    found = difference_of_means(*disjoint(first, second))
    test = ttest_ind(second, first, equal_var=False)
    assert found.difference / found.error == pytest.approx(test.statistic)
    # Degrees of freedom of the smaller sample: never narrower than Welch's interval.
    low, high = test.confidence_interval()
    assert found.low < low and high < found.high


def test_common_units_add_their_covariance() -> None:
    rng = np.random.default_rng(2)
    common = rng.normal(size=(40, 1)) + 0.1 * rng.normal(size=(40, 2))
    own = rng.normal(size=15)
    sums = np.vstack([common, np.column_stack([np.zeros(15), own])])
    counts = np.vstack([np.ones((40, 2)), np.column_stack([np.zeros(15), np.ones(15)])])
    a, b = common[:, 0], np.concatenate([common[:, 1], own])
    covariance = ((a - a.mean()) * (common[:, 1] - b.mean())).sum() / (40 * 55)
    covariance *= np.sqrt(40 / 39 * 55 / 54)
    variance = a.var(ddof=1) / 40 + b.var(ddof=1) / 55 - 2 * covariance
    found = difference_of_means(sums, counts)
    assert found[:2] == pytest.approx((b.mean() - a.mean(), np.sqrt(variance)))


def test_pairs_of_shares_have_the_interval_of_bonett_and_price() -> None:
    # 20 right in both, 9 in the first only, 3 in the second only, 8 in none.
    pairs = [(1, 1)] * 20 + [(1, 0)] * 9 + [(0, 1)] * 3 + [(0, 0)] * 8
    p12, p21 = 10 / 42, 4 / 42  # one more of each, two more in all
    half = 1.959963985 * np.sqrt((p12 + p21 - (p12 - p21) ** 2) / 42)
    values = np.array(pairs, dtype=float)
    found = difference_of_means(values, np.ones_like(values), shares=True)
    assert found[2:] == pytest.approx((p21 - p12 - half, p21 - p12 + half))
    assert found[:2] == pytest.approx(difference_of_means(values, np.ones_like(values))[:2])


def test_shares_without_a_difference_still_have_a_width() -> None:
    ones = np.ones((24, 2))
    found = difference_of_means(ones, ones, shares=True)
    assert found.difference == found.error == 0 and -found.low == found.high > 0.05
    assert difference_of_means(ones, ones)[1:] == (0, 0, 0)
    assert difference_of_means(*disjoint(ones[:3, 0], 0 * ones[:3, 0]), shares=True).low == -1


def test_shares_cover_the_truth() -> None:
    rng = np.random.default_rng(3)
    n_draws, hits = 400, 0
    for _ in range(n_draws):
        right = rng.random((16, 1)) < (0.9, 0.95)  # of one draw for both: pairs depend
        found = difference_of_means(right.astype(float), np.ones((16, 2)), shares=True)
        hits += found.low <= 0.05 <= found.high
    assert hits >= 0.93 * n_draws


def test_one_unit_has_no_error() -> None:
    found = difference_of_means(np.array([[1.0, 3.0]]), np.ones((1, 2)))
    assert found.difference == 2 and np.isnan(found[1:]).all()
