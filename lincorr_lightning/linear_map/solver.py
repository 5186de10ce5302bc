"""From second moments to maps, ridge strengths, nulls and scores: the closed form of a probe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lincorr_lightning.functional import (
    LeastSquares,
    Moments,
    labelwise_pearson_from_moments,
    strongest_within,
)
from lincorr_lightning.linear_map.affine_map import AffineMap
from lincorr_lightning.linear_map.layout import ProbeLayout

Pair = tuple[str, str]


class SourceSolver:
    """All least squares problems of one source, sharing one eigendecomposition.

    Args:
        fit: Moments of the joint rows of the fit half.
        layout: Columns of the joint rows.
        source: Name of the source knowledge.
    """

    def __init__(self, fit: Moments, layout: ProbeLayout, source: str) -> None:
        device = fit.mean.device
        x = layout.columns(source).to(device)
        y = layout.target_columns(source).to(device)
        self._mean_x, self._mean_y = fit.mean[x], fit.mean[y]
        xx, xy = fit.scatter[x][:, x], fit.scatter[x][:, y]
        self._n_target = len(y)
        if fit.n_shuffled:
            # The permuted problem differs in its right-hand side alone.
            xy = torch.cat([xy, fit.shuffled[x][:, y]], dim=1)
        self._squares = LeastSquares(xx, xy)

    def assign(self, real: AffineMap | None, permuted: AffineMap | None, ridge: Tensor) -> None:
        """Put the solutions into maps.

        Args:
            real: The map from source to targets; None leaves it to gradient descent.
            permuted: The map fitted with the targets' rows permuted.
            ridge: Strength per target column, ``(n_target,)``.
        """
        halves = 2 if permuted is not None else 1
        weight = self._squares.weight(ridge.repeat(halves))
        if real is not None:
            real.assign(weight[: self._n_target], self._mean_x, self._mean_y)
        if permuted is not None:
            permuted.assign(weight[self._n_target :], self._mean_x, self._mean_y)

    def real_weight(self, ridge: float) -> Tensor:
        """W from the source to all its targets, ``(n_target, n_source)``."""
        return self._squares.weight(ridge)[: self._n_target]


def fit_control(
    fit: Moments, layout: ProbeLayout, source: str, control: AffineMap, ridge: Tensor
) -> None:
    """Fit the map from the control prompt, read at the source's tokens, to the source's targets."""
    c = layout.control_columns(source).to(fit.mean.device)
    y = layout.target_columns(source).to(fit.mean.device)
    squares = LeastSquares(fit.scatter[c][:, c], fit.scatter[c][:, y])
    control.assign(squares.weight(ridge), fit.mean[c], fit.mean[y])


def label_r(
    moments: Moments,
    weight: Tensor,
    source_columns: Tensor,
    target_columns: Tensor,
    *,
    shuffled: bool = False,
) -> Tensor:
    """Label-wise r of ``W x + b`` on the rows behind `moments`: ``(..., n_target)``."""
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
    layout: ProbeLayout, source: str, values: Tensor, dim: int = -1
) -> Iterator[tuple[str, Tensor]]:
    """Cut values over all target columns of a source into one piece a target."""
    targets = layout.targets(source)
    sizes = [layout.sizes[target] for target in targets]
    yield from zip(targets, torch.split(values, sizes, dim), strict=True)


def per_target_ridge(layout: ProbeLayout, source: str, ridges: Mapping[Pair, float]) -> Tensor:
    """Ridge strength of each target column of a source, ``(n_target,)`` float64."""
    return torch.cat(
        [
            torch.full((layout.sizes[target],), ridges[source, target], dtype=torch.float64)
            for target in layout.targets(source)
        ]
    )


def choose_ridges(
    fit: Moments, tune: Moments, layout: ProbeLayout, grid: Sequence[float], tolerance: float
) -> dict[Pair, float]:
    """The strongest ridge of each pair whose r stays within `tolerance` of the best.

    Args:
        fit: Moments of the rows the candidates are fitted on.
        tune: Moments of other rows of the fit half, on which they are judged.
        layout: Columns of the joint rows.
        grid: Ridge strengths, increasing.
        tolerance: What a stronger ridge may cost in mean label-wise r.
    """
    chosen = {}
    for source in layout.sources:
        solver = SourceSolver(fit, layout, source)
        x, y = layout.columns(source), layout.target_columns(source)
        scores = [label_r(tune, solver.real_weight(ridge), x, y).cpu() for ridge in grid]
        for target, r in split_targets(layout, source, torch.stack(scores)):
            means = r.double().nanmean(1)  # as `summarize` does, of all strengths at once
            chosen[source, target] = grid[strongest_within(means.tolist(), tolerance)]
    return chosen
