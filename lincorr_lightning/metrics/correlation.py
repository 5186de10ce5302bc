"""Streaming instance-wise Pearson."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lincorr_lightning.functional import segmented_pearson


class InstancewisePearson(Metric):
    """Mean over instances of Pearson's r across the labels of each target (paper appendix D).

    ``r`` lies in [-1, 1], higher is better. The intercept dominates it, so that unrelated pairs
    score high, too; the label-wise r is the main result. Instances whose logits are all equal are
    left out.

    Args:
        sizes: Number of labels of each target; targets lie side by side in the rows.

    Example:
        >>> metric = InstancewisePearson([3])
        >>> t = torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
        >>> metric.update(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), t)
        >>> metric.compute().item()
        0.0
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    segments: Tensor
    total: Tensor
    count: Tensor

    def __init__(self, sizes: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Which columns are those of each target, ``(sum(sizes), n_targets)`` of 0 and 1.
        eye = torch.eye(len(sizes), dtype=torch.float64)
        segments = eye.repeat_interleave(torch.tensor(sizes), 0)
        self.register_buffer("segments", segments, persistent=False)
        zeros = torch.zeros(len(sizes), dtype=torch.float64)
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("count", zeros.clone(), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add instances: predicted and true logits, ``(n_subjects, sum(sizes))`` each."""
        r = segmented_pearson(prediction, target, self.segments)
        self.total += r.nansum(0)
        self.count += (~r.isnan()).sum(0)

    def compute(self) -> Tensor:
        """Return the mean r of each target, ``(n_targets,)``; NaN where no instance varies."""
        return self.total / self.count
