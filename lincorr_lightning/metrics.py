"""torchmetrics over `lincorr_lightning.functional`: the same numbers on one device or many."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric

from lincorr_lightning.functional import Moments, segmented_pearson
from lincorr_lightning.functional.correlation import segments_of
from lincorr_lightning.functional.moments import Block, add_rows, merge_moments, no_moments

__all__ = ["InstancewisePearson", "JointMoments", "Reconstruction", "ReconstructionQuality"]

_SUMS = Moments._fields[:-1]  # all but the blocks


class InstancewisePearson(Metric):
    """Mean over instances of Pearson's r across the labels of each target (paper appendix D).

    ``r`` lies in [-1, 1], higher is better. The intercept dominates it, so that unrelated pairs
    score high, too; the label-wise r is the main result. Instances whose logits are all equal are
    left out. `sizes` are the numbers of labels of the targets, which lie side by side in the rows.
    """

    higher_is_better = True
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, sizes: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.sizes = sizes
        zeros = torch.zeros(len(sizes), dtype=torch.float64)
        self.add_state("total", zeros, dist_reduce_fx="sum")
        self.add_state("count", zeros.clone(), dist_reduce_fx="sum")

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add instances: predicted and true logits, ``(n_subjects, sum(sizes))`` each."""
        segments = segments_of(self.sizes, target.device)  # too large to keep for each source
        r = segmented_pearson(prediction, target, segments)
        self.total += r.nansum(0)
        self.count += (~r.isnan()).sum(0)

    def compute(self) -> Tensor:
        """Return the mean r of each target, ``(n_targets,)``; NaN where no instance varies."""
        return self.total / self.count


class JointMoments(Metric):
    """Second moments of all logits of a run, accumulated over batches and ranks.

    One joint matrix serves every ordered pair: each least squares problem consists of parts of it.
    Memory does not grow with the number of rows, of `n_columns` each. `blocks` are those of the
    scatter that are kept; without any, all of it is.

    Example:
        >>> metric = JointMoments(2)
        >>> for batch in torch.arange(12.0).reshape(3, 2, 2):
        ...     metric.update(batch)
        >>> metric.compute().mean.tolist()
        [5.0, 6.0]
    """

    full_state_update = False
    products: Tensor

    def __init__(self, n_columns: int, blocks: Sequence[Block] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        *sums, self.blocks = no_moments(n_columns, blocks)
        self.n_entries = len(sums[-1])  #: Number of products.
        # They are allocated at the first row: torchmetrics keeps a default beside each state.
        sums[-1] = sums[-1].new_empty(0)
        for name, value in zip(_SUMS, sums, strict=True):
            # Means do not add up: ranks are merged in `compute`, not by a plain sum.
            self.add_state(name, value, dist_reduce_fx=None)

    def _allocate(self) -> None:
        if not self.products.numel():
            self.products = self.products.new_zeros(self.n_entries)

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the states of all ranks; one that has seen no row sends zeros."""
        self._allocate()
        super().sync(*args, **kwargs)

    def _merged(self) -> Moments:
        self._allocate()
        sums = [getattr(self, name) for name in _SUMS]
        # After a sync the first dimension of each state is the rank.
        ranks = [sums] if sums[0].ndim == 0 else zip(*sums, strict=True)
        parts = [dict(zip(_SUMS, rank, strict=True)) for rank in ranks]
        return functools.reduce(merge_moments, (Moments(blocks=self.blocks, **p) for p in parts))

    def update(self, *rows: Tensor) -> None:
        """Add rows of ``(n_rows, n_columns)``, or parts of them, see `moments_of`."""
        merged = add_rows(self._merged(), *rows)
        for name in _SUMS:
            setattr(self, name, getattr(merged, name))

    def gather(self) -> Moments:
        """Return the moments of all rows of all ranks; also when no rank has seen a row.

        A later update changes them.
        """
        with self.sync_context():
            return self._merged()

    def compute(self) -> Moments:
        """Return the moments of all rows of all ranks, which later updates leave as they are."""
        merged = self._merged()
        return merged._replace(products=merged.products.clone())


class Reconstruction(NamedTuple):
    """Result of `ReconstructionQuality`.

    Attributes:
        n_tokens: Number of activations at each hook point.
        explained_variance: ``1 - sum ‖x - x̂‖² / sum ‖x - x̄‖²`` over all tokens, with x̄ their mean,
            ``(n_hook_points,)``; NaN for constant activations. Higher is better, 1 is perfect.
        l0: Mean number of active features per token, ``(n_hook_points,)``.
        frequency: Share of tokens where each feature is active, ``(n_hook_points, n_features)``.
        clean: Cross-entropy of the unchanged LM per token, in nats.
        spliced: Cross-entropy with a hook point's activations reconstructed, ``(n_hook_points,)``.
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

        1 if the reconstruction is as good as the activations, 0 if no better than zeros.
        """
        harm = self.ablated - self.clean
        return torch.where(harm > 0, (self.ablated - self.spliced) / harm, torch.nan)


class ReconstructionQuality(Metric):
    """Explained variance, active features and recovered loss of several SAEs, in float64.

    There is one at each hook point; `n_features` is the number of features of the largest one.

    Example:
        >>> metric = ReconstructionQuality(1, 2, 3)
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> metric.update(0, x, x * 0.5, torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.5, 0.2]]))
        >>> metric.gather().explained_variance.tolist(), metric.gather().l0.tolist()
        ([0.75], [1.5])
    """

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
            "n": (n_hook_points,),
            "errors": (n_hook_points,),
            "squares": (n_hook_points,),
            "sums": (n_hook_points, width),
            "active": (n_hook_points, n_features),
            "losses": (1 + 2 * n_hook_points,),
            "n_targets": (),
        }
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
        varies = variance > 1e-12 * self.squares  # the variance of a constant is rounding error
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
