"""Training batches of the vocabulary ablation, and all texts with their answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lincorr_lightning.ablation.mappings import (
    MappedLabels,
    MappingName,
    PairedLabels,
    answer_token_ids,
    map_labels,
)
from lincorr_lightning.ablation.paired_texts import PairedTexts
from lincorr_lightning.lm.config import LMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PhaseName = Literal["uncomposed", "compose", "learn"]


@dataclass(frozen=True)
class Phase:
    """A phase of training.

    Attributes:
        name: ``compose`` reads paired texts, ``learn`` the source texts of new subjects, and
            ``uncomposed`` these too, before anything is composed.
        epochs: Passes over its texts.
        batch_size: Texts of a step.
    """

    name: PhaseName
    epochs: int
    batch_size: int


@dataclass(frozen=True)
class TrainingPlan:
    """What a study needs of its data.

    Attributes:
        lm: The LM whose tokenizer the texts are in.
        mappings: Mappings to be trained.
        seeds: Seeds to be trained.
        phases: Phases in their order.
    """

    lm: LMConfig
    mappings: tuple[MappingName, ...]
    seeds: tuple[int, ...]
    phases: tuple[Phase, ...]


class PairedCorpus:
    """All texts of a run with their answers, for each seed and mapping.

    A seed has ``2 · n_subjects`` texts: the source texts of all subjects, then their target texts.
    It is not a dataclass: Lightning would copy those of a batch field by field.

    Args:
        labels: Source and target labels.
        texts: Subjects and answers of each seed.
        mappings: Names of the mappings.
        seeds: The seeds.
        tokenizer: Tokenizer of the texts.

    Attributes:
        mapped: The labels under each mapping, by seed and mapping.
        token_ids: Token ids of each text, by seed.
        vocabularies: Tokens of a seed's texts, and of the answers under any mapping.

    Raises:
        DomainError: A first letter is not a single token of this vocabulary.
        ConfigError: No permutation gives every source a wrong target.
    """

    def __init__(
        self,
        labels: PairedLabels,
        texts: Sequence[PairedTexts],
        mappings: Sequence[MappingName],
        seeds: Sequence[int],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.labels, self.texts = labels, tuple(texts)
        self.mappings, self.seeds = tuple(mappings), tuple(seeds)
        self.mapped: list[list[MappedLabels]] = [
            [map_labels(labels, name, tokenizer, seed) for name in mappings] for seed in seeds
        ]
        relation = labels.relation
        self.token_ids: list[list[list[int]]] = [
            # Not verbose: positions of the LM do not matter here.
            tokenizer(
                relation.source_prompts(one.subjects) + relation.target_prompts(one.subjects),
                add_special_tokens=False,
                verbose=False,
            )["input_ids"]
            for one in self.texts
        ]
        answers = answer_token_ids(labels, tokenizer)
        self.vocabularies = [sorted(answers.union(*rows)) for rows in self.token_ids]

    @property
    def n_paired(self) -> int:
        """Number of subjects of paired texts, the first ones of each seed."""
        return self.texts[0].n_paired

    @property
    def n_new(self) -> int:
        """Number of new subjects of each seed."""
        return self.texts[0].n_new


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TextBatch:
    """Texts of a training step, side by side for all seeds.

    Attributes:
        corpus: All texts of the run, which a module pools once.
        rows: Index of the step's texts among those of their seed, ``(n_seeds, n)``; the part of
            this rank.
        n_rows: Number of texts per seed on all ranks.
        phase: Name of the phase.
        epoch: Epoch of the phase, from 0.
        begins: Whether the phase begins with this step.
        ends_epoch: Whether an epoch of the phase ends with this step.
        ends: Whether the phase ends with this step.
    """

    corpus: PairedCorpus
    rows: Tensor
    n_rows: int
    phase: PhaseName
    epoch: int
    begins: bool
    ends_epoch: bool
    ends: bool


class PhaseDataset(Dataset[TextBatch]):
    """The steps of one rank, all phases in one epoch, each made from its number alone."""

    def __init__(
        self, corpus: PairedCorpus, phases: Sequence[Phase], rank: int = 0, world_size: int = 1
    ) -> None:
        self.corpus, self.phases = corpus, tuple(phases)
        self._rank, self._world_size = rank, world_size
        n = corpus.n_paired + corpus.n_new
        paired, new = np.arange(corpus.n_paired), np.arange(corpus.n_paired, n)
        self._texts: dict[PhaseName, npt.NDArray[np.int64]] = {
            "uncomposed": new,
            "compose": np.concatenate([paired, n + paired]),
            "learn": new,
        }

    @property
    def determined_by(self) -> dict[str, Any]:
        """What the contents of a step follow from, on all ranks together."""
        return {
            "phases": [asdict(phase) for phase in self.phases],
            "seeds": self.corpus.seeds,
            "n_texts": {name: len(texts) for name, texts in self._texts.items()},
        }

    def _n_steps(self, phase: Phase) -> int:
        return -(-len(self._texts[phase.name]) // phase.batch_size)

    def __len__(self) -> int:
        """Number of steps of all phases."""
        return sum(phase.epochs * self._n_steps(phase) for phase in self.phases)

    def __getitem__(self, index: int) -> TextBatch:
        """Return a step."""
        for number, phase in enumerate(self.phases):
            n_steps = self._n_steps(phase)
            if index >= phase.epochs * n_steps:
                index -= phase.epochs * n_steps
                continue
            epoch, step = divmod(index, n_steps)
            members = slice(step * phase.batch_size, (step + 1) * phase.batch_size)
            texts = self._texts[phase.name]
            orders = [_order(seed, number, epoch, len(texts)) for seed in self.corpus.seeds]
            rows = texts[np.stack(orders)[:, members]]
            own = np.array_split(rows, self._world_size, axis=1)[self._rank]
            last = step == n_steps - 1
            return TextBatch(
                self.corpus,
                torch.from_numpy(np.ascontiguousarray(own)),
                n_rows=rows.shape[1],
                phase=phase.name,
                epoch=epoch,
                begins=index == 0,
                ends_epoch=last,
                ends=last and epoch == phase.epochs - 1,
            )
        raise IndexError(index)


@lru_cache(maxsize=64)
def _order(seed: int, phase: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, 3, phase, epoch]).permutation(n)
