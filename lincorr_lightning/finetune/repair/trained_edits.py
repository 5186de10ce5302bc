"""Edits trained side by side within a step of another training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from lincorr_lightning.finetune.batches import EditBatch
from lincorr_lightning.finetune.losses import answer_losses
from lincorr_lightning.finetune.optimizer_step import EditTraining
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.language_model import LanguageModel


@contextmanager
def trained_edits(
    lm: LanguageModel,
    adapters: StackedLoRA,
    batch: EditBatch,
    training: EditTraining,
    seeds: Sequence[int],
) -> Iterator[None]:
    """Train each edit in an adapter of its own, as `SourceFinetune` does.

    Row i of a forward pass in the context has the adapter of edit i, whose factors are constants.
    The LM's own weights do not change, nor do their gradients.

    Args:
        lm: The LM, in eval mode.
        adapters: Adapters on the LM, at least as many as edits.
        batch: The edits.
        training: How they are trained.
        seeds: Seed of each adapter.
    """
    rows = range(len(batch.input_ids))
    adapters.reset(seeds)
    factors = list(adapters.parameters())
    optimizer = torch.optim.AdamW(factors, lr=training.learning_rate, weight_decay=0.0, fused=True)
    adapters.requires_grad_(True)
    with torch.enable_grad():
        for _ in range(training.n_steps):
            with adapters.rows(rows):
                losses = answer_losses(lm.model, batch)
            # Of the factors alone; the LM's own weights may be trained as well.
            gradients = torch.autograd.grad(losses.sum(), factors)
            for factor, gradient in zip(factors, gradients, strict=True):
                factor.grad = gradient
            optimizer.step()
    optimizer.zero_grad()
    adapters.requires_grad_(False)
    with adapters.rows(rows):
        yield
