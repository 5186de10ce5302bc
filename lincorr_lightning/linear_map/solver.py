"""From second moments of joint rows to W and b of every pair, their ridges and their scores.

Maps are kept by source: one `Solution` leads from a source to all of its targets, side by side, as
one eigendecomposition gives them. `score_maps` and `weights_by_pair` split them into pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lincorr_lightning.functional import (
    LeastSquares,
    Moments,
    hit_rates,
    labelwise_pearson_from_moments,
    strongest_within,
)
from lincorr_lightning.linear_map.layout import JointLayout, Pair, source_progress

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


class AffineMap(nn.Module):
    """A `Solution` as the parameters of a module; gradient descent converges, as it is centred."""

    center: Tensor

    def __init__(self, n_source: int, n_target: int, trainable: bool = True) -> None:
        super().__init__()
        zeros = torch.zeros(n_target, n_source, dtype=torch.float64)
        self.weight = nn.Parameter(zeros, requires_grad=trainable)
        self.offset = nn.Parameter(zeros[:, 0].clone(), requires_grad=trainable)
        self.register_buffer("center", zeros[0].clone())

    @property
    def solution(self) -> Solution:
        """The map as plain tensors without gradients; they share memory with the parameters."""
        return Solution(self.weight.detach(), self.center, self.offset.detach())

    @torch.no_grad()
    def assign(self, solution: Solution) -> None:
        """Copy a solution into the parameters."""
        self.weight.copy_(solution.weight)
        self.center.copy_(solution.mean_x)
        self.offset.copy_(solution.mean_y)

    @torch.no_grad()
    def set_newton_gradients(self, solution: Solution) -> None:
        """Set the gradients with which an SGD step of learning rate 1 reaches the solution.

        The inverse curvature times the gradient of a least squares problem is the distance to its
        solution, from anywhere. The solution's center is taken over.
        """
        self.center.copy_(solution.mean_x)
        self.weight.grad = self.weight - solution.weight
        self.offset.grad = self.offset - solution.mean_y

    def forward(self, source: Tensor) -> Tensor:
        """Return predicted logits, ``(n_subjects, n_target)``, of ``(n_subjects, n_source)``."""
        return Solution(self.weight, self.center, self.offset)(source)


class RidgeSolver:
    """Least squares from one source to all its targets, for any ridge strength.

    One eigendecomposition serves all of them, and the permuted problem too (the null of no
    relation, for which `moments` must have the permuted scatter): its right-hand side alone
    differs. `x` and `y` are the columns of the source and of the targets.
    """

    def __init__(self, moments: Moments, x: Tensor, y: Tensor, permuted: bool = False) -> None:
        x, y = x.to(moments.mean.device), y.to(moments.mean.device)
        self._mean_x, self._mean_y = moments.mean[x], moments.mean[y]
        sides = [moments.scatter[x][:, y]]
        if permuted:
            sides.append(moments.shuffled[x][:, y])
        self._squares = LeastSquares(moments.scatter[x][:, x], torch.cat(sides, dim=1))

    def solve(self, ridge: float | Tensor, permuted: bool = False) -> Solution:
        """Return the map from the source to its targets, or that of the permuted problem.

        The ridge is the penalty on ``|W|^2``, a number or one per target, ``(n_target,)``.
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
    """Return the label-wise r of ``W x + b`` on the rows behind `moments`, ``(n_target,)``.

    It is NaN where a label or its prediction is constant. W is ``(n_target, n_source)``; with
    `shuffled`, targets are the permuted ones.
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


@dataclass(frozen=True)
class FittedMaps:
    """The maps of all pairs of a layout, and of their nulls, by source.

    Attributes:
        ridges: Ridge strength of each pair.
        maps: The maps.
        permuted: Maps fitted with the targets' rows permuted; empty without that null.
        control: Maps from the control prompt, read at the source's tokens; empty without it.
        n: Number of subjects they were fitted on.
        moments: Moments of the joint rows they were fitted on; None for stored maps.
        solvers: Solver of each source, for other ridge strengths; empty for stored maps.
    """

    ridges: Mapping[Pair, float]
    maps: Mapping[str, Solution]
    permuted: Mapping[str, Solution]
    control: Mapping[str, Solution]
    n: int
    moments: Moments | None = None
    solvers: Mapping[str, RidgeSolver] = field(default_factory=dict)


def fit_layout(
    moments: Moments, layout: JointLayout, ridges: Mapping[Pair, float] | float
) -> FittedMaps:
    """Solve for W and b of every pair, and of its nulls; the permuted one needs its scatter."""
    if isinstance(ridges, (int, float)):
        ridges = dict.fromkeys(layout.pairs, float(ridges))
    solvers, maps, permuted, control = {}, {}, {}, {}
    for source in source_progress(layout, "solving"):
        y = layout.target_columns(source)
        ridge = per_target_ridge(layout, source, ridges)
        with_null = moments.n_shuffled > 0
        solver = solvers[source] = RidgeSolver(moments, layout.columns(source), y, with_null)
        maps[source] = solver.solve(ridge)
        if with_null:
            permuted[source] = solver.solve(ridge, permuted=True)
        if layout.control is not None:
            columns = layout.control_columns(source)
            control[source] = RidgeSolver(moments, columns, y).solve(ridge)
    return FittedMaps(dict(ridges), maps, permuted, control, int(moments.n), moments, solvers)


def per_target_ridge(layout: JointLayout, source: str, ridges: Mapping[Pair, float]) -> Tensor:
    """Return the ridge strength of each target column of a source, ``(n_target,)`` float64."""
    targets = layout.targets(source)
    strengths = torch.tensor([ridges[source, target] for target in targets], dtype=torch.float64)
    return strengths.repeat_interleave(torch.tensor([layout.sizes[name] for name in targets]))


def tuning_rows(n: int, first: int = 0) -> Tensor:
    """Return which rows judge ridge strengths that are fitted on the others, ``(n,)`` bool.

    Every fifth by position among all rows, so that the same rows judge for any batch size.
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


def weights_by_pair(layout: JointLayout, maps: Mapping[str, Solution]) -> dict[Pair, Tensor]:
    """Return W of each pair, ``(n_target, n_source)``."""
    return {
        (source, target): weight
        for source, solution in maps.items()
        for target, weight in split_targets(layout, source, solution.weight, dim=0)
    }


def label_r_by_pair(
    test: Moments, layout: JointLayout, weights: Mapping[str, Tensor], null: str | None = None
) -> dict[Pair, Tensor]:
    """Return the label-wise r of each pair on the rows behind `test`, ``(n_target,)`` on the CPU.

    `weights` are W of each source to all of its targets. The null ``permuted`` scores against
    permuted targets, ``control`` from the control prompt.
    """
    by_pair: dict[Pair, Tensor] = {}
    for source, weight in weights.items():
        x = layout.control_columns(source) if null == "control" else layout.columns(source)
        y = layout.target_columns(source)
        r = label_r(test, weight, x, y, shuffled=null == "permuted").cpu()
        by_pair |= {(source, target): part for target, part in split_targets(layout, source, r)}
    return by_pair


@dataclass(frozen=True)
class MapScore:
    """W of one pair and its scores, on the CPU.

    Attributes:
        weight: W, ``(n_target, n_source)``.
        r: Label-wise r on held-out rows, ``(n_target,)``; NaN where constant.
        permuted_r: That of the map fitted on permuted targets; None without one.
        control_r: That of the map from the control prompt; None without one.
        precision: Hit@N (`HitRates.by_rank`) under ``influenced`` and ``influencing``; None without
            a reference.
    """

    weight: Tensor
    r: Tensor
    permuted_r: Tensor | None
    control_r: Tensor | None
    precision: dict[str, dict[str, float]] | None


def score_maps(fitted: FittedMaps, test: Moments, layout: JointLayout) -> dict[Pair, MapScore]:
    """Score the map of every pair and those of its nulls on the held-out rows behind `test`."""
    r, permuted, control = (
        label_r_by_pair(test, layout, {s: each.weight for s, each in maps.items()}, null)
        for maps, null in (
            (fitted.maps, None),
            (fitted.permuted, "permuted"),
            (fitted.control, "control"),
        )
    )
    scores = {}
    for pair, weight in weights_by_pair(layout, fitted.maps).items():
        reference, precision = layout.references.get(pair), None
        weight = weight.cpu()
        if reference is not None and reference.any():
            hits = hit_rates(weight, torch.from_numpy(reference))
            ways = ("influenced", "influencing")
            precision = {way: rates.by_rank() for way, rates in zip(ways, hits, strict=True)}
        scores[pair] = MapScore(weight, r[pair], permuted.get(pair), control.get(pair), precision)
    return scores


def fit_and_score(
    fit: Moments, test: Moments, layout: JointLayout, ridges: Mapping[Pair, float] | float = 0.0
) -> dict[Pair, MapScore]:
    """Fit the maps of all pairs on the rows behind `fit`, and score them on those of `test`."""
    return score_maps(fit_layout(fit, layout, ridges), test, layout)
