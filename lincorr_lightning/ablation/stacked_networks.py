"""Feed-forward networks side by side: many small trainings as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import ConfigError

Activation = Literal["gelu", "relu", "silu", "tanh"]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
    "silu": nn.functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class NetworkSettings:
    """The one feed-forward network, and how pooled embeddings are put into it."""

    width: int | None = None
    """Hidden units; null takes four times the embedding's width."""

    activation: Activation = "gelu"
    """gelu, relu, silu or tanh."""

    residual: bool = True
    """Whether the pooled embedding is added to the network's output."""

    center: bool = True
    """Whether the texts' mean is taken off the pooled embeddings, which share most of it."""

    input_rms: float | None = 0.3
    """Root mean square of the network's inputs, to which they are scaled; null leaves them be."""

    def __post_init__(self) -> None:
        """Refuse what no network can be."""
        if self.width is not None and self.width < 1:
            raise ConfigError(f"model.network.width is {self.width}; it must be at least 1.")
        if self.activation not in get_args(Activation):
            raise ConfigError(
                f"model.network.activation is {self.activation!r}; it must be one of "
                f"{', '.join(get_args(Activation))}."
            )
        if self.input_rms is not None and not 0 < self.input_rms < math.inf:
            raise ConfigError(
                f"model.network.input_rms is {self.input_rms}; it must be greater than 0, or null."
            )


class StackedNetworks(nn.Module):
    """Networks of one shape that do not see each other, with a leading dimension of networks.

    Each is ``x + W₂ σ(W₁ x + b₁) + b₂`` (without ``x +`` if not residual). A step of all of them is
    two batched matrix products; every network computes what it would alone.

    Args:
        n_networks: How many.
        d: Width of inputs and outputs.
        settings: Of each.
    """

    def __init__(self, n_networks: int, d: int, settings: NetworkSettings) -> None:
        super().__init__()
        width = settings.width or 4 * d
        self.settings = settings
        self.weight_in = nn.Parameter(torch.empty(n_networks, d, width))
        self.bias_in = nn.Parameter(torch.empty(n_networks, 1, width))
        self.weight_out = nn.Parameter(torch.empty(n_networks, width, d))
        self.bias_out = nn.Parameter(torch.empty(n_networks, 1, d))

    @torch.no_grad()
    def reset(self, seeds: Sequence[int]) -> None:
        """Initialise each network as two `torch.nn.Linear` of its seed, the same on any device.

        Args:
            seeds: One per network.
        """
        for index, seed in enumerate(seeds):
            rng = torch.Generator().manual_seed(seed)
            for weight, bias in (
                (self.weight_in, self.bias_in),
                (self.weight_out, self.bias_out),
            ):
                bound = weight.shape[1] ** -0.5
                for parameter in (weight, bias):
                    drawn = torch.rand(parameter.shape[1:], generator=rng) * (2 * bound) - bound
                    parameter[index].copy_(drawn)

    def forward(self, inputs: Tensor) -> Tensor:
        """Outputs of each network.

        Args:
            inputs: ``(n_networks, n, d)``.

        Returns:
            The same shape.
        """
        activation = _ACTIVATIONS[self.settings.activation]
        hidden = activation(torch.baddbmm(self.bias_in, inputs, self.weight_in))
        outputs = torch.baddbmm(self.bias_out, hidden, self.weight_out)
        return inputs + outputs if self.settings.residual else outputs

    @torch.no_grad()
    def clip_gradients(self, largest: float) -> None:
        """Scale each network's gradient to a norm of its own, as if it were trained alone.

        Args:
            largest: The norm that no gradient exceeds.
        """
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        scale = (largest / (norms + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale[:, None, None])
