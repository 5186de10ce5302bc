"""Paired texts: the same subject's source and target knowledge (paper, section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import lightning as L
import numpy as np

from lincorr_lightning.ablation.mappings import PairedLabels, pair_labels, tokens_of_answers
from lincorr_lightning.ablation.phases import PhaseDataset, TextPlan
from lincorr_lightning.ablation.written_texts import WrittenText, read_texts
from lincorr_lightning.data.resumable_loader import ResumableLoader
from lincorr_lightning.distributed import require_items
from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.io import write_csv
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("phase", "subject", "source", "target")


@dataclass(frozen=True)
class PairedTexts:
    """Who is spoken of, and what is told of whom.

    Attributes:
        subjects: Each once: first those of paired texts, then the new ones.
        answers: Index of each one's source answer, in `PairedLabels.sources`.
        n_paired: How many are of paired texts.
    """

    subjects: tuple[str, ...]
    answers: tuple[int, ...]
    n_paired: int

    @property
    def n_new(self) -> int:
        """How many are new: of them the source text alone is read."""
        return len(self.subjects) - self.n_paired


class PairedTextsDataModule(L.LightningDataModule):
    """Paired texts to compose knowledge from, and source texts of new subjects to learn.

    "X lives in the city of Shanghai" with "X lives in the country of China", and "Z lives in the
    city of Shanghai": no subject is of both, and none has a token that is an answer. They are the
    vocabulary of the study's tokenizer, whose LightningModule trains on them in two phases.

    Args:
        relation: What is told of a subject, as ``city->country``.
        n_paired: Subjects of paired texts.
        n_new: Subjects of whom the source text alone is read, and the target is asked.
        max_source_labels: How many source answers take part; null takes all that have a target.
        source_labels: The source answers to choose from; null: all.
        texts_file: JSONL or CSV with ``phase`` (compose, learn), ``subject`` and ``source``
            instead of sampled ones.
        knowledge_files: YAML files with knowledge of your own.
        seed: Of the choice of source answers. What is told of whom follows from the study's seeds.

    Raises:
        KnowledgeError: There is no such relation.
        SubjectsError: A file cannot be used; the message says which line.
        ConfigError: Settings that no run can have.
    """

    def __init__(
        self,
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
        for name, value in (("n_paired", n_paired), ("n_new", n_new)):
            if value < 1:
                raise ConfigError(f"data.{name} is {value}: there would be no text of it.")
        if max_source_labels is not None and max_source_labels < 2:
            raise ConfigError(
                f"data.max_source_labels is {max_source_labels}; with fewer than 2 answers "
                "there is nothing to tell apart. null takes all."
            )
        if seed < 0:
            raise ConfigError(f"data.seed is {seed}; it must not be negative.")
        self.save_hyperparameters()
        catalogue = Catalogue.load(*(knowledge_files or ()))
        self.catalogue = catalogue
        self.relation = catalogue.relation(relation)
        self._written = None if texts_file is None else read_texts(texts_file)

    # -- what is told ----------------------------------------------------------------------------

    def labels(self, tokenizer: PreTrainedTokenizerBase) -> PairedLabels:
        """The answers that take part.

        Args:
            tokenizer: The vocabulary's.

        Raises:
            DomainError: A side of the relation has no label in this vocabulary.
            KnowledgeError: The relation has no reference.
            SubjectsError: Fewer are usable than asked for, or one of the user's is not.
        """
        asked = TokenizedRelation.of(self.relation.name, self.catalogue, tokenizer)
        only = self.hparams["source_labels"]
        if self._written is not None and only is None:
            only = list(dict.fromkeys(text.source for text in self._written))
        return pair_labels(asked, self.hparams["max_source_labels"], only, self.hparams["seed"])

    def texts(
        self, labels: PairedLabels, tokenizer: PreTrainedTokenizerBase, seed: int
    ) -> PairedTexts:
        """What is told of whom.

        Args:
            labels: The answers that take part.
            tokenizer: The vocabulary's.
            seed: Of the subjects and their answers.

        Raises:
            SubjectsError: The vocabulary has too few subjects, or a written one cannot be used.
        """
        if self._written is not None:
            return _as_written(self._written, labels, tokenizer)
        n_paired, n_new = self.hparams["n_paired"], self.hparams["n_new"]
        subjects = _subjects(labels, tokenizer, n_paired + n_new, seed)
        rng = np.random.default_rng([seed, 4])
        answers: list[int] = []
        for n in (n_paired, n_new):  # each answer as often as any other, in both phases
            answers += (rng.permutation(n) % len(labels.sources)).tolist()
        return PairedTexts(tuple(subjects), tuple(answers), n_paired)

    def write_texts(self, path: str | Path, labels: PairedLabels, texts: PairedTexts) -> None:
        """Write texts as a CSV that `texts_file` reads.

        Args:
            path: The file.
            labels: The answers.
            texts: Who is told which.

        Raises:
            OutputError: The file cannot be written.
        """
        rows = [
            (
                "compose" if i < texts.n_paired else "learn",
                subject,
                labels.source_text(answer),
                labels.target_text(answer),
            )
            for i, (subject, answer) in enumerate(zip(texts.subjects, texts.answers, strict=True))
        ]
        write_csv(path, COLUMNS, rows)

    # -- dealing it out --------------------------------------------------------------------------

    def train_dataloader(self) -> ResumableLoader:
        """The steps of all phases, as the LightningModule's `text_plan` deals them."""
        trainer = self.trainer
        plan = getattr(getattr(trainer, "lightning_module", None), "text_plan", None)
        if trainer is None or not isinstance(plan, TextPlan):
            raise ConfigError(
                "PairedTextsDataModule deals texts out to a VocabularyAblation. Pass both to "
                "trainer.fit, or call labels() and texts()."
            )
        n_paired, n_new = self.hparams["n_paired"], self.hparams["n_new"]
        if self._written is not None:
            n_paired = sum(text.phase == "compose" for text in self._written)
            n_new = len(self._written) - n_paired
        require_items(trainer, n_new, "new texts", "raise data.n_new")
        steps = PhaseDataset(n_paired, n_new, plan, trainer.global_rank, trainer.world_size)
        return ResumableLoader(steps, trainer)


def _subjects(
    labels: PairedLabels, tokenizer: PreTrainedTokenizerBase, n: int, seed: int
) -> list[str]:
    """Subjects whose texts differ and have no answer in them."""
    answers = tokens_of_answers(labels, tokenizer)
    available = len(usable_strings(tokenizer))
    found: dict[tuple[int, ...], str] = {}
    # The beginning of a longer sample is the shorter one.
    for n_sampled in (min(2 * n, available), available):
        found = {}
        sample = sample_subjects(tokenizer, n_sampled, seed=seed)
        for subject, tokens in zip(sample, _own_tokens(sample, labels, tokenizer), strict=True):
            if tokens and answers.isdisjoint(tokens):
                found.setdefault(tokens, subject)
            if len(found) == n:
                return list(found.values())
    raise SubjectsError(
        f"{n} subjects are asked for; the vocabulary has {len(found)} that differ and hold no "
        "answer. Lower data.n_paired or data.n_new."
    )


def _own_tokens(
    subjects: list[str], labels: PairedLabels, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[int, ...]]:
    """Tokens that a text has of its subject; none for a subject that cannot be read."""
    prompts = labels.asked.source_prompts(subjects)
    frame = set(
        tokenizer(labels.asked.source_prompts([""])[0], add_special_tokens=False)["input_ids"]
    )
    for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]:
        own = tuple(i for i in ids if i not in frame)
        yield () if tokenizer.unk_token_id in own else own


def _as_written(
    written: list[WrittenText], labels: PairedLabels, tokenizer: PreTrainedTokenizerBase
) -> PairedTexts:
    position = {labels.source_text(i): i for i in range(len(labels.sources))}
    for i, source in enumerate(labels.sources):
        for answer in labels.asked.source.labels[source].answers:
            position.setdefault(answer.text, i)
    ordered = sorted(written, key=lambda text: text.phase)  # compose, then learn
    answers = tokens_of_answers(labels, tokenizer)
    tokens = _own_tokens([text.subject for text in ordered], labels, tokenizer)
    seen: dict[tuple[int, ...], WrittenText] = {}
    for text, own in zip(ordered, tokens, strict=True):
        if not own:
            raise SubjectsError(f"{text.where}: this vocabulary cannot read {text.subject!r}.")
        if not answers.isdisjoint(own):
            raise SubjectsError(
                f"{text.where}: the subject {text.subject!r} has an answer in it, which the text "
                "would give away. Choose another subject."
            )
        if own in seen:
            raise SubjectsError(
                f"{text.where}: {text.subject!r} and {seen[own].subject!r} ({seen[own].where}) are "
                "one subject in this vocabulary. Remove one of them."
            )
        seen[own] = text
        if text.source not in position:
            raise SubjectsError(
                f"{text.where}: {text.source!r} is none of the source answers that take part. "
                "Raise data.max_source_labels, or leave it null."
            )
    return PairedTexts(
        tuple(text.subject for text in ordered),
        tuple(position[text.source] for text in ordered),
        sum(text.phase == "compose" for text in ordered),
    )
