"""Dealing texts out to the steps of the vocabulary ablation's phases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

PhaseName = Literal["uncomposed", "compose", "learn"]


@dataclass(frozen=True)
class TextPhase:
    """One phase of training.

    Attributes:
        name: ``compose`` reads paired texts, ``learn`` the source texts of new subjects;
            ``uncomposed`` reads those too, before anything was composed.
        epochs: How often each of its texts is read.
        batch_size: Texts of a step.
    """

    name: PhaseName
    epochs: int
    batch_size: int


@dataclass(frozen=True)
class TextPlan:
    """How texts are dealt into steps.

    Attributes:
        phases: One after the other.
        seeds: Whose texts are read side by side, each in an order of its own.
    """

    phases: tuple[TextPhase, ...]
    seeds: tuple[int, ...]


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TextBatch:
    """Texts of one step.

    Attributes:
        rows: Index of each text among those of its seed, ``(n_seeds, n)``: with n_subjects
            subjects, i < n_subjects is the source text of the i-th one, n_subjects + i the target
            text. This process's share of the step.
        n_rows: Texts per seed on all processes together.
        phase: Number of the phase.
        epoch: Of the phase, from 0.
        begins: Whether the phase begins here.
        ends_epoch: Whether an epoch of the phase ends here.
        ends: Whether the phase ends here.
    """

    rows: Tensor
    n_rows: int
    phase: int
    epoch: int
    begins: bool
    ends_epoch: bool
    ends: bool


class PhaseDataset(Dataset[TextBatch]):
    """One process's steps, all phases in one epoch, each made from its number alone.

    Args:
        n_paired: Subjects of paired texts, the first ones.
        n_new: Subjects of source texts alone, the others.
        plan: How they are dealt out.
        rank: Number of the process.
        n_processes: How many there are.
    """

    def __init__(
        self, n_paired: int, n_new: int, plan: TextPlan, rank: int = 0, n_processes: int = 1
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._n_processes = n_processes
        n = n_paired + n_new
        paired = np.arange(n_paired)
        new = np.arange(n_paired, n)
        self._texts: dict[str, npt.NDArray[np.int64]] = {
            "uncomposed": new,
            "compose": np.concatenate([paired, n + paired]),
            "learn": new,
        }

    @property
    def determined_by(self) -> dict[str, Any]:
        """What the contents of a step follow from; not the processes, which share each step."""
        return {**asdict(self._plan), "n_texts": {k: len(v) for k, v in self._texts.items()}}

    def steps_of(self, phase: TextPhase) -> int:
        """Steps of one epoch of a phase."""
        return -(-len(self._texts[phase.name]) // phase.batch_size)

    def __len__(self) -> int:
        """Steps of all phases."""
        return sum(phase.epochs * self.steps_of(phase) for phase in self._plan.phases)

    def __getitem__(self, index: int) -> TextBatch:
        for number, phase in enumerate(self._plan.phases):
            n_steps = self.steps_of(phase)
            if index >= phase.epochs * n_steps:
                index -= phase.epochs * n_steps
                continue
            epoch, step = divmod(index, n_steps)
            members = slice(step * phase.batch_size, (step + 1) * phase.batch_size)
            texts = self._texts[phase.name]
            rows = np.stack([_order(s, number, epoch, len(texts)) for s in self._plan.seeds])
            rows = texts[rows[:, members]]
            share = np.array_split(rows, self._n_processes, axis=1)[self._rank]
            last = step == n_steps - 1
            return TextBatch(
                torch.from_numpy(np.ascontiguousarray(share)),
                n_rows=rows.shape[1],
                phase=number,
                epoch=epoch,
                begins=index == 0,
                ends_epoch=last,
                ends=last and epoch == phase.epochs - 1,
            )
        raise IndexError(index)


@lru_cache(maxsize=64)
def _order(seed: int, phase: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, 3, phase, epoch]).permutation(n)
