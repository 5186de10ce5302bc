"""Several knowledge files put together: who named what, and whether the facts hold together."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from lincorr_lightning.knowledge.schema import LANGUAGES, Answer, Knowledge
from lincorr_lightning.knowledge.yaml_file import Entity, KnowledgeFile, Query, fail, near

Facts = dict[str, dict[str, tuple[str, ...]]]
"""identity -> kind -> the identities that are true of it."""


class MergedFiles:
    """Entities and queries of all files read so far.

    A later file may add entities to a kind, and names and facts to an entity, but it may not
    restate what is there: two statements of one thing are either idle or a contradiction.
    """

    def __init__(self) -> None:
        self._entities: dict[str, dict[str, Entity]] = {}
        self._questions: dict[str, Query] = {}
        self._entity_files: dict[tuple[str, str], str] = {}
        self._question_files: dict[str, str] = {}

    def copy(self) -> MergedFiles:
        """Return an independent copy; the frozen entities themselves are shared."""
        twin = MergedFiles()
        twin._entities = {kind: dict(members) for kind, members in self._entities.items()}
        twin._questions = dict(self._questions)
        twin._entity_files = dict(self._entity_files)
        twin._question_files = dict(self._question_files)
        return twin

    def add(self, file: KnowledgeFile) -> None:
        """Take in one file.

        Args:
            file: A checked file. Its facts may point into files that are added later.

        Raises:
            KnowledgeError: It names a knowledge that is taken or restates an entity.
        """
        for kind, members in file.entities.items():
            known = self._entities.setdefault(kind, {})
            for identity, entity in members.items():
                place = (kind, identity)
                if identity in known:
                    entity = _extended(known[identity], entity, file.origin, kind)
                    # Messages about this entity now concern either file.
                    self._entity_files[place] += f" and {file.origin}"
                else:
                    self._entity_files[place] = file.origin
                known[identity] = entity
        for name, question in file.queries.items():
            if name in self._question_files:
                taken_by = self._question_files[name]
                fail(file.origin, f"knowledge.{name}", f"the name is already taken by {taken_by}")
            self._questions[name] = question
            self._question_files[name] = file.origin

    def reserve(self, name: str, owner: str) -> None:
        """Mark a knowledge name as taken by something that is not a file."""
        self._question_files[name] = owner

    def facts(self) -> dict[str, Facts]:
        """Check where every fact points to and return them all.

        Returns:
            kind -> identity -> kind of the fact -> identities.

        Raises:
            KnowledgeError: A fact points to an unknown kind or identity.
        """
        for kind, members in self._entities.items():
            for identity, entity in members.items():
                for other_kind, others in entity.facts.items():
                    self._check_fact((kind, identity), other_kind, others)
        return {
            kind: {identity: dict(entity.facts) for identity, entity in members.items()}
            for kind, members in self._entities.items()
        }

    def knowledges(self) -> Iterator[Knowledge]:
        """Give every question its answers.

        Yields:
            The knowledges in the order of the files.

        Raises:
            KnowledgeError: A domain is of an unknown kind, empty or ambiguous.
        """
        domains: dict[tuple[str, str], tuple[Answer, ...]] = {}
        for question in self._questions.values():
            if isinstance(question.answers, str):
                kind = question.answers
                domain = (kind, question.language)
                if domain not in domains:
                    domains[domain] = self._domain(question)
                answers = domains[domain]
            else:
                # A list of its own shares no entity with any kind; kinds have no space in them.
                kind = f"answers of {question.name}"
                answers = tuple(Answer(text, text) for text in question.answers)
                self._refuse_ambiguous(answers, question)
            if question.alike is not None and question.alike not in self._entities:
                hint = near(question.alike, self._entities)
                origin = self._question_files[question.name]
                fail(
                    origin,
                    f"knowledge.{question.name}.alike",
                    f"{question.alike!r} is no kind of entity.{hint}",
                )
            yield Knowledge(
                name=question.name,
                family=question.family,
                language=question.language,
                template=question.template,
                kind=kind,
                answers=answers,
                leading_space=question.leading_space,
                printed_template=question.printed_template,
                alike=question.alike,
            )

    def _check_fact(self, place: tuple[str, str], kind: str, identities: tuple[str, ...]) -> None:
        key = f"entities.{'.'.join(place)}.{kind}"
        origin = self._entity_files[place]
        if kind not in self._entities:
            hint = near(kind, self._entities)
            languages = ", ".join(LANGUAGES)
            fail(origin, key, f"{kind!r} is neither a kind nor a language ({languages}).{hint}")
        known = self._entities[kind]
        for identity in identities:
            if identity not in known:
                aliased = (name for name, entity in known.items() if identity in entity.texts("en"))
                alias = next(aliased, None)
                hint = f" Write {alias!r}." if alias else near(identity, known)
                fail(origin, key, f"there is no {kind} called {identity!r}.{hint}")

    def _domain(self, question: Query) -> tuple[Answer, ...]:
        kind = str(question.answers)
        origin = self._question_files[question.name]
        key = f"knowledge.{question.name}.answers"
        if kind not in self._entities:
            fail(origin, key, f"there is no kind {kind!r}.{near(kind, self._entities)}")
        answers = tuple(
            Answer(identity, text)
            for identity, entity in self._entities[kind].items()
            for text in entity.texts(question.language)
        )
        if not answers:
            language = question.language
            fail(origin, key, f"the domain is empty: no {kind} has a name under {language!r}")
        self._refuse_ambiguous(answers, question)
        return answers

    def _refuse_ambiguous(self, answers: tuple[Answer, ...], question: Query) -> None:
        """One text for two entities could never be told right from wrong."""
        owners: dict[str, Answer] = {}
        for answer in answers:
            folded = unicodedata.normalize("NFKC", answer.text).casefold()
            first = owners.setdefault(folded, answer)
            if first.identity != answer.identity:
                origin = self._question_files[question.name]
                fail(
                    origin,
                    f"knowledge.{question.name}.answers",
                    f"{self._described(answer, question)} and {self._described(first, question)} "
                    "read alike; keep one, or make one an alias of the other",
                )

    def _described(self, answer: Answer, question: Query) -> str:
        origin = self._entity_files.get((str(question.answers), answer.identity))
        if origin is None or answer.text == answer.identity:
            return repr(answer.text) + (f" ({origin})" if origin else "")
        return f"{answer.text!r} of {answer.identity!r} ({origin})"


def _extended(known: Entity, entity: Entity, origin: str, kind: str) -> Entity:
    key = f"entities.{kind}.{entity.identity}"
    restated = [*(known.names.keys() & entity.names), *(known.facts.keys() & entity.facts)]
    if restated:
        fail(
            origin, f"{key}.{min(restated)}", "is already given; a file may add to it, not restate"
        )
    if not entity.names and not entity.facts:
        fail(origin, key, "is already an entity of this kind; leave it out")
    return Entity(known.identity, {**known.names, **entity.names}, {**known.facts, **entity.facts})
