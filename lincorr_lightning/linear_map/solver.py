"""The ridge solve: from second moments of logits to W and b, and to the strength of the ridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.functional import (
    LeastSquares,
    Moments,
    labelwise_pearson_from_moments,
    strongest_within,
)
from lincorr_lightning.linear_map.layout import JointLayout, Pair

_TUNE_EVERY = 5


class Solution(NamedTuple):
    """An affine map between logits, ``y = W (x - mean_x) + mean_y``, in float64.

    Centred, because logits lie far from zero with a small spread: no digits cancel.

    Attributes:
        weight: W, ``(n_target, n_source)``.
        mean_x: Mean of the source, ``(n_source,)``.
        mean_y: Mean of the targets, ``(n_target,)``.
    """

    weight: Tensor
    mean_x: Tensor
    mean_y: Tensor

    @property
    def bias(self) -> Tensor:
        """The paper's b, as in ``y = W x + b``, ``(n_target,)``."""
        return self.mean_y - self.weight @ self.mean_x

    def __call__(self, source: Tensor) -> Tensor:
        """Return predicted logits, ``(..., n_target)``, of source logits ``(..., n_source)``."""
        return (source - self.mean_x) @ self.weight.T + self.mean_y


class RidgeSolver:
    """Least squares from one source to all its targets, for any ridge strength.

    One eigendecomposition serves all of them, and the permuted problem too, which differs in its
    right-hand side alone.

    Args:
        moments: Moments of the rows to fit on.
        x: Columns of the source, ``(n_source,)``.
        y: Columns of the targets, ``(n_target,)``.
        permuted: Whether to solve the permuted problem, too; `moments` must have it.
    """

    def __init__(self, moments: Moments, x: Tensor, y: Tensor, permuted: bool = False) -> None:
        x, y = x.to(moments.mean.device), y.to(moments.mean.device)
        self._mean_x, self._mean_y = moments.mean[x], moments.mean[y]
        sides = [moments.scatter[x][:, y]]
        if permuted:
            sides.append(moments.shuffled[x][:, y])
        self._squares = LeastSquares(moments.scatter[x][:, x], torch.cat(sides, dim=1))

    def solve(self, ridge: float | Tensor, permuted: bool = False) -> Solution:
        """Return the map from the source to its targets.

        Args:
            ridge: Penalty on ``|W|^2``, a number or one per target, ``(n_target,)``.
            permuted: Whether to return the map fitted with the targets' rows permuted, the null of
                no relation.
        """
        n = len(self._mean_y)
        weight = self._squares.weight(ridge, slice(n, None) if permuted else slice(n))
        return Solution(weight, self._mean_x, self._mean_y)


def label_r(
    moments: Moments,
    weight: Tensor,
    source_columns: Tensor,
    target_columns: Tensor,
    *,
    shuffled: bool = False,
) -> Tensor:
    """Return the label-wise r of ``W x + b`` on the rows behind `moments`.

    Args:
        moments: Moments of the rows to score on.
        weight: W, ``(n_target, n_source)``.
        source_columns: Columns of the source, ``(n_source,)``.
        target_columns: Columns of the targets, ``(n_target,)``.
        shuffled: Whether to score against the permuted targets.

    Returns:
        ``(n_target,)``, NaN where a label or its prediction is constant.
    """
    x = source_columns.to(moments.mean.device)
    y = target_columns.to(moments.mean.device)
    scatter = moments.shuffled if shuffled else moments.scatter
    return labelwise_pearson_from_moments(
        weight,
        xx=moments.scatter[x][:, x],
        xy=scatter[x][:, y],
        yy=moments.scatter.diagonal()[y],
        constant=moments.constant[y],
    )


def split_targets(
    layout: JointLayout, source: str, values: Tensor, dim: int = -1
) -> Iterator[tuple[str, Tensor]]:
    """Yield each target of a source with its part of values over all target columns."""
    targets = layout.targets(source)
    sizes = [layout.sizes[target] for target in targets]
    yield from zip(targets, torch.split(values, sizes, dim), strict=True)


def per_target_ridge(layout: JointLayout, source: str, ridges: Mapping[Pair, float]) -> Tensor:
    """Return the ridge strength of each target column of a source, ``(n_target,)`` float64."""
    return torch.cat(
        [
            torch.full((layout.sizes[target],), ridges[source, target], dtype=torch.float64)
            for target in layout.targets(source)
        ]
    )


def tuning_rows(n: int, first: int = 0) -> Tensor:
    """Return which rows judge ridge strengths that are fitted on the others: every fifth.

    By position among all rows, so that the same rows judge for any batch size.

    Returns:
        ``(n,)`` bool.
    """
    return (torch.arange(n) + first) % _TUNE_EVERY == _TUNE_EVERY - 1


def choose_ridges(
    fit: Moments, tune: Moments, layout: JointLayout, grid: Sequence[float], tolerance: float
) -> dict[Pair, float]:
    """Return the strongest ridge of each pair whose r stays within `tolerance` of the best."""
    chosen = {}
    for source in layout.sources:
        x, y = layout.columns(source), layout.target_columns(source)
        solver = RidgeSolver(fit, x, y)
        scores = [label_r(tune, solver.solve(ridge).weight, x, y).cpu() for ridge in grid]
        for target, r in split_targets(layout, source, torch.stack(scores)):
            means = r.double().nanmean(1)  # as `summarize` does, for all strengths at once
            chosen[source, target] = grid[strongest_within(means.tolist(), tolerance)]
    return chosen
