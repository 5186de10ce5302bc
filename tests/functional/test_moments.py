import numpy as np
import pytest
import torch

from lincorr_lightning.functional.moments import merge_moments, moments_of, no_moments, upper_half


def _rows(n: int, d: int, seed: int = 0, offset: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64) + offset


@pytest.mark.parametrize("sizes", [[40], [1, 39], [7, 20, 13], [0, 40, 0]])
def test_batches_merge_to_numpy_covariance(sizes: list[int]) -> None:
    rows = _rows(40, 5, offset=1e3)
    total = no_moments(5)
    for batch in rows.split(sizes):
        total = merge_moments(total, moments_of(batch))
    assert total.n == 40
    np.testing.assert_allclose(total.mean, rows.numpy().mean(0), rtol=1e-13)
    np.testing.assert_allclose(total.scatter, np.cov(rows.numpy().T, ddof=0) * 40, atol=1e-9)


def test_float32_rows_are_taken_in_float64() -> None:
    rows = _rows(300, 3, offset=1e3).float()
    scatter = moments_of(rows).scatter
    assert scatter.dtype == torch.float64
    np.testing.assert_allclose(scatter, np.cov(rows.numpy().astype(float).T, ddof=0) * 300)


def test_blocks_are_parts_of_the_scatter() -> None:
    rows = _rows(40, 7)
    blocks = [(slice(0, 3), slice(0, 5)), (slice(4, 7), slice(5, 7))]
    kept = merge_moments(moments_of(rows[:9], blocks), moments_of(rows[9:], blocks))
    scatter = np.cov(rows.numpy().T, ddof=0) * 40
    np.testing.assert_allclose(kept.square, scatter.diagonal(), atol=1e-12)
    for x, y in (([2, 0], [4, 1]), ([3, 1], [0, 2]), ([6, 4], [5]), ([5, 6], [6, 5])):
        found = kept.between(torch.tensor(x), torch.tensor(y))
        np.testing.assert_allclose(found, scatter[np.ix_(x, y)], atol=1e-12)
    with pytest.raises(KeyError, match="no block"):
        kept.between(torch.tensor([0]), torch.tensor([6]))


def test_half_of_a_scatter_gives_all_of_it_in_any_order() -> None:
    rows = _rows(60, 700)
    parts = [rows[:, :90], rows[:, 90:]]
    blocks = [
        (slice(0, 90), slice(90, 700)),
        *upper_half(slice(90, 700)),
        (slice(3, 9), slice(0, 9)),
    ]
    halves = [
        moments_of([part[half] for part in parts], blocks) for half in (slice(9), slice(9, 60))
    ]
    kept = merge_moments(*halves)
    scatter = np.cov(rows.numpy().T, ddof=0) * 60
    rng = np.random.default_rng(0)
    for x, y in (
        (range(90, 700), range(90, 700)),
        (rng.permutation(range(90, 700))[:300], rng.permutation(700)[:500]),
        ([600, 95, 600, 340], [95, 95, 400, 5]),
        ([8, 3], [0, 8, 699]),
    ):
        found = kept.between(torch.tensor([*x]), torch.tensor([*y]))
        np.testing.assert_allclose(found, scatter[np.ix_([*x], [*y])], atol=1e-11)
    assert kept.products.numel() < 0.7 * 700**2
    for x, y in (([1], [7, 2]), ([20], [120, 7])):
        with pytest.raises(KeyError, match="no block"):
            kept.between(torch.tensor(x), torch.tensor(y))


def test_constant_columns_are_told_by_value() -> None:
    rows = _rows(50, 3)
    rows[:, 1] = 0.1  # its mean is not exactly 0.1, so its variance is not exactly zero
    total = merge_moments(moments_of(rows[:20]), moments_of(rows[20:]))
    assert total.constant.tolist() == [False, True, False]
