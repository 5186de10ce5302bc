"""A probe's maps by gradient descent, on any number of processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor

from lincorr_lightning.data.subjects import SubjectBatch
from lincorr_lightning.linear_map.affine_map import AffineMap
from lincorr_lightning.probe.optimizers import Descent

if TYPE_CHECKING:
    from lincorr_lightning.probe.module import LinearProbe


def descend(probe: LinearProbe, rows: Tensor, batch: SubjectBatch, first: bool) -> None:
    """Take one step of gradient descent on the squared error of every map.

    On several processes it is the step of one process with all their X's.

    Args:
        probe: A probe whose solver is ``sgd``.
        rows: Logits of the domains for this process's X's, ``(n, n_labels)``.
        batch: These X's; of a padding batch nothing counts.
        first: Whether it is the first step of the run.
    """
    optimizer = cast(LightningOptimizer, probe.optimizers())
    descent = cast(Descent, optimizer.optimizer)
    if first:
        _condition(probe, descent)
    own = torch.tensor(0.0 if batch.is_padding else len(rows), dtype=torch.float64)
    n = probe.trainer.strategy.reduce(own.to(rows.device, copy=True), reduce_op="sum")
    # The mean over the X's of all processes, of which each knows its own.
    share = probe.trainer.world_size * float(own) / float(n)
    # One step's X's as often as there are steps.
    strength = probe.hparams["ridge"] / (probe.trainer.num_training_batches * float(n))
    losses = []
    for _, x, y, module in probe.sources_of(rows):
        loss = 0.5 * (module(x) - y).square().sum(1).mean() * share
        losses.append(loss + 0.5 * strength * module.weight.square().sum())
    total = torch.stack(losses).sum()
    optimizer.zero_grad()
    probe.manual_backward(total)
    descent.decay(probe.global_step / probe.trainer.estimated_stepping_batches)
    optimizer.step()
    probe.log("squared_error", total.detach(), prog_bar=True, batch_size=len(rows), sync_dist=True)


def _condition(probe: LinearProbe, descent: Descent) -> None:
    """Centre each map, and set its learning rate, by the X's of the whole first step."""
    step = probe.fit_moments.gather()
    for source, module in probe.maps.items():
        x = probe.layout.columns(source).to(step.mean.device)
        covariance = step.scatter[x][:, x] / step.n
        descent.condition(source, cast(AffineMap, module), step.mean[x], covariance)
