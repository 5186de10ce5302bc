"""Edits: resolved as a user wrote them, or sampled so that each teaches something new."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.finetune.edit_files import RawEdit, nfc
from lincorr_lightning.functional.precision import neighbor_weights
from lincorr_lightning.knowledge import TokenizedRelation, answer_tokens
from lincorr_lightning.knowledge.yaml_file import suggest
from lincorr_lightning.linear_map.layout import relation_logits
from lincorr_lightning.lm.encoding import LONE_SURROGATE
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import SubjectKind, sample_up_to

_MAX_CANDIDATES_PER_EDIT = 20  # some subjects cannot be taught anything new


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


def sample_edits(
    relation: TokenizedRelation,
    lm: LanguageModel,
    n: int,
    subjects: Sequence[str] | None = None,
    seed: int = 0,
    max_per_reference: int | None = None,
) -> list[Edit]:
    """Sample edits whose answers cover the source domain as evenly as possible.

    Source labels that have a reference are drawn in shuffled rounds. The label of an edit differs
    from what the LM answers for its subject, and the LM's target answer is not right for it.
    Answers that fit no subject for a while are kept for the first subject that they fit.

    `subjects` are candidates, None samples some; `max_per_reference` limits the edits of each
    reference.
    """
    relation.require_reference()
    pool = sample_candidates(lm, n, seed) if subjects is None else subjects
    by_label = [
        taught
        for answers in _source_answers(relation, lm)
        if (taught := [answer for answer in answers if answer.reference])
    ]
    kept: list[SourceAnswer] = []
    edits: list[Edit] = []
    counts: Counter[tuple[int, ...]] = Counter()
    n_rounds = 0
    for first in range(0, len(pool), n):  # in chunks, so that few more prompts run than needed
        part = pool[first : first + n]
        leading = (logits.argmax(1).tolist() for logits in relation_logits(lm, relation, part))
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
    limit = "" if max_per_reference is None else ", or raise data.max_edits_per_reference"
    raise SubjectsError(
        f"data.n_edits asks for {n} edits, but of {len(pool)} subjects only {len(edits)} can be "
        f"taught something new about {relation.name}. Lower data.n_edits, or name more subjects"
        f"{limit}."
    )


def _take_new(answers: list[SourceAnswer], source: int, target: int) -> SourceAnswer | None:
    for index, answer in enumerate(answers):
        if answer.label != source and target not in answer.reference:
            return answers.pop(index)
    return None


def sample_candidates(lm: LanguageModel, n: int, seed: int, kind: SubjectKind = "any") -> list[str]:
    """Sample subjects for n edits, if there are enough."""
    pool = sample_up_to(lm.tokenizer, _MAX_CANDIDATES_PER_EDIT * n, seed=seed, kind=kind)
    unknown = set(unknown_subjects(pool, lm))
    return [subject for subject in pool if subject not in unknown]


class ResolvedEdits(NamedTuple):
    """The edits among the rows of a file, in their order, and the rows that are none."""

    edits: list[Edit]
    rows: list[RawEdit]  #: The row of each edit; its questions ask for the reference alone.
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

    Each row is an edit or skipped, also where it is above a limit. A warning counts skipped rows by
    reason; `setting` is the config key of the rows in messages. A `SubjectsError` if no edit is
    left.
    """
    labelled, skipped, message = label_rows(rows, relation, lm, n_edits, max_per_reference)
    if skipped:
        rank_zero_warn(f"{setting}: {message}")
    counts = Counter(row.subject for row, _ in labelled)
    if several := [subject for subject, n in counts.items() if n > 1]:
        rank_zero_warn(
            f"{setting}: subjects that are taught several answers: {len(several)}, such as "
            f"{several[0]!r}. In one LM, these contradict each other."
        )
    kept = [row for row, _ in labelled]
    leading = relation_logits(lm, relation, [row.subject for row in kept])
    pairs = zip(labelled, *(logits.argmax(1).tolist() for logits in leading), strict=True)
    edits = [Edit(row.subject, *answer, *labels) for (row, answer), *labels in pairs]
    return ResolvedEdits(edits, kept, skipped)


def label_rows(
    rows: Sequence[RawEdit],
    relation: TokenizedRelation,
    lm: LanguageModel,
    n_edits: int | None = None,
    max_per_reference: int | None = None,
) -> tuple[list[tuple[RawEdit, SourceAnswer]], list[Skipped], str]:
    """Return the rows that are edits with their answers, the others, and a message about these.

    Needs no weights of the LM. For arguments and errors see `resolve_edits`.
    """
    labels = _Labels(relation, lm)
    subjects = [fact.subject for row in rows for fact in row.rewrites or (row,)]
    unknown = set(unknown_subjects(subjects, lm))
    labelled: list[tuple[RawEdit, SourceAnswer]] = []
    skipped: list[Skipped] = []
    counts: Counter[tuple[int, ...]] = Counter()
    taught: set[tuple[str, str]] = set()
    firsts: dict[str, RawEdit] = {}  # by reason
    for row in rows:
        fact, answer, reason = labels.find(row)
        edit = nfc(fact.subject), answer.answer
        reasons = {
            reason: bool(reason),
            "the subject has no token of the LM": fact.subject in unknown,
            "an earlier row teaches the subject this answer": bool(row.id) and edit in taught,
            "above data.max_edits_per_reference": counts[answer.reference] == max_per_reference,
            "beyond data.n_edits": len(labelled) == n_edits,
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            firsts.setdefault(reason, fact)
            skipped.append(Skipped(row.where, fact.subject, fact.answer, reason))
            continue
        taught.add(edit)
        counts[answer.reference] += 1
        labelled.append((fact, answer))
    by_reason, message = skip_counts(skipped), ""
    if skipped:
        named = "; ".join(f"{n}: {reason}" for reason, n in by_reason.items())
        first = firsts[next(iter(by_reason))]
        message = (
            f"{len(skipped)} of {len(rows)} edits are skipped ({named}), such as {first.where}: "
            f"{first.subject!r} -> {first.answer!r}.{labels.hint(first)}"
        )
    if not labelled:
        if {*by_reason} == {_NO_REFERENCE}:
            relation.require_reference()
        raise SubjectsError(f"{message} No edit is left: name others, or another relation or LM.")
    return labelled, skipped, message


_NO_REFERENCE = "the reference of its answer names no label; add a field `reference`"


class _Labels:
    """Finds the label and the reference of what a row names, compared in NFC."""

    def __init__(self, relation: TokenizedRelation, lm: LanguageModel) -> None:
        self.source, self.target = relation.source, relation.target
        by_label = _source_answers(relation, lm)
        self.answers = {nfc(one.answer): one for answers in by_label for one in answers}
        for index, (label, answers) in enumerate(zip(self.source.labels, by_label, strict=True)):
            right = tuple(sorted({right for one in answers for right in one.reference}))
            whole = SourceAnswer(label.text, (label.token_id,), index, right)
            # As tables show it: the label of one answer is that answer, as the tokenizer spells it.
            self.answers.setdefault(nfc(label.text), answers[0] if len(answers) == 1 else whole)
        every = enumerate(self.target.labels)
        targets = {nfc(answer.text): i for i, label in every for answer in label.answers}
        self.targets = targets | {nfc(text): i for i, text in enumerate(self.target.texts)}
        self._dropped = {nfc(one.answer.text): one.reason for one in self.source.dropped}

    def find(self, row: RawEdit) -> tuple[RawEdit, SourceAnswer, str]:
        """Return what a row edits, and with which answer, or why it is no edit."""
        name = self.source.knowledge.name
        facts = row.rewrites or (row,)
        fitting = [fact for fact in facts if nfc(fact.answer) in self.answers]
        (fact, *others) = fitting or facts
        if fact.problem:
            return fact, SourceAnswer("", (), 0, ()), fact.problem
        answer = self.answers.get(nfc(fact.answer), SourceAnswer("", (), 0, ()))
        if others:
            return fact, answer, f"{len(fitting)} of its several rewrites have an answer of {name}"
        if not fitting:
            why = self._dropped.get(nfc(fact.answer), f"not one of {name}")
            return fact, answer, f"its answer is no label of this LM ({why})"
        named = self._labels(fact.reference)
        if None in named:
            return fact, answer, f"its reference is no label of {self.target.knowledge.name}"
        asked = {self._labels(question.answers) - {None} for question in fact.questions}
        if not named and len(asked) == 1:
            (named,) = asked  # one question, in several wordings
        meanings = {one.identity for one in self.source.labels[answer.label].answers}
        if row.id and not named and len(answer.tokens) > 1 and len(meanings) > 1:
            token = self.source.texts[answer.label]
            return fact, answer, f"other answers share the first token of its answer, {token!r}"
        right = tuple(sorted(label for label in named if label is not None)) or answer.reference
        questions = [one for one in fact.questions if self._labels(one.answers).intersection(right)]
        fact = fact._replace(questions=tuple(questions))
        return fact, answer._replace(reference=right), "" if right else _NO_REFERENCE

    def _labels(self, texts: Iterable[str]) -> frozenset[int | None]:
        return frozenset(self.targets.get(nfc(text)) for text in texts)

    def hint(self, row: RawEdit) -> str:
        """Return labels that a skipped row may mean if it names none."""
        for known, texts in ((self.answers, [row.answer]), (self.targets, row.reference)):
            for text in texts:
                if text and nfc(text) not in known:
                    return suggest(text, known)
        return ""


def skip_counts(skipped: Sequence[Skipped]) -> dict[str, int]:
    """Return the number of skipped rows by reason, the most frequent one first."""
    return dict(Counter(one.reason for one in skipped).most_common())


def vocabulary_nearness(lm: LanguageModel, relation: TokenizedRelation) -> Tensor | None:
    """Return how near the labels are in an LM's head, see `neighbor_weights`: weights like W.

    What pairs labels without any prompt is the null of edits that generalize. None for a head
    without rows; all ranks that share an LM must call it together.
    """
    n, (source, target) = len(relation.source.labels), (relation.source, relation.target)
    rows = lm.head_rows([*source.token_ids, *target.token_ids])
    return None if rows is None else neighbor_weights(rows[:n], rows[n:])


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
