"""How well SAEs reconstruct an LM's activations, as a torchmetrics Metric."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class Reconstruction(NamedTuple):
    """Result of `ReconstructionQuality`.

    Attributes:
        n_tokens: Number of activations at each hook point.
        explained_variance: ``1 - sum ‖x - x̂‖² / sum ‖x - x̄‖²`` over all tokens, with x̄ their mean,
            ``(n_hook_points,)``; NaN for constant activations. Higher is better, 1 is perfect.
        l0: Mean number of active features per token, ``(n_hook_points,)``.
        frequency: Fraction of the tokens at which each feature is active,
            ``(n_hook_points, n_features)``.
        clean: Cross-entropy of the unchanged LM per token, in nats.
        spliced: Cross-entropy with a hook point's activations replaced by their reconstruction,
            ``(n_hook_points,)``.
        ablated: Cross-entropy with them replaced by zeros, ``(n_hook_points,)``.
    """

    n_tokens: int
    explained_variance: Tensor
    l0: Tensor
    frequency: Tensor
    clean: float
    spliced: Tensor
    ablated: Tensor

    @property
    def loss_recovered(self) -> Tensor:
        """``(ablated - spliced) / (ablated - clean)``; NaN where zeros do not increase the loss.

        1 if the reconstruction is as good as the activations, 0 if it is no better than zeros.
        Higher is better.
        """
        harm = self.ablated - self.clean
        return torch.where(harm > 0, (self.ablated - self.spliced) / harm, torch.nan)


class ReconstructionQuality(Metric):
    """Explained variance, active features and recovered loss of several SAEs, in float64.

    Args:
        n_hook_points: Number of SAEs.
        width: Width of the activations.
        n_features: Number of features of the largest SAE.

    Example:
        >>> import torch
        >>> metric = ReconstructionQuality(1, 2, 3)
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(0, x, x * 0.5, torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.5, 0.2]]))
        >>> metric.gather().explained_variance.tolist(), metric.gather().l0.tolist()
        ([0.75], [1.5])
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False
    n: Tensor
    errors: Tensor
    squares: Tensor
    sums: Tensor
    active: Tensor
    losses: Tensor
    n_targets: Tensor

    def __init__(self, n_hook_points: int, width: int, n_features: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        shapes = {
            "n": (n_hook_points,), "errors": (n_hook_points,), "squares": (n_hook_points,),
            "sums": (n_hook_points, width), "active": (n_hook_points, n_features),
            "losses": (1 + 2 * n_hook_points,), "n_targets": (),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.add_state(name, torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self, hook_point: int, activations: Tensor, rebuilt: Tensor, features: Tensor
    ) -> None:
        """Add one batch of one hook point, by its number.

        Activations x and their reconstructions x̂ are ``(n, width)``; features are
        ``(n, n_features)``, 0 where not active.
        """
        x = activations.double()
        self.n[hook_point] += len(x)
        self.errors[hook_point] += (x - rebuilt.double()).square().sum()
        self.squares[hook_point] += x.square().sum()
        self.sums[hook_point] += x.sum(0)
        self.active[hook_point, : features.shape[1]] += (features > 0).sum(0)

    def add_losses(self, losses: Tensor, n_targets: int) -> None:
        """Add the LM's cross-entropies, each summed over the `n_targets` tokens of one batch.

        They are the clean one, then spliced and then ablated ones at each hook point,
        ``(1 + 2 n_hook_points,)``.
        """
        self.losses += losses.to(self.losses)
        self.n_targets += n_targets

    def gather(self) -> Reconstruction:
        """Return the scores over all ranks; those of a single SAE keep their shape."""
        with self.sync_context():
            return self._scores()

    def compute(self) -> Reconstruction:
        """Return the scores over all ranks; torchmetrics squeezes those of a single SAE."""
        return self._scores()

    def _scores(self) -> Reconstruction:
        n = self.n[:, None].clamp(min=1)
        variance = self.squares - (self.sums.square() / n).sum(1)
        # The variance of a constant is rounding error.
        varies = variance > 1e-12 * self.squares
        explained = torch.where(varies, 1 - self.errors / variance, torch.nan)
        losses = self.losses / self.n_targets.clamp(min=1)
        n_hook_points = len(self.n)
        return Reconstruction(
            n_tokens=int(self.n.max()),
            explained_variance=explained,
            l0=self.active.sum(1) / n[:, 0],
            frequency=self.active / n,
            clean=float(losses[0]),
            spliced=losses[1 : 1 + n_hook_points],
            ablated=losses[1 + n_hook_points :],
        )
