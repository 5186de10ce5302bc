import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression

from lincorr_lightning.functional.least_squares import LeastSquares, strongest_within
from lincorr_lightning.functional.moments import moments_of


def _solve(x: np.ndarray, y: np.ndarray, ridge: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    m = moments_of(torch.from_numpy(np.hstack([x, y])))
    k = x.shape[1]
    weight = LeastSquares(m.scatter[:k, :k], m.scatter[:k, k:]).weight(ridge)
    bias = m.mean[k:] - weight @ m.mean[:k]
    return weight.numpy(), bias.numpy()


def _data(n: int, k: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(n, rank))
    x = hidden @ rng.normal(size=(rank, k)) * 2 + rng.normal(size=k) * 10
    y = np.tanh(hidden @ rng.normal(size=(rank, 7))) + rng.normal(size=7) * 5
    return x, y


@pytest.mark.parametrize(("n", "k", "rank"), [(500, 20, 20), (300, 242, 64)])
def test_equals_scikit_learn(n: int, k: int, rank: int) -> None:
    x, y = _data(n, k, rank)
    weight, bias = _solve(x, y)
    oracle = LinearRegression().fit(x, y)
    held_out, _ = _data(400, k, rank)
    ours, theirs = held_out @ weight.T + bias, oracle.predict(held_out)
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(theirs).max()


def test_constant_source_gives_zero_weight() -> None:
    x = np.full((50, 3), 7.0)
    weight, bias = _solve(x, np.random.default_rng(0).normal(size=(50, 2)))
    assert not weight.any()
    assert np.isfinite(bias).all()


@pytest.mark.parametrize(
    ("scores", "index"),
    [([0.9, 0.95, 0.94, 0.8], 2), ([0.5], 0), ([float("nan"), 0.3], 1), ([float("nan")] * 2, 0)],
)
def test_strongest_within(scores: list[float], index: int) -> None:
    assert strongest_within(scores, 0.02) == index
