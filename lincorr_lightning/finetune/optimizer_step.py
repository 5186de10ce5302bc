"""How an edit is trained: settings, one step of its optimizer, and all its steps at once.

AdamW's first update is the sign of the gradient times the learning rate, for every weight that is
trained (Kingma and Ba 2015, section 2.1). One backward pass gives it, and a forward pass after a
step along it shows where the edit leads, at a fraction of the cost of its training.

A step of length s changes the loss by -s times the gradient's sum of absolute values, to first
order. This says how long a step has to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.func import functional_call

from lincorr_lightning.errors import ConfigError, NonFiniteError, require
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditBatch, answer_losses, edit_batch
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import HALF_PRECISIONS, evaluating

STEP_SCALE = 24.0
"""Length of the step, in units of that at which the loss would be 0 to first order; chosen on LoRA
edits of four relations on SmolLM2-135M (benchmarks/real_lms/forecast.py)."""
# The default of torch.optim.AdamW: weights with next to no gradient stay where they are.
_EPS = 1e-8
_SIDE_BY_SIDE = 32


@dataclass(frozen=True)
class EditTraining:
    """How an edit is trained, as far as a forecast depends on it.

    Attributes:
        method: ``full``, or ``lora`` for one adapter per edit.
        learning_rate: Learning rate of AdamW.
        n_steps: Optimizer steps.
        adapter: Rank, alpha, target modules and seed of the adapters.
        together: Whether all edits are trained in one run. A forecast is of each edit alone even
            then.

    Raises:
        ConfigError: A value is out of range.
    """

    method: Literal["full", "lora"] = "lora"
    learning_rate: float = 2e-3
    n_steps: int = 10
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    together: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if self.method not in ("full", "lora"):
            raise ConfigError(f"model.method is {self.method!r}; it must be full or lora.")
        require("model.learning_rate", self.learning_rate, at_least=0)
        require("model.steps_per_edit", self.n_steps, at_least=1)

    @property
    def summary(self) -> str:
        """Such as ``lora of rank 8, alpha 16 in all layers, 10 steps at 0.002``."""
        n = "all edits together" if self.together else f"{self.n_steps} steps"
        steps = f"{n} at {self.learning_rate:g}"
        if self.method == "full":
            return f"full, {steps}"
        own = self.adapter
        layers = "all layers" if own.target_modules is None else ", ".join(own.target_modules)
        return f"lora of rank {own.rank}, alpha {own.alpha:g} in {layers}, {steps}"


def logits_after_step(
    lm: LanguageModel,
    edits: Sequence[Edit],
    source_prompts: Sequence[str],
    target_prompts: Sequence[str],
    target_tokens: Sequence[int],
    training: EditTraining,
    adapters: StackedLoRA | None = None,
    scales: Sequence[float] = (STEP_SCALE,),
) -> Tensor:
    """Return the target logits after a step along each edit's first update.

    The LM's weights, gradients, random streams and modes do not change.

    Args:
        lm: The LM before the edits. If some of its weights are trained (``requires_grad``), the
            step is along those; else along all, or along new adapters.
        edits: The edits.
        source_prompts: Source prompt of each edit.
        target_prompts: Target prompt of each edit.
        target_tokens: Token ids of the n_target labels.
        training: How the edits are trained.
        adapters: Adapters on the LM to use, whose B is 0 afterwards. None makes some for ``lora``.
        scales: Lengths of the step, in units of ``loss / sum(|gradient|)``, at which the loss
            would be 0 to first order. No step is longer than ``n_steps * learning_rate``, the way
            that AdamW takes if all its updates agree; twice that with adapters.

    Returns:
        ``(n_scales, n_edits, n_target)``, float64, on the CPU.
    """
    sources, targets = lm.rows(source_prompts), lm.rows(target_prompts)
    parts = [torch.zeros(len(scales), 0, len(target_tokens), dtype=torch.float64)]
    # Lightning predicts in inference mode, in which there are no gradients.
    with (
        torch.inference_mode(False),
        evaluating(lm),
        torch.autocast(lm.model.device.type, enabled=False),
        _adapters_for(lm, training, adapters, len(edits)) as stack,
    ):
        tokens = torch.tensor(target_tokens, device=lm.model.device)
        size = 1 if stack is None else stack.n
        for first in range(0, len(edits), size):
            chosen = slice(first, first + size)
            ids = range(len(edits))[chosen]
            batch: EditBatch = move_data_to_device(
                edit_batch(edits[chosen], ids, sources[chosen]), lm.model.device
            )
            after = (
                _step_in_weights(lm, batch, targets[chosen], tokens, training, scales)
                if stack is None
                else _step_in_adapters(lm, batch, targets[chosen], tokens, training, scales, stack)
            )
            _require_finite(batch, "a logit after its first update", after.sum((0, 2)))
            parts.append(after.double().cpu())
    return torch.cat(parts, 1)


@contextmanager
def _adapters_for(
    lm: LanguageModel, training: EditTraining, adapters: StackedLoRA | None, n: int
) -> Iterator[StackedLoRA | None]:
    """Yield adapters that edits are stepped in side by side, or None to step in the weights."""
    is_trained = any(p.requires_grad for p in lm.model.parameters())
    if adapters is not None or training.method == "full" or is_trained:
        yield adapters
        return
    made = StackedLoRA.of(lm.model, max(min(n, _SIDE_BY_SIDE), 1), training.adapter)
    try:
        yield made
    finally:
        made.remove()


def _require_finite(batch: EditBatch, what: str, values: Tensor) -> None:
    """Refuse a value that is not finite; there is one for each edit."""
    for number, edit, is_finite in zip(
        batch.ids, batch.edits, values.isfinite().tolist(), strict=True
    ):
        if not is_finite:
            raise NonFiniteError(
                f"edit {number} ({edit.subject!r} -> {edit.answer!r}): {what} is not finite, so it "
                "cannot be forecast. Set lm.dtype to float32, or leave the forecast by the "
                "optimizer's step out."
            )


def _update(gradient: Tensor) -> Tensor:
    """Turn a gradient into AdamW's first update at a learning rate of 1, in place."""
    if gradient.dtype in HALF_PRECISIONS:  # which have no number as small as epsilon
        return gradient.sign_().neg_()
    return gradient.div_(gradient.abs().add_(_EPS)).neg_()


def _step_in_adapters(
    lm: LanguageModel,
    batch: EditBatch,
    targets: Sequence[Sequence[int]],
    tokens: Tensor,
    training: EditTraining,
    scales: Sequence[float],
    adapters: StackedLoRA,
) -> Tensor:
    """Step all edits of a batch side by side; see `logits_after_step`."""
    n = len(batch.ids)
    adapters.reset([training.adapter.seed + i for i in batch.ids])
    factors = list(adapters.lora_B.values())  # B is 0, so that A has no gradient
    with torch.enable_grad(), adapters.rows(range(n)):
        losses = answer_losses(lm.model, batch)
        # Edits side by side are summed: the gradient of one does not depend on the others.
        gradients = torch.autograd.grad(losses.sum(), factors)
    slopes = torch.stack([g[:n].abs().sum((1, 2)).to(losses.device) for g in gradients]).sum(0)
    _require_finite(batch, "its loss or its gradient", losses.detach() + slopes)
    updates = [_update(gradient) for gradient in gradients]
    after = []
    with torch.no_grad():
        for scale in scales:
            lengths = torch.zeros(adapters.n, 1, 1, device=losses.device)
            lengths[:n, 0, 0] = _step_length(scale, losses.detach(), slopes, training)
            for factor, update in zip(factors, updates, strict=True):
                factor.copy_(update * lengths.to(update))
            after.append(lm.logits_of_rows(targets, tokens, adapters.rows))
        for factor in factors:  # B = 0 switches the adapters off
            factor.zero_()
    return torch.stack(after)


class _Losses(nn.Module):
    """The losses of an LM's edits as a module, whose weights can be exchanged for a call."""

    def __init__(self, lm: LanguageModel) -> None:
        super().__init__()
        self.model = lm.model

    def forward(self, batch: EditBatch) -> Tensor:
        return answer_losses(self.model, batch)


def _step_in_weights(
    lm: LanguageModel,
    batch: EditBatch,
    targets: Sequence[Sequence[int]],
    tokens: Tensor,
    training: EditTraining,
    scales: Sequence[float],
) -> Tensor:
    """Step one edit in the LM's own weights; see `logits_after_step`."""
    # The same names in `LanguageModel` and in `_Losses`.
    every = {n: p for n, p in lm.named_parameters() if p.is_floating_point()}
    trained = {n: p for n, p in every.items() if p.requires_grad} or every
    # New leaves that share the weights' memory, so that a frozen LM stays frozen.
    leaves = {name: weight.detach().requires_grad_() for name, weight in trained.items()}
    with torch.enable_grad():
        loss = functional_call(_Losses(lm), leaves, (batch,)).sum()
        computed = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    gradients = {n: g for n, g in zip(leaves, computed, strict=True) if g is not None}
    # An LM may be spread over several devices.
    slope = torch.stack([g.float().abs().sum().to(loss.device) for g in gradients.values()]).sum()
    _require_finite(batch, "its loss or its gradient", (loss.detach() + slope)[None])
    updates = {name: _update(gradient) for name, gradient in gradients.items()}
    ids, mask = (part.to(loss.device) for part in lm.pad(targets))
    after = []
    with torch.no_grad():
        for i, scale in enumerate(scales, start=1):
            length = float(_step_length(scale, loss.detach(), slope, training))
            # The last step replaces the update, which saves a copy of the weights.
            scaled = (u.mul_(length) if i == len(scales) else u * length for u in updates.values())
            moved = {n: u.add_(trained[n]) for n, u in zip(updates, scaled, strict=True)}
            after.append(functional_call(lm, moved, (ids, mask, tokens)))
    return torch.stack(after)


def _step_length(scale: float, losses: Tensor, slopes: Tensor, training: EditTraining) -> Tensor:
    """Return the length of each edit's step, at most what AdamW can move; shape of `losses`."""
    longest = training.n_steps * training.learning_rate
    if training.method == "lora":  # both factors are trained, the step moves one of them
        longest *= 2
    return (scale * losses / slopes.clamp(min=1e-30)).clamp(max=longest)


# -- whole trainings -------------------------------------------------------------------------------


@contextmanager
def trained_edits(
    lm: LanguageModel,
    adapters: StackedLoRA,
    batch: EditBatch,
    training: EditTraining,
    seeds: Sequence[int],
) -> Iterator[None]:
    """Train each edit in an adapter of its own, as `SourceFinetune` with LoRA does.

    Row i of a forward pass in the context has the adapter of edit i, whose factors are constants;
    `seeds` are those of the adapters. The LM, in eval mode, and its gradients do not change.
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
