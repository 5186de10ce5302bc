"""Batches of edits: which edits are in which step, of which epoch, on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.edits import Edit, LeftOut
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation

IGNORED = -100
"""Label of a position that has no loss."""

TrainingProtocol = Literal["joint", "independent"]


@dataclass(frozen=True)
class EditSchedule:
    """How edits are distributed over optimizer steps.

    Attributes:
        protocol: ``joint``: all edits train one LM, in a new order each epoch; ``independent``:
            each edit is trained from the base weights.
        edits_per_step: Edits in a batch; independent edits of a batch are trained side by side,
            each in an adapter of its own.
        steps_per_edit: Optimizer steps of each group of independent edits.

    Raises:
        ConfigError: A value is not allowed.
    """

    protocol: TrainingProtocol = "joint"
    edits_per_step: int = 8
    steps_per_edit: int = 1

    def __post_init__(self) -> None:
        """Check the values."""
        if self.protocol not in get_args(TrainingProtocol):
            raise ConfigError(
                f"protocol is {self.protocol!r}; it must be "
                f"{' or '.join(get_args(TrainingProtocol))}."
            )
        require("edits_per_step", self.edits_per_step, at_least=1)
        require("steps_per_edit", self.steps_per_edit, at_least=1)


class LabelledTokens(Protocol):
    """Rows of tokens with a loss at some of them, such as an `EditBatch`.

    Attributes:
        input_ids: Token ids, padded on the right, ``(n, length)``.
        attention_mask: 1 at tokens, same shape.
        labels: The token that follows each position, -100 where there is no loss; same shape.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class EditBatch:
    """The edits of one optimizer step.

    Attributes:
        edits: The edits, one per row of the tensors. Empty for a padding batch, which keeps a rank
            in step with the others: its single row has no loss.
        ids: Position of each edit in the run, from 0.
        input_ids: Token ids of prompt and answer, padded on the right, ``(n, length)``.
        attention_mask: 1 at tokens and 0 at padding, same shape.
        labels: The token that follows each position if it is one of the answer's, else -100; same
            shape.
        step: For independent edits, which of their steps this is, from 0; step 0 starts from the
            base weights.
        n_steps: For independent edits, the number of their steps; 0 under the joint protocol.
    """

    edits: list[Edit]
    ids: list[int]
    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    step: int = 0
    n_steps: int = 0

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
    """Make a batch of edits on the CPU.

    Args:
        edits: The edits; none for a padding batch.
        ids: Position of each edit in the run.
        prompts: Token ids of the source prompt of each edit; of any one prompt for a padding batch.
        step: Step of independent edits, see `EditBatch`.
        n_steps: Number of these steps, see `EditBatch`.
    """
    answers = [edit.tokens for edit in edits] or [()]
    rows = list(zip(prompts, answers, strict=True))
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, IGNORED)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        input_ids[i, :end] = torch.tensor([*prompt, *answer])
        mask[i, :end] = 1
        # The last position of the prompt predicts the answer's first token.
        labels[i, len(prompt) - 1 : end - 1] = torch.tensor(answer, dtype=torch.long)
    return EditBatch(list(edits), list(ids), input_ids, mask, labels, step, n_steps)


class EditDataset(Dataset[EditBatch]):
    """The steps of one rank over all epochs; each follows from the seed and its own number.

    It holds no state, so a resumed run continues at any step with exactly the batches of an
    uninterrupted one.

    Args:
        edits: All edits of the run, the same on every rank.
        relation: The relation that the edits are about.
        prompts: Token ids of the source prompt of each edit.
        schedule: How the edits are distributed over steps.
        seed: Seed of the order of joint edits.
        rank: Index of this rank's data shard.
        n_shards: Number of data shards.
        catalogue: All knowledge of the run, for other relations of the same run; None is the
            knowledge that the package ships.
        subwords: Whether beginnings of words are target labels too, see `TokenizedRelation.of`.
        left_out: Edits that are not trained, for the results.
        max_risk: Probability of a hallucination above which a forecast marks an edit; None marks
            none.

    Attributes:
        edits: As given, like `relation`, `schedule`, `catalogue`, `subwords`, `left_out` and
            `max_risk`.
    """

    def __init__(
        self,
        edits: Sequence[Edit],
        relation: TokenizedRelation,
        prompts: Sequence[Sequence[int]],
        schedule: EditSchedule,
        seed: int = 0,
        rank: int = 0,
        n_shards: int = 1,
        catalogue: Catalogue | None = None,
        subwords: bool = False,
        left_out: Sequence[LeftOut] = (),
        max_risk: float | None = None,
    ) -> None:
        self.edits = list(edits)
        self.left_out = left_out
        self.max_risk = max_risk
        self.relation = relation
        self.schedule = schedule
        self.catalogue = Catalogue.load() if catalogue is None else catalogue
        self.subwords = subwords
        self._prompts = prompts
        self._seed = seed
        self._rank = rank
        self._n_shards = n_shards
        self._n_repeats = schedule.steps_per_edit if schedule.protocol == "independent" else 1

    @property
    def determined_by(self) -> dict[str, Any]:
        """Settings that determine the content of a step, apart from the edits."""
        return {**asdict(self.schedule), "n_shards": self._n_shards}

    def __len__(self) -> int:
        """Number of steps of an epoch, the same on all ranks."""
        per_step = self.schedule.edits_per_step * self._n_shards
        return -(-len(self.edits) // per_step) * self._n_repeats

    def __getitem__(self, index: int) -> EditBatch:
        epoch, step = divmod(index, len(self))
        turn, repeat = divmod(step, self._n_repeats)
        n, size = len(self.edits), self.schedule.edits_per_step
        if self.schedule.protocol == "independent":
            group = turn * self._n_shards + self._rank
            return self._batch(range(n)[group * size : (group + 1) * size], repeat, self._n_repeats)
        order = np.random.default_rng([self._seed, epoch]).permutation(n)
        per_step = size * self._n_shards
        parts = np.array_split(order[turn * per_step : (turn + 1) * per_step], self._n_shards)
        return self._batch(parts[self._rank].tolist(), 0, 0)

    def _batch(self, ids: Sequence[int], step: int, n_steps: int) -> EditBatch:
        prompts = [self._prompts[i] for i in ids] or [self._prompts[0]]
        return edit_batch([self.edits[i] for i in ids], ids, prompts, step, n_steps)


def edit_dataset(trainer: Any) -> EditDataset | None:
    """Return the run's edits: the training dataset if it is an `EditDataset`, else None."""
    dataset = getattr(trainer.train_dataloader, "dataset", None)
    return dataset if isinstance(dataset, EditDataset) else None
