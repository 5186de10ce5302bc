"""Edits: sampled, or read from rows, and resolved in the labels of a relation and an LM."""

import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.errors import ConfigError, SubjectsError
from lincorr_lightning.finetune.edit_files import RawEdit, nfc
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation, answer_tokens
from lincorr_lightning.knowledge.yaml_file import INVISIBLE, suggest
from lincorr_lightning.linear_map.layout import relation_logits
from lincorr_lightning.lm.encoding import LONE_SURROGATE
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.nearest_words import NearestWords
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to

_MAX_CANDIDATES_PER_EDIT = 20  # some subjects cannot be taught anything new
_MAX_SUBJECT = 2_000  # characters; the LM would run out of memory at what is no name
_NO_REFERENCE = "the reference of its answer names no label; add a field `reference`"


class SourceAnswer(NamedTuple):
    """A source answer that can be taught, with its tokens, label and reference as in `Edit`."""

    answer: str
    tokens: tuple[int, ...]
    label: int
    reference: tuple[int, ...]


class Edit(NamedTuple):  # not a frozen dataclass, which Lightning refuses inside a batch
    """A subject and the new source answer that the LM is taught about it."""

    subject: str
    answer: str
    tokens: tuple[int, ...]  #: Token ids of the answer after the prompt; the first is its label's.
    label: int  #: Index of the answer's label in the source domain.
    reference: tuple[int, ...]  #: Indices of the target labels that are right for the new answer.
    # Any, since they are None of an edit that is only planned, which nothing trains.
    source_before: Any  #: Index of the source label that leads before training; None if planned.
    target_before: Any  #: Index of the target label that leads before training; None if planned.


@dataclass(frozen=True)
class ResolvedEdits:
    """Edits in the labels of a relation, and the LM's answers before them, unless only planned."""

    relation: TokenizedRelation
    edits: list[Edit]
    rows: Sequence[RawEdit] = ()  #: The row of each edit of a file.
    skipped: Sequence[RawEdit] = ()  #: Rows of a file that are no edit, each with its `problem`.
    # For other relations of the same run:
    catalogue: Catalogue = field(default_factory=Catalogue.load)
    subwords: bool = False  #: See `TokenizedRelation.of`.

    @property
    def subjects(self) -> list[str]:
        """The subject of each edit."""
        return [edit.subject for edit in self.edits]


def reference_mask(edits: Sequence[Edit], n_target: int) -> Tensor:
    """Return the target labels in each edit's reference, ``(n, n_target)`` bool."""
    mask = torch.zeros(len(edits), n_target, dtype=torch.bool)
    for row, edit in enumerate(edits):
        mask[row, list(edit.reference)] = True
    return mask


def taught_labels(edits: Sequence[Edit]) -> Tensor:
    """Return the index of the source label that each edit teaches, ``(n,)``."""
    return torch.tensor([edit.label for edit in edits], dtype=torch.long)


def skip_counts(skipped: Sequence[RawEdit]) -> dict[str, int]:
    """Return the number of skipped rows by problem, the most frequent one first."""
    return dict(Counter(row.problem for row in skipped).most_common())


class _AnswerLabels:
    """Finds the label and the reference of what a row names, compared in NFC."""

    def __init__(self, relation: TokenizedRelation, lm: LanguageModel) -> None:
        self.source = relation.source
        self.target = relation.target
        by_label = _source_answers(relation, lm)
        self.answers = {nfc(each.answer): each for answers in by_label for each in answers}
        self.targets = {nfc(text): label for label, text in enumerate(self.target.texts)}
        for index, label in enumerate(self.target.labels):
            self.targets |= {nfc(answer.text): index for answer in label.answers}
        self._dropped = {nfc(each.answer.text): each.reason for each in self.source.dropped}

    def find(self, row: RawEdit) -> tuple[RawEdit, SourceAnswer | None, str]:
        """Return the fact that a row edits and its answer, or None and why it is no edit."""
        name = self.source.knowledge.name
        fitting = [fact for fact in row.facts if nfc(fact.answer) in self.answers]
        fact = fitting[0] if fitting else row.facts[0]
        answer = self.answers.get(nfc(fact.answer))
        if fact.problem:
            return fact, None, fact.problem
        if len(row.facts) > 1 and len(fitting) != 1:
            return fact, None, f"{len(fitting)} of its several rewrites have an answer of {name}"
        if answer is None:
            why = self._dropped.get(nfc(fact.answer), f"not one of {name}")
            if invisible := INVISIBLE.search(fact.answer):
                why = f"it has an invisible {unicodedata.name(invisible[0])}"
            return fact, None, f"its answer is no label of this LM ({why})"
        named = {self.targets.get(nfc(text)) for text in fact.reference}
        if None in named:
            return fact, None, f"its reference is no label of {self.target.knowledge.name}"
        meanings = {each.identity for each in self.source.labels[answer.label].answers}
        if row.id and not named and len(answer.tokens) > 1 and len(meanings) > 1:
            token = self.source.texts[answer.label]
            return fact, None, f"other answers share the first token of its answer, {token!r}"
        right = tuple(sorted(label for label in named if label is not None)) or answer.reference
        if not right:
            return fact, None, _NO_REFERENCE
        return fact, answer._replace(reference=right), ""


def _source_answers(relation: TokenizedRelation, lm: LanguageModel) -> list[list[SourceAnswer]]:
    """Return the answers of each source label; the reference of an answer may be empty.

    An answer has a reference of its own: South Korea lies in Asia, though its label " South" is
    that of South Africa as well.
    """
    source = relation.source
    facts = relation.relation.reference or {}
    rows = answer_tokens(source.knowledge, lm.tokenizer)
    texts = [answer.text for answer in source.knowledge.answers]
    tokens = {text: tuple(ids or ()) for text, ids in zip(texts, rows, strict=True)}
    target_labels: dict[str, set[int]] = {}
    for row, label in enumerate(relation.target.labels):
        for answer in label.answers:
            target_labels.setdefault(answer.identity, set()).add(row)
    answers_of_labels = []
    for index, label in enumerate(source.labels):
        by_text: dict[str, set[int]] = {}
        for answer in label.answers:
            right = by_text.setdefault(answer.text, set())
            for identity in facts.get(answer.identity, ()):
                right |= target_labels.get(identity, set())
        answers_of_labels.append(
            [SourceAnswer(t, tokens[t], index, tuple(sorted(by_text[t]))) for t in by_text]
        )
    return answers_of_labels


def nearness(words: NearestWords | None, relation: TokenizedRelation) -> Tensor | None:
    """Return how near the labels of a relation are in an LM's head: weights like W.

    What pairs labels without any prompt is the null of edits that generalize. None for a head
    without rows; all ranks that share an LM must call it together.
    """
    if words is None:
        return None
    return words.weights(relation.source.token_ids, relation.target.token_ids)


def unknown_subjects(subjects: Collection[str], lm: LanguageModel) -> list[str]:
    """Return the subjects without tokens, or with none but the unknown token."""
    if not subjects:
        return []
    plain = [LONE_SURROGATE.sub("", subject) for subject in subjects]
    rows = lm.tokenizer(plain, add_special_tokens=False)["input_ids"]
    return [
        subject
        for subject, row in zip(subjects, rows, strict=True)
        if not subject.strip()
        or LONE_SURROGATE.search(subject)
        or set(row) <= {lm.tokenizer.unk_token_id}
    ]


# -- where edits come from -------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledEdits:
    """Edits whose answers cover the source domain as evenly as possible.

    Source labels that have a reference are drawn in shuffled rounds. The label of an edit differs
    from what the LM answers for its subject, and the LM's target answer is not right for it.
    """

    n: int  #: Number of edits.
    subjects: Sequence[str] | None = None  #: Candidates; None samples some.
    subject_kind: SubjectKind = "any"  #: Which strings sampled subjects are.
    seed: int = 0  #: Seed of subjects and answers.
    max_per_reference: int | None = None  #: Largest number of edits with the same reference.


@dataclass(frozen=True)
class ListedEdits:
    """Edits that somebody wrote. Each row is an edit or skipped, also where it is above a limit."""

    rows: Sequence[RawEdit]  #: Of a file or a list; each names its own LM, if it has one.
    setting: str = "data.edits_file"  #: Config key of the rows, for messages.
    n: int | None = None  #: Largest number of edits, of which the first are used.
    max_per_reference: int | None = None  #: Largest number of edits with the same reference.
    skipped: Sequence[RawEdit] = ()  #: Rows that were left out before.


EditSource = SampledEdits | ListedEdits


def in_own_lms(source: ListedEdits, pattern: str) -> ListedEdits:
    """Return edits each of which is in an LM of its own; rows without an LM are skipped.

    In the `pattern` of the folders, ``{edit}`` stands for the id of a row.

    Raises:
        ConfigError: Two rows have the same LM.
    """
    by_folder: dict[str, RawEdit] = {}
    skipped = []
    for row in source.rows:
        folder = pattern.replace("{edit}", row.id)
        if row.problem or Path(row.id).name != row.id or row.id in ("", ".."):  # would be elsewhere
            problem = row.problem or "its id is no name of a folder"
            skipped.append(row._replace(problem=problem, rewrites=()))
        elif not Path(folder).exists():
            skipped.append(row._replace(problem="there is no edited LM", rewrites=()))
        elif folder in by_folder:
            raise ConfigError(
                f"{by_folder[folder].where} and {row.where} have one LM, {folder}. Write "
                "data.edited_lms as FOLDER/{edit}, and give each row an `id` of its own, which "
                "replaces {edit}."
            )
        else:
            by_folder[folder] = row._replace(lm=folder)
    return replace(source, rows=list(by_folder.values()), skipped=skipped)


def check_edits(source: EditSource, relation: TokenizedRelation, lm: LanguageModel) -> None:
    """Raise the errors of `resolve_edits` that the tokenizer shows, before weights are read."""
    if isinstance(source, ListedEdits):
        _label_rows(source, relation, lm)
        return
    relation.require_reference()
    for subject in unknown_subjects(source.subjects or (), lm):
        raise SubjectsError(f"data.subjects: {subject!r} has no token of the LM's.")


_Leading = Callable[[Sequence[str]], Iterable[tuple[int | None, int | None]]]
"""Returns the source and the target label that lead for each of some subjects, None if unknown."""


def plan_edits(source: EditSource, relation: TokenizedRelation, lm: LanguageModel) -> ResolvedEdits:
    """Sample edits or find the labels of rows by the tokenizer alone; the LM is not read.

    Nobody knows what the LM answers, so each sampled subject takes the next answer. A warning
    counts skipped rows by reason. Raises the errors of `resolve_edits`.
    """
    return _edits(source, relation, lm, lambda subjects: [(None, None)] * len(subjects))


def resolve_edits(
    source: EditSource, relation: TokenizedRelation, lm: LanguageModel
) -> ResolvedEdits:
    """Sample edits or find the labels of rows, and read the LM's answers before training.

    A warning counts skipped rows by reason.

    Raises:
        KnowledgeError: The relation has no reference, and no row has one.
        SubjectsError: There are too few subjects to sample edits from, one has no token of the LM,
            or no row is an edit.
    """

    def leading(subjects: Sequence[str]) -> Iterable[tuple[int, int]]:
        logits = relation_logits(lm, relation, subjects)
        labels = (side.argmax(1).tolist() for side in (logits.source, logits.target))
        return zip(*labels, strict=True)

    resolved = _edits(source, relation, lm, leading)
    known = [edit for edit in resolved.edits if edit.target_before in edit.reference]
    if known:
        rank_zero_warn(
            f"{len(known)} of {len(resolved.edits)} edits, such as {known[0].subject!r} -> "
            f"{known[0].answer!r}, ask for the target that the LM answers already: they count as "
            "right before, never as generalized."
        )
    return resolved


def _edits(
    source: EditSource, relation: TokenizedRelation, lm: LanguageModel, leading: _Leading
) -> ResolvedEdits:
    if isinstance(source, SampledEdits):
        check_edits(source, relation, lm)
        return ResolvedEdits(relation, _sample(source, relation, lm, leading))
    labelled, skipped, message = _label_rows(source, relation, lm)
    if message:
        rank_zero_warn(f"{source.setting}: {message}")
    rows = [row for row, _ in labelled]
    edits = [
        Edit(row.subject, *answer, *labels)
        for (row, answer), labels in zip(
            labelled, leading([row.subject for row in rows]), strict=True
        )
    ]
    return ResolvedEdits(relation, edits, rows, skipped)


def _label_rows(
    source: ListedEdits, relation: TokenizedRelation, lm: LanguageModel
) -> tuple[list[tuple[RawEdit, SourceAnswer]], list[RawEdit], str]:
    """Return the rows that are edits with their answers, the others, and a message about these."""
    labels = _AnswerLabels(relation, lm)
    subjects = {fact.subject for row in source.rows for fact in row.facts}
    unusable = dict.fromkeys(
        (each for each in subjects if len(each) > _MAX_SUBJECT),
        f"the subject is above {_MAX_SUBJECT:,} characters",
    )
    unusable |= dict.fromkeys(
        unknown_subjects(subjects - unusable.keys(), lm), "the subject has no token of the LM"
    )
    labelled: list[tuple[RawEdit, SourceAnswer]] = []
    skipped = list(source.skipped)
    counts: Counter[tuple[int, ...]] = Counter()
    taught: set[tuple[str, str]] = set()
    for row in source.rows:
        fact, answer, reason = labels.find(row)
        if answer is not None:
            edit = nfc(fact.subject), answer.answer
            if fact.subject in unusable:
                reason = unusable[fact.subject]
            elif row.id and edit in taught:
                reason = "an earlier row teaches the subject this answer"
            elif counts[answer.reference] == source.max_per_reference:
                reason = "above data.max_edits_per_reference"
            elif len(labelled) == source.n:
                reason = "beyond data.n_edits"
        if answer is None or reason:
            skipped.append(fact._replace(problem=reason))
            continue
        taught.add(edit)
        counts[answer.reference] += 1
        labelled.append((fact, answer))
    message = _skip_message(skipped, len(labelled), labels) if skipped else ""
    if not labelled:
        if {row.problem for row in skipped} == {_NO_REFERENCE}:
            relation.require_reference()
        raise SubjectsError(f"{message} No edit is left: name others, or another relation or LM.")
    return labelled, skipped, message


def _skip_message(skipped: Sequence[RawEdit], n_left: int, labels: _AnswerLabels) -> str:
    counts = skip_counts(skipped)
    by_reason = "; ".join(f"{n}: {reason}" for reason, n in counts.items())
    first = next(row for row in skipped if row.problem == next(iter(counts)))
    is_label = not first.answer or nfc(first.answer) in labels.answers
    hint = "" if is_label else suggest(first.answer, labels.answers)
    return (
        f"{len(skipped)} of {len(skipped) + n_left} edits are skipped ({by_reason}), such as "
        f"{first.where}: {first.subject!r} -> {first.answer!r}.{hint}"
    )


def _sample(
    source: SampledEdits, relation: TokenizedRelation, lm: LanguageModel, leading: _Leading
) -> list[Edit]:
    """Sample edits. An answer that fits no subject for a while is kept for the first it fits."""
    subjects = source.subjects
    if subjects is None:
        n = _MAX_CANDIDATES_PER_EDIT * source.n
        sample = sample_up_to(lm.tokenizer, n, seed=source.seed, kind=source.subject_kind)
        unknown = set(unknown_subjects(sample, lm))
        subjects = [subject for subject in sample if subject not in unknown]
    by_label = [
        [answer for answer in answers if answer.reference]
        for answers in _source_answers(relation, lm)
    ]
    by_label = [answers for answers in by_label if answers]
    waiting: list[SourceAnswer] = []
    edits: list[Edit] = []
    counts: Counter[tuple[int, ...]] = Counter()
    n_rounds = 0
    for first in range(0, len(subjects), source.n):  # so that few more prompts run than needed
        part = subjects[first : first + source.n]
        for subject, labels in zip(part, leading(part), strict=True):
            answer = _take_new(waiting, *labels)
            if answer is None:
                order = np.random.default_rng([source.seed, n_rounds]).permutation(len(by_label))
                # Answers that share a label take turns, one per round.
                fresh = [by_label[i][n_rounds % len(by_label[i])] for i in order]
                answer = _take_new(fresh, *labels)
                if answer is None:
                    continue
                waiting += fresh
                n_rounds += 1
            edits.append(Edit(subject, *answer, *labels))
            if len(edits) == source.n:
                return edits
            reference = answer.reference
            counts[reference] += 1
            if counts[reference] == source.max_per_reference:
                waiting = [each for each in waiting if each.reference != reference]
                by_label = [[x for x in part if x.reference != reference] for part in by_label]
                by_label = [answers for answers in by_label if answers]
    limit = ", or raise data.max_edits_per_reference" if source.max_per_reference else ""
    raise SubjectsError(
        f"data.n_edits asks for {source.n} edits, but of {len(subjects)} subjects only "
        f"{len(edits)} can be taught something new about {relation.name}. Lower data.n_edits, or "
        f"name more subjects{limit}."
    )


def _take_new(
    answers: list[SourceAnswer], source: int | None, target: int | None
) -> SourceAnswer | None:
    for index, answer in enumerate(answers):
        if answer.label != source and target not in answer.reference:
            return answers.pop(index)
    return None
