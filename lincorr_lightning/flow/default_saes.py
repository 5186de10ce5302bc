"""Small SAEs for a study that was given none."""

from __future__ import annotations

import torch
from tqdm import tqdm

from lincorr_lightning.data.texts import TextsDataModule
from lincorr_lightning.errors import ConfigError, NonFiniteError
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import evaluating
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, width_of
from lincorr_lightning.sae.scoring import read_activations
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from lincorr_lightning.sae.stacked import SAESettings, StackedAutoencoders

# The defaults of `SparseAutoencoders`, which also resumes, logs and runs on several devices.
_LEARNING_RATE, _WARMUP, _DECAY = 4e-3, 0.05, 0.4


def train_saes(
    lm: LanguageModel,
    data: TextsDataModule,
    n_tokens: int,
    settings: SAESettings,
    seed: int,
    max_steps: int | None = None,
) -> dict[HookPoint, SparseAutoencoder]:
    """Train an SAE at every hook point of an LM, as `SparseAutoencoders` does by default.

    Args:
        lm: The loaded LM.
        data: Texts that the study reads; the SAEs are trained on their complement.
        n_tokens: Number of tokens to train on.
        settings: Form and size of the SAEs.
        seed: Seed of the initial weights.
        max_steps: Maximum number of training steps.

    Raises:
        ConfigError: There are fewer tokens than in one block whose activations are shuffled.
        SubjectsError: There are too few texts.
        NonFiniteError: The loss of an SAE is NaN or infinite.
    """
    n_block = data.hparams["batch_tokens"] * data.hparams["block_steps"]
    if n_tokens < n_block:
        raise ConfigError(
            f"model.training_tokens is {n_tokens}, but SAEs are trained on blocks of {n_block} "
            "tokens. Set it to that or more, or pass SAEs as model.saes."
        )
    texts = data.complement(n_tokens)
    texts.setup("fit")
    steps = texts.blocks()
    n_steps = len(steps) if max_steps is None else min(len(steps), max_steps)

    model = lm.model
    device = next(model.parameters()).device
    hook_points, width = find_hook_points(model), width_of(model)
    saes = StackedAutoencoders(hook_points, width, settings, seed).to(device)
    optimizer = torch.optim.Adam(saes.parameters(), lr=_LEARNING_RATE)

    def rate(step: int) -> float:
        up, down = (step + 1) / (_WARMUP * n_steps), (n_steps - step) / (_DECAY * n_steps)
        return max(min(1.0, up, down), 0.0)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    batches = MicroBatches(lm.config.tokens_per_forward)
    block = None
    for number in tqdm(range(n_steps), desc="Training SAEs", unit="step", disable=None):
        step = steps[number]
        if step.block != block:
            with evaluating(model), torch.autocast(device.type, enabled=False):
                activations = read_activations(model, hook_points, step.texts, batches, device)
            if block is None:
                saes.fit_input(activations)
            block = step.block
        with torch.enable_grad():
            losses = saes(activations[:, step.positions])
            saes.remember(losses.active, losses.least)
            optimizer.zero_grad()
            losses.total.backward()
        saes.project_gradient()
        optimizer.step()
        schedule.step()
        saes.normalize()
    if not bool(losses.unexplained.isfinite().all()):
        hook_point = hook_points[int((~losses.unexplained.isfinite()).nonzero()[0])]
        raise NonFiniteError(
            f"the loss of the SAE at {hook_point} is NaN or infinite. Set model.lm.dtype to "
            "float32, or pass SAEs as model.saes."
        )
    return saes.export(lm.config.name_or_path)
