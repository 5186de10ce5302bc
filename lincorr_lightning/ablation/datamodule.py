"""The data of the vocabulary ablation: paired texts of one subject (paper, section 6)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.ablation import mappings
from lincorr_lightning.ablation.mappings import MappedLabels, MappingName, PairedLabels
from lincorr_lightning.data.files import read_rows
from lincorr_lightning.data.loaders import ResumableLoader
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require, require_one_of
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_data
from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings
from lincorr_lightning.study import StudyData

COLUMNS = ("phase", "subject", "source", "target")
"""Columns of a file of texts; the target is for readers only."""

_REQUIRED = COLUMNS[:3]
PHASES = ("compose", "learn")
Trained = Literal["network", "all", "embeddings"]
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
        lowest = {"epochs": 0, "batch_size": 1, "learning_rate": 0, "weight_decay": 0}
        for name, least in lowest.items():
            names = f"model.compose.{name} or model.learn.{name}"
            require(names, getattr(self, name), at_least=least)


@dataclass(frozen=True)
class LearnSettings(PhaseSettings):
    """Hyper-parameters of the phase of source texts."""

    train: Trained = "network"
    """What is trained, of the network and the embeddings of the new subjects' tokens, or all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("model.learn.train", self.train, get_args(Trained))


@dataclass(frozen=True)
class TrainingPlan:
    """What a study needs of its data: the LM's tokenizer, and what is trained, in its order."""

    lm: LMConfig
    mappings: tuple[MappingName, ...]
    seeds: tuple[int, ...]
    phases: Mapping[PhaseName, PhaseSettings]


@dataclass(frozen=True)
class PairedTexts:
    """The subjects of a seed and their source answers."""

    subjects: tuple[str, ...]  #: Distinct subjects, first those of paired texts, then the new ones.
    answers: tuple[int, ...]  #: Index of each subject's source label, see `PairedLabels`.
    n_paired: int  #: Number of subjects of paired texts.

    @property
    def n_new(self) -> int:
        """Number of new subjects, of which only the source text is read."""
        return len(self.subjects) - self.n_paired

    def rows(self, labels: PairedLabels) -> Iterator[tuple[str, str, str, str]]:
        """Yield a row for each subject, in the columns of a file of texts."""
        for i, (subject, answer) in enumerate(zip(self.subjects, self.answers, strict=True)):
            phase = PHASES[i >= self.n_paired]
            yield phase, subject, labels.source_text(answer), labels.target_text(answer)


class PairedCorpus:
    """All texts of a run with their answers, for each seed and mapping.

    A seed has ``2 · n_subjects`` texts: the source texts of all subjects, then their target texts.
    By seed, there are the labels of each mapping (`mapped`), the `token_ids` of each text, the
    tokens of the texts and of the answers under any mapping (`vocabularies`), and those of new
    subjects, without the prompts' (`new_tokens`). A dataclass would be copied field by field.
    """

    def __init__(
        self,
        labels: PairedLabels,
        texts: Sequence[PairedTexts],
        plan: TrainingPlan,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.labels, self.texts, self.plan = labels, tuple(texts), plan
        self.n_paired, self.n_new = texts[0].n_paired, texts[0].n_new
        self.mapped: list[list[MappedLabels]] = [
            [mappings.map_labels(labels, name, tokenizer, seed) for name in plan.mappings]
            for seed in plan.seeds
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
        answers = mappings.answer_token_ids(labels, tokenizer)
        self.vocabularies = [sorted(answers.union(*rows)) for rows in self.token_ids]
        new = (one.subjects[self.n_paired :] for one in self.texts)
        self.new_tokens = [
            sorted(set().union(*_own_tokens(subjects, labels, tokenizer))) for subjects in new
        ]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all texts and answers."""
        tokens = [[(m.source_tokens, m.target_tokens) for m in row] for row in self.mapped]
        return fingerprint_data([self.texts, self.token_ids, tokens])


@dataclass  # not frozen: Lightning copies a batch field by field when it moves it to a device
class TextBatch:
    """Texts of a training step, side by side for all seeds; the module pools their corpus once.

    `rows` are the indices of this rank's texts among those of their seed, ``(n_seeds, n)``, of
    `n_rows` on all ranks. The phase `begins` and `ends` with this step or not, and its epoch, from
    0, `ends_epoch` or not.
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

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> TextBatch:
        number, name, epoch, first = self._steps[index]
        texts, phase = self._texts[name], self.phases[name]
        orders = [
            np.random.default_rng([seed, 3, number, epoch]).permutation(len(texts))
            for seed in self.corpus.plan.seeds
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
        max_sources_per_target: Number of source labels with the same target; null takes all. With
            1, no country has two cities, and no answer is more frequent than another.
    """

    batch_type = TextBatch
    free_settings = frozenset({"texts_file", "knowledge_files"})

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
        max_sources_per_target: int | None = None,
    ) -> None:
        super().__init__()
        require("data.n_paired", n_paired, at_least=1)
        require("data.n_new", n_new, at_least=1)
        require("data.seed", seed, at_least=0)
        if max_source_labels is not None:
            require("data.max_source_labels", max_source_labels, at_least=2)
        if max_sources_per_target is not None:
            require("data.max_sources_per_target", max_sources_per_target, at_least=1)
        self.save_hyperparameters(ignore=["plan"])
        self.relation, self.n_paired, self.n_new, self.seed = relation, n_paired, n_new, seed
        self.max_source_labels, self.source_labels = max_source_labels, source_labels
        self.max_sources_per_target = max_sources_per_target
        self.plan = plan
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)  # refuses an unknown one
        self._rows = None if texts_file is None else read_paired_texts(texts_file)
        self.corpus: PairedCorpus | None = None

    def setup(self, stage: str | None = None) -> None:
        """Choose labels and subjects, identical on all ranks."""
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
        labels = mappings.pair_labels(
            relation, self.max_source_labels, only, self.seed, self.max_sources_per_target
        )
        if rows is not None:
            texts = [resolve_texts(rows, labels, tokenizer)] * len(plan.seeds)
        else:
            texts = [
                sample_texts(labels, tokenizer, self.n_paired, self.n_new, seed)
                for seed in plan.seeds
            ]
        self.corpus = PairedCorpus(labels, texts, plan, tokenizer)
        self.keep_contents(texts_file=self.corpus.fingerprint)

    def train_dataloader(self) -> ResumableLoader:
        assert self.corpus is not None, "setup makes the texts"
        require_items(self.trainer, self.corpus.n_new, "new texts", "raise data.n_new")
        shard = data_shard(self.trainer)
        return ResumableLoader(PhaseDataset(self.corpus, shard.number, shard.n), self.trainer)


def sample_texts(
    labels: PairedLabels, tokenizer: PreTrainedTokenizerBase, n_paired: int, n_new: int, seed: int
) -> PairedTexts:
    """Sample subjects, and assign each source label equally often in both phases.

    No two subjects have the same tokens, and none has a token that is an answer.
    """
    n, answers = n_paired + n_new, mappings.answer_token_ids(labels, tokenizer)
    sample = sample_subjects(tokenizer, len(usable_strings(tokenizer)), seed=seed)
    subjects: dict[tuple[int, ...], str] = {}
    for subject, tokens in zip(sample, _own_tokens(sample, labels, tokenizer), strict=True):
        if tokens and answers.isdisjoint(tokens):
            subjects.setdefault(tokens, subject)
    if len(subjects) < n:
        raise SubjectsError(
            f"{n} subjects are needed; the vocabulary has {len(subjects)} that are distinct and "
            "contain no answer. Lower data.n_paired or data.n_new."
        )
    rng = np.random.default_rng([seed, 4])
    assigned = [a for k in (n_paired, n_new) for a in (rng.permutation(k) % len(labels)).tolist()]
    return PairedTexts(tuple(subjects.values())[:n], tuple(assigned), n_paired)


def _own_tokens(
    subjects: Sequence[str], labels: PairedLabels, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each subject in its prompt; none if the vocabulary cannot spell it."""
    prompts = labels.relation.source_prompts(["", *subjects])
    rows = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    frame = set(rows[0])
    for ids in rows[1:]:
        own = tuple(i for i in ids if i not in frame)
        yield () if tokenizer.unk_token_id in own else own


class TextRow(NamedTuple):
    """A row of a file of texts, with its file and line for messages."""

    where: str
    phase: str
    subject: str
    source: str


def read_paired_texts(path: str | Path) -> list[TextRow]:
    """Read a file of texts, such as the ``tables/texts.csv`` of a run.

    It has phase (compose or learn), subject and source of each text. The target follows from the
    relation; a column ``target`` is ignored.
    """
    rows: dict[str, TextRow] = {}
    for where, entry in read_rows(path, "texts", _REQUIRED):
        values = [entry.get(name) if isinstance(entry, Mapping) else None for name in _REQUIRED]
        fields = [value.strip() if isinstance(value, str) else "" for value in values]
        if not all(fields) or fields[0] not in PHASES:
            raise SubjectsError(
                f"{where}: each text needs a phase (compose or learn), a subject and a source, "
                f"such as compose, Ada and Paris; this is {entry!r}."
            )
        row = TextRow(where, *fields)
        other = rows.setdefault(row.subject, row)
        if other is not row:
            raise SubjectsError(
                f"{where}: {row.subject!r} has another text at {other.where}. What is learned must "
                "be about subjects of no other text: remove one of them."
            )
    for phase in PHASES:
        if not any(row.phase == phase for row in rows.values()):
            raise SubjectsError(
                f"{path} has no text of phase {phase!r}. Write a row for each subject, with "
                "phase, subject and source."
            )
    return list(rows.values())


def resolve_texts(
    rows: Sequence[TextRow], labels: PairedLabels, tokenizer: PreTrainedTokenizerBase
) -> PairedTexts:
    """Look the source answers of a file up among the labels."""
    position = mappings.source_positions(labels.relation)
    ordered = sorted(rows, key=lambda row: row.phase)  # compose, then learn
    answers = mappings.answer_token_ids(labels, tokenizer)
    tokens = _own_tokens([row.subject for row in ordered], labels, tokenizer)
    seen: dict[tuple[int, ...], TextRow] = {}
    for row, own in zip(ordered, tokens, strict=True):
        other = seen.setdefault(own, row)
        if not own:
            problem = "this vocabulary cannot spell the subject"
        elif not answers.isdisjoint(own):
            problem = "the subject has an answer in it, which would reveal it"
        elif other is not row:
            problem = f"{other.subject!r} ({other.where}) has the same tokens in this vocabulary"
        elif position.get(row.source) not in labels.sources:
            problem = (
                f"{row.source!r} is not one of the source labels of this run; raise "
                "data.max_source_labels and max_sources_per_target, or leave them null"
            )
        else:
            continue
        raise SubjectsError(f"{row.where}, {row.subject!r}: {problem}. Change or remove the text.")
    return PairedTexts(
        tuple(row.subject for row in ordered),
        tuple(labels.sources.index(position[row.source]) for row in ordered),
        sum(row.phase == "compose" for row in ordered),
    )
