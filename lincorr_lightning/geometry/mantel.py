"""How two numbers go together over some things, with p-values and confidence intervals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""Of the intervals."""
# Fisher's interval needs four points.
_LEAST = 4
_SLACK = 1e-12
# Permutations in memory.
_AT_ONCE = 1000


@dataclass(frozen=True)
class Tie:
    """Two correlations of the same points.

    Attributes:
        pearson: Pearson's r.
        low: Lower end of its 95% confidence interval (Fisher).
        high: Upper end.
        pearson_p: Two-sided p of r.
        spearman: Spearman's rho.
        spearman_p: Two-sided p of rho.
        n: Points.
    """

    pearson: float
    low: float
    high: float
    pearson_p: float
    spearman: float
    spearman_p: float
    n: int

    def results(self) -> dict[str, Any]:
        """For ``results.json``."""
        return asdict(self)


NO_TIE: dict[str, Any] = dict.fromkeys(Tie.__dataclass_fields__)
"""What stands in ``results.json`` where there is none."""


def tie(x: npt.ArrayLike, y: npt.ArrayLike) -> Tie | None:
    """Correlate the pairs of which both numbers are finite.

    Args:
        x: ``(n,)``.
        y: ``(n,)``.

    Returns:
        None where fewer than four such pairs are left, or either number is the same in all.

    Example:
        >>> found = tie([1, 2, 3, 4, float("nan")], [1, 2, 4, 3, 5])
        >>> found.n, round(found.pearson, 2), round(found.spearman, 2)
        (4, 0.8, 0.8)
        >>> tie([1, 1, 1, 1], [1, 2, 4, 3]) is None
        True
    """
    from scipy.stats import pearsonr, spearmanr

    pairs = np.stack([np.asarray(x, dtype=float), np.asarray(y, dtype=float)])
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    if pairs.shape[1] < _LEAST or (np.ptp(pairs, axis=1) == 0).any():
        return None
    linear, ranked = pearsonr(*pairs), spearmanr(*pairs)
    around = linear.confidence_interval(CONFIDENCE)
    found = Tie(
        float(linear.statistic),
        float(around.low),
        float(around.high),
        float(linear.pvalue),
        float(ranked.statistic),
        float(ranked.pvalue),
        pairs.shape[1],
    )
    return found if all(map(math.isfinite, asdict(found).values())) else None


@dataclass(frozen=True)
class MantelResult:
    """How two matrices over the same things go together (Mantel, 1967, by ranks).

    Attributes:
        spearman: Rho over the pairs of things.
        p: Share of the permutations of the things whose rho is as far from 0, of either sign.
        n_pairs: Pairs that both matrices know.
        n_permutations: How many there were; all there are, if no more than asked for.
    """

    spearman: float
    p: float
    n_pairs: int
    n_permutations: int


def matrix_tie(
    a: npt.ArrayLike, b: npt.ArrayLike, n_permutations: int = 9999, seed: int = 0
) -> MantelResult | None:
    """Correlate two symmetric matrices over their pairs, with a test that permutes the things.

    Pairs that share a thing depend on each other, so the p of a correlation over pairs would be
    too small; under a permutation of one matrix' rows and columns alike they still do.

    Args:
        a: ``(n, n)``, symmetric; NaN where a pair is not known, and the diagonal does not count.
        b: Likewise.
        n_permutations: How many are drawn; all are taken if there are no more. One drawn at random
            counts the matrices as they are too.
        seed: Of the permutations.

    Returns:
        None with fewer than four things, fewer than four known pairs, or one value alone.
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n = len(a)
    upper = np.triu_indices(n, 1)
    found = _rho(a[upper], b[upper])
    if n < _LEAST or found is None:
        return None
    exact = n < 20 and math.factorial(n) <= n_permutations
    orders = itertools.permutations(range(n)) if exact else _drawn(n, n_permutations, seed)
    rhos = _permuted_rhos(a, b, np.array(list(orders)))
    # Where too few known pairs meet there is no rho; to count it as far is the careful way.
    as_far = int((~(np.abs(rhos) < abs(found) - _SLACK)).sum())
    total = len(rhos)
    p = as_far / total if exact else (as_far + 1) / (total + 1)
    known = int((np.isfinite(a[upper]) & np.isfinite(b[upper])).sum())
    return MantelResult(found, p, known, total)


def rank_residuals(a: npt.ArrayLike, given: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Ranks of a matrix' pairs, less what the ranks of another one tell of them linearly.

    Of two matrices of which this is left, `matrix_tie` is a partial Mantel test (Smouse, Long and
    Sokal, 1986), by ranks. Where both matrices rank their pairs all but as the third one does, its
    p comes out too small.

    Args:
        a: ``(n, n)``, symmetric; NaN where a pair is not known.
        given: Likewise.

    Returns:
        ``(n, n)``, symmetric; NaN where either is, and on the diagonal.
    """
    from scipy.stats import rankdata

    a, given = np.asarray(a, dtype=float), np.asarray(given, dtype=float)
    left = np.full(a.shape, math.nan)
    rows, columns = np.triu_indices(len(a), 1)
    known = np.isfinite(a[rows, columns]) & np.isfinite(given[rows, columns])
    rows, columns = rows[known], columns[known]
    if not len(rows):
        return left
    y, x = (rankdata(matrix[rows, columns]) for matrix in (a, given))
    y, x = y - y.mean(), x - x.mean()
    power = float(x @ x)
    y = y - x * (float(x @ y) / power if power > 0 else 0.0)
    left[rows, columns] = left[columns, rows] = y
    return left


def _permuted_rhos(
    a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], orders: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Rho under each order of b's rows and columns, NaN where there is none."""
    from scipy.stats import rankdata

    rows, columns = np.triu_indices(len(a), 1)
    x = a[rows, columns]
    if not np.isfinite(x).all():
        found = [_rho(x, b[order[rows], order[columns]]) for order in orders]
        return np.array([math.nan if rho is None else rho for rho in found])
    if np.isfinite(b[rows, columns]).all():
        return _rhos_of_ranks(x, b, orders)
    parts = []
    for part in np.array_split(orders, 1 + len(orders) // _AT_ONCE):
        y = b[part[:, rows], part[:, columns]]
        # Of a matrix that is known but for some pairs, as many meet in each order.
        known = np.isfinite(y)
        pairs = [values[known].reshape(len(y), -1) for values in (np.broadcast_to(x, y.shape), y)]
        ranks = [rankdata(values, axis=1) for values in pairs]
        u, v = (values - values.mean(1, keepdims=True) for values in ranks)
        scale = np.sqrt((u * u).sum(1) * (v * v).sum(1))
        parts.append((u * v).sum(1) / np.where(scale > 0, scale, math.nan))
    return np.concatenate(parts)


def _rhos_of_ranks(
    x: npt.NDArray[np.float64], b: npt.NDArray[np.float64], orders: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """The same where every pair is known: an order moves b's ranks, and changes none."""
    from scipy.stats import rankdata

    rows, columns = np.triu_indices(len(b), 1)
    u, v = rankdata(x), rankdata(b[rows, columns])
    u, v = u - u.mean(), v - v.mean()
    scale = math.sqrt(float((u @ u) * (v @ v)))
    if scale == 0:
        return np.full(len(orders), math.nan)
    ranks = np.zeros(b.shape)
    ranks[rows, columns] = ranks[columns, rows] = v
    parts = np.array_split(orders, 1 + len(orders) // _AT_ONCE)
    rhos = [ranks[part[:, rows], part[:, columns]] @ u / scale for part in parts]
    return np.concatenate(rhos)


def _drawn(n: int, n_permutations: int, seed: int) -> Iterator[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    for _ in range(n_permutations):
        yield tuple(rng.permutation(n))


def _rho(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> float | None:
    from scipy.stats import rankdata

    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < _LEAST:
        return None
    x, y = rankdata(x[known]), rankdata(y[known])
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else None
