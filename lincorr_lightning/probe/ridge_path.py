"""The ridge path: correlation and precision of W at every ridge strength, on held-out subjects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, hit_rates
from lincorr_lightning.functional.precision import HIT_RANKS, HitRates
from lincorr_lightning.linear_map.layout import ProbeLayout
from lincorr_lightning.linear_map.solver import Pair, SourceSolver, label_r, split_targets
from lincorr_lightning.results.numbers import Rates, number, rates_as_json


@dataclass(frozen=True)
class RidgePoint:
    """What one ridge strength gives, on held-out X's.

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

    def results(self) -> dict[str, Any]:
        """The point's entry in ``results.json``."""
        return {
            "ridge": number(self.ridge),
            "label_mean": number(self.label_mean),
            "influenced": self.influenced and rates_as_json(self.influenced),
            "influencing": self.influencing and rates_as_json(self.influencing),
        }


def ridge_paths(
    solver: SourceSolver, test: Moments, layout: ProbeLayout, source: str, grid: Sequence[float]
) -> dict[Pair, list[RidgePoint]]:
    """Score every ridge strength for every target of one source, on held-out rows."""
    x, y = layout.columns(source), layout.target_columns(source)
    r_rows: list[Tensor] = []
    hits: dict[str, list[tuple[HitRates, HitRates]]] = {t: [] for t in layout.targets(source)}
    for ridge in grid:
        weight = solver.real_weight(ridge)
        r_rows.append(label_r(test, weight, x, y).cpu())
        for target, block in split_targets(layout, source, weight, dim=0):
            reference = layout.references[source, target]
            if reference is not None:
                hits[target].append(hit_rates(block.cpu(), torch.from_numpy(reference)))
    paths = {}
    for target, r in split_targets(layout, source, torch.stack(r_rows)):
        found: Sequence[tuple[HitRates, HitRates] | None] = hits[target] or [None] * len(grid)
        means = r.double().nanmean(1).tolist()
        paths[source, target] = [
            RidgePoint(
                ridge=ridge,
                label_mean=mean,
                influenced=None if hit is None else as_rates(hit[0]),
                influencing=None if hit is None else as_rates(hit[1]),
            )
            for ridge, mean, hit in zip(grid, means, found, strict=True)
        ]
    return paths


def as_rates(hits: HitRates) -> dict[str, float]:
    """Hit@N by N, and how many labels were asked: ``{"1": .., "3": .., "5": .., "n": ..}``."""
    rates = {str(n): rate for n, rate in zip(HIT_RANKS, hits.rates.tolist(), strict=True)}
    return {**rates, "n": hits.n}
