"""Second moments of rows of logits, sufficient for least squares and label-wise Pearson.

Their size does not depend on the number of rows. They are float64 and centered on their own mean,
so that large logits with a small spread keep their digits, and they merge exactly
(Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979) over batches and over ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, starmap
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
        for (rows, columns), place in zip(self.blocks, _places(self.blocks), strict=True):
            is_turned = not (_holds(rows, x_ends) and _holds(columns, y_ends))
            if not is_turned or (_holds(rows, y_ends) and _holds(columns, x_ends)):
                a, b = (y, x) if is_turned else (x, y)
                block = self.products[place].view(rows.stop - rows.start, -1)
                part = block[a - rows.start][:, b - columns.start]
                return part.T if is_turned else part
        raise KeyError("no block of the scatter has these columns")


def _ends(columns: Tensor) -> list[int]:
    return torch.stack(columns.aminmax()).tolist() if len(columns) else []


def _holds(part: slice, ends: list[int]) -> bool:
    return not ends or (part.start <= ends[0] and ends[1] < part.stop)


def no_moments(
    n_columns: int, blocks: Sequence[Block] = (), device: torch.device | str | None = None
) -> Moments:
    """Return the moments of no rows, neutral in `merge_moments`; the products take no memory."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    kept = tuple(blocks) or ((slice(0, n_columns), slice(0, n_columns)),)
    *_, all_products = _places(kept)
    return Moments(
        n=zeros(),
        mean=zeros(n_columns),
        square=zeros(n_columns),
        low=zeros(n_columns) + torch.inf,
        high=zeros(n_columns) - torch.inf,
        products=zeros(1).expand(all_products.stop),
        blocks=kept,
    )


def moments_of(rows: Tensor, blocks: Sequence[Block] = ()) -> Moments:
    """Return the moments of one batch of rows, ``(n_rows, n_columns)``, of any floating type.

    `blocks` are those of the scatter that are kept; without any, all of it is.
    """
    return add_rows(no_moments(rows.shape[1], blocks, rows.device), rows)


def add_rows(total: Moments, rows: Tensor) -> Moments:
    """Return moments with a batch of rows added; the products of `total` are changed in place.

    No more than a block of products is held beside them, which may take gigabytes.
    """
    if len(rows) == 0:
        return total
    rows = rows.double()
    mean = rows.mean(0)
    centred = rows - mean
    batch = Moments(
        n=torch.tensor(float(len(rows)), dtype=torch.float64, device=rows.device),
        mean=mean,
        square=centred.square().sum(0),
        low=rows.amin(0),
        high=rows.amax(0),
        products=rows.new_empty(0),
        blocks=total.blocks,
    )
    exact = total._replace(products=total.products.double().contiguous())  # after a cast, too
    return _add(exact, batch, (centred[:, x].T @ centred[:, y] for x, y in total.blocks))


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of the rows of `a` and `b` together, which have the same blocks."""
    parts = (b.products[place] for place in _places(b.blocks))
    return _add(a._replace(products=a.products.clone()), b, parts)


def _places(blocks: Sequence[Block]) -> Iterator[slice]:
    """Yield where among the products those of each block are."""
    sizes = ((x.stop - x.start) * (y.stop - y.start) for x, y in blocks)
    return starmap(slice, pairwise(accumulate(sizes, initial=0)))


def _add(a: Moments, b: Moments, scatters: Iterable[Tensor]) -> Moments:
    """Add to `a`, in place, what `b` counts; `scatters` are those of its blocks."""
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    step = b.mean - a.mean
    for (x, y), place, new in zip(a.blocks, _places(a.blocks), scatters, strict=True):
        moved = torch.outer(step[x], step[y]).mul_(a.n * share)
        a.products[place].add_(new.reshape(-1)).add_(moved.reshape(-1))
    return Moments(
        n=n,
        mean=a.mean + share * step,
        square=a.square + b.square + a.n * share * step.square(),
        low=torch.minimum(a.low, b.low),
        high=torch.maximum(a.high, b.high),
        products=a.products,
        blocks=a.blocks,
    )
