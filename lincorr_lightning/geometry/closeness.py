"""Closeness of two kinds of knowledge in geometry, against their linear correlation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from lincorr_lightning.geometry.mantel import Floats, mantel_test, rank_residuals
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.results.table import column

SCORES = {
    "r": "label-wise r", "random_label_mean": "r of random words", "excess": "r above the control",
    "excess_over_random": "r above random words", "hit1": "Hit@1",
    "best_baseline_1": "Hit@1 of the strongest baseline",
}  # fmt: skip
"""Titles of the scores of maps."""
# Names of these in `PairScore.row`, where they have others.
_COLUMNS = {"r": "label_mean", "hit1": "influenced_1"}


@dataclass(frozen=True)
class ClosenessTest:
    """A correlation of closeness and scores over pairs; without numbers if there are too few."""

    closeness: str
    """``overlap``, ``dimension_difference`` or ``wording``."""
    setting: str
    """As ``k=10`` or ``n2=2``; empty for wording."""
    layer: str
    """Number of the layer; ``all`` for the mean over all layers."""
    against: str
    """Score of the maps, a key of `KnowledgeCloseness.score_matrices`."""
    given: str | None
    """``wording`` if that is partialled out, else None."""
    spearman: float | None = column("rho", ".2f", None)
    p: float | None = column(format=".4f", default=None)
    n_pairs: int | None = None
    n_permutations: int | None = None


@dataclass(frozen=True)
class KnowledgeCloseness:
    """Closeness of the clouds of two kinds of knowledge, and scores of the maps between them."""

    n_subjects: int
    """Number of subjects, the points of each cloud."""
    scores: Sequence[PairScore]
    layers: Sequence[int]
    range_scalings: Sequence[int]
    ks: Sequence[int]
    dimension: Mapping[str, Floats]
    """Intrinsic dimension of each cloud by knowledge, ``(n_layers, n_scalings)``."""
    overlap: Mapping[tuple[str, str], Floats]
    """Mean overlap of neighborhoods in two clouds by pair, ``(n_layers, n_ks)``."""
    wording: Mapping[tuple[str, str], float]
    """Similarity of the wording of two prompts by pair, from 0 to 1: the null of closeness."""
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

        By name, those of `SCORES` that are known for some pair, and ``r``; NaN for unknown pairs.
        """
        both: dict[str, dict[tuple[str, str], list[float]]] = {name: {} for name in SCORES}
        for score in self.scores:
            row, (a, b) = score.row(), sorted(score.pair)
            for name, by_pair in both.items():
                if (value := row[_COLUMNS.get(name, name)]) is not None:
                    by_pair.setdefault((a, b), []).append(value)
        return {
            name: self._matrix({pair: sum(known) / len(known) for pair, known in by_pair.items()})
            for name, by_pair in both.items()
            if by_pair or name == "r"
        }

    # k, scaling and layer are positions; None for a layer is the mean over all of them.

    def overlap_matrix(self, k: int, layer: int | None = None) -> Floats:
        """Return the overlap of all pairs."""
        return self._matrix({pair: _at(o[:, k], layer) for pair, o in self.overlap.items()})

    def difference_matrix(self, scaling: int, layer: int | None = None) -> Floats:
        """Return ``|log ID - log ID'|`` of all pairs."""
        logs = {name: np.log(values[:, scaling]) for name, values in self.dimension.items()}
        return self._matrix({(a, b): _at(abs(logs[a] - logs[b]), layer) for a, b in self.overlap})

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
        single = range(len(self.layers)) if len(self.layers) > 1 else ()
        return [test for layer in (None, *single) for test in self._tests(layer)]

    def _tests(self, layer: int | None) -> Iterator[ClosenessTest]:
        number = "all" if layer is None else str(self.layers[layer])
        wording = self._matrix(self.wording)
        measures = {("overlap", f"k={k}"): self.overlap_matrix(i, layer)
                    for i, k in enumerate(self.ks)}  # fmt: skip
        for i, n2 in enumerate(self.range_scalings):
            measures["dimension_difference", f"n2={n2}"] = self.difference_matrix(i, layer)
        if layer is None:
            measures["wording", ""] = wording
        for (name, setting), matrix in measures.items():
            for against, scores in self.score_matrices.items():
                for given in (None, "wording") if name != "wording" else (None,):
                    pair = matrix, scores
                    if given is not None:
                        pair = rank_residuals(matrix, wording), rank_residuals(scores, wording)
                    result = mantel_test(*pair, self.n_permutations, self.seed)
                    numbers = {} if result is None else vars(result)
                    yield ClosenessTest(name, setting, number, against, given, **numbers)

    def test(self, closeness: str, setting: str, against: str) -> ClosenessTest:
        """Return one of `tests`, over the mean of all layers, with nothing partialled out."""
        wanted = closeness, setting, "all", against, None
        return next(t for t in self.tests if astuple(t)[: len(wanted)] == wanted)


def _at(values: Floats, layer: int | None) -> float:
    return float(values.mean() if layer is None else values[layer])
