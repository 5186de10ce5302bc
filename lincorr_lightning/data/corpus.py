"""The tiny world's corpus: every true statement once an epoch, packed into rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import PreTrainedTokenizerFast

from lincorr_lightning.data.word_tokenizer import build_tokenizer
from lincorr_lightning.data.world import Statement, World, WorldConfig
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue, Knowledge

IGNORED = -100
"""Target of a token that no loss is taken at."""


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class PackedBatch:
    """Statements side by side in rows; each one begins again at position 0 and sees only itself.

    Attributes:
        input_ids: Tokens, shape `(n_rows, row_length)`.
        position_ids: Position of each token within its statement, same shape.
        targets: Token that follows, or `IGNORED`, same shape.
        knowledge: Index of the knowledge where the target is an answer's first token, else -1,
            same shape.
    """

    input_ids: Tensor
    position_ids: Tensor
    targets: Tensor
    knowledge: Tensor


@dataclass
class RecallBatch:
    """Prompts of one knowledge, all of one length, with the answers that are true.

    Attributes:
        knowledge: Name of the knowledge.
        input_ids: Prompts, shape `(n_prompts, n_tokens)`.
        answers: First token of each answer, shape `(n_prompts,)`.
    """

    knowledge: str
    input_ids: Tensor
    answers: Tensor


@dataclass(frozen=True)
class _Encoded:
    """A statement in tokens: the prompt, the answer, and a full stop."""

    tokens: list[int]
    n_prompt: int
    knowledge: int


@dataclass(frozen=True)
class _Epochs(Dataset[PackedBatch]):
    """All batches of all epochs, each made from the seed and its own number.

    That no state is kept is what makes a run that is resumed at the end of an epoch go on with
    exactly the batches of the run that was not interrupted.
    """

    statements: Sequence[_Encoded]
    batch_size: int
    row_length: int
    read_in_full: float
    seed: int
    _order: dict[int, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        """Batches of one epoch."""
        return -(-len(self.statements) // self.batch_size)

    def __getitem__(self, index: int) -> PackedBatch:
        epoch, batch = divmod(index, len(self))
        members = _shuffled(len(self.statements), self.seed, epoch)
        members = members[batch * self.batch_size : (batch + 1) * self.batch_size]
        rng = np.random.default_rng([self.seed, epoch, batch])
        in_full = rng.random(len(members)) < self.read_in_full
        chosen = [self.statements[i] for i in members]
        return _pack(chosen, in_full.tolist(), self.row_length)


@lru_cache(maxsize=2)
def _shuffled(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
