"""Edits: read and resolved as a user wrote them, or sampled so that each asks for something new."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.data.files import read_rows
from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.knowledge import Domain, TokenizedRelation, answer_tokens
from lincorr_lightning.knowledge.yaml_file import suggest
from lincorr_lightning.lm.encoding import LONE_SURROGATE
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to

_MAX_CANDIDATES_PER_EDIT = 20  # some subjects cannot be taught anything new
REPAIRED_SUBJECTS = "repaired_subjects"
"""Key of a repaired LM's config.json: the subjects that it was repaired with."""
SEPARATOR = "|"  # of the target answers of a reference
_REQUIRED, _OPTIONAL = ("subject", "answer"), ("reference",)


class Question(NamedTuple):
    """A complete prompt that asks for a target, and the right answers that a file names."""

    prompt: str
    answers: tuple[str, ...]


class RawEdit(NamedTuple):
    """A row of a file as its author wrote it.

    A case that rewrites several facts is one row: the only one of `rewrites` whose answer is a
    label of the source is the edit.
    """

    where: str  #: File and row, for messages.
    subject: str
    answer: str
    reference: tuple[str, ...] = ()  #: Right target answers; empty for the relation's own.
    id: str = ""  #: Name of the row in the file, else its number from 0.
    prompts: tuple[str, ...] = ()  #: Complete prompts of the source.
    questions: tuple[Question, ...] = ()  #: Of what follows from the edit, the target or not.
    rewrites: tuple[RawEdit, ...] = ()


class Skipped(NamedTuple):
    """A row that is no edit of this LM and relation."""

    where: str
    subject: str
    answer: str
    reason: str  #: One of few, by which rows are counted.


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
    source_before: int  #: Index of the source label that leads before training.
    target_before: int  #: Index of the target label that leads before training.


def reference_mask(edits: Sequence[Edit], n_target: int) -> Tensor:
    """Return the target labels in each edit's reference, ``(n, n_target)`` bool."""
    mask = torch.zeros(len(edits), n_target, dtype=torch.bool)
    for row, edit in enumerate(edits):
        mask[row, list(edit.reference)] = True
    return mask


def prompts_in_context(edits: Sequence[Edit], relation: TokenizedRelation) -> list[str]:
    """Return prompts such as ``X lives in the city of Paris. X lives in the country of``."""
    state, prompt = relation.relation.source.statement, relation.relation.target.prompt
    return [f"{state(edit.subject, edit.answer)}. {prompt(edit.subject)}" for edit in edits]


# -- sampling --------------------------------------------------------------------------------------


def sample_edits(
    relation: TokenizedRelation,
    lm: LanguageModel,
    n: int,
    subjects: Sequence[str] | None = None,
    seed: int = 0,
    labels: Collection[int] | None = None,
    setting: str = "data.n_edits",
    max_per_reference: int | None = None,
) -> list[Edit]:
    """Sample edits whose answers cover the source domain as evenly as possible.

    Source labels that have a reference are drawn in shuffled rounds. The label of an edit differs
    from what the LM answers for its subject, and the LM's target answer is not right for it.
    Answers that fit no subject for a while are kept for the first subject that they fit.

    `subjects` are candidates, None samples some; `labels` are the source labels that may be taught,
    None allows all; `setting` is the config key of `n`; `max_per_reference` limits edits.
    """
    relation.require_reference()
    pool = sample_candidates(lm, n, seed) if subjects is None else subjects
    by_label = [
        taught
        for label, answers in enumerate(_source_answers(relation, lm))
        if labels is None or label in labels
        if (taught := [answer for answer in answers if answer.reference])
    ]
    kept: list[SourceAnswer] = []
    edits: list[Edit] = []
    counts: Counter[tuple[int, ...]] = Counter()
    n_rounds = 0
    for first in range(0, len(pool), n):  # in chunks, so that few more prompts run than needed
        part = pool[first : first + n]
        leading = (logits.argmax(1).tolist() for logits in edit_logits(relation, lm, part))
        for subject, source, target in zip(part, *leading, strict=True):
            answer = _take_new(kept, source, target)
            if answer is None:
                order = np.random.default_rng([seed, n_rounds]).permutation(len(by_label))
                # Answers that share a label take turns, one per round.
                fresh = [by_label[i][n_rounds % len(by_label[i])] for i in order]
                answer = _take_new(fresh, source, target)
                if answer is None:
                    continue
                kept += fresh
                n_rounds += 1
            edits.append(Edit(subject, *answer, source, target))
            if len(edits) == n:
                return edits
            full = answer.reference
            counts[full] += 1
            if counts[full] == max_per_reference:
                kept = [one for one in kept if one.reference != full]
                rest = ([one for one in answers if one.reference != full] for answers in by_label)
                by_label = [answers for answers in rest if answers]
    raise SubjectsError(
        f"{setting} asks for {n} edits, but of {len(pool)} subjects only {len(edits)} can be "
        f"taught something new about {relation.name}. Lower {setting}, or name more subjects"
        f"{'' if max_per_reference is None else ', or raise data.max_edits_per_reference'}."
    )


def _take_new(answers: list[SourceAnswer], source: int, target: int) -> SourceAnswer | None:
    """Take the first answer that changes these labels, which lead now, out of the list."""
    for index, answer in enumerate(answers):
        if answer.label != source and target not in answer.reference:
            return answers.pop(index)
    return None


def sample_candidates(
    lm: LanguageModel, n: int, seed: int, kind: SubjectKind = "any", excluding: Collection[str] = ()
) -> list[str]:
    """Sample subjects for n edits, if there are enough, without those of a repair of the LM."""
    excluding = repaired_subjects(lm).union(excluding)
    pool = sample_up_to(lm.tokenizer, _MAX_CANDIDATES_PER_EDIT * n, excluding, seed, kind)
    unknown = set(_unknown_subjects(pool, lm))
    return [subject for subject in pool if subject not in unknown]


def edit_logits(
    relation: TokenizedRelation, lm: LanguageModel, subjects: Sequence[str]
) -> tuple[Tensor, Tensor]:
    """Return the source and target logits of each subject, ``(n, n_labels)``, on the CPU."""
    source = lm.domain_logits(relation.source_prompts(subjects), relation.source.token_ids)
    target = lm.domain_logits(relation.target_prompts(subjects), relation.target.token_ids)
    return source.cpu(), target.cpu()


# -- reading ---------------------------------------------------------------------------------------


def read_edits(
    source: str | Path | Iterable[Mapping[str, Any]],
    *,
    subject_key: str = "subject",
    answer_key: str = "answer",
) -> list[RawEdit]:
    """Read the rows of a file of edits, or of a list.

    A ``.jsonl`` file has an object per line, a ``.csv`` file a header; each edit has a subject and
    an answer, by these keys, and ``reference`` where it is not the relation's (a list, or one text
    with ``|`` between its answers). Other fields are ignored.
    """
    keys = subject_key, answer_key
    if isinstance(source, (str, Path)):
        name, entries = str(source), read_rows(source, "edits", keys)
    else:
        name = "the list of edits"
        entries = ((f"edit {number}", entry) for number, entry in enumerate(source, 1))
    raw = [_checked(entry, where, n, keys) for n, (where, entry) in enumerate(entries)]
    if not raw:
        raise SubjectsError(f"{name} has no edit. Write at least one, with {' and '.join(keys)}.")
    return raw


def _checked(entry: Any, where: str, number: int, keys: tuple[str, str]) -> RawEdit:
    if not isinstance(entry, Mapping):
        needed = '{"subject": "Ada", "answer": "Paris"}'
        raise SubjectsError(f"{where}: an object is needed, such as {needed}, not {entry!r}.")
    fields = (*keys, "reference")
    for name in entry:
        meant = get_close_matches(str(name), fields, 1, 0.8) if name not in fields else []
        # Silently ignored, a misspelled reference would be replaced by the relation's own.
        if meant and meant[0] not in entry:
            raise SubjectsError(f"{where}: there is no field {name!r}. Did you mean {meant[0]!r}?")
    subject, answer = (_text(entry.get(name), name, where) for name in keys)
    reference = entry.get("reference")
    if isinstance(reference, str):
        reference = reference.split(SEPARATOR) if reference.strip() else None
    parts = reference if isinstance(reference, list) else [] if reference is None else [reference]
    right = tuple(_text(part, "reference", where) for part in parts)
    row = next((entry[key] for key in ("case_id", "id") if entry.get(key) is not None), number)
    return RawEdit(where, subject, answer, right, str(row))


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        shown = "missing" if value is None else repr(value)
        raise SubjectsError(f"{where}: {name!r} is {shown}; it must be a non-empty text.")
    return value.strip()


def named_subjects(source: str | Path | Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the subjects of all rows of a file or list of edits."""
    return [fact.subject for row in read_edits(source) for fact in row.rewrites or (row,)]


# -- resolving -------------------------------------------------------------------------------------


class ResolvedEdits(NamedTuple):
    """The edits among the rows of a file, in their order, and the rows that are none."""

    edits: list[Edit]
    raw: list[RawEdit]  #: The row of each edit; its questions ask for the reference alone.
    skipped: list[Skipped]


def resolve_edits(
    rows: Sequence[RawEdit],
    relation: TokenizedRelation,
    lm: LanguageModel,
    setting: str = "data.edits_file",
    n_edits: int | None = None,
    max_per_reference: int | None = None,
) -> ResolvedEdits:
    """Find the labels of the rows of a file, and the LM's answers before training.

    Edits and skipped rows are together as many as `rows`. Rows of subjects that the LM was repaired
    with are skipped, and so are those above the limits. A warning counts skipped rows by reason;
    `setting` is the config key of the file.

    Raises:
        SubjectsError: No edit is left.
    """
    repaired = repaired_subjects(lm)
    labelled, skipped = label_rows(rows, relation, lm, repaired, n_edits, max_per_reference)
    if skipped:
        rank_zero_warn(_skips(rows, skipped, relation, lm, setting))
    by_subject: dict[str, list[RawEdit]] = {}
    for row, _ in labelled:
        by_subject.setdefault(row.subject, []).append(row)
    several = [group for group in by_subject.values() if len(group) > 1]
    if several:
        one, other = several[0][:2]
        rank_zero_warn(
            f"{len(several)} of {len(by_subject)} subjects are taught several answers, such as "
            f"{one.subject!r}: {one.answer!r} ({one.where}) and {other.answer!r} ({other.where}). "
            "Each is a separate edit; with model.protocol joint, they contradict each other."
        )
    edits = _with_leading([(row.subject, answer) for row, answer in labelled], relation, lm)
    return ResolvedEdits(edits, [row for row, _ in labelled], skipped)


def edits_in_relation(
    rows: Sequence[RawEdit], relation: TokenizedRelation, lm: LanguageModel
) -> list[Edit]:
    """Return the edits of an earlier run in the labels of a relation of their source.

    All are kept, or a `SubjectsError` is raised: others refer to them by their position.
    """
    labels, answers = _Labels(relation, lm), []
    for row in rows:
        _, answer, reason = labels.find(row, may_share_token=True)
        if reason == _NO_REFERENCE:
            relation.require_reference()
        if reason:
            raise SubjectsError(f"{row.where}: {row.subject!r} -> {row.answer!r}: {reason}.")
        answers.append((row.subject, answer))
    return _with_leading(answers, relation, lm)


def _with_leading(
    answers: Sequence[tuple[str, SourceAnswer]], relation: TokenizedRelation, lm: LanguageModel
) -> list[Edit]:
    """Return the edits of subjects, with the LM's answers before training."""
    subjects = [subject for subject, _ in answers]
    leading = (logits.argmax(1).tolist() for logits in edit_logits(relation, lm, subjects))
    rows = zip(answers, *leading, strict=True)
    return [Edit(subject, *answer, *labels) for (subject, answer), *labels in rows]


def label_rows(
    rows: Sequence[RawEdit],
    relation: TokenizedRelation,
    lm: LanguageModel,
    repaired: Collection[str] = (),
    n_edits: int | None = None,
    max_per_reference: int | None = None,
) -> tuple[list[tuple[RawEdit, SourceAnswer]], list[Skipped]]:
    """Return the rows that are edits with their answers, and the others; needs no weights.

    A `SubjectsError` if none is an edit, and a `KnowledgeError` if only a reference is missing.
    """
    labels = _Labels(relation, lm)
    facts = [fact for row in rows for fact in (row.rewrites or (row,))]
    unknown = {*_unknown_subjects([fact.subject for fact in facts], lm)}
    labelled: list[tuple[RawEdit, SourceAnswer]] = []
    skipped: list[Skipped] = []
    counts: Counter[tuple[int, ...]] = Counter()
    taught: set[tuple[str, str]] = set()
    for row in rows:
        fact, answer, reason = labels.find(row)
        key = _nfc(fact.subject), answer.answer
        if reason:
            pass
        elif fact.subject in unknown:
            reason = "the subject has no token of the LM"
        elif key in taught:
            reason = "the subject is taught this answer by an earlier row"
        elif fact.subject in repaired:
            reason = "the subject was an example of the LM's repair"
        elif counts[answer.reference] == max_per_reference:
            reason = "above data.max_edits_per_reference"
        elif len(labelled) == n_edits:
            reason = "beyond data.n_edits"
        if reason:
            skipped.append(Skipped(row.where, fact.subject, fact.answer, reason))
            continue
        taught.add(key)
        counts[answer.reference] += 1
        labelled.append((fact, answer))
    if not labelled:
        if {one.reason for one in skipped} == {_NO_REFERENCE}:
            relation.require_reference()
        raise SubjectsError(_skips(rows, skipped, relation, lm))
    return labelled, skipped


_NO_REFERENCE = "the reference of the answer names no label of the target; add a field `reference`"
_NOTHING = SourceAnswer("", (), 0, ())


class _Labels:
    """Finds the label and the reference of what a row names, compared in NFC."""

    def __init__(self, relation: TokenizedRelation, lm: LanguageModel) -> None:
        self.source, self.target = relation.source, relation.target
        by_text = _by_text(_source_answers(relation, lm), relation.source)
        self.answers = {_nfc(text): answer for text, answer in by_text.items()}
        # Labels by the texts of their answers, and by their own.
        every = enumerate(relation.target.labels)
        targets = {_nfc(answer.text): i for i, label in every for answer in label.answers}
        self.targets = targets | {_nfc(text): i for i, text in enumerate(relation.target.texts)}
        self._reasons = {_nfc(one.answer.text): one.reason for one in relation.source.dropped}

    def find(
        self, row: RawEdit, may_share_token: bool = False
    ) -> tuple[RawEdit, SourceAnswer, str]:
        """Return what a row edits, and with which answer, or why it is no edit.

        An answer of several tokens is scored by its first one, which no other answer may share
        unless the row has a reference of its own.
        """
        fitting = [one for one in row.rewrites or (row,) if _nfc(one.answer) in self.answers]
        if len(fitting) != 1:
            (fact, *others) = fitting or row.rewrites or (row,)
            if fitting:
                return fact, _NOTHING, f"{len(fitting)} of its rewrites are answers of the source"
            if others:
                return fact, _NOTHING, "none of its rewrites is an answer of the source"
            why = self._reasons.get(_nfc(fact.answer))
            name = self.source.knowledge.name
            why = f"no label in this LM's vocabulary ({why})" if why else f"no answer of {name}"
            return fact, _NOTHING, f"the answer is {why}"
        (fact,) = fitting
        answer = self.answers[_nfc(fact.answer)]
        meanings = {one.identity for one in self.source.labels[answer.label].answers}
        named = self._labels(fact.reference)
        if None in named:
            return fact, answer, f"its reference is no label of {self.target.knowledge.name}"
        asked = {self._labels(question.answers) - {None} for question in fact.questions}
        if not named and len(asked) == 1:
            (named,) = asked  # one question, in several wordings
        if named:
            reference = tuple(sorted(label for label in named if label is not None))
            answer = answer._replace(reference=reference)
        elif len(answer.tokens) > 1 < len(meanings) and not may_share_token:
            return fact, answer, "other answers share the first token of the answer"
        if not answer.reference:
            return fact, answer, _NO_REFERENCE
        right = {*answer.reference}
        questions = (one for one in fact.questions if self._labels(one.answers) & right)
        return fact._replace(questions=tuple(questions)), answer, ""

    def _labels(self, texts: Iterable[str]) -> frozenset[int | None]:
        return frozenset(self.targets.get(_nfc(text)) for text in texts)

    def hint(self, row: RawEdit) -> str:
        """Return labels that a row which names none may mean; empty if it names some."""
        for known, texts in ((self.answers, [row.answer]), (self.targets, row.reference)):
            for text in texts:
                if _nfc(text) not in known and not row.rewrites:
                    return suggest(text, known, f" Some are {', '.join(list(known)[:5])}.")
        return ""


def _skips(
    rows: Sequence[RawEdit],
    skipped: Sequence[Skipped],
    relation: TokenizedRelation,
    lm: LanguageModel,
    setting: str = "",
) -> str:
    """Return how many rows are skipped, and why, with an example of the most frequent reason."""
    counts = skip_counts(skipped)
    reasons = "; ".join(f"{n}: {reason}" for reason, n in counts.items())
    first = next(one for one in skipped if one.reason == next(iter(counts)))
    row = next(row for row in rows if row.where == first.where)
    return (
        f"{len(skipped)} of {len(rows)} edits{f' of {setting}' if setting else ''} are skipped "
        f"({reasons}), such as {first.where}: {first.subject!r} -> {first.answer!r}."
        f"{_Labels(relation, lm).hint(row)}"
    )


def skip_counts(skipped: Sequence[Skipped]) -> dict[str, int]:
    """Return the number of skipped rows by reason, the most frequent one first."""
    return dict(Counter(one.reason for one in skipped).most_common())


_nfc = partial(unicodedata.normalize, "NFC")


def limit_per_reference(edits: list[Edit], limit: int | None, setting: str) -> list[Edit]:
    """Return the first edits of each reference, and warn of the others; None returns all."""
    counts: Counter[tuple[int, ...]] = Counter()
    kept = []
    for edit in edits:
        counts[edit.reference] += 1
        if limit is None or counts[edit.reference] <= limit:
            kept.append(edit)
    if len(kept) < len(edits):
        rank_zero_warn(
            f"{len(edits) - len(kept)} of {len(edits)} edits of {setting} are left out: their "
            f"references have more than {limit} (data.max_edits_per_reference)."
        )
    return kept


def repaired_subjects(lm: LanguageModel) -> frozenset[str]:
    """Return the subjects that a loaded LM was repaired with (`Repair`); empty if none."""
    return frozenset(getattr(lm.model.config, REPAIRED_SUBJECTS, ()))


def without_repaired(subjects: Sequence[str], lm: LanguageModel, setting: str) -> list[str]:
    """Return the subjects of a setting without those that the LM was repaired with, and warn."""
    examples = repaired_subjects(lm)
    repaired = [subject for subject in subjects if subject in examples]
    kept = [subject for subject in subjects if subject not in examples]
    if repaired:
        message = (
            f"{len(repaired)} of {len(subjects)} subjects of {setting}, such as {repaired[0]!r}, "
            f"were examples of the repair of {lm.config.name_or_path}"
        )
        if not kept:
            raise SubjectsError(f"{message}. Name other subjects.")
        rank_zero_warn(f"{message}. They are left out of {setting}.")
    return kept


def refuse_unknown_subjects(where: Mapping[str, str], lm: LanguageModel) -> None:
    """Refuse subjects that have no token known to the LM; `where` says where each is named."""
    for subject in _unknown_subjects(where, lm):
        raise SubjectsError(f"{where[subject]}: the subject {subject!r} has no token of the LM's.")


def _unknown_subjects(subjects: Collection[str], lm: LanguageModel) -> list[str]:
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


def _source_answers(relation: TokenizedRelation, lm: LanguageModel) -> list[list[SourceAnswer]]:
    """Return the answers of each source label; the reference of an answer may be empty.

    An answer has a reference of its own: South Korea lies in Asia, though its label " South" is
    that of South Africa as well.
    """
    source, reference = relation.source, relation.relation.reference or {}
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
            for identity in reference.get(answer.identity, ()):
                right |= target_labels.get(identity, set())
        answers = [SourceAnswer(t, tokens[t], index, tuple(sorted(by_text[t]))) for t in by_text]
        answers_of_labels.append(answers)
    return answers_of_labels


def _by_text(
    answers_of_labels: Sequence[Sequence[SourceAnswer]], domain: Domain
) -> dict[str, SourceAnswer]:
    """Map each text to what it teaches: an answer, or a label as tables show it."""
    known = {answer.answer: answer for answers in answers_of_labels for answer in answers}
    for index, (label, answers) in enumerate(zip(domain.labels, answers_of_labels, strict=True)):
        reference = tuple(sorted({right for answer in answers for right in answer.reference}))
        whole = SourceAnswer(label.text, (label.token_id,), index, reference)
        # The label of one answer is that answer, as the tokenizer spells it.
        known.setdefault(label.text, answers[0] if len(answers) == 1 else whole)
    return known
