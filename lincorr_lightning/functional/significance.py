"""Is a tie real? Standard errors of r, r given a third knowledge, and maps laid end to end.

Beyond the paper, whose appendix B leaves open which knowledges are tied and why. A high r alone
says little: the logits of any two prompts of an LM drift together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.functional.correlation import labelwise_pearson_from_moments
from lincorr_lightning.functional.least_squares import LeastSquares
from lincorr_lightning.functional.moments import Moments


def pearson_influence(u: Tensor, v: Tensor, r: Tensor) -> Tensor:
    """What each row adds to Pearson's r: its influence function.

    (Devlin, Gnanadesikan and Kettenring, "Robust estimation and outlier detection with correlation
    coefficients", 1975.) To first order in the number of rows, r of a sample is the true r plus the
    mean of these. So their spread over rows gives the standard error of r, and of sums and
    differences of r's on the same rows, whatever the distribution.

    Args:
        u: One variable, standardized, ``(n_rows, n)``.
        v: The other one, standardized, ``(n_rows, n)``.
        r: Their correlation, ``(n,)``.

    Returns:
        ``(n_rows, n)``: ``u v - r (u² + v²) / 2``.
    """
    return u * v - 0.5 * r * (u * u + v * v)


def one_sided_p(z: float) -> float:
    """Probability of at least this many standard errors above nothing.

    Example:
        >>> round(one_sided_p(1.6449), 4)
        0.05
    """
    return 0.5 * math.erfc(z / math.sqrt(2)) if math.isfinite(z) else math.nan


def adjust_for_many(p: Tensor) -> Tensor:
    """Adjust p-values of many tests (Benjamini and Yekutieli, 2001).

    A test whose adjusted value is at most q may be called a finding: on average no more than the
    share q of all that are called so is none. It holds whatever the dependence between the tests;
    pairs that share a knowledge, and all that share their X's, depend on one another.

    Args:
        p: One p-value a test, ``(n,)``; NaN where nothing was tested.

    Returns:
        ``(n,)``, float64, NaN where `p` is.

    Example:
        >>> adjust_for_many(torch.tensor([0.01, 0.04, float("nan")]).double()).round(decimals=9)
        tensor([0.0300, 0.0600,    nan], dtype=torch.float64)
    """
    tested = (~p.isnan()).nonzero(as_tuple=True)[0]
    adjusted = torch.full_like(p, torch.nan, dtype=torch.float64)
    n = len(tested)
    if n == 0:
        return adjusted
    values, order = p[tested].double().sort()
    rank = torch.arange(1, n + 1, dtype=torch.float64, device=p.device)
    steps = values * n * (1 / rank).sum() / rank
    # The least of all that are at least as large: the largest p decides from above.
    least = steps.flip(0).cummin(0).values.flip(0).clamp(max=1)
    adjusted[tested[order]] = least
    return adjusted


class PartialTie(NamedTuple):
    """A tie given a third knowledge, by target label.

    Attributes:
        r: Partial label-wise r on held-out rows, ``(n_target,)``; NaN where nothing is left.
        unique: Share of each target logit's variance that the source explains beyond the third
            knowledge, ``(n_target,)``: the squared semi-partial correlation.
    """

    r: Tensor
    unique: Tensor


def partial_tie(
    fit: Moments, test: Moments, x: Tensor, y: Tensor, given: Tensor, ridge: float | Tensor = 0.0
) -> PartialTie:
    """How well a source still tells a target when a third knowledge has told all it can.

    Source and target logits are both freed of what a linear map of the third knowledge's logits
    predicts, the map between what remains is fitted, and r is taken on held-out rows. All from
    second moments: maps from those of the fit half, scores from those of the held-out half.

    Args:
        fit: Moments that maps are fitted on.
        test: Moments that they are scored on.
        x: Columns of the source.
        y: Columns of the targets.
        given: Columns of the third knowledge, or of several.
        ridge: Of the map between what remains, per target column or one for all.
    """
    x, y, given = (columns.to(fit.mean.device) for columns in (x, y, given))
    free = torch.cat([x, y])
    told = LeastSquares(fit.scatter[given][:, given], fit.scatter[given][:, free]).weight(0.0)
    rest_fit, rest = (_residual(m.scatter, free, given, told) for m in (fit, test))
    n = len(x)
    # What a subtraction leaves of a direction that is gone is noise of the size of what was there.
    largest = torch.linalg.matrix_norm(fit.scatter[x][:, x], 2)
    left = torch.linalg.matrix_norm(rest_fit[:n, :n], 2)
    rtol = 16 * n * torch.finfo(rest_fit.dtype).eps * float(largest / left.clamp(min=1e-300))
    weight = LeastSquares(rest_fit[:n, :n], rest_fit[:n, n:], rtol).weight(ridge)
    remaining, whole = rest.diagonal()[n:], test.scatter.diagonal()[y]
    gone = test.constant[y] | (remaining <= 1e-12 * whole)
    r = labelwise_pearson_from_moments(weight, rest[:n, :n], rest[:n, n:], remaining, gone)
    return PartialTie(r, r.square() * remaining / whole)


def _residual(scatter: Tensor, free: Tensor, given: Tensor, told: Tensor) -> Tensor:
    """Scatter of ``free - told given`` on the rows behind `scatter`."""
    both, third = scatter[free][:, given], scatter[given][:, given]
    cross = both @ told.T
    return scatter[free][:, free] - cross - cross.T + told @ third @ told.T


def weight_cosine(a: Tensor, b: Tensor) -> float:
    """Cosine between two maps, taken as vectors.

    Example:
        >>> round(weight_cosine(torch.eye(2), 3 * torch.eye(2)), 9)
        1.0
    """
    a, b = a.double(), b.double()
    return float((a * b).sum() / (a.norm() * b.norm()))
