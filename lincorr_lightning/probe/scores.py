"""Scores of fitted maps on held-out subjects, beside those of their nulls (paper section 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, hit_rates, summarize
from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.linear_map.layout import JointLayout, Pair
from lincorr_lightning.linear_map.solver import FittedMaps, score_maps
from lincorr_lightning.results.numbers import Rates, number, rates_as_json

_NUMBERS = (
    "label_mean", "label_std", "instance_mean", "permuted_label_mean", "control_label_mean",
    "excess", "label_error", "excess_error", "p", "q", "partial_label_mean", "through_given",
    "ridge",
)  # fmt: skip


@dataclass(frozen=True)
class CompletenessScore:
    """Scores of a pair on its target labels of one completeness (paper, table 18).

    Attributes:
        n_labels: Number of these labels.
        label_mean: Their mean label-wise r.
        influenced: Hit@N of influenced targets among them; None without a reference.
    """

    n_labels: int
    label_mean: float
    influenced: Rates | None

    def to_json(self) -> dict[str, Any]:
        """Return the entry in ``results.json``."""
        return {
            "n_labels": self.n_labels,
            "label_mean": number(self.label_mean),
            "influenced": self.influenced and rates_as_json(self.influenced),
        }


@dataclass(frozen=True)
class PairScore:
    """Scores of one pair on held-out subjects.

    Attributes:
        source: Name of the source.
        target: Name of the target.
        label_mean: Mean label-wise r; NaN when no label varies.
        label_std: Its standard deviation over labels.
        instance_mean: Mean instance-wise r.
        n_labels: Number of target labels.
        n_constant_labels: Number of target labels without r because they never change.
        permuted_label_mean: Mean label-wise r of a map fitted on permuted targets; None without.
        control_label_mean: Mean label-wise r from the control prompt; None without.
        ridge: Ridge strength of the map.
        label_r: r of each label, ``(n_target_labels,)``, NaN where constant.
        precision: Hit@N under ``influenced`` and ``influencing``; None without a reference.
        label_error: Standard error of `label_mean` over subjects; None where it was not measured.
        excess_error: Standard error of `excess`, or of `label_mean` where there is no control.
        p: One-sided p-value of `excess`, or of `label_mean` where there is no control.
        q: `p` adjusted for all pairs of the run.
        partial_label_mean: Mean label-wise r with the knowledge of ``model.partial_out`` removed
            from both sides.
        through_given: Fraction of the correlation that goes through that knowledge: 1 minus what
            the source explains of the target beyond it over what the source explains alone (squared
            correlations).
        completeness: Scores by completeness of the target labels, where these differ.
    """

    source: str
    target: str
    label_mean: float
    label_std: float
    instance_mean: float
    n_labels: int
    n_constant_labels: int
    permuted_label_mean: float | None
    control_label_mean: float | None
    ridge: float
    label_r: npt.NDArray[np.floating[Any]]
    precision: Mapping[str, Rates] | None
    label_error: float | None = None
    excess_error: float | None = None
    p: float | None = None
    q: float | None = None
    partial_label_mean: float | None = None
    through_given: float | None = None
    completeness: Mapping[str, CompletenessScore] = field(default_factory=dict)

    @property
    def pair(self) -> Pair:
        """Source and target."""
        return self.source, self.target

    @property
    def name(self) -> str:
        """The pair as ``city->country``."""
        return f"{self.source}->{self.target}"

    @property
    def excess(self) -> float | None:
        """R minus the control's; None where one of them is unknown."""
        r, control = number(self.label_mean), number(self.control_label_mean)
        return None if r is None or control is None else r - control

    @property
    def evidence(self) -> float:
        """`excess`, or r itself where there is no control: what pairs are ranked by."""
        return float(self.label_mean if self.excess is None else self.excess)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the pair in ``results.json``."""
        return {
            "source": self.source,
            "target": self.target,
            **{key: number(getattr(self, key)) for key in _NUMBERS},
            "n_labels": int(self.n_labels),
            "n_constant_labels": int(self.n_constant_labels),
            "precision": self.precision
            and {way: rates_as_json(rates) for way, rates in self.precision.items()},
            "completeness": {kind: one.to_json() for kind, one in self.completeness.items()},
        }


def rank_pairs(scores: Sequence[PairScore]) -> list[PairScore]:
    """Return the pairs that have r, those with the most evidence first."""
    known = [score for score in scores if not math.isnan(score.evidence)]
    return sorted(known, key=lambda score: -score.evidence)


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
    instance_of = {
        (source, target): r
        for source, means in instance.items()
        for target, r in zip(layout.targets(source), means.tolist(), strict=True)
    }
    measured = score_maps(fitted, test, layout)
    scores = []
    for source, target in layout.pairs:
        found = measured[source, target]
        summary = summarize(found.r)
        scores.append(
            PairScore(
                source=source,
                target=target,
                label_mean=summary.mean,
                label_std=summary.std,
                instance_mean=instance_of[source, target],
                n_labels=layout.sizes[target],
                n_constant_labels=summary.n_constant,
                permuted_label_mean=_mean(found.permuted_r),
                control_label_mean=_mean(found.control_r),
                ridge=fitted.ridges[source, target],
                label_r=found.r.numpy(),
                precision=found.precision,
                completeness=by_completeness(
                    found.r,
                    found.weight,
                    layout.references[source, target],
                    layout.domains[target].completeness,
                ),
            )
        )
    return scores


def _mean(r: Tensor | None) -> float | None:
    return None if r is None else summarize(r).mean


def by_completeness(
    r: Tensor,
    weight: Tensor,
    reference: npt.NDArray[np.bool_] | None,
    completeness: Sequence[Completeness],
) -> dict[str, CompletenessScore]:
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
    found: dict[str, CompletenessScore] = {}
    if len(set(completeness)) < 2:
        return found
    for kind in Completeness:
        mine = torch.tensor([other is kind for other in completeness])
        if not mine.any():
            continue
        hits = None
        if reference is not None:
            right = torch.from_numpy(reference)
            elsewhere = right & ~mine[:, None]
            influenced, _ = hit_rates(
                weight.masked_fill(elsewhere, -torch.inf), right & mine[:, None]
            )
            hits = influenced.by_rank()
        found[str(kind)] = CompletenessScore(int(mine.sum()), summarize(r[mine]).mean, hits)
    return found
