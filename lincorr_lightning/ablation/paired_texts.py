"""Subjects and their source answers: sampled from a vocabulary, or read from a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lincorr_lightning.ablation.mappings import PairedLabels, answer_token_ids
from lincorr_lightning.data.files import read_rows
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("phase", "subject", "source", "target")
"""Columns of a file of texts; the target is for readers only."""

PHASES = ("compose", "learn")
_REQUIRED = COLUMNS[:3]


@dataclass(frozen=True)
class PairedTexts:
    """The subjects of a seed and their source answers.

    Attributes:
        subjects: Distinct subjects: first those of paired texts, then the new ones.
        answers: Index of each subject's source label, see `PairedLabels`.
        n_paired: Number of subjects of paired texts.
    """

    subjects: tuple[str, ...]
    answers: tuple[int, ...]
    n_paired: int

    @property
    def n_new(self) -> int:
        """Number of new subjects, of which only the source text is read."""
        return len(self.subjects) - self.n_paired

    def rows(self, labels: PairedLabels) -> Iterator[tuple[str, str, str, str]]:
        """Yield a row for each subject, in the columns of a file of texts."""
        for i, (subject, answer) in enumerate(zip(self.subjects, self.answers, strict=True)):
            phase = PHASES[i >= self.n_paired]
            yield phase, subject, labels.source_text(answer), labels.target_text(answer)


def sample_texts(
    labels: PairedLabels, tokenizer: PreTrainedTokenizerBase, n_paired: int, n_new: int, seed: int
) -> PairedTexts:
    """Sample subjects, and assign each source label equally often in both phases.

    No two subjects have the same tokens, and none has a token that is an answer.
    """
    n, answers = n_paired + n_new, answer_token_ids(labels, tokenizer)
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

    Args:
        path: JSONL or CSV in UTF-8, with ``phase`` (compose or learn), ``subject`` and ``source``
            of each text. The target follows from the relation; a column ``target`` is ignored.

    Raises:
        SubjectsError: The file cannot be read, has no text of a phase, an invalid line, or a
            subject twice; the message names the line.
    """
    rows: dict[str, TextRow] = {}
    for where, entry in read_rows(path, "texts", _REQUIRED):
        row = _parse(entry, where)
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


def _parse(entry: Any, where: str) -> TextRow:
    values = [entry.get(name) if isinstance(entry, Mapping) else None for name in _REQUIRED]
    fields = [value.strip() if isinstance(value, str) else "" for value in values]
    if not all(fields) or fields[0] not in PHASES:
        raise SubjectsError(
            f"{where}: each text needs a phase (compose or learn), a subject and a source, such as "
            f"compose, Ada and Paris; this is {entry!r}."
        )
    return TextRow(where, *fields)


def resolve_texts(
    rows: Sequence[TextRow], labels: PairedLabels, tokenizer: PreTrainedTokenizerBase
) -> PairedTexts:
    """Look the source answers of a file up among the labels.

    Raises:
        SubjectsError: A subject cannot be spelled, has an answer in it, or has the tokens of
            another one; or a source is not among the labels. The message names the line.
    """
    position = {labels.source_text(i): i for i in range(len(labels))}
    for i, source in enumerate(labels.sources):
        for answer in labels.relation.source.labels[source].answers:
            position.setdefault(answer.text, i)
    ordered = sorted(rows, key=lambda row: row.phase)  # compose, then learn
    answers = answer_token_ids(labels, tokenizer)
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
        elif row.source not in position:
            problem = (
                f"{row.source!r} is not one of the source labels of this run; raise "
                "data.max_source_labels, or leave it null"
            )
        else:
            continue
        raise SubjectsError(f"{row.where}, {row.subject!r}: {problem}. Change or remove the text.")
    return PairedTexts(
        tuple(row.subject for row in ordered),
        tuple(position[row.source] for row in ordered),
        sum(row.phase == "compose" for row in ordered),
    )
