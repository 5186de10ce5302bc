"""Batches of a repair: edits with the prompts that they are evaluated on, and statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lincorr_lightning.finetune.batches import IGNORED, EditBatch

Batch = TypeVar("Batch")

SHOWN, HELD_OUT = "shown", "held_out"
"""Parts of the measured edits: source answers that are in the examples, and held-out ones."""


class Prompts(NamedTuple):
    """Prompts of one kind of knowledge, as `LanguageModel.forward` takes them.

    Attributes:
        input_ids: Token ids, padded on the right, ``(n, length)``.
        attention_mask: 1 at tokens, same shape.
        token_ids: Tokens of its labels, ``(n_labels,)``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    token_ids: Tensor


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class RepairBatch:
    """Edits, and the prompts that they are evaluated on.

    Attributes:
        part: ``shown`` or ``held_out``, see `RepairDataModule`.
        edits: The edits, and their source prompts.
        source: The source prompts, with the source labels.
        target: The target prompts, with the n_target target labels.
        in_context: The target prompts after the statement of the new answer.
        reference_mask: Target labels in each edit's reference, ``(n, n_target)`` bool.
        target_shown: Whether an example has a target label of each edit's reference, ``(n,)`` bool.
        other_prompts: Prompts of other kinds of knowledge, which must not change.
        logits_before: Logits after these before the repair, ``(n, n_labels)``; empty for edits that
            are only measured.
        unedited_before: Logits before the repair after the source prompts, ``(n, n_source)``, and
            after the target prompts, ``(n, n_target)``; empty for edits that are only measured.
        texts: Token ids of texts whose predictions must not change, ``(n_texts, n_tokens)``;
            without rows for edits that are only measured.
        is_padding: Whether the batch only keeps a rank in step with the others.
    """

    part: str
    edits: EditBatch
    source: Prompts
    target: Prompts
    in_context: Prompts
    reference_mask: Tensor
    target_shown: Tensor
    other_prompts: dict[str, Prompts]
    logits_before: dict[str, Tensor]
    unedited_before: list[Tensor]
    texts: Tensor
    is_padding: bool = False


@dataclass  # not frozen, as above
class StatementBatch:
    """Statements to train on.

    Attributes:
        input_ids: Token ids, padded on the right, ``(n, length)``.
        attention_mask: 1 at tokens, same shape.
        labels: The token that follows each position, -100 at padding; same shape.
        texts: Token ids of texts whose predictions must not change, ``(n_texts, n_tokens)``.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    texts: Tensor


def statement_batch(rows: Sequence[Sequence[int]], texts: Tensor) -> StatementBatch:
    """Return a batch of statements, given as token ids; all tokens but the first are learned."""
    length = max(len(row) for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for i, row in enumerate(rows):
        tokens = torch.tensor(row)
        input_ids[i, : len(row)], mask[i, : len(row)] = tokens, 1
        labels[i, : len(row) - 1] = tokens[1:]
    return StatementBatch(input_ids, mask, labels, texts)


class RepairDataset(Dataset[Batch], Generic[Batch]):
    """Batches of one rank over all epochs; each follows from the seed and its own number.

    Args:
        n: Number of examples.
        make_batch: Returns a batch, given the numbers of its examples and one that no other batch
            of the run has.
        batch_size: Examples of a step, on all ranks together.
        seed: Seed of the order.
        rank: Index of this rank's data shard.
        n_shards: Number of data shards.
        settings: Settings that determine the examples.
    """

    def __init__(
        self,
        n: int,
        make_batch: Callable[[Sequence[int], int], Batch],
        batch_size: int,
        seed: int,
        rank: int,
        n_shards: int,
        settings: Mapping[str, Any],
    ) -> None:
        self._n, self._make_batch = n, make_batch
        self._batch_size, self._seed = min(batch_size, n), seed
        self._rank, self._n_shards = rank, n_shards
        self._settings = settings

    @property
    def determined_by(self) -> dict[str, Any]:
        """Settings that determine the content of a step."""
        return {**self._settings, "n_shards": self._n_shards}

    def __len__(self) -> int:
        """Number of steps of an epoch; examples that do not fill one are left to a later epoch."""
        return self._n // self._batch_size

    def __getitem__(self, index: int) -> Batch:
        epoch, step = divmod(index, len(self))
        order = np.random.default_rng([self._seed, epoch]).permutation(self._n)
        ids = order[step * self._batch_size : (step + 1) * self._batch_size]
        own = np.array_split(ids, self._n_shards)[self._rank].tolist()
        return self._make_batch(own, index * self._n_shards + self._rank)
