"""Feed-forward networks side by side: many small networks trained as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import ConfigError, require

Activation = Literal["gelu", "relu", "silu", "tanh"]


@dataclass(frozen=True)
class NetworkSettings:
    """The feed-forward network, and how its inputs are standardized."""

    width: int | None = None
    """Number of hidden units; null takes four times the width of the embedding."""

    activation: Activation = "gelu"
    """One of gelu, relu, silu and tanh."""

    residual: bool = True
    """Whether the pooled embedding is added to the network's output."""

    center: bool = True
    """Whether the mean over all texts is subtracted from the pooled embeddings."""

    input_rms: float | None = 0.3
    """Root mean square that the inputs are scaled to; null leaves them unscaled."""

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.width is not None:
            require("model.network.width", self.width, at_least=1)
        if self.activation not in get_args(Activation):
            raise ConfigError(
                f"model.network.activation is {self.activation!r}; it must be one of "
                f"{', '.join(get_args(Activation))}."
            )
        if self.input_rms is not None:
            require("model.network.input_rms", self.input_rms, above=0)


class StackedNetworks(nn.Module):
    """Independent networks of one shape, with a leading dimension of networks.

    Each is ``x + W₂ σ(W₁ x + b₁) + b₂`` (without ``x +`` if not residual). A forward pass of all of
    them is two batched matrix products; every network computes what it would alone. Inputs and
    outputs have the width `d`.
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
        """Initialize each network like two `torch.nn.Linear`, the same on any device."""
        for index, seed in enumerate(seeds):
            rng = torch.Generator().manual_seed(seed)
            for layer in ((self.weight_in, self.bias_in), (self.weight_out, self.bias_out)):
                bound = layer[0].shape[1] ** -0.5
                for parameter in layer:
                    drawn = torch.rand(parameter.shape[1:], generator=rng) * (2 * bound) - bound
                    parameter[index].copy_(drawn)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs of each network, of the inputs' shape ``(n_networks, n, d)``."""
        activation = getattr(nn.functional, self.settings.activation)
        hidden = activation(torch.baddbmm(self.bias_in, inputs, self.weight_in))
        outputs: Tensor = torch.baddbmm(self.bias_out, hidden, self.weight_out)
        return inputs + outputs if self.settings.residual else outputs
