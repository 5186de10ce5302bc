"""The loss of edits, and the edits to blame where it or a weight is not finite."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lincorr_lightning.distributed import gather
from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.finetune.batches import IGNORED, EditBatch, LabelledTokens
from lincorr_lightning.finetune.edits import Edit

_MAX_NAMED = 3


def answer_losses(model: nn.Module, batch: LabelledTokens) -> Tensor:
    """Return the mean cross-entropy over the labels of each row (paper, section 4.1).

    Returns:
        ``(n_rows,)``, in nats; 0 for the row of a padding batch.
    """
    labels = batch.labels
    positions = (labels != IGNORED).any(0).nonzero().squeeze(1)
    options: dict[str, Any] = {}
    # The head is most of the work, and most positions are the prompt's.
    if "logits_to_keep" in inspect.signature(model.forward).parameters and len(positions):
        options["logits_to_keep"] = positions
    logits = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        **options,
    ).logits
    if logits.shape[1] == labels.shape[1] and len(positions) != labels.shape[1]:
        logits = logits[:, positions]
    labels = labels[:, positions]
    if not len(positions):
        return logits.float().sum((1, 2)) * 0.0
    losses = cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )
    return losses.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)


def edits_by_loss(batches: Sequence[tuple[EditBatch, Tensor]]) -> list[Edit]:
    """Return the edits of a step on all ranks, highest loss first; all ranks must call it."""
    own = [
        (loss, number, edit)
        for batch, losses in batches
        for loss, number, edit in zip(losses.tolist(), batch.ids, batch.edits, strict=False)
    ]
    found = sorted(
        (row for part in gather(own) for row in part), key=lambda row: row[:2], reverse=True
    )
    return [edit for *_, edit in found]


def nonfinite_error(
    trainer: L.Trainer, what: str, edits: Sequence[Edit], all_ranks: bool, learning_rate: float
) -> NonFiniteError:
    """Return the error for a loss or weight that is not finite.

    `what` is the message's subject and verb, such as ``the loss is``; `edits` are those that may be
    the cause, with `all_ranks` those of all ranks, highest loss first.
    """
    named = "; ".join(f"{edit.subject!r} -> {edit.answer!r}" for edit in edits[:_MAX_NAMED])
    where = f"at the edit {named}" if edits else "in a padding batch"
    if len(edits) > _MAX_NAMED:
        where += f" and {len(edits) - _MAX_NAMED} more"
    if all_ranks and len(edits) > 1:
        where += " (all edits of the step, highest loss first)"
    elif trainer.world_size > 1 and not all_ranks:
        where += f" (on rank {trainer.global_rank} of {trainer.world_size})"
    kept = any(c.best_model_path for c in trainer.checkpoint_callbacks)  # type: ignore[attr-defined]
    return NonFiniteError(
        f"{what} NaN or infinite at step {trainer.global_step}, {where}. "
        f"Lower model.learning_rate (it is {learning_rate}), or set model.lm.dtype to float32; "
        + ("the last checkpoint was saved before." if kept else "no checkpoint was kept.")
    )
