"""The data of the vocabulary ablation: paired texts of one subject (paper, section 6)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.ablation import mappings
from lincorr_lightning.ablation.mappings import MappedLabels, MappingName, PairedLabels
from lincorr_lightning.data.loaders import ResumableLoader
from lincorr_lightning.distributed import data_shard, require_items
from lincorr_lightning.errors import ConfigError, SubjectsError, require, require_one_of
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.loading import find_checkpoint, read_tokenizer
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings
from lincorr_lightning.study import StudyData

Trained = Literal["network", "all", "embeddings"]
PhaseName = Literal["uncomposed", "compose", "learn"]
"""``compose`` reads paired texts, ``learn`` the source texts of new subjects, and ``uncomposed``
these too, before anything is composed."""


@dataclass(frozen=True)
class PhaseSettings:
    """Hyper-parameters of a phase of training."""

    epochs: int = 40
    """Passes over the texts."""
    batch_size: int = 256
    """Texts per step."""
    learning_rate: float = 1e-3
    """Learning rate of AdamW, whose state is reset at the beginning of the phase."""
    weight_decay: float = 0.3
    """Weight decay of AdamW."""

    def __post_init__(self) -> None:
        lowest = {"epochs": 1, "batch_size": 1, "learning_rate": 0, "weight_decay": 0}
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
    n_paired: int  #: Number of subjects of paired texts; of the others, only the source is read.


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
        self.labels = labels
        self.texts = tuple(texts)
        self.plan = plan
        self.n_paired = texts[0].n_paired
        self.n_new = len(texts[0].subjects) - self.n_paired
        self.mapped: list[list[MappedLabels]] = [
            [mappings.map_labels(labels, name, tokenizer, seed) for name in plan.mappings]
            for seed in plan.seeds
        ]
        relation = labels.relation
        self.token_ids: list[list[list[int]]] = [
            # Not verbose: positions of the LM do not matter here.
            tokenizer(
                relation.source_prompts(each.subjects) + relation.target_prompts(each.subjects),
                add_special_tokens=False,
                verbose=False,
            )["input_ids"]
            for each in self.texts
        ]
        answers = mappings.answer_token_ids(labels, tokenizer)
        self.vocabularies = [sorted(answers.union(*rows)) for rows in self.token_ids]
        new = [each.subjects[self.n_paired :] for each in self.texts]
        self.new_tokens = [
            sorted(set().union(*_subject_tokens(subjects, labels, tokenizer))) for subjects in new
        ]


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
        self.corpus = corpus
        self.phases = corpus.plan.phases
        self._rank = rank
        self._world_size = world_size
        n = corpus.n_paired + corpus.n_new
        paired = np.arange(corpus.n_paired)
        new = np.arange(corpus.n_paired, n)
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
        texts = self._texts[name]
        phase = self.phases[name]
        orders = [
            np.random.default_rng([seed, 3, number, epoch]).permutation(len(texts))
            for seed in self.corpus.plan.seeds
        ]
        rows = texts[np.stack(orders)[:, first : first + phase.batch_size]]
        of_rank = np.array_split(rows, self._world_size, axis=1)[self._rank]
        ends_epoch = first + phase.batch_size >= len(texts)
        return TextBatch(
            self.corpus,
            torch.from_numpy(np.ascontiguousarray(of_rank)),
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
        knowledge_files: YAML files with additional knowledge.
        seed: Seed of the choice of source labels.
        max_sources_per_target: Number of source labels with the same target; null takes all. With
            1, no country has two cities, and no answer is more frequent than another.
    """

    batch_type = TextBatch
    free_settings = frozenset({"knowledge_files"})

    def __init__(
        self,
        plan: TrainingPlan | None = None,
        relation: str = "city->country",
        n_paired: int = 1024,
        n_new: int = 128,
        max_source_labels: int | None = None,
        knowledge_files: list[str] | None = None,
        seed: int = 0,
        max_sources_per_target: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["plan"])
        self.require_at_least(
            "max_source_labels",
            "max_sources_per_target",
            n_paired=1,
            n_new=1,
            seed=0,
            max_source_labels=2,
            max_sources_per_target=1,
        )
        self.plan = plan
        self._catalogue = Catalogue.load(*(knowledge_files or ()))
        self._catalogue.relation(relation)  # refuses an unknown one
        self.corpus: PairedCorpus | None = None

    def setup(self, stage: str | None = None) -> None:
        """Choose labels and subjects, identical on all ranks."""
        if self.corpus is not None:
            return
        plan = self.plan
        if plan is None:
            raise ConfigError(
                "PairedTextsDataModule makes texts for a VocabularyAblation. Pass --model "
                "VocabularyAblation, or in Python plan=module.plan."
            )
        tokenizer = read_tokenizer(find_checkpoint(plan.lm))
        settings = self.hparams
        labels = mappings.pair_labels(
            TokenizedRelation.of(settings["relation"], self._catalogue, tokenizer),
            settings["max_source_labels"],
            settings["seed"],
            settings["max_sources_per_target"],
        )
        texts = [
            sample_texts(labels, tokenizer, settings["n_paired"], settings["n_new"], seed)
            for seed in plan.seeds
        ]
        corpus = self.corpus = PairedCorpus(labels, texts, plan, tokenizer)
        tokens = [[(m.source_tokens, m.target_tokens) for m in row] for row in corpus.mapped]
        self.keep_contents(texts=[corpus.texts, corpus.token_ids, tokens])

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
    n = n_paired + n_new
    answers = mappings.answer_token_ids(labels, tokenizer)
    sample = sample_subjects(tokenizer, len(usable_strings(tokenizer)), seed=seed)
    subjects: dict[tuple[int, ...], str] = {}
    for subject, tokens in zip(sample, _subject_tokens(sample, labels, tokenizer), strict=True):
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


def _subject_tokens(
    subjects: Sequence[str], labels: PairedLabels, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each subject in its prompt; none if the vocabulary cannot spell it."""
    prompts = labels.relation.source_prompts(["", *subjects])
    rows = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    frame = set(rows[0])
    for ids in rows[1:]:
        tokens = tuple(i for i in ids if i not in frame)
        yield () if tokenizer.unk_token_id in tokens else tokens
