"""Making edits: sampled so that they ask for something new, or looked up from what a user wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.finetune.files import RawEdit, check_edits, read_edits
from lincorr_lightning.knowledge import Domain, TokenizedRelation, answer_tokens
from lincorr_lightning.knowledge.yaml_file import near
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST = 20
"""Subjects that are asked at most for each edit wanted; some cannot be taught anything new."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Teach the LM one piece of source knowledge about one subject.

    Attributes:
        subject: X, as it stands in the prompts.
        answer: The answer, all of its words.
        tokens: The answer's tokens after the prompt; the first is its label's.
        label: Index of the answer's label in the source domain.
        rights: Indices of the target labels that are right then: its reference.
        source_before: Label that the LM gives for the source before.
        target_before: Label that it gives for the target before.
    """

    subject: str
    answer: str
    tokens: tuple[int, ...]
    label: int
    rights: tuple[int, ...]
    source_before: int
    target_before: int

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return asdict(self)

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Edit:
        """The edit of a checkpoint."""
        lists = {name: tuple(state[name]) for name in ("tokens", "rights")}
        return cls(**{**state, **lists})


class _Lesson(NamedTuple):
    """An answer that can be taught."""

    answer: str
    tokens: tuple[int, ...]
    label: int
    rights: tuple[int, ...]


# -- sampling --------------------------------------------------------------------------------------


def sample_edits(
    asked: TokenizedRelation,
    lm: LanguageModel,
    n: int,
    subjects: Sequence[str] | None = None,
    seed: int = 0,
) -> list[Edit]:
    """Sample edits whose answers cover the source's domain as evenly as possible.

    The labels that have a reference are dealt out in shuffled rounds. An edit's label is not what
    the LM says of its subject before, nor is what it says for the target right by the new answer.

    Args:
        asked: The relation; it has a reference.
        lm: As it is before.
        n: How many.
        subjects: Whom they are about, each at most once; None samples the vocabulary.
        seed: Of subjects and answers.

    Raises:
        KnowledgeError: The relation has no reference among the LM's labels.
        SubjectsError: There are too few subjects, or one without tokens.
    """
    asked.require_reference()
    if subjects is None:
        available = len(usable_strings(lm.tokenizer))
        pool = sample_subjects(lm.tokenizer, min(available, _MOST * n), seed=seed)
        unseen = _unseen(pool, lm.tokenizer)
        pool = [subject for index, subject in enumerate(pool) if index not in unseen]
    else:
        pool = list(subjects)
        check_subjects(pool, lm.tokenizer)
    lessons = [[one for one in label if one.rights] for label in _lessons(asked, lm.tokenizer)]
    deck = _Deck([label for label in lessons if label], seed)
    edits: list[Edit] = []
    for first in range(0, len(pool), n):  # so that few more are asked than are needed
        part = pool[first : first + n]
        for subject, source, target in zip(part, *said_before(asked, lm, part), strict=True):
            lesson = deck.deal(_is_news(source, target))
            if lesson is not None:
                edits.append(Edit(subject, *lesson, source, target))
            if len(edits) == n:
                return edits
    raise SubjectsError(
        f"data.n_edits asks for {n} edits, but of {len(pool)} subjects only {len(edits)} can be "
        f"taught something new about {asked.name}. Lower data.n_edits, or name more subjects."
    )


def _is_news(source: int, target: int) -> Callable[[_Lesson], bool]:
    return lambda lesson: lesson.label != source and target not in lesson.rights


class _Deck:
    """Deals lessons out in shuffled rounds, in each of which every label comes once.

    What fits nobody for a while (where the LM says one country of everybody, that country's
    cities) is kept on top, for the first one whom it fits.
    """

    def __init__(self, lessons: Sequence[Sequence[_Lesson]], seed: int) -> None:
        self._lessons = lessons
        self._seed = seed
        self._n_rounds = 0
        self._kept: list[_Lesson] = []

    def deal(self, fits: Callable[[_Lesson], bool]) -> _Lesson | None:
        """Take the next lesson that fits, if any does."""
        lesson = _take(self._kept, fits)
        if lesson is None:
            fresh = self._round()
            lesson = _take(fresh, fits)
            if lesson is not None:
                self._kept += fresh
                self._n_rounds += 1
        return lesson

    def _round(self) -> list[_Lesson]:
        order = np.random.default_rng([self._seed, self._n_rounds]).permutation(len(self._lessons))
        # Of answers that share a label, each round teaches another.
        return [self._lessons[i][self._n_rounds % len(self._lessons[i])] for i in order]


def _take(stock: list[_Lesson], fits: Callable[[_Lesson], bool]) -> _Lesson | None:
    place = next((place for place, lesson in enumerate(stock) if fits(lesson)), None)
    return None if place is None else stock.pop(place)


# -- looking up ------------------------------------------------------------------------------------


class ResolvedEdit(NamedTuple):
    """An edit with its labels; what the LM says before is not known yet.

    Attributes:
        subject: X.
        answer: The answer, all of its words.
        tokens: Its tokens.
        label: Index of its label in the source domain.
        rights: Indices of the target labels that are right then.
    """

    subject: str
    answer: str
    tokens: tuple[int, ...]
    label: int
    rights: tuple[int, ...]


def resolve_edits(
    written: Sequence[Mapping[str, Any]] | str | Path, asked: TokenizedRelation, lm: LanguageModel
) -> list[Edit]:
    """Look up edits that somebody wrote; all of them are taken, in their order.

    Args:
        written: ``subject`` and ``answer`` of each, and ``reference`` where it is not the
            relation's; or a JSONL or CSV file of such.
        asked: The relation.
        lm: As it is before.

    Raises:
        SubjectsError: A bad line, a subject without tokens, or an answer that is not one label; it
            says where.
        KnowledgeError: An edit needs the relation's reference, which it lacks.
    """
    read = read_edits(written) if isinstance(written, (str, Path)) else check_edits(written)
    return record_baseline(place_edits(read, asked, lm.tokenizer), asked, lm)


def place_edits(
    written: Sequence[RawEdit], asked: TokenizedRelation, tokenizer: PreTrainedTokenizerBase
) -> list[ResolvedEdit]:
    """Find the labels of edits, without asking the LM.

    Args:
        written: The edits.
        asked: The relation.
        tokenizer: The LM's.

    Raises:
        SubjectsError: A subject without tokens, or an answer that is not one label; it says where.
        KnowledgeError: An edit needs the relation's reference, which it lacks.
    """
    check_subjects([edit.subject for edit in written], tokenizer, [edit.where for edit in written])
    known = _by_text(_lessons(asked, tokenizer), asked.source)
    placed = []
    for edit in written:
        lesson = known.get(edit.answer)
        if lesson is None:
            raise SubjectsError(f"{edit.where}: {_no_label(edit.answer, asked.source, known)}")
        rights = lesson.rights
        if edit.reference:
            rights = _labels_of(edit.reference, asked.target, edit.where)
        elif not rights:
            asked.require_reference()
            raise SubjectsError(
                f"{edit.where}: no {asked.target.knowledge.name} that this LM has a label for is "
                f"right by {edit.answer!r}. Say which is, in a field `reference`, or leave this "
                "edit out."
            )
        placed.append(
            ResolvedEdit(edit.subject, lesson.answer, lesson.tokens, lesson.label, rights)
        )
    return placed


def record_baseline(
    placed: Sequence[ResolvedEdit], asked: TokenizedRelation, lm: LanguageModel
) -> list[Edit]:
    """Complete edits by what an LM says of their subjects now."""
    said = said_before(asked, lm, [edit.subject for edit in placed])
    return [Edit(*edit, *before) for edit, *before in zip(placed, *said, strict=True)]


def said_before(
    asked: TokenizedRelation, lm: LanguageModel, subjects: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Labels that an LM gives for source and target of each subject."""
    source = lm.domain_logits(asked.source_prompts(subjects), asked.source.token_ids)
    target = lm.domain_logits(asked.target_prompts(subjects), asked.target.token_ids)
    return source.argmax(1).tolist(), target.argmax(1).tolist()


def check_subjects(
    subjects: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    places: Sequence[str] | None = None,
) -> None:
    """Refuse subjects of which an LM sees nothing.

    Args:
        subjects: The X's.
        tokenizer: The LM's.
        places: Where each stands, for the message; None: it is one of ``data.subjects``.

    Raises:
        SubjectsError: It names the subject, and where it stands.
    """
    for index in sorted(_unseen(subjects, tokenizer)):
        where = places[index] if places else f"data.subjects, number {index + 1}"
        raise SubjectsError(
            f"{where}: the LM would see nothing of the subject {subjects[index]!r}, which has no "
            "token that it knows. Name another one."
        )


def _unseen(subjects: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Indices of subjects that have no tokens, or only the one for unknown words."""
    if not subjects:
        return set()
    rows = tokenizer(list(subjects), add_special_tokens=False)["input_ids"]
    return {
        index
        for index, (subject, row) in enumerate(zip(subjects, rows, strict=True))
        if not subject.strip() or set(row) <= {tokenizer.unk_token_id}
    }


# -- answers ---------------------------------------------------------------------------------------


def _lessons(asked: TokenizedRelation, tokenizer: PreTrainedTokenizerBase) -> list[list[_Lesson]]:
    """The answers of each source label; what is right by them may be unknown.

    Right by an answer is its own reference: South Korea lies in Asia, though its label " South"
    is that of South Africa as well.
    """
    source, reference = asked.source, asked.relation.reference or {}
    rows = answer_tokens(source.knowledge, tokenizer)
    tokens = {
        answer.text: tuple(ids or ())
        for answer, ids in zip(source.knowledge.answers, rows, strict=True)
    }
    target: dict[str, set[int]] = {}
    for row, label in enumerate(asked.target.labels):
        for answer in label.answers:
            target.setdefault(answer.identity, set()).add(row)
    lessons = []
    for index, label in enumerate(source.labels):
        rights: dict[str, set[int]] = {}
        for answer in label.answers:
            right = [target.get(identity, set()) for identity in reference.get(answer.identity, ())]
            rights.setdefault(answer.text, set()).update(*right)
        lessons.append(
            [_Lesson(text, tokens[text], index, tuple(sorted(r))) for text, r in rights.items()]
        )
    return lessons


def _by_text(lessons: Sequence[Sequence[_Lesson]], domain: Domain) -> dict[str, _Lesson]:
    """What each text teaches: an answer, or a label as it is shown in tables."""
    known = {lesson.answer: lesson for of_label in lessons for lesson in of_label}
    for index, (label, of_label) in enumerate(zip(domain.labels, lessons, strict=True)):
        if label.text in known:
            continue
        if len(of_label) == 1:  # its answer, as the tokenizer spells it
            known[label.text] = of_label[0]
        else:
            rights = tuple(sorted({right for lesson in of_label for right in lesson.rights}))
            known[label.text] = _Lesson(label.text, (label.token_id,), index, rights)
    return known


def _labels_of(texts: Iterable[str], domain: Domain, where: str) -> tuple[int, ...]:
    """The label of each text, by its own text or by an answer of it."""
    known = {answer.text: i for i, label in enumerate(domain.labels) for answer in label.answers}
    known |= {text: i for i, text in enumerate(domain.texts)}
    found = set()
    for text in texts:
        if text not in known:
            raise SubjectsError(f"{where}: reference: {_no_label(text, domain, known)}")
        found.add(known[text])
    return tuple(sorted(found))


def _no_label(text: str, domain: Domain, known: Iterable[str]) -> str:
    known = list(known)
    hint = near(text, known, f" Some are {', '.join(known[:5])}.")
    name = domain.knowledge.name
    for dropped in domain.dropped:
        if dropped.answer.text == text:
            return (
                f"{text!r} is an answer of {name!r}, but none that is one label of this LM "
                f"({dropped.reason}: {' + '.join(dropped.tokens)}). Take another one.{hint}"
            )
    return f"{text!r} is not one label of {name!r}.{hint}"
