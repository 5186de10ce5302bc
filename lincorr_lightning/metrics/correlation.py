"""Streaming instance-wise Pearson, and the standard error of a mean label-wise r."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lincorr_lightning.functional import segmented_pearson
from lincorr_lightning.functional.significance import pearson_influence


def _segments(sizes: list[int]) -> Tensor:
    """Return which columns are those of each target, ``(sum(sizes), n_targets)`` of 0 and 1."""
    eye = torch.eye(len(sizes), dtype=torch.float64)
    return eye.repeat_interleave(torch.tensor(sizes), 0)


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
        self.register_buffer("segments", _segments(sizes), persistent=False)
        zeros = torch.zeros(len(sizes), dtype=torch.float64)
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("count", zeros.clone(), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add instances.

        Args:
            prediction: ``(n_subjects, sum(sizes))``.
            target: ``(n_subjects, sum(sizes))``.
        """
        r = segmented_pearson(prediction, target, self.segments)
        self.total += r.nansum(0)
        self.count += (~r.isnan()).sum(0)

    def compute(self) -> Tensor:
        """Return the mean r of each target, ``(n_targets,)``; NaN where no instance varies."""
        return self.total / self.count


class Scale(NamedTuple):
    """Location and spread of some columns on the rows that are scored, and their r.

    Attributes:
        mean: Mean of each column, ``(n_columns,)``.
        std: Standard deviation of each column, ``(n_columns,)``; 0 where it is constant.
        r: Correlation with the target, ``(n_columns,)``; NaN where one of them is constant.
    """

    mean: Tensor
    std: Tensor
    r: Tensor


class MeanRStandardError(Metric):
    """Standard error over rows of the mean label-wise r of each target, and of its excess.

    By the influence function of r (`pearson_influence`): rows are independent, labels are not, so
    labels are averaged within a row before the spread over rows is taken. Only sums are kept.

    Args:
        sizes: Number of labels of each target; targets lie side by side in the rows.
        target: Scale of the true logits; its r is not used.
        prediction: Scale of the predicted logits.
        null: Scale of the null's predictions; None without a null.
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False
    n: Tensor
    sums: Tensor
    squares: Tensor

    def __init__(
        self,
        sizes: list[int],
        target: Scale,
        prediction: Scale,
        null: Scale | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        zeros = torch.zeros(2, len(sizes), dtype=torch.float64)
        self.add_state("n", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sums", zeros, dist_reduce_fx="sum")
        self.add_state("squares", zeros.clone(), dist_reduce_fx="sum")
        self._target, self._prediction, self._null = target, prediction, null
        known = ~prediction.r.isnan() if null is None else ~(prediction.r + null.r).isnan()
        weights = _segments(sizes).to(known.device) * known[:, None]
        self._weights = weights / weights.sum(0).clamp(min=1)

    @property
    def count(self) -> Tensor:
        """Number of rows of all ranks, a float64 scalar."""
        with self.sync_context():
            return self.n.clone()

    def update(self, prediction: Tensor, target: Tensor, null: Tensor | None) -> None:
        """Add rows.

        Args:
            prediction: Predicted logits, ``(n_rows, sum(sizes))``.
            target: True logits, likewise.
            null: Predictions of the null, likewise; None without a null.
        """
        y = _standardized(target, self._target)
        own = self._influence(prediction, y, self._prediction)
        above = own
        if null is not None:
            assert self._null is not None
            above = own - self._influence(null, y, self._null)
        for i, values in enumerate((own, above)):
            self.sums[i] += values.sum(0)
            self.squares[i] += values.square().sum(0)
        self.n += len(target)

    def _influence(self, prediction: Tensor, y: Tensor, scale: Scale) -> Tensor:
        """Return the influence of each row on the mean over labels, ``(n_rows, n_targets)``."""
        r = scale.r.nan_to_num()
        return pearson_influence(_standardized(prediction, scale), y, r) @ self._weights

    def compute(self) -> Tensor:
        """Return standard errors, ``(2, n_targets)``: of the mean r and of its excess.

        NaN with fewer than two rows.
        """
        mean = self.sums / self.n
        variance = (self.squares / self.n - mean.square()).clamp(min=0) / (self.n - 1)
        return torch.where(self.n > 1, variance.sqrt(), torch.nan)


def _standardized(values: Tensor, scale: Scale) -> Tensor:
    """Return values in standard deviations; constant columns become 0."""
    inverse = torch.where(scale.std > 0, 1 / scale.std, 0.0)
    return (values - scale.mean) * inverse
