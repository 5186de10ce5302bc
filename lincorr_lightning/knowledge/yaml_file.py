"""Read, check and merge knowledge files.

A file is accepted or refused as a whole. Every message has the form `file: key: reason`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

import yaml

from lincorr_lightning.config import compose_yaml
from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.io import regular_file
from lincorr_lightning.knowledge.arithmetic import KIND
from lincorr_lightning.knowledge.schema import (
    FAMILIES,
    LANGUAGES,
    UNSPACED_LANGUAGES,
    Answer,
    Knowledge,
)

T = TypeVar("T")

VERSION = 1
"""Version of the schema that this package reads."""

_TOP_LEVEL_KEYS = ("version", "source", "entities", "knowledge")
_REQUIRED_KEYS = ("family", "language", "template", "answers")
_KNOWLEDGE_KEYS = (*_REQUIRED_KEYS, "space", "printed", "alike", "paper_size")
_MAX_DIGITS = 9
_FORBIDDEN_IN_NAMES = ("->", ".", ",", '"', "'", "[", "]", "{", "}")
_TAG = "tag:yaml.org,2002:"
_MEANINGS = {"bool": "a boolean", "int": "a number", "float": "a number", "timestamp": "a date",
             "null": "nothing"}  # fmt: skip
_KINDS: dict[type, str] = {yaml.SequenceNode: "list", yaml.MappingNode: "mapping"}
_CONSTRUCTOR = yaml.constructor.SafeConstructor()


@dataclass(frozen=True, slots=True)
class Entity:
    """Something in the world that can be an answer.

    Attributes:
        identity: Key of the entity in the file, its English name.
        origin: File that defines the entity.
        names: Ways to write it by language, the canonical one first.
        facts: Identities that are true of it by kind, such as country -> (France,).
    """

    identity: str
    origin: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def texts(self, language: str) -> tuple[str, ...]:
        """Return the ways to write it; in English its identity, unless the file lists others."""
        default = (self.identity,) if language == "en" else ()
        return self.names.get(language, default)


Entities = Mapping[str, Mapping[str, Entity]]
"""Entities by kind and identity."""


@dataclass(frozen=True, slots=True)
class KnowledgeFile:
    """Checked content of one file.

    An entry of `knowledge` has its answers if the file lists them; else they are the names of the
    entities of its kind, which other files may add to, and are looked up in `merge_files`.
    """

    origin: str
    source: str
    entities: Entities
    knowledge: Mapping[str, Knowledge]


def fail(origin: str, key: str, reason: str) -> NoReturn:
    """Raise a KnowledgeError that names file, key and reason."""
    raise KnowledgeError(f"{origin}: {key}: {reason}" if key else f"{origin}: {reason}")


def suggest(name: str, known: Iterable[str], fallback: str = "") -> str:
    """Return " Did you mean 'a' or 'b'?" if there are similar names, else the fallback."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.6)
    if not matches:
        return fallback
    return f" Did you mean {' or '.join(repr(by_folded[match]) for match in matches)}?"


# -- reading ---------------------------------------------------------------------------------


def read_knowledge_file(path: str | Path) -> KnowledgeFile:
    """Read and check one knowledge file, in UTF-8.

    Facts that refer to entities of other files are checked when the files are merged.
    """
    try:
        text = regular_file(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        fail(str(path), "", f"cannot be read as a knowledge file ({error.strerror})")
    except UnicodeDecodeError as error:
        fail(str(path), "", f"is not UTF-8 text ({error})")
    return parse_knowledge_file(text, str(path))


def parse_knowledge_file(text: str, origin: str) -> KnowledgeFile:
    """Parse and check the text of one knowledge file, which messages call `origin`."""
    root = _Value(origin, "", _load_yaml(text, origin))
    keys = ", ".join(_TOP_LEVEL_KEYS)
    parts = root.mapping(f"must be a mapping with the keys {keys}", _TOP_LEVEL_KEYS)
    if "version" not in parts:
        fail(origin, "version", f"is missing; write `version: {VERSION}`")
    version = parts["version"]
    if version.node.value != str(VERSION):
        shown = f"a {version.kind}" if version.kind != "text" else version.node.value[:20]
        version.fail(f"is {shown}; this package reads version {VERSION}")
    reason = "must map each kind to its entities"
    kinds = parts["entities"].mapping(reason, names=True) if "entities" in parts else {}
    reason = "must map each name to its family, language, template, answers"
    entries = parts["knowledge"].mapping(reason, names=True) if "knowledge" in parts else {}
    return KnowledgeFile(
        origin=origin,
        source=parts["source"].text() if "source" in parts else "",
        entities={kind: _entities(kind, members) for kind, members in kinds.items()},
        knowledge={name: _entry(name, entry) for name, entry in entries.items()},
    )


def _load_yaml(text: str, origin: str) -> yaml.Node:
    try:
        return compose_yaml(text) or yaml.ScalarNode(f"{_TAG}null", "")
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise KnowledgeError(f"{origin}:{line} {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        fail(origin, "", f"is not YAML ({' '.join(str(error).split())})")


@dataclass(frozen=True, slots=True)
class _Value:
    """A value of a file, with the file and the key that messages name."""

    origin: str
    key: str
    node: yaml.Node

    def fail(self, reason: str, child: str = "") -> NoReturn:
        fail(self.origin, ".".join(filter(None, (self.key, child))), reason)

    @property
    def kind(self) -> str:
        return _KINDS.get(type(self.node), "text")

    @property
    def is_null(self) -> bool:
        return bool(self.node.tag == f"{_TAG}null")

    @property
    def is_empty(self) -> bool:
        return self.is_null or not self.node.value

    def mapping(
        self, reason: str, known: Iterable[str] = (), *, names: bool = False
    ) -> dict[str, _Value]:
        """Return the values of a mapping, none for null; else fail for the reason."""
        if self.is_null and self.key:
            return {}
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(reason)
        _CONSTRUCTOR.flatten_mapping(self.node)  # merge keys, <<
        values = {}
        for key_node, node in self.node.value:
            key = _Value(self.origin, self.key, key_node).text(is_name=names)
            if known and key not in known:
                hint = suggest(key, known, f" Known: {', '.join(known)}.")
                self.fail(f"unknown key.{hint}", key)
            values[key] = _Value(self.origin, f"{self.key}.{key}" if self.key else key, node)
        return values

    def text(self, *, is_name: bool = False) -> str:
        """Return a text; a name must also be usable in `a->b`, in config keys and in lists."""
        value, line = self.node.value, self.node.start_mark and self.node.start_mark.line + 1
        if self.kind != "text":
            self.fail(f"must be a text, not a {self.kind}")
        if self.node.tag != f"{_TAG}str":
            if not value:
                self.fail(f"is empty (line {line}); a text is needed")
            meaning = _MEANINGS.get(self.node.tag.removeprefix(_TAG), self.node.tag)
            self.fail(f'{value} (line {line}) reads as {meaning}, not as text; quote it: "{value}"')
        if not value.strip():
            self.fail("is an empty text")
        if value != value.strip() or "\n" in value:
            self.fail(f"{value!r} has space around it or a line break in it")
        for forbidden in filter(value.__contains__, _FORBIDDEN_IN_NAMES if is_name else ()):
            self.fail(f"a name must not contain {forbidden!r}", value)
        if is_name and any(character.isspace() for character in value):
            self.fail("a name must not contain a space; write an underscore instead", value)
        return str(value)

    def texts(self) -> tuple[str, ...]:
        """Return the items of a list without repetitions; a text counts as a list of one."""
        if self.kind != "list":
            return (self.text(),)
        if self.is_empty:
            self.fail("is an empty list")
        texts = tuple(_Value(self.origin, self.key, item).text() for item in self.node.value)
        if len(set(texts)) < len(texts):
            repeated = next(text for text in texts if texts.count(text) > 1)
            self.fail(f"{repeated!r} is listed twice")
        return texts

    def choice(self, known: tuple[str, ...]) -> str:
        text = self.text()
        if text not in known:
            self.fail(f"{text!r} is unknown; known: {', '.join(known)}")
        return text

    def flag(self) -> bool:
        written = str(self.node.value).lower()
        if self.node.tag != f"{_TAG}bool" or written not in ("true", "false"):
            self.fail("must be true or false")
        return written == "true"

    def count(self) -> int:
        written = str(self.node.value)
        if not written.isdecimal() or len(written) > _MAX_DIGITS:
            self.fail("must be a whole number")
        return int(written)

    def template(self) -> str:
        if str(self.node.value).endswith(" "):
            self.fail(f"{self.node.value!r} ends in a space; the space belongs to the answer")
        template = self.text()
        count = template.count("{}")
        if count != 1:
            self.fail(f"{template!r} has {count} placeholders {{}} for the subject; it needs one")
        return template


def _entities(kind: str, value: _Value) -> dict[str, Entity]:
    if kind in LANGUAGES:
        value.fail("is the name of a language and cannot be a kind")
    if kind == KIND:
        value.fail("is a computed kind; choose another name")
    if value.is_empty:
        value.fail("has no entities")
    if value.kind == "list":
        return {identity: Entity(identity, value.origin) for identity in value.texts()}
    entities = {}
    reason = "must be a list of names or a mapping from name to facts"
    for identity, body in value.mapping(reason).items():
        names: dict[str, tuple[str, ...]] = {}
        facts: dict[str, tuple[str, ...]] = {}
        reason = "must be a mapping of names by language and facts by kind"
        for name, texts in body.mapping(reason).items():
            (names if name in LANGUAGES else facts)[name] = texts.texts()
        entities[identity] = Entity(identity, value.origin, names, facts)
    return entities


def _entry(name: str, value: _Value) -> Knowledge:
    if name in (*FAMILIES, "all"):
        value.fail("is the name of a family and cannot name a kind of knowledge")
    parts = value.mapping(f"must be a mapping with {', '.join(_REQUIRED_KEYS)}", _KNOWLEDGE_KEYS)
    for key in _REQUIRED_KEYS:
        if key not in parts:
            value.fail("is missing", key)
    answers, language = parts["answers"], parts["language"].choice(LANGUAGES)
    if answers.is_empty:
        answers.fail("the domain is empty; name a kind or list the answers")
    listed = answers.texts() if answers.kind == "list" else ()

    def optional(key: str, read: Callable[[_Value], T], default: T) -> T:
        return read(parts[key]) if key in parts else default

    return Knowledge(
        name=name,
        family=parts["family"].choice(FAMILIES),
        language=language,
        template=parts["template"].template(),
        # Listed answers share no entity with any kind: a kind's name contains no space.
        kind=f"answers of {name}" if listed else answers.text(),
        answers=tuple(Answer(text, text) for text in listed),
        leading_space=optional("space", _Value.flag, language not in UNSPACED_LANGUAGES),
        printed_template=optional("printed", _Value.text, None),
        alike=optional("alike", _Value.text, None),
        paper_size=optional("paper_size", _Value.count, None),
    )


# -- merging ---------------------------------------------------------------------------------


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
    entries: dict[str, Knowledge] = {}
    owners = dict(reserved)
    for file in files:
        for kind, members in file.entities.items():
            known = entities.setdefault(kind, {})
            for identity, entity in members.items():
                is_new = identity not in known
                known[identity] = entity if is_new else _extend(known[identity], entity, kind)
        for name, entry in file.knowledge.items():
            if name in owners:
                reason = f"the name is already taken by {owners[name]}"
                fail(file.origin, f"knowledge.{name}", reason)
            entries[name], owners[name] = entry, file.origin
    _check_facts(entities)
    return [_resolve(entry, owners[name], entities) for name, entry in entries.items()], entities


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
                        named = (e.identity for e in known.values() if identity in e.texts("en"))
                        alias = next(named, None)
                        hint = suggest(identity, known) if alias is None else f" Write {alias!r}."
                        fail(entity.origin, key, f"there is no {other_kind} {identity!r}.{hint}")


def _resolve(entry: Knowledge, origin: str, entities: Entities) -> Knowledge:
    """Look up the answers of an entry."""
    key = f"knowledge.{entry.name}"
    if entry.alike is not None and entry.alike not in entities:
        hint = suggest(entry.alike, entities)
        fail(origin, f"{key}.alike", f"{entry.alike!r} is no kind of entity.{hint}")
    members = entities.get(entry.kind)
    if not entry.answers:
        if members is None:
            hint = suggest(entry.kind, entities)
            fail(origin, f"{key}.answers", f"there is no kind {entry.kind!r}.{hint}")
        answers = tuple(
            Answer(identity, text)
            for identity, entity in members.items()
            for text in entity.texts(entry.language)
        )
        if not answers:
            reason = f"the domain is empty: no {entry.kind} has a name under {entry.language!r}"
            fail(origin, f"{key}.answers", reason)
        entry = replace(entry, answers=answers)
    _refuse_ambiguous(entry, origin, members or {})
    return entry


def _refuse_ambiguous(entry: Knowledge, origin: str, entities: Mapping[str, Entity]) -> None:
    """Refuse texts that read alike.

    An LM's answer could not be attributed to one of two entities, and two spellings of one entity
    that differ only in case would be counted as two answers.
    """

    def describe(answer: Answer) -> str:
        owner = "" if answer.text == answer.identity else f" of {answer.identity!r}"
        known = entities.get(answer.identity)
        return f"{answer.text!r}{owner} ({known.origin if known else origin})"

    first_with: dict[str, Answer] = {}
    for answer in entry.answers:
        folded = unicodedata.normalize("NFKC", answer.text).casefold()
        first = first_with.setdefault(folded, answer)
        if first != answer:
            is_alias = first.identity == answer.identity
            way_out = "" if is_alias else ", or make one an alias of the other"
            reason = f"{describe(answer)} and {describe(first)} read alike; keep one{way_out}"
            fail(origin, f"knowledge.{entry.name}.answers", reason)
