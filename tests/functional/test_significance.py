import math

import numpy as np
import pytest
import torch

from lincorr_lightning.functional import labelwise_pearson
from lincorr_lightning.functional.significance import adjust_for_many, mean_r_error


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


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
