"""Dealing edits out: which are in which step, of which epoch, on which process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lincorr_lightning.errors import ConfigError

IGNORED = -100
"""Target of a token that no loss is taken at."""

Protocol = Literal["joint", "independent"]


@dataclass(frozen=True)
class EditSchedule:
    """How edits are dealt into steps.

    Attributes:
        protocol: ``joint``: all edits train one LM, in an order of its own each epoch;
            ``independent``: each begins at the base weights, in their own order.
        edits_per_step: Edits in a batch; independent ones are trained side by side, each in a
            copy of its own.
        steps_per_edit: Optimizer steps of each group of independent edits.

    Raises:
        ConfigError: A value that no run can have.
    """

    protocol: Protocol = "joint"
    edits_per_step: int = 8
    steps_per_edit: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be."""
        if self.protocol not in get_args(Protocol):
            raise ConfigError(
                f"protocol is {self.protocol!r}; it must be {' or '.join(get_args(Protocol))}."
            )
        for name in ("edits_per_step", "steps_per_edit"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class EditBatch:
    """Edits of one step.

    Attributes:
        input_ids: Prompt and answer, padded on the right, ``(n, length)``.
        attention_mask: 1 at true tokens, same shape.
        labels: The token that follows each position, same shape; -100 but where that is one of
            the answer's.
        edits: Index of each row's edit in `EditsDataModule.edits`; empty for a batch that only
            keeps a process in step with the others, whose one row asks for nothing.
        step: Of an independent group: which of its steps, from 0; 0 begins at the base weights.
        n_steps: Of an independent group: how many steps it has; 0 under the joint protocol.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    edits: list[int]
    step: int = 0
    n_steps: int = 0

    @property
    def first(self) -> bool:
        """Whether these edits begin here, at the base weights."""
        return self.n_steps > 0 and self.step == 0

    @property
    def last(self) -> bool:
        """Whether these edits end here."""
        return self.n_steps > 0 and self.step == self.n_steps - 1


class EditDataset(Dataset[EditBatch]):
    """One process's steps of all epochs, each made from the seed and its own number.

    That no state is kept is what lets a resumed run go on at any step with exactly the batches of
    the run that was not interrupted.

    Args:
        rows: Tokens of the prompt and of the answer, of each edit.
        plan: How they are dealt out.
        seed: Of the order of joint edits.
        rank: Number of the process.
        n_processes: How many there are.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        plan: EditSchedule,
        seed: int = 0,
        rank: int = 0,
        n_processes: int = 1,
    ) -> None:
        self._rows = rows
        self._plan = plan
        self._seed = seed
        self._rank = rank
        self._n_processes = n_processes
        self._n_repeats = plan.steps_per_edit if plan.protocol == "independent" else 1

    @property
    def dealt(self) -> dict[str, Any]:
        """What the contents of a step follow from, beside the edits."""
        return {**asdict(self._plan), "n_processes": self._n_processes}

    def __len__(self) -> int:
        """Steps of one epoch, the same on all processes."""
        together = self._plan.edits_per_step * self._n_processes
        return -(-len(self._rows) // together) * self._n_repeats

    def __getitem__(self, index: int) -> EditBatch:
        epoch, step = divmod(index, len(self))
        turn, repeat = divmod(step, self._n_repeats)
        n, size = len(self._rows), self._plan.edits_per_step
        if self._plan.protocol == "independent":
            group = turn * self._n_processes + self._rank
            members = range(n)[group * size : (group + 1) * size]
            return self._batch(list(members), repeat, self._n_repeats)
        order = np.random.default_rng([self._seed, epoch]).permutation(n)
        together = size * self._n_processes
        shares = np.array_split(order[turn * together : (turn + 1) * together], self._n_processes)
        return self._batch(shares[self._rank].tolist(), 0, 0)

    def _batch(self, members: list[int], step: int, n_steps: int) -> EditBatch:
        # A process that has no edit at this step takes part with a row that asks for nothing.
        rows = [self._rows[i] for i in members] or [(self._rows[0][0], ())]
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        input_ids = torch.zeros(len(rows), length, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        labels = torch.full_like(input_ids, IGNORED)
        for i, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            input_ids[i, :end] = torch.tensor([*prompt, *answer])
            mask[i, :end] = 1
            # The answer's first token is predicted where the prompt ends.
            labels[i, len(prompt) - 1 : end - 1] = torch.tensor(answer, dtype=torch.long)
        return EditBatch(input_ids, mask, labels, members, step, n_steps)
