"""Streaming second moments as a torchmetrics Metric."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torchmetrics import Metric

from lincorr_lightning.functional import Moments, merge_moments, moments_of, no_moments


class JointMoments(Metric):
    """Second moments of all logits of a run, accumulated over batches and ranks.

    One joint matrix serves every ordered pair: each least squares problem consists of blocks of it.
    Memory does not grow with the number of rows.

    Args:
        n_columns: Width of the rows.
        n_shuffled: Leading columns whose permuted scatter is kept (see `Moments.shuffled`).

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
    shuffled: Tensor

    def __init__(self, n_columns: int, n_shuffled: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, value in no_moments(n_columns, n_shuffled)._asdict().items():
            # Means do not add up: ranks are merged in `compute`, not by a plain sum.
            self.add_state(name, value, dist_reduce_fx=None)

    def _state(self) -> Moments:
        return Moments(*(getattr(self, name) for name in Moments._fields))

    def update(self, rows: Tensor) -> None:
        """Add rows of ``(n_rows, n_columns)``."""
        merged = merge_moments(self._state(), moments_of(rows, self.shuffled.shape[-1]))
        for name, value in merged._asdict().items():
            setattr(self, name, value)

    def gather(self) -> Moments:
        """Return the moments of all rows of all ranks; also when no rank has seen a row."""
        with self.sync_context():
            return self._merged()

    def compute(self) -> Moments:
        """Return the moments of all rows of all ranks."""
        return self._merged()

    def _merged(self) -> Moments:
        state = self._state()
        if state.n.ndim == 0:
            return state
        # After a sync the first dimension of each state is the rank.
        return functools.reduce(
            merge_moments, (Moments(*parts) for parts in zip(*state, strict=True))
        )
