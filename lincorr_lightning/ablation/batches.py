"""Training batches of the vocabulary ablation, and all texts with their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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
from lincorr_lightning.errors import require
from lincorr_lightning.lm.config import LMConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PhaseName = Literal["uncomposed", "compose", "learn"]
"""``compose`` reads paired texts, ``learn`` the source texts of new subjects, and ``uncomposed``
these too, before anything is composed."""


@dataclass(frozen=True)
class PhaseSettings:
    """Hyper-parameters of a phase of training."""

    epochs: int = 40
    """Passes over the texts; 0 skips the phase."""

    batch_size: int = 256
    """Texts per step."""

    learning_rate: float = 1e-3
    """Learning rate of AdamW, whose state is reset at the beginning of the phase."""

    weight_decay: float = 0.3
    """Weight decay of AdamW."""

    def __post_init__(self) -> None:
        """Check the settings."""
        lowest = {"epochs": 0, "batch_size": 1, "learning_rate": 0, "weight_decay": 0}
        for name, least in lowest.items():
            names = f"model.compose.{name} or model.learn.{name}"
            require(names, getattr(self, name), at_least=least)


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
    phases: Mapping[PhaseName, PhaseSettings]


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
        self.n_paired, self.n_new = texts[0].n_paired, texts[0].n_new
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

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all texts and answers."""
        tokens = [[(m.source_tokens, m.target_tokens) for m in row] for row in self.mapped]
        return hashlib.sha256(repr((self.texts, self.token_ids, tokens)).encode()).hexdigest()[:16]


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
        self,
        corpus: PairedCorpus,
        phases: Mapping[PhaseName, PhaseSettings],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.corpus, self.phases = corpus, phases
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
        phases = {name: [one.epochs, one.batch_size] for name, one in self.phases.items()}
        return {"phases": phases, "seeds": self.corpus.seeds, "texts": self.corpus.fingerprint}

    def _n_steps(self, name: PhaseName) -> int:
        return -(-len(self._texts[name]) // self.phases[name].batch_size)

    def __len__(self) -> int:
        """Number of steps of all phases."""
        return sum(phase.epochs * self._n_steps(name) for name, phase in self.phases.items())

    def __getitem__(self, index: int) -> TextBatch:
        """Return a step."""
        for number, (name, phase) in enumerate(self.phases.items()):
            n_steps = self._n_steps(name)
            if index >= phase.epochs * n_steps:
                index -= phase.epochs * n_steps
                continue
            epoch, step = divmod(index, n_steps)
            members = slice(step * phase.batch_size, (step + 1) * phase.batch_size)
            texts = self._texts[name]
            orders = [_order(seed, number, epoch, len(texts)) for seed in self.corpus.seeds]
            rows = texts[np.stack(orders)[:, members]]
            own = np.array_split(rows, self._world_size, axis=1)[self._rank]
            last = step == n_steps - 1
            return TextBatch(
                self.corpus,
                torch.from_numpy(np.ascontiguousarray(own)),
                n_rows=rows.shape[1],
                phase=name,
                epoch=epoch,
                begins=index == 0,
                ends_epoch=last,
                ends=last and epoch == phase.epochs - 1,
            )
        raise IndexError(index)


@lru_cache(maxsize=64)
def _order(seed: int, phase: int, epoch: int, n: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, 3, phase, epoch]).permutation(n)
