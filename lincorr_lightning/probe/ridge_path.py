"""The ridge path: correlation and precision of W at every ridge strength, on held-out subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, hit_rates
from lincorr_lightning.functional.precision import HitRates
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
    """Score every ridge strength for every pair."""
    paths: dict[Pair, list[RidgePoint]] = {}
    for source in source_progress(layout, "ridge path") if fitted.solvers else ():
        x, y = layout.columns(source), layout.target_columns(source)
        r_rows: list[Tensor] = []
        hits: dict[str, list[tuple[HitRates, HitRates]]] = {t: [] for t in layout.targets(source)}
        for ridge in grid:
            weight = fitted.solvers[source].solve(ridge).weight
            r_rows.append(label_r(test, weight, x, y).cpu())
            for target, block in split_targets(layout, source, weight, dim=0):
                reference = layout.references[source, target]
                if reference is not None:
                    hits[target].append(hit_rates(block.cpu(), torch.from_numpy(reference)))
        for target, r in split_targets(layout, source, torch.stack(r_rows)):
            found: Sequence[tuple[HitRates, HitRates] | None] = hits[target] or [None] * len(grid)
            means = r.double().nanmean(1).tolist()
            paths[source, target] = [
                RidgePoint(ridge, mean, hit and hit[0].by_rank(), hit and hit[1].by_rank())
                for ridge, mean, hit in zip(grid, means, found, strict=True)
            ]
    return paths
