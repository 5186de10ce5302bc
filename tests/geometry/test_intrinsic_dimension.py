"""GRIDE against DADApy.

DADApy (0.3.4 is the newest) needs numpy < 2, this package numpy >= 2, so that the two cannot be
installed together. Its estimates of clouds from numpy's `RandomState`, which never changes, are
recorded below. Other clouds are checked against its recipe, `naive_dimension`, after that has met
the record itself.
"""

import numpy as np
import pytest
import torch

from lincorr_lightning.geometry.observables import (
    RANGE_SCALINGS,
    intrinsic_dimension,
    nearest_tokens,
)
from tests.geometry.conftest import naive_dimension, ratios

# Data(coordinates=ball(d)).return_id_scaling_gride(range_max=256): estimates.
DADAPY = {
    1: [1.072824, 0.958742, 1.002045, 1.026376, 1.005088, 1.020058, 1.064700, 1.025622],
    2: [2.045480, 2.083344, 2.068293, 2.051317, 2.100319, 2.015197, 1.989824, 1.832181],
    5: [5.101801, 4.956622, 4.780346, 4.779352, 4.813583, 4.538428, 4.137194, 3.457705],
    10: [9.515048, 9.428823, 8.795952, 8.494157, 7.807818, 7.349854, 6.473807, 5.284952],
}


def ball(d: int, n: int = 600, seed: int | None = None) -> np.ndarray:
    return np.random.RandomState(d if seed is None else seed).standard_normal((n, d))


def estimate(
    clouds: np.ndarray | torch.Tensor, scalings: tuple[int, ...] = RANGE_SCALINGS
) -> torch.Tensor:
    clouds = torch.as_tensor(clouds)
    return intrinsic_dimension(nearest_tokens(clouds, max(scalings)), scalings)


@pytest.mark.parametrize("d", DADAPY)
def test_balls_have_the_estimates_of_dadapy_and_of_its_recipe(d: int) -> None:
    expected = [naive_dimension(ball(d), n2) for n2 in RANGE_SCALINGS]
    np.testing.assert_allclose(expected, DADAPY[d], rtol=1e-6)
    np.testing.assert_allclose(estimate(ball(d)[None])[0], expected, rtol=1e-9)
    found = estimate(ball(d)[None].astype(np.float32))
    np.testing.assert_allclose(found[0], DADAPY[d], rtol=2e-5)
    found = estimate(ball(d)[None], (256, 2, 6))  # any even scalings, in any order
    expected = [expected[-1], expected[0], naive_dimension(ball(d), 6)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-9)


def test_copies_do_not_count() -> None:
    cloud = ball(3, 200)
    copied = np.concatenate([cloud, cloud[50:150], cloud[60:70]])
    shuffled = copied[np.random.RandomState(0).permutation(len(copied))]
    scalings = (2, 4, 64)
    found, expected = estimate(shuffled[None], scalings), estimate(cloud[None], scalings)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_near_copies_are_outliers() -> None:
    cloud = ball(3, 300)
    cloud[:6] = cloud[6:12] + 1e-9
    expected = [naive_dimension(cloud, n2) for n2 in (2, 4)]
    np.testing.assert_allclose(estimate(cloud[None], (2, 4))[0], expected, rtol=1e-6)
    naive = 299 / np.log(ratios(cloud, 2)).sum()
    assert naive < 0.8 * expected[0]


def test_scale_and_other_layers_do_not_matter() -> None:
    cloud = ball(5, 300).astype(np.float32)
    scales = np.float32([1e-30, 1e-8, 1e8, 1e30])[:, None, None]
    found, expected = estimate(cloud * scales, (2, 16)), estimate(cloud[None], (2, 16))
    assert found.shape == (4, 2)
    torch.testing.assert_close(found, expected.expand(4, 2))


def test_ties_give_no_nan() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(8.0)] * 3), -1).reshape(1, -1, 3)
    found = estimate(grid, (2, 8, 64))
    assert not found.isnan().any()
    assert found[0, 2].isfinite()
    simplex = intrinsic_dimension(nearest_tokens(torch.eye(20)[None], 4), (2, 4))
    assert simplex.tolist() == [[torch.inf] * 2]


@pytest.mark.parametrize("size", [0.1, 1e-2, 2e-3])
def test_rounding_makes_no_difference_of_distances(size: float) -> None:
    """Simplices, turned, and far from each other for their size: all edges of each are equal."""
    rng = np.random.RandomState(0)
    edges = np.linalg.qr(rng.standard_normal((64, 64)))[0][:16]
    corners = rng.standard_normal((4, 1, 64)) / 8 + size * edges
    cloud = corners.reshape(-1, 64)
    assert estimate(cloud[None], (2, 4, 8)).tolist() == [[torch.inf] * 3]
    assert ratios(cloud, 8).max() < 1 + 1e-11  # by differences


def test_too_few_distinct_tokens_give_nan() -> None:
    clouds = np.stack([ball(2, 40, seed) for seed in range(4)])
    expected = estimate(clouds, (2, 4, 8))
    clouds[2, 8:] = clouds[2, 7]
    found = estimate(clouds, (2, 4, 8))
    assert found.isnan().tolist() == [[False, False, layer == 2] for layer in range(4)]
    torch.testing.assert_close(found[[0, 1, 3]], expected[[0, 1, 3]])
    few = estimate(clouds, (2, 4, 8, 64))
    torch.testing.assert_close(few[:, :3], found, equal_nan=True)
    assert few[:, 3].isnan().all()
    assert estimate(torch.ones(3, 1, 5), (2, 4)).isnan().all()
