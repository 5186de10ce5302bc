import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine
from sklearn.linear_model import LinearRegression

from lincorr_lightning.functional import labelwise_pearson, moments_of
from lincorr_lightning.functional.significance import (
    adjust_for_many,
    mean_r_error,
    partial_correlation,
    weight_cosine,
)


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# -- standard errors -----------------------------------------------------------------------------


def test_error_of_the_mean_r_is_its_spread_over_samples() -> None:
    # Labels share noise, so that their r rise and fall together.
    shared = _normal(800, 60, 1, seed=1)
    x = shared + _normal(800, 60, 5, seed=2)
    y = x + shared + 2 * _normal(800, 60, 5, seed=3)
    found = [labelwise_pearson(a, b).mean() for a, b in zip(x, y, strict=True)]
    errors = [mean_r_error(a, b) for a, b in zip(x[:50], y[:50], strict=True)]
    assert np.mean(errors) == pytest.approx(float(torch.stack(found).std()), rel=0.08)
    assert math.isnan(mean_r_error(torch.ones(9, 2), torch.ones(9, 2)))
    for n in range(3):  # r of two rows is 1 or -1, whatever they are
        assert math.isnan(mean_r_error(_normal(n, 4), _normal(n, 4, seed=1)))


@pytest.mark.parametrize("n", [1, 50])
def test_adjusted_p_is_the_least_q_of_tests_that_are_no_stronger(n: int) -> None:
    p = np.random.default_rng(n).random(n) ** 3
    with_gaps = np.insert(p, [0, n // 2, n], np.nan)
    adjusted = adjust_for_many(torch.from_numpy(with_gaps)).numpy()
    known = ~np.isnan(with_gaps)
    bound = {x: x * n * sum(1 / i for i in range(1, n + 1)) / (p <= x).sum() for x in p}
    least = [min(1, *(bound[x] for x in p if x >= own)) for own in p]
    np.testing.assert_allclose(adjusted[known], least)
    assert np.isnan(adjusted[~known]).all()
    assert adjust_for_many(torch.full((n,), torch.nan)).isnan().all()


# -- r given a third knowledge -------------------------------------------------------------------


def _rows(n: int, seed: int) -> torch.Tensor:
    """Source (3), target (4) and third (2): a common cause, and a correlation of their own."""
    common, own = _normal(n, 2, seed=seed), _normal(n, 1, seed=seed + 1)
    mix = _normal(2, 9, seed=99)
    noise = _normal(n, 9, seed=seed + 2)
    mix[:, 7:] = torch.eye(2)
    noise[:, 7:] *= 0.1
    rows = common @ mix + 0.4 * noise
    rows[:, 0] += own[:, 0]
    rows[:, 3] += 1.5 * own[:, 0]
    return rows


X, Y, Z = torch.arange(3), torch.arange(3, 7), torch.arange(7, 9)


def test_partial_r_is_that_of_regressions_on_the_rows() -> None:
    fit, test = _rows(500, 0), _rows(400, 10)
    found = partial_correlation(moments_of(fit), moments_of(test), X, Y, Z)
    free = [0, 1, 2, 3, 4, 5, 6]
    known = LinearRegression().fit(fit[:, 7:], fit[:, free])
    rest_fit, rest = (
        rows[:, free] - torch.from_numpy(known.predict(rows[:, 7:])) for rows in (fit, test)
    )
    beyond = LinearRegression().fit(rest_fit[:, :3], rest_fit[:, 3:])
    predicted = torch.from_numpy(beyond.predict(rest[:, :3]))
    naive = labelwise_pearson(predicted, rest[:, 3:])
    torch.testing.assert_close(found.r, naive, rtol=1e-9, atol=1e-9)
    share = naive**2 * rest[:, 3:].var(0) / test[:, 3:7].var(0)
    torch.testing.assert_close(found.unique, share, rtol=1e-9, atol=1e-9)


def test_cosine_is_that_of_vectors() -> None:
    a, b = _normal(3, 4), _normal(3, 4, seed=1)
    naive = 1 - cosine(a.ravel().numpy(), b.ravel().numpy())
    assert weight_cosine(a, b) == pytest.approx(naive)
