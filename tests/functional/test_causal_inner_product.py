"""The causal inner product, beside numpy on whole heads."""

import numpy as np
import pytest
import torch

from lincorr_lightning.functional import causal_whitening
from lincorr_lightning.functional.precision import neighbor_weights
from tests.nearness import causal_nearness

SOURCE, TARGET = list(range(10, 22)), list(range(30, 37))


def head(n: int = 200, width: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(width, width, generator=generator)
    return (torch.randn(n, width, generator=generator) @ mixing + 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 500])
def test_words_are_near_as_by_numpy_whatever_the_blocks(dtype: torch.dtype, size: int) -> None:
    rows = head(dtype=dtype)
    whitening = causal_whitening(lambda: rows.split(size))
    near = neighbor_weights(rows[SOURCE], rows[TARGET], whitening.matrix)
    expected = causal_nearness(rows.double().numpy(), SOURCE, TARGET)
    assert near.numpy() == pytest.approx(expected, abs=1e-9)


def test_copies_of_rows_do_not_count() -> None:
    """Padding, a row that occurs twice, and 0.0 beside -0.0: as if none of them were there."""
    rows = head()
    padding = torch.zeros(9, 12)
    padding[::2] = -0.0
    padded = torch.cat([rows[:50], padding[:5], rows[50:], padding[5:], 8 * torch.ones(2, 12)])
    whitening = causal_whitening(lambda: padded.split(60))
    assert (whitening.n_rows, whitening.n_copies) == (211, 11)
    assert whitening.matrix.abs() == pytest.approx(
        causal_whitening(lambda: rows.split(60)).matrix.abs(), abs=1e-9
    )


def test_directions_without_variance_are_left_out() -> None:
    rows = head()
    rows[:, 5] = rows[:, 4] - 2 * rows[:, 3]
    whitening = causal_whitening(lambda: rows.split(64))
    assert whitening.matrix.shape == (12, 11)
    white = rows.double().numpy() @ whitening.matrix.numpy()
    assert np.cov(white.T) == pytest.approx(np.eye(11), abs=1e-8)
