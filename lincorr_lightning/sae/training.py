"""Train SAEs without a Trainer; the learning rate schedule and defaults of every training."""

from __future__ import annotations

import torch

from lincorr_lightning.data.texts import TokenStep
from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.scoring import read_activations
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import SAESettings, StackedAutoencoders

LEARNING_RATE, WARMUP, DECAY = 4e-3, 0.05, 0.4
"""Defaults of `SparseAutoencoders`: peak learning rate, and shares of the steps."""


def learning_rate_factor(step: int, n_steps: float, warmup: float, decay: float) -> float:
    """Return the learning rate of a step, counted from 0, as a share of its peak.

    It increases linearly over the first `warmup` of the steps and decreases linearly to 0 over the
    last `decay` of them.
    """
    up = (step + 1) / max(warmup * n_steps, 1.0)
    down = (n_steps - step) / max(decay * n_steps, 1.0)
    return max(min(1.0, up, down), 0.0)


class SAETraining:
    """Training of SAEs at all hook points of an LM with the defaults of `SparseAutoencoders`.

    Args:
        lm: The loaded LM.
        settings: Size, activation and losses of each SAE.
        seed: Seed of the initial weights.
        n_steps: Number of training steps.
    """

    def __init__(self, lm: LanguageModel, settings: SAESettings, seed: int, n_steps: float) -> None:
        self._lm = lm
        self._device = next(lm.model.parameters()).device
        saes = StackedAutoencoders(find_hook_points(lm.model), width_of(lm.model), settings, seed)
        self._saes = saes.to(self._device)
        self._optimizer = torch.optim.Adam(saes.parameters(), lr=LEARNING_RATE)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer, lambda step: learning_rate_factor(step, n_steps, WARMUP, DECAY)
        )
        self._batches = MicroBatches(lm.config.tokens_per_forward)
        self._block: int | None = None

    def step(self, batch: TokenStep) -> None:
        """Train on the tokens of one step."""
        saes, model = self._saes, self._lm.model
        if batch.block != self._block:
            with evaluating(model), torch.autocast(self._device.type, enabled=False):
                self._activations = read_activations(
                    model, saes.hook_points, batch.texts, self._batches, self._device
                )
            if self._block is None:
                saes.fit_input(self._activations)
            self._block = batch.block
        with torch.enable_grad():
            self._losses = saes(self._activations[:, batch.positions])
            saes.remember(self._losses.active, self._losses.least)
            self._optimizer.zero_grad()
            self._losses.total.backward()
        saes.project_gradient()
        self._optimizer.step()
        self._schedule.step()
        saes.normalize()

    def finish(self) -> dict[HookPoint, SparseAutoencoder]:
        """Return the trained SAEs.

        Raises:
            NonFiniteError: The loss of an SAE is NaN or infinite.
        """
        bad = self._saes.nonfinite_hook_point(self._losses)
        if bad is not None:
            raise NonFiniteError(
                f"the loss of the SAE at {bad} is NaN or infinite. Set model.lm.dtype to float32, "
                "or pass SAEs as model.saes."
            )
        return self._saes.export(self._lm.config.name_or_path)
