"""The ridge path: correlation and precision of W at every ridge strength, on held-out subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lincorr_lightning.functional import Moments, hit_rates
from lincorr_lightning.linear_map.fitting import FittedMaps
from lincorr_lightning.linear_map.layout import JointLayout, Pair, source_progress
from lincorr_lightning.linear_map.solver import label_r, split_targets
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
        x, y = layout.columns(source), layout.target_columns(source)
        for ridge in grid:
            weight = fitted.solvers[source].solve(ridge).weight
            r = dict(split_targets(layout, source, label_r(test, weight, x, y).cpu()))
            for target, block in split_targets(layout, source, weight.cpu(), dim=0):
                reference = layout.references[source, target]
                hits: tuple[Rates | None, Rates | None] = (None, None)
                if reference is not None:
                    both = hit_rates(block, torch.from_numpy(reference))
                    hits = both[0].by_rank(), both[1].by_rank()
                mean = float(r[target].double().nanmean())
                paths.setdefault((source, target), []).append(RidgePoint(ridge, mean, *hits))
    return paths
