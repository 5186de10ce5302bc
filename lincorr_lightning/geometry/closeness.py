"""Correlations over prompts and over pairs of kinds of knowledge, with their tests."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import scipy

from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.results.table import column

Floats = npt.NDArray[np.float64]

_MIN_POINTS = 4  # Fisher's interval needs as many
_TOLERANCE = 1e-12
_PERMUTATIONS_AT_ONCE = 1000
SCORES = {
    "r": "label-wise r", "random_label_mean": "r of random words", "excess": "r above the control",
    "excess_over_random": "r above random words", "hit1": "Hit@1",
    "best_baseline_1": "Hit@1 of the strongest baseline",
}  # fmt: skip
"""Titles of the scores of maps."""
# Names of these in `PairScore.row`, where they have others.
_COLUMNS = {"r": "label_mean", "hit1": "influenced_1"}


@dataclass(frozen=True)
class CorrelationTest:
    """Pearson's r with its 95 % interval, and Spearman's rho, of the same `n` points.

    All are None if there are too few points, or one of the numbers is constant.
    """

    pearson: float | None = column(format=".2f", default=None)
    low: float | None = column(format=".2f", default=None)
    high: float | None = column(format=".2f", default=None)
    pearson_p: float | None = column(format=".4f", default=None)
    spearman: float | None = column(format=".2f", default=None)
    spearman_p: float | None = column(format=".4f", default=None)
    n: int | None = column(format="d", default=None)


def correlation_test(x: npt.ArrayLike, y: npt.ArrayLike) -> CorrelationTest:
    """Correlate the points of which both numbers are finite; four at least."""
    points = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)])
    points = points[:, np.isfinite(points).all(0)]
    if points.shape[1] < _MIN_POINTS or (np.ptp(points, axis=1) == 0).any():
        return CorrelationTest()
    linear, ranked = scipy.stats.pearsonr(*points), scipy.stats.spearmanr(*points)
    interval = linear.confidence_interval()
    test = CorrelationTest(
        pearson=float(linear.statistic), low=float(interval.low), high=float(interval.high),
        pearson_p=float(linear.pvalue), spearman=float(ranked.statistic),
        spearman_p=float(ranked.pvalue), n=points.shape[1],
    )  # fmt: skip
    return test if np.isfinite(astuple(test)).all() else CorrelationTest()


@dataclass(frozen=True)
class MantelResult:
    """Correlation of two matrices over the same items (Mantel, 1967), by ranks."""

    spearman: float  #: Rho over the pairs of items.
    p: float  #: Share of permutations of the items whose rho is as far from 0, of either sign.
    n_pairs: int  #: Number of pairs that both matrices have.
    n_permutations: int


def mantel_test(
    a: npt.ArrayLike, b: npt.ArrayLike, n_permutations: int = 9999, seed: int = 0
) -> MantelResult | None:
    """Correlate two symmetric matrices over their pairs, with a test that permutes the items.

    Pairs that share an item depend on each other, so the p of a correlation over pairs would be
    too small; they still do if rows and columns of one matrix are permuted alike.

    The matrices are ``(n, n)``, with NaN for an unknown pair; the diagonal is not read. Of the
    permutations, `n_permutations` are drawn beside the identity, or all are taken if there are no
    more. None if there are fewer than four items or four known pairs, or a matrix is constant.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n = len(a)
    upper = np.triu_indices(n, 1)
    rho = float(_rho(a[upper], b[upper]))
    if n < _MIN_POINTS or math.isnan(rho):
        return None
    is_exact = n < 20 and math.factorial(n) <= n_permutations
    if is_exact:
        orders = np.array(list(itertools.permutations(range(n))))
    else:
        orders = _random_orders(n, n_permutations, seed)
    rhos = _permuted_rhos(a, b, orders)
    # NaN, where too few known pairs meet, counts as far from 0: the conservative choice.
    n_as_far = int((~(np.abs(rhos) < abs(rho) - _TOLERANCE)).sum())
    p = n_as_far / len(rhos) if is_exact else (n_as_far + 1) / (len(rhos) + 1)
    n_pairs = int((np.isfinite(a[upper]) & np.isfinite(b[upper])).sum())
    return MantelResult(rho, p, n_pairs, len(rhos))


# A study makes hundreds of tests with the same orders, which take longer to draw than to use.
@lru_cache(maxsize=4)
def _random_orders(n: int, n_permutations: int, seed: int) -> npt.NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    orders = np.array([rng.permutation(n) for _ in range(n_permutations)])
    orders.flags.writeable = False
    return orders


def rank_residuals(a: npt.ArrayLike, given: npt.ArrayLike) -> Floats:
    """Return the ranks of a matrix's pairs without what the ranks of another one explain linearly.

    `mantel_test` of two such residuals is a partial Mantel test (Smouse, Long and Sokal, 1986), by
    ranks. Its p is too small if both matrices rank their pairs almost as the third one does.

    Both are ``(n, n)`` and symmetric, with NaN for an unknown pair, and so is the result.
    """
    a, given = np.asarray(a, dtype=float), np.asarray(given, dtype=float)
    residuals = np.full(a.shape, math.nan)
    rows, columns = np.triu_indices(len(a), 1)
    known = np.isfinite(a[rows, columns]) & np.isfinite(given[rows, columns])
    rows, columns = rows[known], columns[known]
    if not len(rows):
        return residuals
    y, x = (_centred_ranks(matrix[rows, columns]) for matrix in (a, given))
    power = float(x @ x)
    y = y - x * (float(x @ y) / power if power > 0 else 0.0)
    residuals[rows, columns] = residuals[columns, rows] = y
    return residuals


def _permuted_rhos(a: Floats, b: Floats, orders: npt.NDArray[np.int64]) -> Floats:
    rows, columns = np.triu_indices(len(a), 1)
    x, y = a[rows, columns], b[rows, columns]
    parts = np.array_split(orders, 1 + len(orders) // _PERMUTATIONS_AT_ONCE)
    if not np.isfinite([x, y]).all():
        # Often few pairs of b are known: compare them alone with the pairs of a at their places.
        known = np.isfinite(y)
        r, c, places = rows[known], columns[known], (part.argsort(1) for part in parts)
        return np.concatenate([_rho(a[at[:, r], at[:, c]], y[known]) for at in places])
    u, v = _centred_ranks(x), _centred_ranks(y)  # an order moves b's ranks and changes none
    ranks = np.zeros(b.shape)
    ranks[rows, columns] = ranks[columns, rows] = v
    scale = math.sqrt(float((u @ u) * (v @ v))) or math.nan
    return np.concatenate([ranks[part[:, rows], part[:, columns]] @ u / scale for part in parts])


def _centred_ranks(values: Floats) -> Floats:
    """Return ranks minus their mean along the last axis; 0 for NaN."""
    ranks: Floats = scipy.stats.rankdata(values, axis=-1, nan_policy="omit")
    known = np.isfinite(ranks)
    n = np.maximum(known.sum(-1, keepdims=True), 1)
    return np.where(known, ranks - np.where(known, ranks, 0.0).sum(-1, keepdims=True) / n, 0.0)


def _rho(x: Floats, y: Floats) -> Floats:
    """Return Spearman's rho of the finite points along the last axis.

    NaN if they are too few or constant. `scipy.stats.spearmanr` gives the same and takes ten times
    as long, which counts here.
    """
    known = np.isfinite(x) & np.isfinite(y)
    u, v = (_centred_ranks(np.where(known, values, math.nan)) for values in (x, y))
    scale = np.sqrt((u * u).sum(-1) * (v * v).sum(-1))
    defined = (known.sum(-1) >= _MIN_POINTS) & (scale > 0)
    return np.where(defined, (u * v).sum(-1) / np.where(defined, scale, 1.0), math.nan)


@dataclass(frozen=True)
class ClosenessTest:
    """A correlation of closeness and scores over pairs; without numbers if there are too few."""

    closeness: str  #: ``overlap``, ``dimension_difference`` or ``wording``.
    setting: str  #: As ``k=10`` or ``n2=2``; empty for wording.
    layer: str  #: Number of the layer; ``all`` for the mean over all layers.
    against: str  #: Score of the maps, a key of `KnowledgeCloseness.score_matrices`.
    given: str | None  #: ``wording`` if that is partialled out, else None.
    spearman: float | None = column("rho", ".2f", None)
    p: float | None = column(format=".4f", default=None)
    n_pairs: int | None = None
    n_permutations: int | None = None


@dataclass(frozen=True)
class KnowledgeCloseness:
    """Closeness of the clouds of two kinds of knowledge, and scores of the maps between them."""

    n_subjects: int  #: Number of subjects, the points of each cloud.
    scores: Sequence[PairScore]
    layers: Sequence[int]
    range_scalings: Sequence[int]
    ks: Sequence[int]
    dimension: Mapping[str, Floats]  #: Intrinsic, of each cloud, ``(n_layers, n_scalings)``.
    overlap: Mapping[tuple[str, str], Floats]  #: Mean, of neighborhoods, ``(n_layers, n_ks)``.
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

    # k, scaling and layer are positions; of several layers, it is the mean over them.

    def overlap_matrix(self, k: int, layer: int | slice = slice(None)) -> Floats:
        """Return the overlap of all pairs."""
        return self._matrix({pair: o[layer, k].mean() for pair, o in self.overlap.items()})

    def difference_matrix(self, scaling: int, layer: int | slice = slice(None)) -> Floats:
        """Return ``|log ID - log ID'|`` of all pairs."""
        logs = {name: np.log(values[layer, scaling]) for name, values in self.dimension.items()}
        return self._matrix({(a, b): abs(logs[a] - logs[b]).mean() for a, b in self.overlap})

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
        single = {str(layer): i for i, layer in enumerate(self.layers) if len(self.layers) > 1}
        layers: dict[str, int | slice] = {"all": slice(None), **single}
        return [test for name, layer in layers.items() for test in self._tests(name, layer)]

    def _tests(self, number: str, layer: int | slice) -> Iterator[ClosenessTest]:
        wording = self._matrix(self.wording)
        measures = {("overlap", f"k={k}"): self.overlap_matrix(i, layer)
                    for i, k in enumerate(self.ks)}  # fmt: skip
        for i, n2 in enumerate(self.range_scalings):
            measures["dimension_difference", f"n2={n2}"] = self.difference_matrix(i, layer)
        if number == "all":
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
