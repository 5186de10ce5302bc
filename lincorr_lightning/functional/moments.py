"""Second moments of rows of logits, sufficient for least squares and label-wise Pearson.

Their size does not depend on the number of rows. They are float64 and centered on their own mean,
so that large logits with a small spread keep their digits, and they merge exactly
(Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979) over batches and over ranks.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

Block = tuple[slice, slice]  #: Rows and columns of a part of a scatter matrix.


class Moments(NamedTuple):
    """Sufficient statistics of rows ``z`` with ``n_columns`` columns.

    The scatter is the sum over rows of ``(z - mean)(z - mean)^T``. Only blocks of it are kept, as
    the nulls of many pairs have far more columns than pairs of columns that are ever compared.

    Attributes:
        n: Number of rows, a float64 scalar.
        mean: Mean of each column, ``(n_columns,)``.
        square: Diagonal of the scatter, ``(n_columns,)``.
        low: Smallest value of each column, ``(n_columns,)``.
        high: Largest value of each column, ``(n_columns,)``.
        products: The entries of all blocks, one after another, ``(n_entries,)``.
        blocks: The blocks.
    """

    n: Tensor
    mean: Tensor
    square: Tensor
    low: Tensor
    high: Tensor
    products: Tensor
    blocks: tuple[Block, ...]

    @property
    def constant(self) -> Tensor:
        """Which columns are constant, ``(n_columns,)`` bool; judged by value, not by variance."""
        return self.low >= self.high

    @property
    def scatter(self) -> Tensor:
        """The whole scatter, ``(n_columns, n_columns)``, of moments that keep all of it."""
        return self.products.view(len(self.mean), -1)

    def between(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the scatter between columns x and y, ``(len(x), len(y))``.

        A KeyError if they are in no block that is kept.
        """
        x, y = x.to(self.mean.device), y.to(self.mean.device)
        x_ends, y_ends = _ends(x), _ends(y)
        ends = accumulate((_size(block) for block in self.blocks), initial=0)
        for (rows, columns), (start, end) in zip(self.blocks, pairwise(ends), strict=True):
            block = self.products[start:end].view(rows.stop - rows.start, -1)
            if _holds(rows, x_ends) and _holds(columns, y_ends):
                return block[x - rows.start][:, y - columns.start]
            if _holds(rows, y_ends) and _holds(columns, x_ends):
                return block[y - rows.start][:, x - columns.start].T
        raise KeyError("no block of the scatter has these columns")


def _size(block: Block) -> int:
    return (block[0].stop - block[0].start) * (block[1].stop - block[1].start)


def _ends(columns: Tensor) -> list[int]:
    return torch.stack(columns.aminmax()).tolist() if len(columns) else []


def _holds(part: slice, ends: list[int]) -> bool:
    return not ends or (part.start <= ends[0] and ends[1] < part.stop)


def _blocks(blocks: Sequence[Block], n_columns: int) -> tuple[Block, ...]:
    return tuple(blocks) or ((slice(0, n_columns), slice(0, n_columns)),)


def no_moments(
    n_columns: int, blocks: Sequence[Block] = (), device: torch.device | str | None = None
) -> Moments:
    """Return the moments of no rows, the neutral element of `merge_moments`; see `moments_of`."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    kept = _blocks(blocks, n_columns)
    return Moments(
        n=zeros(), mean=zeros(n_columns), square=zeros(n_columns), low=zeros(n_columns) + torch.inf,
        high=zeros(n_columns) - torch.inf, products=zeros(sum(map(_size, kept))), blocks=kept,
    )  # fmt: skip


def moments_of(rows: Tensor, blocks: Sequence[Block] = ()) -> Moments:
    """Return the moments of one batch of rows, ``(n_rows, n_columns)``, of any floating type.

    `blocks` are those of the scatter that are kept; without any, all of it is.
    """
    if len(rows) == 0:
        return no_moments(rows.shape[1], blocks, rows.device)
    rows = rows.double()
    mean = rows.mean(0)
    centred = rows - mean
    kept = _blocks(blocks, len(mean))
    return Moments(
        n=torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device), mean=mean,
        square=centred.square().sum(0), low=rows.amin(0), high=rows.amax(0),
        products=torch.cat([(centred[:, x].T @ centred[:, y]).reshape(-1) for x, y in kept]),
        blocks=kept,
    )  # fmt: skip


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of the rows of `a` and `b` together, which have the same blocks."""
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    step = b.mean - a.mean
    outer = torch.cat([torch.outer(step[x], step[y]).reshape(-1) for x, y in a.blocks])
    return Moments(
        n=n, mean=a.mean + share * step, square=a.square + b.square + a.n * share * step.square(),
        low=torch.minimum(a.low, b.low), high=torch.maximum(a.high, b.high),
        products=a.products + b.products + (a.n * share) * outer, blocks=a.blocks,
    )  # fmt: skip
