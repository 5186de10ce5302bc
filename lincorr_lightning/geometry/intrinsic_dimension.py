"""Intrinsic dimension of the cloud of tokens at many scales: GRIDE, by maximum likelihood.

Denti et al., 2022, "The generalized ratios intrinsic dimension estimator" (arXiv 2104.13832), as
Viswanathan et al., 2025 (arXiv 2501.10573) use it on tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lincorr_lightning.geometry.distances import NearestTokens

RANGE_SCALINGS = (2, 4, 8, 16, 32, 64, 128, 256)
"""The paper's range scalings n2, twice n1 (Viswanathan et al., section 3)."""

# Bisection halves the interval with each step, to the precision of float64.
_STEPS = 54


@torch.no_grad()
def intrinsic_dimension(
    nearest: NearestTokens, range_scalings: Sequence[int] = RANGE_SCALINGS
) -> Tensor:
    """Estimate the intrinsic dimension of each layer at each range scaling, which are even.

    With ``μ = r_{n2} / r_{n1}`` of each distinct token and n2 = 2 n1, maximum likelihood for d
    under ``p(μ | d) = d (μ^d - 1)^{n2-n1-1} / (B(n2-n1, n1) μ^{(n2-1)d+1})``. At n2 = 2 it is the
    2NN estimator, ``d = (N - 1) / Σ log μ``. As in DADApy, the score's N/d is (N - 1)/d, which
    makes 2NN unbiased, and ratios above ``q50 + 20 (q95 - q50)`` are left out: such a token has an
    almost identical neighbor.

    Returns:
        ``(..., n_layers, n_scalings)``, float64; inf if each token has its n1-th and n2-th neighbor
        at the same distance, like the corners of a simplex; NaN if a layer has fewer than n2 + 1
        distinct tokens.

    Example:
        >>> from lincorr_lightning.geometry.distances import nearest_tokens
        >>> plane = torch.rand(1, 500, 2, generator=torch.Generator().manual_seed(0))
        >>> intrinsic_dimension(nearest_tokens(plane, max_rank=16), (2, 16)).round().tolist()
        [[2.0, 2.0]]
    """
    outer = torch.tensor(range_scalings, device=nearest.distances.device)
    near = nearest.distances[..., outer // 2 - 1]
    far = nearest.distances[..., outer - 1]
    enough = nearest.distinct.sum(-1, keepdim=True) > outer
    ratio = (far / near).mT  # (..., n_scalings, n_tokens)
    ratio = ratio.where(nearest.distinct[..., None, :] & enough[..., None], torch.nan)
    quantiles = ratio.new_tensor([0.5, 0.95])
    middle, high = ratio.nanquantile(quantiles, dim=-1, keepdim=True)
    # With <=, a cloud in which all ratios are equal keeps them.
    used = ratio <= middle + 20 * (high - middle)
    found = _maximum_likelihood(ratio.log().where(used, 0.0), used, outer)
    return found.where(enough, torch.nan)


def _maximum_likelihood(log_ratio: Tensor, used: Tensor, outer: Tensor) -> Tensor:
    """Return the root of the score, by bisection.

    The score times d is ``N - 1 + a Σ h(d log μ) - (n2 - 1) d Σ log μ``, with a = n2 - n1 - 1 and
    h(x) = x / (1 - exp(-x)) <= 1 + x, which bounds the root from above; at n2 = 2 the bound is the
    closed form. `log_ratio` is log μ, ``(..., n_scalings, n_tokens)``, 0 where it is not `used`;
    `outer` is n2.
    """
    n2 = outer.double()
    a = n2 / 2 - 1
    n, total = used.sum(-1).double(), log_ratio.sum(-1)
    high = (n - 1 + a * n) / (n2 / 2 * total)
    low = torch.zeros_like(high)
    for _ in range(_STEPS):
        d = (low + high) / 2
        x = d[..., None] * log_ratio
        h = torch.where(x > 0, x / -torch.expm1(-x), 1.0)
        is_below = n - 1 + a * (h * used).sum(-1) > (n2 - 1) * d * total
        low, high = torch.where(is_below, d, low), torch.where(is_below, high, d)
    return high.where(total > 0, torch.inf)
