"""Two ways to a least squares solution, both as torch optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lincorr_lightning.linear_map.affine_map import AffineMap


class ClosedForm(torch.optim.Optimizer):
    """An optimizer whose one step is the solution.

    With it a closed-form fit is an ordinary run to Lightning: steps are counted, checkpoints saved.

    Args:
        params: The parameters that `solve` sets.
        solve: Sets them.
    """

    def __init__(self, params: Iterable[nn.Parameter], solve: Callable[[], None]) -> None:
        super().__init__(params, {})
        self._solve = solve

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Solve.

        Args:
            closure: Called first when given: Lightning counts steps by it.
        """
        if closure is not None:
            closure()
        self._solve()


class Descent(torch.optim.SGD):
    """Gradient descent with momentum, each map at the learning rate its source allows.

    Least squares has one curvature a source, the largest eigenvalue of its covariance. `condition`
    takes it from the first step; the learning rate then means the same for every LM.

    Args:
        maps: Map of each source.
        learning_rate: In units of the inverse curvature; below 1 it converges.
        momentum: Between 0 and 1.
    """

    def __init__(self, maps: nn.ModuleDict, learning_rate: float, momentum: float) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [parameter], "source": source, "parameter": name}
            for source, module in maps.items()
            for name, parameter in module.named_parameters()
        ]
        super().__init__(groups, lr=learning_rate, momentum=momentum)
        # With momentum m a step goes 1 / (1 - m) times as far.
        self._unit = learning_rate * (1 - momentum)

    def condition(self, source: str, module: AffineMap, mean: Tensor, covariance: Tensor) -> None:
        """Centre a map on its source and set its learning rates.

        Args:
            source: Name of the source.
            module: Its map.
            mean: Of the source's logits over the X's of a step, ``(n_source,)``.
            covariance: Of the same, ``(n_source, n_source)``.
        """
        module.center.copy_(mean)
        curvature = torch.linalg.matrix_norm(covariance, ord=2)
        curvature = curvature.clamp(min=torch.finfo(torch.float64).tiny)
        for group in self.param_groups:
            if group["source"] == source:
                scale = curvature.item() if group["parameter"] == "weight" else 1.0
                group["lr"] = group["top_lr"] = self._unit / scale

    def decay(self, share_done: float) -> None:
        """Follow a half cosine to zero, so that the noise of the batches dies out."""
        for group in self.param_groups:
            group["lr"] = group["top_lr"] * 0.5 * (1 + math.cos(math.pi * min(share_done, 1.0)))
