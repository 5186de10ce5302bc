"""Least squares from second moments: minimum norm, or any number of ridge strengths at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

HALF_DECADES = (0.0, *(10 ** (exponent / 2) for exponent in range(-2, 13)))
"""The ridge strengths 0 and half decades from 0.1 to 1e6."""


class LeastSquares:
    """Solver of linear maps to many targets, for any ridge strength, by one eigendecomposition.

    Solves ``min_W  sum_x |y - mean_y - W (x - mean_x)|^2 + ridge * |W|^2``; the intercept is
    ``b = mean_y - W mean_x`` and is not penalized. With ``ridge = 0`` it is ordinary least squares
    (paper section 3.2), with the solution of minimum norm: the logits of a small LM span
    ``hidden_size`` dimensions, fewer than there are labels.

    Args:
        xx: Scatter of the source, ``(n_source, n_source)``, float64.
        xy: Scatter between source and targets, ``(n_source, n_target)``, float64.
        rtol: Directions whose scatter is below `rtol` times the largest are ignored: by default
            ``16 * n_source * eps``, for singular values below about 1e-6 of the largest.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64) - 1
        >>> LeastSquares(x.T @ x, x.T @ (3 * x)).weight(0.0).tolist()
        [[3.0]]
    """

    def __init__(self, xx: Tensor, xy: Tensor, rtol: float | None = None) -> None:
        values, vectors = torch.linalg.eigh(xx)
        if rtol is None:
            rtol = 16 * len(xx) * torch.finfo(xx.dtype).eps
        # A mask instead of a selection avoids a host synchronisation on an accelerator.
        self._present = values > rtol * values[-1].clamp(min=0)
        self._values, self._vectors = values, vectors
        self._projected = vectors.T @ xy

    def weight(self, ridge: float | Tensor) -> Tensor:
        """Return W, ``(n_target, n_source)``, float64.

        The ridge strength, at least 0, is a number, or one per target, ``(n_target,)``.
        """
        strength = torch.as_tensor(ridge, dtype=self._values.dtype, device=self._values.device)
        inverse = torch.where(self._present[:, None], 1 / (self._values[:, None] + strength), 0.0)
        return (self._vectors @ (inverse * self._projected)).T


def strongest_within(scores: Sequence[float], tolerance: float) -> int:
    """Return the index of the last score that is within `tolerance` of the best one.

    With ridge strengths in increasing order, it is the strongest one that costs at most
    `tolerance`. The index is 0 if all scores are NaN.
    """
    floor = max((score for score in scores if score == score), default=torch.inf) - tolerance
    return max((i for i, score in enumerate(scores) if score >= floor), default=0)
