"""Second moments of rows of logits, sufficient for least squares and label-wise Pearson.

Their size does not depend on the number of rows. They are float64 and centred on their own mean, so
that large logits with a small spread keep their digits, and they merge exactly
(Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979) over batches and over ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Sufficient statistics of rows ``z`` with ``n_columns`` columns.

    Attributes:
        n: Number of rows, a float64 scalar.
        mean: Mean of each column, ``(n_columns,)``.
        scatter: Sum over rows of ``(z - mean)(z - mean)^T``, ``(n_columns, n_columns)``.
        shuffled: Sum over rows i of ``(z_i - mean)(z_p(i) - mean)^T`` of the first ``n_shuffled``
            columns, ``(n_shuffled, n_shuffled)``, where p(i) is another row of the same batch:
            the scatter of sources and targets that are permuted against each other.
        low: Smallest value of each column, ``(n_columns,)``.
        high: Largest value of each column, ``(n_columns,)``.
    """

    n: Tensor
    mean: Tensor
    scatter: Tensor
    shuffled: Tensor
    low: Tensor
    high: Tensor

    @property
    def constant(self) -> Tensor:
        """Which columns are constant, ``(n_columns,)`` bool; judged by value, not by variance."""
        return self.low >= self.high

    @property
    def n_shuffled(self) -> int:
        """Number of leading columns with a permuted scatter."""
        return self.shuffled.shape[0]


def no_moments(
    n_columns: int, n_shuffled: int = 0, device: torch.device | str | None = None
) -> Moments:
    """Return the moments of no rows, the neutral element of `merge_moments`.

    Args:
        n_columns: Number of columns.
        n_shuffled: Number of leading columns whose permuted scatter is kept.
        device: Device of the statistics.
    """

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    return Moments(
        n=zeros(),
        mean=zeros(n_columns),
        scatter=zeros(n_columns, n_columns),
        shuffled=zeros(n_shuffled, n_shuffled),
        low=zeros(n_columns) + torch.inf,
        high=zeros(n_columns) - torch.inf,
    )


def moments_of(rows: Tensor, n_shuffled: int = 0) -> Moments:
    """Return the moments of one batch.

    Args:
        rows: ``(n_rows, n_columns)``, of any floating type; converted to float64.
        n_shuffled: Number of leading columns whose permuted scatter is kept. Each row's partner is
            the row before it, so the pairing is as random as the order of the rows.

    Example:
        >>> m = moments_of(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
        >>> m.mean.tolist(), m.scatter.tolist()
        ([2.0, 4.0], [[2.0, 4.0], [4.0, 8.0]])
    """
    if len(rows) == 0:
        return no_moments(rows.shape[1], n_shuffled, rows.device)
    rows = rows.double()
    mean = rows.mean(0)
    centred = rows - mean
    head = centred[:, :n_shuffled]
    return Moments(
        n=torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device),
        mean=mean,
        scatter=centred.T @ centred,
        shuffled=head.T @ head.roll(1, 0),
        low=rows.amin(0),
        high=rows.amax(0),
    )


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of the rows of `a` and `b` together.

    Example:
        >>> rows = torch.arange(12.0).reshape(6, 2) ** 2
        >>> both = merge_moments(moments_of(rows[:2]), moments_of(rows[2:]))
        >>> torch.allclose(both.scatter, moments_of(rows).scatter)
        True
    """
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    step = b.mean - a.mean
    # A permutation within a batch keeps the batch's mean: both scatters have the same correction.
    outer = (a.n * share) * torch.outer(step, step)
    k = a.n_shuffled
    return Moments(
        n=n,
        mean=a.mean + share * step,
        scatter=a.scatter + b.scatter + outer,
        shuffled=a.shuffled + b.shuffled + outer[:k, :k],
        low=torch.minimum(a.low, b.low),
        high=torch.maximum(a.high, b.high),
    )
