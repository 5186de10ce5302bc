"""Significance of a correlation: influence functions, p-values, partial correlations.

Not in the paper, whose appendix B leaves open which knowledge correlates and why. A high r alone is
no evidence: the logits of any two prompts of an LM are correlated.
"""

import math
from typing import NamedTuple

import scipy
import torch
from scipy.special import stdtrit
from torch import Tensor

from lincorr_lightning.functional import correlation
from lincorr_lightning.functional.least_squares import LeastSquares
from lincorr_lightning.functional.moments import Moments
from lincorr_lightning.io import number

_LEAST_UNITS = 5  # of an interval


def pearson_influence(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """Return the influence function of Pearson's r at each row.

    To first order in the number of rows, r of a sample is the true r plus the mean of the
    influences. Their spread over rows therefore gives the standard error of r, and of sums and
    differences of several r on the same rows, for any distribution. (Devlin, Gnanadesikan and
    Kettenring, "Robust estimation and outlier detection with correlation coefficients", 1975.)

    Of both variables, standardized, ``(n_rows, n)`` each, and their r, ``(n,)``: ``(n_rows, n)``,
    ``u v - r (u² + v²) / 2``.
    """
    return u * v - 0.5 * r * (u * u + v * v)


def mean_r_error(prediction: Tensor, target: Tensor) -> float:
    """Return the standard error over rows of the mean label-wise r.

    Rows are independent, labels are not: their influences are averaged within each row. Of
    predicted and true logits, ``(n_rows, n_labels)`` each; NaN of two rows, or if no label varies.
    """
    if len(target) < 3:
        return math.nan
    r = correlation.labelwise_pearson(prediction, target)
    known = ~r.isnan()
    if not known.any():
        return math.nan
    u, v = (x[:, known].double() for x in (prediction, target))
    u, v = ((x - x.mean(0)) / x.std(0, correction=0) for x in (u, v))
    return float(pearson_influence(u, v, r[known]).mean(1).std() / math.sqrt(len(target)))


def adjust_for_many(p: Tensor) -> Tensor:
    """Adjust the p-values of many tests (Benjamini and Yekutieli, 2001).

    Among the tests with an adjusted value of at most q, the expected fraction of false discoveries
    is at most q, for any dependence between the tests. Pairs depend on one another through shared
    knowledge and shared subjects. Of p-values ``(n,)``, NaN where there was no test: the same,
    adjusted, in float64.
    """
    adjusted = torch.full_like(p, torch.nan, dtype=torch.float64)
    known = ~p.isnan()
    values = scipy.stats.false_discovery_control(p[known].double().cpu().numpy(), method="by")
    adjusted[known] = torch.from_numpy(values).to(adjusted)
    return adjusted


def mean_interval(values: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of a mean by Student's t; NaN of fewer than five values.

    The values, ``(n,)``, are those of independent units, such as means over the edits of each
    reference, or differences between two hits on the same labels. A percentile bootstrap would
    cover too little where units are few.

    Example:
        >>> low, high = mean_interval(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        >>> round(low, 2), round(high, 2)
        (1.04, 4.96)
    """
    n = len(values)
    return _t_interval(float(values.double().mean()), float(values.double().var(correction=0)), n)


def named_interval(name: str, values: Tensor) -> dict[str, float | None]:
    """Return a mean and its `mean_interval` by name, ``<name>_low`` and ``<name>_high``."""
    low, high = mean_interval(values)
    return {name: float(values.mean()), f"{name}_low": number(low), f"{name}_high": number(high)}


def jackknife_interval(value: float, without: Tensor) -> tuple[float, float]:
    """Return the 95 % interval of any statistic of independent units; NaN of fewer than five.

    `without` has the statistic of all units but one, for each of them, ``(n,)``; those that do not
    exist are NaN and do not count. The degrees of freedom are those of the units.
    """
    known = without[~without.isnan()].double()
    n = len(known)
    return _t_interval(value, (n - 1) ** 2 * float(known.var(correction=0)), n)


def _t_interval(mean: float, variance: float, n: int) -> tuple[float, float]:
    """Return the interval of a mean of n values; the variance is that of a population."""
    if n < _LEAST_UNITS:
        return math.nan, math.nan
    half = float(stdtrit(n - 1, 0.975)) * math.sqrt(variance / (n - 1))
    return mean - half, mean + half


class PartialCorrelation(NamedTuple):
    """Correlation by target label after removing other knowledge from both sides, ``(n_target,)``.

    `r` is the partial label-wise r on held-out rows, NaN where no variance remains; `unique` is the
    fraction of each target logit's variance that the source explains beyond the removed knowledge:
    the squared semi-partial correlation.
    """

    r: Tensor
    unique: Tensor


def partial_correlation(
    fit: Moments, test: Moments, x: Tensor, y: Tensor, removed: Tensor, ridge: float | Tensor = 0.0
) -> PartialCorrelation:
    """Correlate source and target after removing what other knowledge predicts of both.

    A linear map of the other knowledge's logits is subtracted from source and target logits, and a
    map between the residuals is fitted, both on the moments of the fit half. The r is computed on
    the moments of the held-out half, `test`. `x`, `y` and `removed` are the columns of the source,
    of the targets and of the other knowledge; the ridge is that of the map between the residuals,
    one per target column or one for all.
    """
    x, y, removed = (columns.to(fit.mean.device) for columns in (x, y, removed))
    free = torch.cat([x, y])
    known = LeastSquares(fit.between(removed, removed), fit.between(removed, free)).weight(0.0)
    rest_fit, rest = (_residual(moments, free, removed, known) for moments in (fit, test))
    n = len(x)
    # Where nothing remains, the subtraction leaves rounding noise relative to the original size.
    largest = torch.linalg.matrix_norm(fit.between(x, x), 2)
    left = torch.linalg.matrix_norm(rest_fit[:n, :n], 2)
    rtol = 16 * n * torch.finfo(rest_fit.dtype).eps * float(largest / left.clamp(min=1e-300))
    weight = LeastSquares(rest_fit[:n, :n], rest_fit[:n, n:], rtol).weight(ridge)
    remaining = rest.diagonal()[n:]
    whole = test.square[y]
    gone = test.constant[y] | (remaining <= 1e-12 * whole)
    parts = rest[:n, :n], rest[:n, n:], remaining, gone
    r = correlation.labelwise_pearson_from_moments(weight, *parts)
    return PartialCorrelation(r, r.square() * remaining / whole)


def _residual(moments: Moments, free: Tensor, removed: Tensor, known: Tensor) -> Tensor:
    """Return the scatter of ``free - known removed`` on the rows behind the moments."""
    cross = moments.between(free, removed) @ known.T
    whole, other = moments.between(free, free), moments.between(removed, removed)
    return whole - cross - cross.T + known @ other @ known.T


def weight_cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine between two maps as vectors."""
    a, b = a.double(), b.double()
    return float((a * b).sum() / (a.norm() * b.norm()))
