"""How two numbers go together over some things, with p-values and confidence intervals."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.95
"""Of the intervals."""
# Fisher's interval needs four points.
_LEAST = 4


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
