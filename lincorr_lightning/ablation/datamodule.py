"""The data of the vocabulary ablation: paired texts of one subject (paper, section 6)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lincorr_lightning.ablation.mappings import (
    MappedLabels,
    MappingName,
    PairedLabels,
    answer_token_ids,
    map_labels,
    pair_labels,
)
from lincorr_lightning.ablation.paired_texts import (
    PairedTexts,
    read_paired_texts,
    resolve_texts,
    sample_texts,
)
from lincorr_lightning.data.loaders import ResumableLoader
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer
from lincorr_lightning.study import StudyData

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
    """What a study needs of its data: the LM's tokenizer, and what is trained, in its order."""

    lm: LMConfig
    mappings: tuple[MappingName, ...]
    seeds: tuple[int, ...]
    phases: Mapping[PhaseName, PhaseSettings]


class PairedCorpus:
    """All texts of a run with their answers, for each seed and mapping.

    A seed has ``2 · n_subjects`` texts: the source texts of all subjects, then their target texts.
    It is not a dataclass: Lightning would copy those of a batch field by field.

    Attributes:
        texts: Subjects and answers of each seed.
        mapped: The labels under each mapping, by seed and mapping.
        token_ids: Token ids of each text, by seed.
        vocabularies: Tokens of a seed's texts, and of the answers under any mapping.
    """

    def __init__(
        self,
        labels: PairedLabels,
        texts: Sequence[PairedTexts],
        plan: TrainingPlan,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.labels, self.texts, self.plan = labels, tuple(texts), plan
        self.mappings, self.seeds = plan.mappings, plan.seeds
        self.n_paired, self.n_new = texts[0].n_paired, texts[0].n_new
        self.mapped: list[list[MappedLabels]] = [
            [map_labels(labels, name, tokenizer, seed) for name in self.mappings]
            for seed in self.seeds
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
        phase: Name of the phase, which `begins` and `ends` with this step or not.
        epoch: Epoch of the phase, from 0, which `ends_epoch` or not.
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

    def __init__(self, corpus: PairedCorpus, rank: int = 0, world_size: int = 1) -> None:
        self.corpus, self.phases = corpus, corpus.plan.phases
        self._rank, self._world_size = rank, world_size
        n = corpus.n_paired + corpus.n_new
        paired, new = np.arange(corpus.n_paired), np.arange(corpus.n_paired, n)
        composed = np.concatenate([paired, n + paired])
        self._texts = {"uncomposed": new, "compose": composed, "learn": new}
        self._steps = [
            (number, name, epoch, first)
            for number, (name, phase) in enumerate(self.phases.items())
            for epoch in range(phase.epochs)
            for first in range(0, len(self._texts[name]), phase.batch_size)
        ]

    @property
    def determined_by(self) -> dict[str, Any]:
        """What the contents of a step follow from, on all ranks together."""
        phases = {name: [one.epochs, one.batch_size] for name, one in self.phases.items()}
        return {"phases": phases, "seeds": self.corpus.seeds, "texts": self.corpus.fingerprint}

    def __len__(self) -> int:
        """Number of steps of all phases."""
        return len(self._steps)

    def __getitem__(self, index: int) -> TextBatch:
        """Return a step."""
        number, name, epoch, first = self._steps[index]
        texts, phase = self._texts[name], self.phases[name]
        orders = [
            np.random.default_rng([seed, 3, number, epoch]).permutation(len(texts))
            for seed in self.corpus.seeds
        ]
        rows = texts[np.stack(orders)[:, first : first + phase.batch_size]]
        own = np.array_split(rows, self._world_size, axis=1)[self._rank]
        ends_epoch = first + phase.batch_size >= len(texts)
        return TextBatch(
            self.corpus,
            torch.from_numpy(np.ascontiguousarray(own)),
            n_rows=rows.shape[1],
            phase=name,
            epoch=epoch,
            begins=epoch == first == 0,
            ends_epoch=ends_epoch,
            ends=ends_epoch and epoch == phase.epochs - 1,
        )


class PairedTextsDataModule(StudyData):
    """Paired texts to compose knowledge from, and source texts of new subjects to learn.

    "X lives in the city of Shanghai" with "X lives in the country of China", and "Z lives in the
    city of Shanghai". A subject has either paired texts or a source text alone, and none has a
    token that is an answer. Subjects and their answers follow from the seeds of the study.

    Args:
        plan: Vocabulary, mappings, seeds and phases of the study, `VocabularyAblation.plan`; the
            program `lincorr` passes that of the study.
        relation: Relation that the texts state, as ``city->country``.
        n_paired: Number of subjects of paired texts.
        n_new: Number of new subjects, whose source text is learned and whose target is evaluated.
        max_source_labels: Number of source labels; null takes all that have a target.
        source_labels: Source answers to choose from; null takes all.
        texts_file: JSONL or CSV file with ``phase`` (compose or learn), ``subject`` and ``source``,
            instead of sampled subjects.
        knowledge_files: YAML files with additional knowledge.
        seed: Seed of the choice of source labels.

    Raises:
        KnowledgeError: There is no such relation.
        SubjectsError: The file of texts cannot be used; the message names the line.
    """

    batch_type = TextBatch

    def __init__(
        self,
        plan: TrainingPlan | None = None,
        relation: str = "city->country",
        n_paired: int = 1024,
        n_new: int = 128,
        max_source_labels: int | None = None,
        source_labels: list[str] | None = None,
        texts_file: str | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require("data.n_paired", n_paired, at_least=1)
        require("data.n_new", n_new, at_least=1)
        require("data.seed", seed, at_least=0)
        if max_source_labels is not None:
            require("data.max_source_labels", max_source_labels, at_least=2)
        self.save_hyperparameters(ignore=["plan"])
        self.relation, self.n_paired, self.n_new, self.seed = relation, n_paired, n_new, seed
        self.max_source_labels, self.source_labels = max_source_labels, source_labels
        self.plan = plan
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)  # refuses an unknown one
        self._rows = None if texts_file is None else read_paired_texts(texts_file)
        self.corpus: PairedCorpus | None = None

    def setup(self, stage: str | None = None) -> None:
        """Choose labels and subjects, identical on all ranks."""
        del stage
        if self.corpus is not None:
            return
        plan, rows, only = self.plan, self._rows, self.source_labels
        if plan is None:
            raise ConfigError(
                "PairedTextsDataModule makes texts for a VocabularyAblation. Pass --model "
                "VocabularyAblation, or in Python plan=module.plan."
            )
        tokenizer = read_tokenizer(find_checkpoint(plan.lm))
        relation = TokenizedRelation.of(self.relation, self._catalogue, tokenizer)
        if rows is not None and only is None:
            only = list(dict.fromkeys(row.source for row in rows))
        labels = pair_labels(relation, self.max_source_labels, only, self.seed)
        if rows is not None:
            texts = [resolve_texts(rows, labels, tokenizer)] * len(plan.seeds)
        else:
            texts = [
                sample_texts(labels, tokenizer, self.n_paired, self.n_new, seed)
                for seed in plan.seeds
            ]
        self.corpus = PairedCorpus(labels, texts, plan, tokenizer)

    def train_dataloader(self) -> ResumableLoader:
        """Return the steps of all phases."""
        assert self.corpus is not None, "setup makes the texts"
        require_items(self.trainer, self.corpus.n_new, "new texts", "raise data.n_new")
        shard = data_shard(self.trainer)
        return ResumableLoader(PhaseDataset(self.corpus, shard.number, shard.n), self.trainer)
