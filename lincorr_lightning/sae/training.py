"""Read the activations that SAEs are trained on, and train SAEs without a Trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm

from lincorr_lightning.data.texts import TextBlocks, TokenRows, TokenStep
from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import Forward, rows_of, run_with_hooks
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
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


class BlockActivations:
    """Activations of one block of texts, read once for all of its steps."""

    def __init__(self, lm: LanguageModel, hook_points: Sequence[HookPoint]) -> None:
        self._lm, self._hook_points = lm, hook_points
        self._batches = MicroBatches(lm.config.tokens_per_forward)
        self._block: int | None = None
        self.block = torch.empty(0)
        """Those of the whole block, ``(n_hook_points, n_counted, width)``."""

    def read(self, batch: TokenStep | TokenRows) -> Tensor:
        """Return the activations of a batch's tokens in their order."""
        texts, block = (batch, None) if isinstance(batch, TokenRows) else (batch.texts, batch.block)
        if block is None or block != self._block:
            self.block = torch.empty(0)  # frees the last block's memory first
            self.block = read_activations(self._lm, self._hook_points, texts, self._batches)
        self._block = block
        return self.block if isinstance(batch, TokenRows) else self.block[:, batch.positions]


def read_activations(
    lm: LanguageModel,
    hook_points: Sequence[HookPoint],
    texts: TokenRows,
    batches: MicroBatches | None = None,
) -> Tensor:
    """Return the activations of all counted tokens, ``(n_hook_points, n_counted, width)``."""
    counted = texts.counted.cpu()
    slots = counted.flatten().cumsum(0).view_as(counted) - 1
    shape = (len(hook_points), int(counted.sum()), width_of(lm.model))
    out = torch.empty(shape, dtype=lm.model.dtype, device=lm.model.device)

    def write(forward: Forward) -> None:
        longest = forward.ids.shape[1]
        mask = counted[forward.cases, :longest]
        slot = slots[forward.cases, :longest][mask].to(out.device)
        for i, hook_point in enumerate(hook_points):
            out[i, slot] = forward.at[hook_point][mask.to(out.device)].to(out)

    rows = rows_of(texts)
    run_with_hooks(lm, rows, write, hook_points=hook_points, logits=False, batches=batches)
    return out


def train_saes(
    lm: LanguageModel, steps: TextBlocks | Sequence[TokenStep], settings: SAESettings, seed: int
) -> dict[HookPoint, SparseAutoencoder]:
    """Train SAEs at all hook points of a loaded LM with the defaults of `SparseAutoencoders`.

    Args:
        lm: The LM, loaded.
        steps: Training steps in their order.
        settings: Size, activation and losses of each SAE.
        seed: Seed of the initial weights.

    Raises:
        NonFiniteError: The loss of an SAE is NaN or infinite.
    """
    # Lightning tests in inference mode, whose tensors cannot be trained.
    with torch.inference_mode(False), torch.enable_grad():
        saes = StackedAutoencoders(find_hook_points(lm.model), width_of(lm.model), settings, seed)
        saes = saes.to(lm.model.device)
        optimizer = torch.optim.Adam(saes.parameters(), lr=LEARNING_RATE)
        activations = BlockActivations(lm, saes.hook_points)
        n = len(steps)
        for i in tqdm(range(n), desc="Training SAEs", unit="step", disable=None, leave=False):
            read = activations.read(steps[i])
            if i == 0:
                saes.fit_input(activations.block)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * learning_rate_factor(i, n, WARMUP, DECAY)
            losses = saes(read)
            saes.remember(losses.active, losses.least)
            optimizer.zero_grad()
            losses.total.backward()
            saes.project_gradient()
            optimizer.step()
            saes.normalize()
        bad = saes.nonfinite_hook_point(losses)
        if bad is not None:
            raise NonFiniteError(
                f"the loss of the SAE at {bad} is NaN or infinite. Set model.lm.dtype to float32, "
                "or pass SAEs as model.saes."
            )
        return saes.export(lm.config.name_or_path)
