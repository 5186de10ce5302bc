"""Edits: read and resolved as a user wrote them, or sampled so that each asks for something new."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
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


class RawEdit(NamedTuple):
    """An edit as a user wrote it, and where; `reference` is empty for the relation's own."""

    where: str
    subject: str
    answer: str
    reference: tuple[str, ...] = ()


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


def read_edits(edits: str | Path | Iterable[Mapping[str, Any]]) -> list[RawEdit]:
    """Read edits from a file, or from a list; warn of subjects that have several answers.

    A ``.jsonl`` file has an object per line, a ``.csv`` file a header; each edit has ``subject``
    and ``answer``, and ``reference`` where it is not the relation's (a list, or one text with ``|``
    between its answers). Other fields are ignored.
    """
    if isinstance(edits, (str, Path)):
        name, entries = str(edits), read_rows(edits, "edits", _REQUIRED)
    else:
        name = "the list of edits"
        entries = ((f"edit {number}", entry) for number, entry in enumerate(edits, 1))
    by_subject: dict[str, dict[str, RawEdit]] = {}
    raw = []
    for where, entry in entries:
        edit = _checked(entry, where)
        first = by_subject.setdefault(edit.subject, {}).setdefault(edit.answer, edit)
        if first is not edit:
            raise SubjectsError(
                f"{where}: {edit.subject!r} is taught {edit.answer!r} already, at {first.where}."
            )
        raw.append(edit)
    if not raw:
        raise SubjectsError(f"{name} has no edit. Write at least one, with subject and answer.")
    several = [list(group.values()) for group in by_subject.values() if len(group) > 1]
    if several:
        one, other = several[0][:2]
        rank_zero_warn(
            f"{len(several)} of {len(by_subject)} subjects are taught several answers, such as "
            f"{one.subject!r}: {one.answer!r} ({one.where}) and {other.answer!r} ({other.where}). "
            "Each is a separate edit; with model.protocol joint, they contradict each other."
        )
    return raw


def _checked(entry: Any, where: str) -> RawEdit:
    if not isinstance(entry, Mapping):
        needed = '{"subject": "Ada", "answer": "Paris"}'
        raise SubjectsError(f"{where}: an object is needed, such as {needed}, not {entry!r}.")
    fields = (*_REQUIRED, *_OPTIONAL)
    for name in entry:
        meant = get_close_matches(str(name), fields, 1, 0.8) if name not in fields else []
        # Silently ignored, a misspelled reference would be replaced by the relation's own.
        if meant and meant[0] not in entry:
            raise SubjectsError(f"{where}: there is no field {name!r}. Did you mean {meant[0]!r}?")
    subject, answer = (_text(entry.get(name), name, where) for name in _REQUIRED)
    reference = entry.get("reference")
    if isinstance(reference, str):
        reference = reference.split(SEPARATOR) if reference.strip() else None
    parts = reference if isinstance(reference, list) else [] if reference is None else [reference]
    return RawEdit(where, subject, answer, tuple(_text(part, "reference", where) for part in parts))


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        shown = "missing" if value is None else repr(value)
        raise SubjectsError(f"{where}: {name!r} is {shown}; it must be a non-empty text.")
    return value.strip()


# -- resolving -------------------------------------------------------------------------------------


def resolve_edits(
    edits: Sequence[RawEdit],
    relation: TokenizedRelation,
    lm: LanguageModel,
    setting: str | None = None,
) -> list[Edit]:
    """Find the labels of edits that a user wrote, and the LM's answers before training.

    If `setting`, their config key, is given, those of subjects that the LM was repaired with are
    left out, see `without_repaired`.
    """
    if setting is not None:
        kept = set(without_repaired([edit.subject for edit in edits], lm, setting))
        edits = [edit for edit in edits if edit.subject in kept]
    answers = resolve_labels(edits, relation, lm)
    subjects = [edit.subject for edit in edits]
    leading = (logits.argmax(1).tolist() for logits in edit_logits(relation, lm, subjects))
    rows = zip(subjects, answers, *leading, strict=True)
    return [Edit(subject, *answer, *labels) for subject, answer, *labels in rows]


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


def resolve_labels(
    edits: Sequence[RawEdit], relation: TokenizedRelation, lm: LanguageModel
) -> list[SourceAnswer]:
    """Return the answer of each edit, with its label; needs no weights of the LM."""
    refuse_unknown_subjects({edit.subject: edit.where for edit in edits}, lm)
    known = _by_text(_source_answers(relation, lm), relation.source)
    labels = relation.target.labels
    # Labels by the texts of their answers, and by their own.
    targets = {answer.text: i for i, label in enumerate(labels) for answer in label.answers}
    targets |= {text: i for i, text in enumerate(relation.target.texts)}
    unknown = [edit for edit in edits if edit.answer not in known]
    if unknown:
        named = (f"{x.where}: {_no_label(x.answer, relation.source, known)}" for x in unknown[:5])
        more = f" {len(unknown) - 5} more answers are no labels." if len(unknown) > 5 else ""
        raise SubjectsError(" ".join(named) + more)
    resolved = []
    for edit in edits:
        answer = known[edit.answer]
        if edit.reference:
            for text in set(edit.reference) - targets.keys():
                problem = _no_label(text, relation.target, targets)
                raise SubjectsError(f"{edit.where}: reference: {problem}")
            reference = {targets[text] for text in edit.reference}
            answer = answer._replace(reference=tuple(sorted(reference)))
        elif not answer.reference:
            relation.require_reference()
            raise SubjectsError(
                f"{edit.where}: the reference of {edit.answer!r} names no "
                f"{relation.target.knowledge.name} that is a label. Give it a field `reference`."
            )
        resolved.append(answer)
    return resolved


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


def _no_label(text: str, domain: Domain, known: Collection[str]) -> str:
    hint = suggest(text, known, f" Some are {', '.join(list(known)[:5])}.")
    name = domain.knowledge.name
    for dropped in domain.dropped:
        if dropped.answer.text == text:
            return (
                f"{text!r} is an answer of {name!r}, but not a label of this LM "
                f"({dropped.reason}: {' + '.join(dropped.tokens)}). Take another one.{hint}"
            )
    return f"{text!r} is not a label of {name!r}.{hint}"
