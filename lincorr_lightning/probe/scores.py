"""Scores of fitted maps on held-out subjects, beside those of their nulls (paper section 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, hit_rates, summarize
from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.linear_map.layout import JointLayout, Pair, source_progress
from lincorr_lightning.linear_map.solver import FittedMaps, score_maps
from lincorr_lightning.results.numbers import Rates, number, rates_as_json
from lincorr_lightning.results.table import column

RANKS = ("1", "3", "5")
WAYS = ("influenced", "influencing")


@dataclass(frozen=True)
class PairScore:
    """Scores of one pair on held-out subjects; an r that is not known is None.

    Attributes:
        source: Name of the source.
        target: Name of the target.
        label_mean: Mean label-wise r; None when no label varies.
        label_std: Its standard deviation over labels.
        instance_mean: Mean instance-wise r.
        permuted_label_mean: Mean label-wise r of a map fitted on permuted targets.
        control_label_mean: Mean label-wise r from the control prompt.
        excess: `label_mean` minus `control_label_mean`.
        label_error: Standard error of `label_mean` over subjects.
        excess_error: Standard error of `excess`, or of `label_mean` where there is no control.
        p: One-sided p-value of `excess`, or of `label_mean` where there is no control.
        q: `p` adjusted for all pairs of the run.
        partial_label_mean: Mean label-wise r with the knowledge of ``model.partial_out`` removed
            from both sides.
        through_given: Fraction of the correlation that goes through that knowledge: 1 minus what
            the source explains of the target beyond it over what the source explains alone (squared
            correlations).
        ridge: Ridge strength of the map.
        n_labels: Number of target labels.
        n_constant_labels: Number of target labels without r because they never change.
        precision: Hit@N under ``influenced`` and ``influencing``; None without a reference.
        completeness: Scores by completeness of the target labels, where these differ: ``n_labels``,
            ``label_mean``, and ``influenced``, Hit@N or None (paper, table 18).
        label_r: r of each label, ``(n_target_labels,)``, NaN where constant.
    """

    source: str
    target: str
    label_mean: float | None = column("r", ".2f")
    label_std: float | None = column("std", ".2f")
    instance_mean: float | None = column()
    permuted_label_mean: float | None = column("r, permuted", ".2f")
    control_label_mean: float | None = column("r, control prompt", ".2f")
    excess: float | None = column("r above the control", ".2f")
    label_error: float | None = column(default=None)
    excess_error: float | None = column(default=None)
    p: float | None = column(default=None)
    q: float | None = column(default=None)
    partial_label_mean: float | None = column(default=None)
    through_given: float | None = column(default=None)
    ridge: float | None = column(default=0.0)
    n_labels: int = 0
    n_constant_labels: int = 0
    precision: Mapping[str, Rates] | None = None
    completeness: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    label_r: npt.NDArray[np.floating[Any]] = field(
        default_factory=lambda: np.empty(0), repr=False, compare=False
    )

    @property
    def pair(self) -> Pair:
        """Source and target."""
        return self.source, self.target

    @property
    def name(self) -> str:
        """The pair as ``city->country``."""
        return f"{self.source}->{self.target}"

    @property
    def evidence(self) -> float | None:
        """`excess`, or r itself where there is no control: what pairs are ranked by."""
        return self.label_mean if self.excess is None else self.excess

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the pair in ``results.json``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "label_r"}

    def row(self) -> dict[str, Any]:
        """Return the scores as a row of a table, with the pair's name and Hit@N in columns."""
        nested = ("precision", "completeness")
        plain = {key: value for key, value in self.to_json().items() if key not in nested}
        return {"pair": self.name, **plain, **hit_columns(self.precision)}


def hit_columns(precision: Mapping[str, Rates | None] | None) -> dict[str, float | None]:
    """Return Hit@N in both directions as columns ``influenced_1`` to ``influencing_n``."""
    known = precision or {}
    return {f"{way}_{n}": (known.get(way) or {}).get(n) for way in WAYS for n in (*RANKS, "n")}


def rank_pairs(scores: Sequence[PairScore]) -> list[PairScore]:
    """Return the pairs that have r, those with the most evidence first."""
    known = [score for score in scores if score.evidence is not None]
    return sorted(known, key=lambda score: -(score.evidence or 0.0))


def score_pairs(
    fitted: FittedMaps, test: Moments, layout: JointLayout, instance: Mapping[str, Tensor]
) -> list[PairScore]:
    """Score the map of every pair, and the maps of its nulls.

    Args:
        fitted: The maps.
        test: Moments of the joint rows of held-out subjects.
        layout: Columns of the joint rows.
        instance: Mean instance-wise r of every target of each source, ``(n_targets,)``.

    Returns:
        Scores in the order of the layout's pairs.
    """
    instance_means = {
        (source, target): mean
        for source, means in instance.items()
        for target, mean in zip(layout.targets(source), means.tolist(), strict=True)
    }
    measured = score_maps(fitted, test, layout)
    scores = []
    for pair in layout.pairs:
        source, target = pair
        one = measured[pair]
        summary, r, control = summarize(one.r), _mean(one.r), _mean(one.control_r)
        completeness = layout.domains[target].completeness
        scores.append(
            PairScore(
                source=source,
                target=target,
                label_mean=r,
                label_std=number(summary.std),
                instance_mean=number(instance_means[pair]),
                permuted_label_mean=_mean(one.permuted_r),
                control_label_mean=control,
                excess=None if r is None or control is None else r - control,
                ridge=number(fitted.ridges[pair]),
                n_labels=layout.sizes[target],
                n_constant_labels=int(summary.n_constant),
                precision=one.precision
                and {way: rates_as_json(rates) for way, rates in one.precision.items()},
                completeness=by_completeness(
                    one.r, one.weight, layout.references[pair], completeness
                ),
                label_r=one.r.numpy(),
            )
        )
    return scores


def _mean(r: Tensor | None) -> float | None:
    return None if r is None else number(summarize(r).mean)


def by_completeness(
    r: Tensor,
    weight: Tensor,
    reference: npt.NDArray[np.bool_] | None,
    completeness: Sequence[Completeness],
) -> dict[str, dict[str, Any]]:
    """Return the scores by completeness of the target labels (paper, appendix K, table 18).

    Hit@N is of influenced targets: of the source labels with a right target of one completeness,
    the fraction for which one of them is among the N highest; right ones of other completeness do
    not compete.

    Args:
        r: r of each target label, ``(n_target,)``.
        weight: W, ``(n_target, n_source)``.
        reference: Which label pairs the reference has, shaped like W; None without one.
        completeness: Completeness of each target label; if all have the same, there are no scores.
    """
    scores: dict[str, dict[str, Any]] = {}
    for kind in Completeness if len(set(completeness)) > 1 else ():
        chosen = torch.tensor([other is kind for other in completeness])
        if not chosen.any():
            continue
        influenced = None
        if reference is not None:
            right = torch.from_numpy(reference)
            elsewhere = weight.masked_fill(right & ~chosen[:, None], -torch.inf)
            hits, _ = hit_rates(elsewhere, right & chosen[:, None])
            influenced = rates_as_json(hits.by_rank())
        scores[str(kind)] = {
            "n_labels": int(chosen.sum()),
            "label_mean": number(summarize(r[chosen]).mean),
            "influenced": influenced,
        }
    return scores


# -- the ridge path ------------------------------------------------------------------------------


@dataclass(frozen=True)
class RidgePoint:
    """Scores at one ridge strength: mean label-wise r, and Hit@N where there is a reference."""

    ridge: float
    label_mean: float | None
    influenced: Rates | None
    influencing: Rates | None


def ridge_paths(
    fitted: FittedMaps, test: Moments, layout: JointLayout, grid: Sequence[float]
) -> dict[Pair, list[RidgePoint]]:
    """Score every ridge strength for every pair; there is no path without the fit's solvers."""
    paths: dict[Pair, list[RidgePoint]] = {}
    for source in source_progress(layout, "ridge path") if fitted.solvers else ():
        for ridge in grid:
            maps = {source: fitted.solvers[source].solve(ridge)}
            alone = replace(fitted, maps=maps, permuted={}, control={})
            for pair, one in score_maps(alone, test, layout).items():
                hits = {way: rates_as_json(rates) for way, rates in (one.precision or {}).items()}
                mean = number(float(one.r.double().nanmean()))
                point = RidgePoint(
                    float(ridge), mean, hits.get("influenced"), hits.get("influencing")
                )
                paths.setdefault(pair, []).append(point)
    return paths
