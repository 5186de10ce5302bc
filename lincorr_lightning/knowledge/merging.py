"""Merge knowledge files: look up the answers of each entry and check what the facts refer to."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping

from lincorr_lightning.knowledge.schema import LANGUAGES, Answer, Knowledge
from lincorr_lightning.knowledge.yaml_file import (
    Entity,
    KnowledgeFile,
    RawKnowledge,
    fail,
    suggest,
)

Entities = Mapping[str, Mapping[str, Entity]]
"""Entities by kind and identity."""


def merge_files(
    files: Iterable[KnowledgeFile], reserved: Mapping[str, str]
) -> tuple[list[Knowledge], Entities]:
    """Merge the entities and entries of several files.

    A later file may add entities to a kind, and names and facts to an entity. It may not restate
    what an earlier file says: that would be either redundant or a contradiction. `reserved` are
    names that no file may use, with their owner.

    Returns:
        The kinds of knowledge in the order of the files, and the entities by kind.

    Raises:
        KnowledgeError: A name is already taken, an entity is restated, a fact or a domain refers to
            an unknown kind or entity, or a domain is empty or ambiguous.
    """
    entities: dict[str, dict[str, Entity]] = {}
    entries: dict[str, RawKnowledge] = {}
    for file in files:
        for kind, members in file.entities.items():
            known = entities.setdefault(kind, {})
            for identity, entity in members.items():
                if identity in known:
                    entity = _extend(known[identity], entity, kind)
                known[identity] = entity
        for name, entry in file.knowledge.items():
            owner = entries[name].origin if name in entries else reserved.get(name)
            if owner:
                fail(entry.origin, f"knowledge.{name}", f"the name is already taken by {owner}")
            entries[name] = entry
    _check_facts(entities)
    return [_resolve(entry, entities) for entry in entries.values()], entities


def _extend(known: Entity, entity: Entity, kind: str) -> Entity:
    """Add the names and facts that a later file gives to an entity."""
    key = f"entities.{kind}.{entity.identity}"
    restated = [*(known.names.keys() & entity.names), *(known.facts.keys() & entity.facts)]
    if restated:
        reason = "is already given; a file may add to it, not restate"
        fail(entity.origin, f"{key}.{min(restated)}", reason)
    if not entity.names and not entity.facts:
        fail(entity.origin, key, "is already an entity of this kind; leave it out")
    return Entity(
        identity=known.identity,
        origin=f"{known.origin} and {entity.origin}",  # either may be at fault from now on
        names={**known.names, **entity.names},
        facts={**known.facts, **entity.facts},
    )


def _check_facts(entities: Entities) -> None:
    """Refuse facts that refer to an unknown kind or entity."""
    for kind, members in entities.items():
        for entity in members.values():
            for other_kind, identities in entity.facts.items():
                key = f"entities.{kind}.{entity.identity}.{other_kind}"
                if other_kind not in entities:
                    languages, hint = ", ".join(LANGUAGES), suggest(other_kind, entities)
                    reason = f"{other_kind!r} is neither a kind nor a language ({languages}).{hint}"
                    fail(entity.origin, key, reason)
                known = entities[other_kind]
                for identity in identities:
                    if identity not in known:
                        hint = _suggest_entity(identity, known)
                        fail(entity.origin, key, f"there is no {other_kind} {identity!r}.{hint}")


def _suggest_entity(name: str, known: Mapping[str, Entity]) -> str:
    for identity, entity in known.items():
        if name in entity.texts("en"):
            return f" Write {identity!r}."
    return suggest(name, known)


def _resolve(entry: RawKnowledge, entities: Entities) -> Knowledge:
    """Look up the answers of an entry."""
    key = f"knowledge.{entry.name}"
    if isinstance(entry.answers, str):
        kind = entry.answers
        members = entities.get(kind)
        if members is None:
            hint = suggest(kind, entities)
            fail(entry.origin, f"{key}.answers", f"there is no kind {kind!r}.{hint}")
        answers = tuple(
            Answer(identity, text)
            for identity, entity in members.items()
            for text in entity.texts(entry.language)
        )
        if not answers:
            reason = f"the domain is empty: no {kind} has a name under {entry.language!r}"
            fail(entry.origin, f"{key}.answers", reason)
    else:
        # Listed answers share no entity with any kind: a kind's name contains no space.
        kind, members = f"answers of {entry.name}", {}
        answers = tuple(Answer(text, text) for text in entry.answers)
    _refuse_ambiguous(answers, entry, members)
    if entry.alike is not None and entry.alike not in entities:
        hint = suggest(entry.alike, entities)
        fail(entry.origin, f"{key}.alike", f"{entry.alike!r} is no kind of entity.{hint}")
    return Knowledge(
        name=entry.name,
        family=entry.family,
        language=entry.language,
        template=entry.template,
        kind=kind,
        answers=answers,
        leading_space=entry.leading_space,
        printed_template=entry.printed_template,
        alike=entry.alike,
        paper_size=entry.paper_size,
    )


def _refuse_ambiguous(
    answers: Iterable[Answer], entry: RawKnowledge, entities: Mapping[str, Entity]
) -> None:
    """Refuse texts that read alike.

    An LM's answer could not be attributed to one of two entities, and two spellings of one entity
    that differ only in case would be counted as two answers.
    """

    def describe(answer: Answer) -> str:
        if answer.identity not in entities:
            return repr(answer.text)
        origin = entities[answer.identity].origin
        if answer.text == answer.identity:
            return f"{answer.text!r} ({origin})"
        return f"{answer.text!r} of {answer.identity!r} ({origin})"

    first_with: dict[str, Answer] = {}
    for answer in answers:
        folded = unicodedata.normalize("NFKC", answer.text).casefold()
        first = first_with.setdefault(folded, answer)
        if first.identity != answer.identity:
            reason = (
                f"{describe(answer)} and {describe(first)} read alike; keep one, or make one an "
                "alias of the other"
            )
            fail(entry.origin, f"knowledge.{entry.name}.answers", reason)
        if first.text != answer.text:
            reason = f"{describe(answer)} and {describe(first)} differ only in case; keep one"
            fail(entry.origin, f"knowledge.{entry.name}.answers", reason)
