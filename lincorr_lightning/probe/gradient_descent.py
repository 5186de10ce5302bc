"""Gradient descent on the squared error of all maps, as a check of the closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.linear_map.solver import AffineMap


class MapDescent(torch.optim.SGD):
    """SGD with momentum on the map of each source, at the learning rate that its source allows.

    Learning rates are in units of the inverse of the largest curvature, the largest eigenvalue of
    the source's covariance: below 1 they converge, and one setting suits every LM.
    """

    def __init__(
        self, maps: Mapping[str, AffineMap], learning_rate: float, momentum: float
    ) -> None:
        groups: list[dict[str, Any]] = [
            {"params": [parameter], "source": source, "parameter": name}
            for source, module in maps.items()
            for name, parameter in module.named_parameters()
        ]
        super().__init__(groups, lr=learning_rate, momentum=momentum)
        # With momentum m a step goes 1 / (1 - m) times as far.
        self._unit = learning_rate * (1 - momentum)

    def set_curvature(self, source: str, covariance: Tensor) -> None:
        """Set the learning rates of a source's map by its covariance, ``(n_source, n_source)``."""
        curvature = torch.linalg.matrix_norm(covariance, ord=2)
        curvature = curvature.clamp(min=torch.finfo(torch.float64).tiny)
        for group in self.param_groups:
            if group["source"] == source:
                scale = curvature.item() if group["parameter"] == "weight" else 1.0
                group["lr"] = group["top_lr"] = self._unit / scale

    def decay(self, fraction_done: float) -> None:
        """Lower the learning rates along a half cosine to zero, so that batch noise dies out."""
        for group in self.param_groups:
            group["lr"] = group["top_lr"] * 0.5 * (1 + math.cos(math.pi * min(fraction_done, 1.0)))


def squared_error(module: AffineMap, x: Tensor, y: Tensor, scale: float, ridge: float) -> Tensor:
    """Return half the mean squared error of a map's rows times `scale`, plus its ridge penalty."""
    error = 0.5 * (module(x) - y).square().sum(1).mean()
    return error * scale + 0.5 * ridge * module.weight.square().sum()
