"""The loss of edits, and which edits went nonfinite_error."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import lightning as L
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy

from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.finetune.datamodule import IGNORED, EditBatch
from lincorr_lightning.finetune.sampling import Edit

_MOST_NAMED = 3


def answer_losses(model: nn.Module, batch: EditBatch) -> Tensor:
    """Mean cross-entropy of each edit's answer tokens.

    Args:
        model: A Hugging Face causal LM.
        batch: The edits.

    Returns:
        ``(n_rows,)``; 0 for a row that asks for nothing.
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


def edits_by_loss(in_step: Sequence[tuple[Sequence[int], Tensor]]) -> list[int]:
    """The edits of a step on all processes, by their losses; all processes must ask.

    Args:
        in_step: This process's batches: their edits, and the loss of each.
    """
    own = [
        (loss, edit)
        for edits, losses in in_step
        for edit, loss in zip(edits, losses.tolist(), strict=False)
    ]
    every = [own]
    if distributed.is_initialized():
        every = [[] for _ in range(distributed.get_world_size())]
        distributed.all_gather_object(every, own)
    return [edit for _, edit in sorted((pair for part in every for pair in part), reverse=True)]


def nonfinite_error(
    trainer: L.Trainer, what: str, edits: Sequence[Edit], together: bool, learning_rate: float
) -> NonFiniteError:
    """What to raise where edits went nonfinite_error.

    Args:
        trainer: The run's trainer.
        what: That is not finite, and of what.
        edits: Which may be why; the first three are named.
        together: They are those of all processes, the highest loss first.
        learning_rate: Of the run.
    """
    named = "; ".join(f"{edit.subject!r} -> {edit.answer!r}" for edit in edits[:_MOST_NAMED])
    where = f"at the edit {named}" if edits else "where there is no edit"
    if len(edits) > _MOST_NAMED:
        where += f" and {len(edits) - _MOST_NAMED} more"
    if together and len(edits) > 1:
        where += " (all of the step, the highest loss first)"
    elif trainer.world_size > 1 and not together:
        where += f" (on process {trainer.global_rank} of {trainer.world_size})"
    kept = any(c.best_model_path for c in trainer.checkpoint_callbacks)  # type: ignore[attr-defined]
    return NonFiniteError(
        f"{what} NaN or infinite at step {trainer.global_step}, {where}. "
        f"Lower model.learning_rate (it is {learning_rate}), or set model.lm.dtype to float32; "
        + ("the last checkpoint is that of before." if kept else "no checkpoint was kept.")
    )
