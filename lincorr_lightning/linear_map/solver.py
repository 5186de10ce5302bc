"""From second moments of joint rows to W and b of every pair, their ridges and their scores.

Maps are kept by source: one `Solution` leads from a source to all of its targets, side by side, as
one eigendecomposition gives them. `FittedMaps` splits them into pairs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from lincorr_lightning.functional.correlation import labelwise_pearson_from_moments, segments_of
from lincorr_lightning.functional.least_squares import LeastSquares
from lincorr_lightning.functional.moments import Moments
from lincorr_lightning.functional.significance import pearson_influence
from lincorr_lightning.io import number
from lincorr_lightning.linear_map.layout import JointLayout, Pair
from lincorr_lightning.progress import progress

_ROWS_AT_ONCE = 256  # whose influences are held


class Solution(NamedTuple):
    """An affine map between logits, ``y = W (x - mean_x) + mean_y``, in float64.

    Centred on the means of source and targets, because logits lie far from zero with a small
    spread: no digits cancel. The weight is W, ``(n_target, n_source)``.
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

    One eigendecomposition serves all strengths. Of the moments of joint rows, `x` are the columns
    of the source and `y` those of the targets.
    """

    def __init__(self, moments: Moments, x: Tensor, y: Tensor) -> None:
        device = moments.mean.device
        self._mean_x, self._mean_y = (moments.mean[columns.to(device)] for columns in (x, y))
        self._squares = LeastSquares(moments.between(x, x), moments.between(x, y))

    def solve(self, ridge: float | Tensor) -> Solution:
        """Return the map from the source to the targets.

        The ridge is the penalty on ``|W|^2``, a number or one per target column, ``(n_target,)``.
        """
        return Solution(self._squares.weight(ridge), self._mean_x, self._mean_y)


class REstimate(NamedTuple):
    """Label-wise r, and how much each held-out row moves its mean.

    Attributes:
        r: Of each label, ``(n,)``, or of each draw and target, ``(n_draws, n_targets)``; NaN where
            a label or prediction is constant.
        influence: Of each row on the mean over the labels of a target, ``(n_rows, n_targets)``, or
            of the one target, ``(n_rows,)``.
    """

    r: Tensor
    influence: Tensor


class Judge:
    """Scores maps between columns, from `x` to `y`, on the rows behind `moments`."""

    def __init__(self, moments: Moments, x: Tensor, y: Tensor) -> None:
        self._moments = moments
        self._x, self._y = (columns.to(moments.mean.device) for columns in (x, y))
        self._xx, self._xy = moments.between(x, x), moments.between(x, y)

    def label_r(self, weight: Tensor) -> Tensor:
        """Return the label-wise r of ``W x + b``, ``(n_target,)``.

        NaN where a label or prediction is constant. W is ``(n_target, n_source)``.
        """
        yy, constant = self._moments.square[self._y], self._moments.constant[self._y]
        return labelwise_pearson_from_moments(weight, self._xx, self._xy, yy, constant)

    def influences(self, solution: Solution, rows: Tensor, sizes: Sequence[int]) -> REstimate:
        """Return r of each label, and of rows the influence on its mean over those of each target.

        The influence is taken around the moments, of whose rows `rows` are some, in any floating
        type. `sizes` are the numbers of labels of the targets; constant labels are left out.
        """
        n, x, y = self._moments.n, self._x, self._y
        r = self.label_r(solution.weight)
        varies = ~r.isnan()
        weights = segments_of(sizes, r.device) * varies[:, None]
        weights /= weights.sum(0)  # NaN where all labels of a target are constant
        predicted = ((solution.weight @ self._xx) * solution.weight).sum(1)
        scales = [
            torch.where(varies, (n / each).sqrt(), 0)
            for each in (predicted, self._moments.square[y])
        ]
        to_u = (scales[0][:, None] * solution.weight).T
        mean_x, mean_y = self._moments.mean[x], self._moments.mean[y]
        influence = [r.new_zeros(0, len(sizes))]
        for some in torch.split(rows.to(n.device), _ROWS_AT_ONCE):
            u = (some.index_select(1, x).to(n) - mean_x) @ to_u
            v = (some.index_select(1, y).to(n) - mean_y) * scales[1]
            influence.append(pearson_influence(u, v, r.nan_to_num()) @ weights)
        return REstimate(r.cpu(), torch.cat(influence).cpu())


def mean_r(r: Tensor | None) -> float | None:
    """Return the mean of r over labels, leaving out constant ones; None if there is none."""
    return None if r is None else number(float(r.double().nanmean()))


def split_targets(
    layout: JointLayout, source: str, values: Tensor, dim: int = -1
) -> Iterator[tuple[str, Tensor]]:
    """Yield each target of a source with its part of values over all target columns."""
    parts = torch.split(values, layout.target_sizes(source), dim)
    yield from zip(layout.targets[source], parts, strict=True)


@dataclass(frozen=True)
class FittedMaps:
    """The maps of a layout's problems, by source.

    Those of nulls are solved each time they are used: with many kinds of knowledge, all of them
    take as much memory as the moments.
    """

    layout: JointLayout
    ridges: Mapping[Pair, float]
    maps: Mapping[str, Mapping[str, Solution]]
    """Maps of the pairs, ``y``; without `moments` also of nulls, see `JointLayout.problems`."""
    n: int  #: Number of subjects they were fitted on.
    moments: Moments | None = None  #: Of the rows they were fitted on; None for stored maps.

    def to(self, device: torch.device) -> Self:
        """Return the same maps on a device."""
        maps = {
            problem: {
                source: Solution(*(part.to(device) for part in solution))
                for source, solution in by_source.items()
            }
            for problem, by_source in self.maps.items()
        }
        moments = self.moments
        if moments is not None:
            moments = Moments._make([*(part.to(device) for part in moments[:-1]), moments.blocks])
        return replace(self, maps=maps, moments=moments)

    def solution(self, problem: str, source: str) -> Solution | None:
        """Return the map of a source; None if there is no such problem."""
        problems = self.layout.problems[source]
        if problem not in problems:
            return None
        if problem in self.maps or self.moments is None:
            return self.maps.get(problem, {}).get(source)
        ridge = per_target_ridge(self.layout, source, self.ridges)
        return RidgeSolver(self.moments, *problems[problem]).solve(ridge)

    def without_moments(self) -> Self:
        """Solve all nulls, and return the maps as a checkpoint stores them."""
        maps: dict[str, dict[str, Solution]] = {}
        for source, problems in self.layout.problems.items():
            for problem in problems:
                if (solution := self.solution(problem, source)) is not None:
                    maps.setdefault(problem, {})[source] = solution
        return replace(self, maps=maps, moments=None)

    def predictions(self, rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield each source with predicted and true logits of all its targets, of joint rows."""
        for source, solution in self.maps["y"].items():
            x, y = self.layout.problems[source]["y"]
            yield source, solution(rows[:, x]), rows[:, y]

    def weights(self, problem: str = "y", *sources: str) -> dict[Pair, Tensor]:
        """Return W of each pair of these sources, or of all, ``(n_target, n_source)``, if any."""
        return self._by_pair(problem, lambda _, solution: solution.weight, sources)

    def biases(self) -> dict[Pair, Tensor]:
        """Return b of each pair, ``(n_target,)``."""
        return self._by_pair("y", lambda _, solution: solution.bias)

    def label_r(self, test: Moments, problem: str = "y", on: str = "") -> dict[Pair, Tensor]:
        """Return the label-wise r of each pair on the rows behind `test`, ``(n_target,)``, on CPU.

        A null is scored on the columns that it was fitted on, or on those of another problem.
        """

        def r(source: str, solution: Solution) -> Tensor:
            x, y = self.layout.problems[source][on or problem]
            return Judge(test, x, y).label_r(solution.weight).cpu()

        return self._by_pair(problem, r)

    def _by_pair(
        self, problem: str, values: Callable[[str, Solution], Tensor], sources: Sequence[str] = ()
    ) -> dict[Pair, Tensor]:
        """Return each pair's part of values of its source's map, whose rows are the targets'."""
        return {
            (source, target): part
            for source in sources or self.layout.sources
            if (solution := self.solution(problem, source)) is not None
            for target, part in split_targets(self.layout, source, values(source, solution), dim=0)
        }


def fit_layout(
    moments: Moments, layout: JointLayout, ridges: Mapping[Pair, float] | float
) -> FittedMaps:
    """Solve for W and b of every pair; the moments are kept for its nulls."""
    if isinstance(ridges, (int, float)):
        ridges = dict.fromkeys(layout.pairs, float(ridges))
    solved: dict[str, Solution] = {}
    for source in progress(layout.sources, "solving"):
        columns, ridge = layout.problems[source]["y"], per_target_ridge(layout, source, ridges)
        solved[source] = RidgeSolver(moments, *columns).solve(ridge)
    return FittedMaps(layout, dict(ridges), {"y": solved}, int(moments.n), moments)


def per_target_ridge(layout: JointLayout, source: str, ridges: Mapping[Pair, float]) -> Tensor:
    """Return the ridge strength of each target column of a source, ``(n_target,)`` float64."""
    targets = layout.targets[source]
    strengths = torch.tensor([ridges[source, target] for target in targets], dtype=torch.float64)
    return strengths.repeat_interleave(torch.tensor(layout.target_sizes(source)))
