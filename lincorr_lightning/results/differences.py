"""Difference between two means whose samples share all, some or none of their units."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

_FLOATS = npt.NDArray[np.float64]
# Two more units, one right in the first sample only and one in the second only.
_ADDED = np.array([[1.0, 0.0], [0.0, 1.0]])


class Difference(NamedTuple):
    """A difference, its standard error and its 95 % interval; NaN with fewer than two units."""

    difference: float
    error: float
    low: float
    high: float


def difference_of_means(sums: _FLOATS, counts: _FLOATS, shares: bool = False) -> Difference:
    """Return the second mean minus the first, with its error over units.

    Units of both samples count as pairs: with the same units this is the paired t-test's interval,
    with no common ones the error is Welch's. Shares have the interval of Bonett and Price (2012,
    "Adjusted Wald confidence interval for a difference of binomial proportions based on paired
    data"), which has a width also where no unit differs.

    `sums` and `counts`, ``(n_units, 2)``, are the sum and the number of the values of each unit in
    each sample, 0 where a sample lacks the unit; all values of `shares` are 0 or 1.
    """
    n, (value, parts) = (counts > 0).sum(0), _deviations(sums, counts)
    if n.min() < 2:
        return Difference(value, math.nan, math.nan, math.nan)
    error = float(np.linalg.norm((parts * np.sqrt(n / (n - 1))) @ (-1, 1)))
    if not shares:
        half = float(stdtrit(n.min() - 1, 0.975)) * error
        return Difference(value, error, value - half, value + half)
    center, parts = _deviations(np.vstack([sums, _ADDED]), np.vstack([counts, _ADDED**0]))
    half = float(ndtri(0.975) * np.linalg.norm(parts @ (-1, 1)))
    return Difference(value, error, max(center - half, -1.0), min(center + half, 1.0))


def _deviations(sums: _FLOATS, counts: _FLOATS) -> tuple[float, _FLOATS]:
    """Return the difference of the means, and what each unit adds to the deviation of each mean."""
    means = sums.sum(0) / counts.sum(0)
    return float(means[1] - means[0]), (sums - means * counts) / counts.sum(0)
