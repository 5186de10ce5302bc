"""Which pairs of a probe are tied: a ranking, and maps laid end to end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lincorr_lightning.probe.results import PairScore

FINDING = 0.01
"""Adjusted p-value up to which a pair's r is called above its control."""
RANKING = ("rank", "source", "target", "label_mean", "label_error", "control_label_mean", "excess",
           "excess_error", "p", "q", "partial_label_mean", "through_given")  # fmt: skip


@dataclass(frozen=True)
class Composition:
    """``W(via→target) W(source→via)`` in the place of ``W(source→target)``.

    Attributes:
        source: Name of the source knowledge.
        via: Name of the one in between.
        target: Name of the target knowledge.
        direct: Mean label-wise r of the pair's own map.
        composed: That of the two maps laid end to end.
        weight_cosine: Cosine between the two matrices.
        elsewhere: Median r through knowledges that the world does not tie to both; None if there
            is none.
    """

    source: str
    via: str
    target: str
    direct: float
    composed: float
    weight_cosine: float
    elsewhere: float | None

    def results(self) -> dict[str, Any]:
        """Its entry in ``results.json``."""
        found = {**asdict(self), "kept": self.composed / self.direct if self.direct else None}
        return {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in found.items()
        }


def ranking(scores: Sequence[PairScore]) -> list[PairScore]:
    """Pairs by how far r lies above its control, or r itself where there is none.

    Args:
        scores: Of the pairs; those without r are left out.
    """
    known = [score for score in scores if not math.isnan(height(score))]
    return sorted(known, key=lambda score: -height(score))


def height(score: PairScore) -> float:
    """How far r lies above its control; r itself where there is none."""
    return float(score.label_mean if score.excess is None else score.excess)
