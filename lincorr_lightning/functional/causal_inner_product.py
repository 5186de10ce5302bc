"""The causal inner product of an LM's head, in which words are near without any forward pass.

Park, Choe and Veitch, "The Linear Representation Hypothesis and the Geometry of Large Language
Models" (arXiv 2311.03658): words are compared after the covariance of *all* rows of the head is
whitened. It needs no labels and has no free parameter.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

_SMALLEST = 1e-6  # variance that is kept, in units of the largest
_HASHED_AT_ONCE = 512  # rows
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Whitening(NamedTuple):
    """A matrix that makes the covariance of a head's rows the identity.

    Attributes:
        matrix: What rows are multiplied by, ``(hidden_size, rank)``, float64.
        n_rows: Number of rows of the head.
        n_copies: Number of rows that were left out, since each equals another row.
    """

    matrix: Tensor
    n_rows: int
    n_copies: int


def causal_whitening(blocks: Callable[[], Iterable[Tensor]]) -> Whitening:
    """Return the whitening of the covariance C of a head's rows, C^(-1/2) up to a rotation.

    Rows that equal another row, such as those of a padded vocabulary, do not count. Directions of
    less than 1e-6 of the largest variance are left out. No more than a block of rows is held in
    float64, beside the covariance.

    Args:
        blocks: Returns all rows in blocks, ``(n_rows, hidden_size)`` each, of any floating type and
            in the same order each time.

    Example:
        >>> rows = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * 4
        >>> white = rows.double() @ causal_whitening(lambda: rows.split(100)).matrix
        >>> torch.allclose(white.T.cov(), torch.eye(3).double())
        True
    """
    hashes = torch.cat([_hashes(rows) for rows in blocks()])
    _, kinds, counts = torch.unique(hashes, return_inverse=True, return_counts=True)
    kept = counts[kinds] == 1
    n = int(kept.sum())
    start = 0
    for rows in blocks():
        if start == 0:
            shift = rows.double().mean(0)  # a large mean leaves the digits of a small spread
            scatter = shift.new_zeros(len(shift), len(shift))
            total = torch.zeros_like(shift)
        centred = rows[kept[start : start + len(rows)].to(rows.device)].double().sub_(shift)
        scatter.addmm_(centred.T, centred)  # in place: each copy may take gigabytes
        total += centred.sum(0)
        start += len(rows)
    assert start, "a head has rows"
    covariance = (scatter - torch.outer(total, total / max(n, 1))) / max(n - 1, 1)
    variances, directions = torch.linalg.eigh(covariance)
    strong = (variances > 0) & (variances >= _SMALLEST * variances[-1])
    matrix = directions[:, strong] / variances[strong].sqrt()
    return Whitening(matrix.cpu(), len(kept), int((~kept).sum()))


def _hashes(rows: Tensor) -> Tensor:
    """Return an int64 of each row on the CPU, the same for equal rows and else different."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (rows.shape[1],), generator=generator)
    factors = factors.to(rows.device)
    hashes = []
    for part in torch.split(rows, _HASHED_AT_ONCE):
        bits = (part + 0.0).view(_INTEGERS[rows.itemsize])  # 0.0 and -0.0 are equal
        hashes.append((bits * factors).sum(1))
    return torch.cat(hashes).cpu()
