"""The ridge path: correlation and precision of W at every ridge strength, on held-out subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lincorr_lightning.functional import Moments
from lincorr_lightning.linear_map.layout import JointLayout, Pair, source_progress
from lincorr_lightning.linear_map.solver import FittedMaps, score_maps
from lincorr_lightning.results.numbers import Rates, number, rates_as_json


@dataclass(frozen=True)
class RidgePoint:
    """Scores at one ridge strength.

    Attributes:
        ridge: Ridge strength.
        label_mean: Mean label-wise r.
        influenced: Hit@N of influenced targets; None without a reference.
        influencing: Hit@N of influencing sources; None without a reference.
    """

    ridge: float
    label_mean: float
    influenced: Rates | None
    influencing: Rates | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the point in ``results.json``."""
        return {
            "ridge": number(self.ridge),
            "label_mean": number(self.label_mean),
            "influenced": self.influenced and rates_as_json(self.influenced),
            "influencing": self.influencing and rates_as_json(self.influencing),
        }


def ridge_paths(
    fitted: FittedMaps, test: Moments, layout: JointLayout, grid: Sequence[float]
) -> dict[Pair, list[RidgePoint]]:
    """Score every ridge strength for every pair; there is no path without the fit's solvers."""
    paths: dict[Pair, list[RidgePoint]] = {}
    for source in source_progress(layout, "ridge path") if fitted.solvers else ():
        for ridge in grid:
            maps = {source: fitted.solvers[source].solve(ridge)}
            alone = replace(fitted, maps=maps, permuted={}, control={})
            for pair, found in score_maps(alone, test, layout).items():
                mean = float(found.r.double().nanmean())
                hits = found.precision or {}
                point = RidgePoint(ridge, mean, hits.get("influenced"), hits.get("influencing"))
                paths.setdefault(pair, []).append(point)
    return paths
