"""One step of the optimizer that trains an edit.

AdamW's first update is the sign of the gradient times the learning rate, for every weight that is
trained (Kingma and Ba 2015, section 2.1). One backward pass gives it, and a forward pass after a
step along it shows where the edit leads. A step of length s changes the loss by -s times the
gradient's sum of absolute values, to first order. This says how long a step has to be.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.func import functional_call

from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.finetune.batches import EditBatch, EditTraining, answer_losses, edit_batch
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.modes import HALF_PRECISIONS, reading

STEP_SCALE = 24.0
"""Length of the step, in units of that at which the loss would be 0 to first order; chosen on LoRA
edits of four relations on SmolLM2-135M (benchmarks/real_lms/forecast.py)."""
_EPS = 1e-8  # of torch.optim.AdamW: weights with next to no gradient stay where they are
_SIDE_BY_SIDE = 32


def logits_after_step(
    lm: LanguageModel, edits: Sequence[Edit], relation: TokenizedRelation, training: EditTraining,
    adapters: StackedLoRA | None = None, scale: float = STEP_SCALE,
) -> Tensor:  # fmt: skip
    """Return the target logits after a step along each edit's first update, ``(n, n_target)``.

    They are in float64 on the CPU. The LM's weights, gradients, random streams and modes do not
    change. If some of its weights are trained (``requires_grad``), the step is along those; else
    along all, or along adapters: the given ones, whose B is 0 afterwards, or new ones.

    `scale` is the length of the step, in units of ``loss / sum(|gradient|)``, at which the loss
    would be 0 to first order. No step is longer than ``n_steps * learning_rate``, the way that
    AdamW takes if all its updates agree; twice that with adapters.
    """
    subjects, tokens = [edit.subject for edit in edits], relation.target.token_ids
    sources = lm.rows(relation.source_prompts(subjects))
    targets = lm.rows(relation.target_prompts(subjects))
    parts = [torch.zeros(0, len(tokens), dtype=torch.float64)]
    # Lightning predicts in inference mode, in which there are no gradients.
    with (
        torch.inference_mode(False),
        reading(lm, lm.model.device.type, compiled=lm.config.compile),
        _adapters_for(lm, training, adapters, len(edits)) as stack,
    ):
        size = 1 if stack is None else stack.n
        for first in range(0, len(edits), size):
            chosen = slice(first, first + size)
            ids = range(len(edits))[chosen]
            batch: EditBatch = move_data_to_device(
                edit_batch(edits[chosen], ids, sources[chosen]), lm.model.device
            )
            read = partial(
                lm.logits_of_rows, targets[chosen], tokens, None if stack is None else stack.rows
            )
            parts.append(_after_step(lm, stack, batch, training, scale, read).cpu())
    return torch.cat(parts)


@contextmanager
def _adapters_for(
    lm: LanguageModel, training: EditTraining, adapters: StackedLoRA | None, n: int
) -> Iterator[StackedLoRA | None]:
    """Yield adapters that edits are stepped in side by side, or None to step in the weights."""
    is_trained = any(p.requires_grad for p in lm.model.parameters())
    if adapters is not None or training.method == "full" or is_trained:
        yield adapters
        return
    made = StackedLoRA(lm.model, max(min(n, _SIDE_BY_SIDE), 1), training.adapter)
    try:
        yield made
    finally:
        made.remove()


class _EditedLM(nn.Module):
    """An LM and its adapters as one module, whose weights can be exchanged for a call."""

    def __init__(self, lm: LanguageModel, adapters: StackedLoRA | None) -> None:
        super().__init__()
        self.lm, self.adapters = lm, adapters

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return compute()


def _after_step(
    lm: LanguageModel, adapters: StackedLoRA | None, batch: EditBatch, training: EditTraining,
    scale: float, read: Callable[[], Tensor],
) -> Tensor:  # fmt: skip
    """Return what `read` does after each step, in the weights or side by side in adapters."""
    n, module = len(batch.ids), _EditedLM(lm, adapters)
    if adapters is None:
        every = {k: p for k, p in module.named_parameters() if p.is_floating_point()}
        weights = {k: p for k, p in every.items() if p.requires_grad} or every
    else:  # B is 0, so that A has no gradient
        adapters.reset([training.adapter.seed + i for i in batch.ids])
        weights = dict(adapters.lora_B.named_parameters("adapters.lora_B"))
    # New leaves that share the weights' memory, so that a frozen LM stays frozen.
    leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    with torch.enable_grad(), nullcontext() if adapters is None else adapters.rows(range(n)):
        losses = functional_call(module, leaves, (partial(answer_losses, lm.model, batch),))
        # Edits side by side are summed: the gradient of one does not depend on the others.
        computed = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True)
    gradients = {k: g for k, g in zip(leaves, computed, strict=True) if g is not None}
    losses, moved = losses.detach(), {}
    with torch.no_grad():
        # The first dimension of a factor is that of the edits; an LM has one edit.
        slopes = [
            (g.float().abs().sum()[None] if adapters is None else g.abs().sum((1, 2))[:n])
            for g in gradients.values()
        ]
        # An LM may be spread over several devices.
        slope = torch.stack([one.to(losses.device) for one in slopes]).sum(0)
        _require_finite(batch, losses + slope)
        longest = training.n_steps * training.learning_rate
        if training.method == "lora":  # both factors are trained, the step moves one of them
            longest *= 2
        lengths = (scale * losses / slope.clamp(min=1e-30)).clamp(max=longest)
        for name, gradient in gradients.items():
            update = _update(gradient)  # in place, which saves a copy of the weights
            if adapters is None:
                update.mul_(float(lengths))
            else:
                update[:n].mul_(lengths.to(update)[:, None, None])
            moved[name] = update.add_(weights[name])
        return functional_call(module, moved, (read,))


def _require_finite(batch: EditBatch, values: Tensor) -> None:
    finite = values.isfinite().tolist()
    for number, edit, is_finite in zip(batch.ids, batch.edits, finite, strict=True):
        if not is_finite:
            raise NonFiniteError(
                f"edit {number} ({edit.subject!r} -> {edit.answer!r}): its loss or its gradient is "
                "not finite, so it cannot be forecast. Set lm.dtype to float32, or leave the "
                "forecast by the optimizer's step out."
            )


def _update(gradient: Tensor) -> Tensor:
    """Turn a gradient into AdamW's first update at a learning rate of 1, in place."""
    if gradient.dtype in HALF_PRECISIONS:  # which have no number as small as epsilon
        return gradient.sign_().neg_()
    return gradient.div_(gradient.abs().add_(_EPS)).neg_()
