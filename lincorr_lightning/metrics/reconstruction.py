"""How well SAEs rebuild an LM's activations, as a torchmetrics Metric."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


class Reconstruction(NamedTuple):
    """What a `ReconstructionQuality` found.

    Attributes:
        n_tokens: Activations seen at each place.
        explained_variance: ``1 - sum ‖x - x̂‖² / sum ‖x - x̄‖²`` over all tokens, with x̄ their mean,
            ``(n_places,)``; NaN where activations do not vary. Higher is better, 1 is perfect.
        l0: Mean number of active features of a token, ``(n_places,)``.
        frequency: Share of the tokens at which each feature is active, ``(n_places, n_features)``.
        clean: The LM's own cross-entropy of a token, in nats.
        spliced: With each place's activations replaced by their reconstruction, ``(n_places,)``.
        ablated: With them replaced by zeros, ``(n_places,)``.
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
        """``(ablated - spliced) / (ablated - clean)``; NaN where zeros do no harm.

        1 when the reconstruction does as well as the activations, 0 when no better than zeros.
        """
        harm = self.ablated - self.clean
        shares = (self.ablated - self.spliced) / harm
        return torch.where(harm > 0, shares, torch.nan)


class ReconstructionQuality(Metric):
    """Sums over batches and processes, in float64.

    Args:
        n_hook_points: Number of SAEs.
        width: Of the activations.
        n_features: Of the largest SAE.

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
        """Add one batch of one place.

        Args:
            hook_point: Its number.
            activations: x, ``(n, width)``.
            rebuilt: x̂, the same shape.
            features: ``(n, n_features)``, 0 where not active.
        """
        x = activations.double()
        self.n[hook_point] += len(x)
        self.errors[hook_point] += (x - rebuilt.double()).square().sum()
        self.squares[hook_point] += x.square().sum()
        self.sums[hook_point] += x.sum(0)
        self.active[hook_point, : features.shape[1]] += (features > 0).sum(0)

    def add_losses(self, losses: Tensor, n_targets: int) -> None:
        """Add the LM's summed cross-entropies on one batch.

        Args:
            losses: Clean, then of each place spliced, then of each ablated, ``(1 + 2 n_places,)``.
            n_targets: Tokens that they are sums over.
        """
        self.losses += losses.to(self.losses)
        self.n_targets += n_targets

    def gather(self) -> Reconstruction:
        """The scores of all tokens of all processes, one place's in tensors of one number too."""
        with self.sync_context():
            return self._scores()

    def compute(self) -> Reconstruction:
        """The scores of all tokens of all processes; torchmetrics makes scalars of one place's."""
        return self._scores()

    def _scores(self) -> Reconstruction:
        n = self.n[:, None].clamp(min=1)
        variance = self.squares - (self.sums.square() / n).sum(1)
        # What rounding leaves of a constant.
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
