"""Second moments of rows of logits, sufficient for least squares and label-wise Pearson.

Their size does not depend on the number of rows. They are float64 and centered on their own mean,
so that large logits with a small spread keep their digits, and they merge exactly
(Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979) over batches and over ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor

Block = tuple[slice, slice]  #: Rows and columns of a part of a scatter matrix.
_TILE = 256  # columns


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

        A KeyError if no blocks that are kept have all of it.
        """
        # Of sorted columns, those in a block are neighbours, which is faster by much.
        (rows, row_of), (columns, column_of) = _sorted(x), _sorted(y)
        scatter = self.products.new_empty(len(x), len(y))
        is_kept = torch.zeros(len(x), len(y), dtype=torch.bool)
        ways = (rows, columns, scatter, is_kept), (columns, rows, scatter.T, is_kept.T)
        for (a_part, b_part), place in zip(self.blocks, _places(self.blocks), strict=True):
            for a, b, values, kept in ways:
                i = _within(a, a_part)
                j = _within(b, b_part) if i else None
                if i and j:
                    block = self.products[place].view(a_part.stop - a_part.start, -1)
                    values[i, j] = _take(_take(block, 0, a[i], a_part), 1, b[j], b_part)
                    kept[i, j] = True
        if not is_kept.all():
            raise KeyError("no block of the scatter has these columns")
        for dim, place_of in enumerate((row_of, column_of)):
            if place_of is not None:
                scatter = scatter.index_select(dim, place_of.to(scatter.device))
        return scatter


def upper_half(columns: slice) -> list[Block]:
    """Return the blocks of the upper triangle of some columns' scatter, in strips of `_TILE`.

    `Moments.between` mirrors them.
    """
    starts = range(columns.start, columns.stop, _TILE)
    return [
        (slice(start, min(start + _TILE, columns.stop)), slice(start, columns.stop))
        for start in starts
    ]


def _sorted(columns: Tensor) -> tuple[list[int], Tensor | None]:
    """Return sorted columns, and the place of each column among them; None if it is its own."""
    numbers = columns.tolist()
    ordered = sorted(numbers)
    return ordered, None if ordered == numbers else columns.argsort().argsort()


def _within(columns: list[int], part: slice) -> slice | None:
    """Return where among sorted columns those of a part are; None if there are none."""
    if not columns or part.stop <= columns[0] or part.start > columns[-1]:  # most blocks
        return None
    found = slice(bisect_left(columns, part.start), bisect_left(columns, part.stop))
    return found if found.start < found.stop else None


def _take(block: Tensor, dim: int, columns: list[int], part: slice) -> Tensor:
    """Return some columns of a block that has those of a part along `dim`."""
    first, n = columns[0], len(columns)
    if columns == list(range(first, first + n)):  # neighbours
        return block.narrow(dim, first - part.start, n)
    return block.index_select(dim, torch.tensor(columns, device=block.device) - part.start)


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


def moments_of(rows: Tensor | Sequence[Tensor], blocks: Sequence[Block] = ()) -> Moments:
    """Return the moments of one batch of rows, ``(n_rows, n_columns)``, of any floating type.

    Columns may come in parts, side by side, none of which ends within a block. `blocks` are those
    of the scatter that are kept; without any, all of it is.
    """
    parts = [rows] if isinstance(rows, Tensor) else rows
    n_columns = sum(part.shape[1] for part in parts)
    return add_rows(no_moments(n_columns, blocks, parts[0].device), *parts)


def add_rows(total: Moments, *rows: Tensor) -> Moments:
    """Return moments with a batch of rows added; the products of `total` are changed in place.

    Both may take gigabytes: no more than the columns of a block are copied at once.
    """
    if len(rows[0]) == 0:
        return total
    parts = [part.double() for part in rows]
    means = [part.mean(0) for part in parts]
    starts = list(accumulate((part.shape[1] for part in parts), initial=0))

    def centred(columns: slice) -> Tensor:
        i = bisect_right(starts, columns.start) - 1
        here = slice(columns.start - starts[i], columns.stop - starts[i])
        return parts[i][:, here] - means[i][here]

    def add_scatter(block: Tensor, x: slice, y: slice, _: slice) -> None:
        block.addmm_(centred(x).T, centred(y))

    n = float(len(parts[0]))
    batch = Moments(
        n=torch.tensor(n, dtype=torch.float64, device=parts[0].device),
        mean=torch.cat(means),
        square=torch.cat([part.var(0, correction=0) for part in parts]) * n,
        low=torch.cat([part.amin(0) for part in parts]),
        high=torch.cat([part.amax(0) for part in parts]),
        products=parts[0].new_empty(0),
        blocks=total.blocks,
    )
    exact = total._replace(products=total.products.double().contiguous())  # after a cast, too
    return _add(exact, batch, add_scatter)


def merge_moments(a: Moments, b: Moments) -> Moments:
    """Return the moments of the rows of `a` and `b` together, which have the same blocks."""

    def add_products(block: Tensor, _: slice, __: slice, place: slice) -> None:
        block.add_(b.products[place].view_as(block))

    return _add(a._replace(products=a.products.clone()), b, add_products)


def _places(blocks: Sequence[Block]) -> Iterator[slice]:
    """Yield where among the products those of each block are."""
    sizes = ((x.stop - x.start) * (y.stop - y.start) for x, y in blocks)
    return starmap(slice, pairwise(accumulate(sizes, initial=0)))


def _add(
    a: Moments, b: Moments, add_scatter: Callable[[Tensor, slice, slice, slice], None]
) -> Moments:
    """Add to `a`, in place, what `b` counts.

    `add_scatter` adds the scatter of `b` to a block, of which it gets rows, columns and place.
    """
    n = a.n + b.n
    share = b.n / n.clamp(min=1)
    step = b.mean - a.mean
    weighted = a.n * share * step
    for (x, y), place in zip(a.blocks, _places(a.blocks), strict=True):
        block = a.products[place].view(x.stop - x.start, -1)
        add_scatter(block, x, y, place)
        block.addr_(weighted[x], step[y])
    return Moments(
        n=n,
        mean=a.mean + share * step,
        square=a.square + b.square + a.n * share * step.square(),
        low=torch.minimum(a.low, b.low),
        high=torch.maximum(a.high, b.high),
        products=a.products,
        blocks=a.blocks,
    )
