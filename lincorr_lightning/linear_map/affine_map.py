"""An affine map between logits that keeps its digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class AffineMap(nn.Module):
    """``y = W (x - center) + offset``, in float64.

    Centred, because logits sit far from zero with a small spread: gradient descent then converges,
    and nothing cancels.

    Args:
        n_source: Number of source labels.
        n_target: Number of target labels.
        trainable: Whether its parameters ask for gradients.
    """

    center: Tensor

    def __init__(self, n_source: int, n_target: int, trainable: bool = True) -> None:
        super().__init__()
        zeros = torch.zeros(n_target, n_source, dtype=torch.float64)
        self.weight = nn.Parameter(zeros, requires_grad=trainable)
        self.offset = nn.Parameter(zeros[:, 0].clone(), requires_grad=trainable)
        self.register_buffer("center", zeros[0].clone())

    def cpu_copy(self) -> AffineMap:
        """The same map on the CPU, without gradients."""
        n_target, n_source = self.weight.shape
        copy = AffineMap(n_source, n_target, trainable=False)
        copy.assign(self.weight, self.center, self.offset)
        return copy

    @property
    def bias(self) -> Tensor:
        """The paper's b: ``y = W x + b``, ``(n_target,)``."""
        return self.offset - self.weight @ self.center

    @torch.no_grad()
    def assign(self, weight: Tensor, center: Tensor, offset: Tensor) -> None:
        """Take over a solution: ``(n_target, n_source)``, ``(n_source,)``, ``(n_target,)``."""
        self.weight.copy_(weight)
        self.center.copy_(center)
        self.offset.copy_(offset)

    def forward(self, source: Tensor) -> Tensor:
        """Predicted target logits, ``(n_subjects, n_target)``, from ``(n_subjects, n_source)``."""
        return (source - self.center) @ self.weight.T + self.offset
