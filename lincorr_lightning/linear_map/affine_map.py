"""An affine map between logits as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lincorr_lightning.linear_map.solver import Solution


class AffineMap(nn.Module):
    """``y = W (x - center) + offset``, in float64: the parameters of a `Solution`.

    Centred, because logits lie far from zero with a small spread: gradient descent then converges,
    and no digits cancel.
    """

    center: Tensor

    def __init__(self, n_source: int, n_target: int, trainable: bool = True) -> None:
        super().__init__()
        zeros = torch.zeros(n_target, n_source, dtype=torch.float64)
        self.weight = nn.Parameter(zeros, requires_grad=trainable)
        self.offset = nn.Parameter(zeros[:, 0].clone(), requires_grad=trainable)
        self.register_buffer("center", zeros[0].clone())

    @property
    def solution(self) -> Solution:
        """The map as plain tensors without gradients; they share memory with the parameters."""
        return Solution(self.weight.detach(), self.center, self.offset.detach())

    @torch.no_grad()
    def assign(self, solution: Solution) -> None:
        """Copy a solution into the parameters."""
        self.weight.copy_(solution.weight)
        self.center.copy_(solution.mean_x)
        self.offset.copy_(solution.mean_y)

    @torch.no_grad()
    def set_newton_gradients(self, solution: Solution) -> None:
        """Set the gradients with which an SGD step of learning rate 1 reaches the solution.

        The inverse curvature times the gradient of a least squares problem is the distance to its
        solution, from anywhere.

        Args:
            solution: The solution; its center is taken over.
        """
        self.center.copy_(solution.mean_x)
        self.weight.grad = self.weight - solution.weight
        self.offset.grad = self.offset - solution.mean_y

    def forward(self, source: Tensor) -> Tensor:
        """Return predicted logits, ``(n_subjects, n_target)``, of ``(n_subjects, n_source)``."""
        return Solution(self.weight, self.center, self.offset)(source)
