"""Batches of edits, their loss, and which edits are in which step, epoch and rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from lincorr_lightning.errors import LanguageModelError, require, require_one_of
from lincorr_lightning.finetune.edits import Edit, ResolvedEdits
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.lm.head import head_of

IGNORED = -100  # label of a position that has no loss


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class EditBatch:
    """The edits of one optimizer step, whose answers' tokens alone have a loss.

    There is one for each row of the tensors. A padding batch, which keeps a rank in step with the
    others, has none: its single row has no loss.
    """

    input_ids: Tensor  #: Prompts and answers, padded on the right.
    attention_mask: Tensor
    labels: Tensor  #: The token that follows each position, -100 for no loss.
    edits: list[Edit]
    ids: list[int]  #: Position of each edit in the run, from 0.
    step: int = 0  #: Which step of independent edits this is, from 0.
    n_steps: int = 0  #: Number of steps of independent edits; 0 for joint ones.

    @property
    def first(self) -> bool:
        """Whether these edits start here, from the base weights."""
        return self.n_steps > 0 and self.step == 0

    @property
    def last(self) -> bool:
        """Whether these edits end here."""
        return self.n_steps > 0 and self.step == self.n_steps - 1


def edit_batch(
    edits: Sequence[Edit],
    ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    step: int = 0,
    n_steps: int = 0,
) -> EditBatch:
    """Make a batch on the CPU, from the tokens of each source prompt; of any one for padding."""
    answers = [edit.tokens for edit in edits] or [()]
    tokens = []
    labels = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens.append(torch.tensor([*prompt, *answer]))
        # The last position of the prompt predicts the answer's first token.
        labels.append(torch.tensor([IGNORED] * (len(prompt) - 1) + [*answer, IGNORED]))
    return EditBatch(
        pad_sequence(tokens, batch_first=True),
        pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True),
        pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        list(edits),
        list(ids),
        step,
        n_steps,
    )


def answer_losses(model: nn.Module, batch: EditBatch) -> Tensor:
    """Return the mean cross-entropy over the labels of each row, ``(n_rows,)`` (paper, 4.1).

    It is in nats, and 0 for the row of a padding batch.

    Raises:
        LanguageModelError: The LM has no gradients in eval mode.
    """
    labelled = (batch.labels != IGNORED).nonzero()[:, 1]
    # Nothing depends on what follows the last label.
    end = int(labelled.max()) + 1 if len(labelled) else None
    labels = batch.labels[:, :end]
    n_labels = max(int((labels != IGNORED).sum(1).max()), 1)
    # The labelled positions of each row, and others of rows that have fewer.
    positions = (labels == IGNORED).long().argsort(dim=1, stable=True)[:, :n_labels]

    def select(head: nn.Module, args: tuple[Any, ...]) -> Any:
        """Let the head, which is most of the work at one position, read these alone."""
        states = args[0]
        if states.shape[:2] != labels.shape:
            return None
        return (states.take_along_dim(positions.to(states.device)[:, :, None], 1), *args[1:])

    head = head_of(model)  # type: ignore[arg-type]
    # First, while the state is whole on each of the ranks that split the head's matrix.
    with head.register_forward_pre_hook(select, prepend=True) if head else nullcontext():
        logits = model(
            input_ids=batch.input_ids[:, :end],
            attention_mask=batch.attention_mask[:, :end],
            use_cache=False,
        ).logits
    if torch.is_grad_enabled() and not logits.requires_grad:
        raise LanguageModelError(
            f"{type(model).__name__} has no gradients in eval mode, without dropout, in which "
            "edits are trained. The probe and other studies without training still work."
        )
    if logits.shape[1] != n_labels:  # another shape of states
        logits = logits.take_along_dim(positions.to(logits.device)[:, :, None], 1)
    learned = labels.gather(1, positions).to(logits.device)
    losses = cross_entropy(logits.float().mT, learned, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / (learned != IGNORED).sum(1).clamp(min=1)


@dataclass(frozen=True)
class EditTraining:
    """How edits are trained and distributed over optimizer steps; see `SourceFinetune`."""

    method: Literal["full", "lora"] = "lora"
    n_steps: int = 10  #: Of each independent edit.
    protocol: Literal["joint", "independent"] = "independent"
    edits_per_step: int = 8

    def __post_init__(self) -> None:
        require_one_of("model.method", self.method, ("full", "lora"))
        require_one_of("model.protocol", self.protocol, ("joint", "independent"))
        require("model.steps_per_edit", self.n_steps, at_least=1)
        require("model.edits_per_step", self.edits_per_step, at_least=1)

    @property
    def steps_per_edit(self) -> int:
        """Successive optimizer steps with the same edits."""
        return self.n_steps if self.protocol == "independent" else 1


@dataclass(frozen=True, eq=False)
class EditDataset(Dataset[EditBatch]):
    """The steps of one rank over all epochs; each follows from the seed and its own number.

    It holds no state, so a resumed run continues at any step with exactly the batches of an
    uninterrupted one.
    """

    resolved: ResolvedEdits  #: All edits of the run, the same on every rank.
    prompts: Sequence[Sequence[int]]  #: Token ids of the source prompt of each edit.
    training: EditTraining
    seed: int = 0  #: Seed of the order of joint edits.
    rank: int = 0  #: Index of this rank's data shard, of `n_shards`.
    n_shards: int = 1

    @property
    def edits(self) -> list[Edit]:
        """All edits of the run."""
        return self.resolved.edits

    @property
    def relation(self) -> TokenizedRelation:
        """The relation of the edits."""
        return self.resolved.relation

    @property
    def determined_by(self) -> dict[str, Any]:
        """Settings that determine the content of a step, apart from the edits."""
        names = ("protocol", "edits_per_step", "steps_per_edit")
        return {name: getattr(self.training, name) for name in names} | {"n_shards": self.n_shards}

    def __len__(self) -> int:
        """Number of steps of an epoch, the same on all ranks."""
        per_step = self.training.edits_per_step * self.n_shards
        return -(-len(self.edits) // per_step) * self.training.steps_per_edit

    def __getitem__(self, index: int) -> EditBatch:
        epoch, step = divmod(index, len(self))
        turn, repeat = divmod(step, self.training.steps_per_edit)
        size = self.training.edits_per_step
        first = turn * size * self.n_shards
        if self.training.protocol == "independent":
            n_steps = self.training.steps_per_edit
            ids = list(range(len(self.edits)))[first + self.rank * size :][:size]
        else:
            n_steps = 0
            order = np.random.default_rng([self.seed, epoch]).permutation(len(self.edits))
            of_ranks = np.array_split(order[first:][: size * self.n_shards], self.n_shards)
            ids = of_ranks[self.rank].tolist()
        prompts = [self.prompts[i] for i in ids] or [self.prompts[0]]
        return edit_batch([self.edits[i] for i in ids], ids, prompts, repeat, n_steps)


def edit_dataset(trainer: Any) -> EditDataset | None:
    """Return the run's edits: the training dataset if it is an `EditDataset`, else None."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    return dataset if isinstance(dataset, EditDataset) else None
