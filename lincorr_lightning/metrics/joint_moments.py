"""Streaming second moments as a torchmetrics Metric."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lincorr_lightning.functional import Moments, merge_moments, moments_of, no_moments
from lincorr_lightning.functional.moments import Block

# All but the blocks.
_SUMS = Moments._fields[:-1]


class JointMoments(Metric):
    """Second moments of all logits of a run, accumulated over batches and ranks.

    One joint matrix serves every ordered pair: each least squares problem consists of parts of it.
    Memory does not grow with the number of rows.

    Args:
        n_columns: Width of the rows.
        blocks: Blocks of the scatter to keep; none keeps all of it.

    Example:
        >>> import torch
        >>> metric = JointMoments(2)
        >>> for batch in torch.arange(12.0).reshape(3, 2, 2):
        ...     metric.update(batch)
        >>> metric.compute().mean.tolist()
        [5.0, 6.0]
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False
    products: Tensor

    def __init__(self, n_columns: int, blocks: Sequence[Block] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        *sums, self.blocks = no_moments(n_columns, blocks)
        for name, value in zip(_SUMS, sums, strict=True):
            # Means do not add up: ranks are merged in `compute`, not by a plain sum.
            self.add_state(name, value, dist_reduce_fx=None)

    def _moments(self, sums: Sequence[Tensor]) -> Moments:
        return Moments(blocks=self.blocks, **dict(zip(_SUMS, sums, strict=True)))

    def _merged(self) -> Moments:
        sums = [getattr(self, name) for name in _SUMS]
        # After a sync the first dimension of each state is the rank.
        ranks = [sums] if sums[0].ndim == 0 else zip(*sums, strict=True)
        return functools.reduce(merge_moments, map(self._moments, ranks))

    def update(self, rows: Tensor) -> None:
        """Add rows of ``(n_rows, n_columns)``."""
        merged = merge_moments(self._merged(), moments_of(rows, self.blocks))
        for name in _SUMS:
            setattr(self, name, getattr(merged, name))

    def gather(self) -> Moments:
        """Return the moments of all rows of all ranks; also when no rank has seen a row."""
        with self.sync_context():
            return self._merged()

    def compute(self) -> Moments:
        """Return the moments of all rows of all ranks."""
        return self._merged()
