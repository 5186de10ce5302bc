"""Closeness of two kinds of knowledge in geometry, against their linear correlation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from lincorr_lightning.geometry.mantel import (
    Floats,
    MantelResult,
    mantel_test,
    rank_residuals,
)

SCORES = ("r", "excess", "hit1")
"""Scores of a linear map: label-wise r, r above the control's, Hit@1."""


@dataclass(frozen=True)
class PairScore:
    """Scores of a linear map from a source to a target on held-out subjects.

    Attributes:
        source: Name of the source.
        target: Name of the target.
        r: Mean label-wise r.
        excess: r minus that of the control prompt; None without a control.
        hits: Hit@N of influenced targets by N; empty without a reference.
    """

    source: str
    target: str
    r: float | None
    excess: float | None
    hits: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, float | None]:
        """The score's numbers, by the names of `SCORES`."""
        return {"r": self.r, "excess": self.excess, "hit1": self.hits.get("1")}


class ClosenessTest(NamedTuple):
    """A correlation of closeness and scores over pairs.

    Attributes:
        closeness: ``overlap``, ``dimension_difference`` or ``wording``.
        setting: As ``k=10`` or ``n2=2``; empty for wording.
        layer: Number of the layer; None for the mean over all layers.
        against: One of `SCORES`.
        given: ``wording`` if that is partialled out, else None.
        result: None if there are too few pairs.
    """

    closeness: str
    setting: str
    layer: int | None
    against: str
    given: str | None
    result: MantelResult | None


@dataclass(frozen=True)
class KnowledgeCloseness:
    """Closeness of the clouds of two kinds of knowledge, and scores of the maps between them.

    Attributes:
        n_subjects: Number of subjects, the points of each cloud.
        scores: Scores of the maps, by ordered pair.
        layers: Numbers of the layers.
        range_scalings: Range scalings n2 of the intrinsic dimension.
        ks: Sizes of the neighborhoods.
        dimension: Intrinsic dimension of each cloud by knowledge, ``(n_layers, n_scalings)``.
        overlap: Mean overlap of neighborhoods in two clouds by pair, ``(n_layers, n_ks)``.
        wording: Similarity of the wording of two prompts by pair, from 0 to 1: the null of
            closeness.
        n_permutations: Number of permutations of a test.
        seed: Seed of the permutations.
    """

    n_subjects: int
    scores: Sequence[PairScore]
    layers: Sequence[int]
    range_scalings: Sequence[int]
    ks: Sequence[int]
    dimension: Mapping[str, Floats]
    overlap: Mapping[tuple[str, str], Floats]
    wording: Mapping[tuple[str, str], float]
    n_permutations: int
    seed: int

    @property
    def names(self) -> list[str]:
        """The kinds of knowledge."""
        return list(self.dimension)

    @property
    def middle_k(self) -> int:
        """Position of the k that figures show."""
        return len(self.ks) // 2

    @cached_property
    def score_matrices(self) -> dict[str, Floats]:
        """Symmetric matrices of the scores, the mean over both directions or the known one.

        By name: ``r``, and ``excess`` and ``hit1`` where known; NaN for unknown pairs.
        """
        n = len(self.names)
        both = {name: np.full((2, n, n), math.nan) for name in SCORES}
        for score in self.scores:
            i, j = self.names.index(score.source), self.names.index(score.target)
            for name, value in score.values.items():
                if value is not None:
                    both[name][0, i, j] = both[name][1, j, i] = value
        means = {}
        for name, values in both.items():
            n_known = np.isfinite(values).sum(0)
            total = np.where(np.isfinite(values), values, 0.0).sum(0)
            means[name] = np.where(n_known > 0, total / np.maximum(n_known, 1), math.nan)
        return {name: m for name, m in means.items() if np.isfinite(m).any() or name == "r"}

    @cached_property
    def wording_matrix(self) -> Floats:
        """Similarity of the wording of all pairs."""
        return self._matrix(self.wording)

    # k, scaling and layer are positions; None for a layer is the mean over all of them.

    def overlap_matrix(self, k: int, layer: int | None = None) -> Floats:
        """Return the overlap of all pairs."""
        return self._matrix(
            {
                pair: float(values[:, k].mean() if layer is None else values[layer, k])
                for pair, values in self.overlap.items()
            }
        )

    def difference_matrix(self, scaling: int, layer: int | None = None) -> Floats:
        """Return ``|log ID - log ID'|`` of all pairs."""
        logs = {name: np.log(values[:, scaling]) for name, values in self.dimension.items()}
        apart = {(a, b): np.abs(logs[a] - logs[b]) for a, b in self.overlap}
        return self._matrix(
            {pair: float(v.mean() if layer is None else v[layer]) for pair, v in apart.items()}
        )

    def _matrix(self, values: Mapping[tuple[str, str], float]) -> Floats:
        matrix = np.full((len(self.names), len(self.names)), math.nan)
        for (a, b), value in values.items():
            i, j = self.names.index(a), self.names.index(b)
            matrix[i, j] = matrix[j, i] = value if math.isfinite(value) else math.nan
        return matrix

    @cached_property
    def tests(self) -> list[ClosenessTest]:
        """Correlations of closeness and scores over pairs, over all layers and in each one.

        If correlated knowledge is close, rho is positive for the overlap and negative for the
        difference of log ID. Prompts worded alike may be close and correlated for that alone: see
        rho of the wording, and the other correlations with wording partialled out.
        """
        layers: list[int | None] = [None]
        if len(self.layers) > 1:
            layers += range(len(self.layers))
        return [test for layer in layers for test in self._tests(layer)]

    def _tests(self, layer: int | None) -> Iterator[ClosenessTest]:
        number = None if layer is None else self.layers[layer]
        for name, setting, matrix in self._closeness(layer):
            for against, scores in self.score_matrices.items():
                result = mantel_test(matrix, scores, self.n_permutations, self.seed)
                yield ClosenessTest(name, setting, number, against, None, result)
                if name != "wording":
                    x, y = (rank_residuals(m, self.wording_matrix) for m in (matrix, scores))
                    result = mantel_test(x, y, self.n_permutations, self.seed)
                    yield ClosenessTest(name, setting, number, against, "wording", result)

    def _closeness(self, layer: int | None) -> Iterator[tuple[str, str, Floats]]:
        for i, k in enumerate(self.ks):
            yield "overlap", f"k={k}", self.overlap_matrix(i, layer)
        for i, n2 in enumerate(self.range_scalings):
            yield "dimension_difference", f"n2={n2}", self.difference_matrix(i, layer)
        if layer is None:
            yield "wording", "", self.wording_matrix

    def test(self, closeness: str, setting: str, against: str) -> MantelResult | None:
        """Return one of `tests`, over the mean of all layers, with nothing partialled out."""
        wanted = (closeness, setting, None, against, None)
        (found,) = [test.result for test in self.tests if test[:5] == wanted]
        return found
