"""Read and check one knowledge file.

A file is accepted or refused as a whole. Every message has the form `file: key: reason`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.io import regular_file
from lincorr_lightning.knowledge.schema import FAMILIES, LANGUAGES, UNSPACED_LANGUAGES
from lincorr_lightning.yaml_checks import SafeLoader, load_yaml

VERSION = 1
"""Version of the schema that this package reads."""

RESERVED_KINDS = frozenset({"number"})
"""Kinds of entities that are computed, not listed in a file."""

_TOP_LEVEL_KEYS = ("version", "source", "entities", "knowledge")
_REQUIRED_KEYS = ("family", "language", "template", "answers")
_KNOWLEDGE_KEYS = (*_REQUIRED_KEYS, "space", "printed", "alike", "paper_size")
_MAX_DIGITS = 9
_FORBIDDEN_IN_NAMES = ("->", ".", ",", '"', "'", "[", "]", "{", "}")


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


@dataclass(frozen=True, slots=True)
class RawKnowledge:
    """An entry under `knowledge` in a file, before its answers are looked up.

    Attributes:
        name: Key of the entry.
        origin: File that has the entry.
        answers: A kind of entity, or the answers themselves.

    The other attributes are those of `Knowledge`.
    """

    name: str
    origin: str
    family: str
    language: str
    template: str
    answers: str | tuple[str, ...]
    leading_space: bool
    printed_template: str | None
    alike: str | None
    paper_size: int | None


@dataclass(frozen=True, slots=True)
class KnowledgeFile:
    """Checked content of one file: its source, entities by kind and identity, entries by name."""

    source: str
    entities: Mapping[str, Mapping[str, Entity]]
    knowledge: Mapping[str, RawKnowledge]


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


def read_knowledge_file(path: str | Path) -> KnowledgeFile:
    """Read and check one knowledge file, in UTF-8.

    Facts that refer to entities of other files are checked when the files are merged.

    Raises:
        KnowledgeError: The file cannot be read or breaks the schema.
    """
    try:
        text = regular_file(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise KnowledgeError(
            f"{path}: cannot be read as a knowledge file ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        raise KnowledgeError(f"{path}: is not UTF-8 text ({error})") from error
    return parse_knowledge_file(text, str(path))


def parse_knowledge_file(text: str, origin: str) -> KnowledgeFile:
    r"""Parse and check the text of one knowledge file, which messages call `origin`.

    Raises:
        KnowledgeError: The text is not YAML or breaks the schema.

    Example:
        >>> file = parse_knowledge_file("version: 1\nentities: {pet: [dog, cat]}", "mine.yaml")
        >>> list(file.entities["pet"])
        ['dog', 'cat']
        >>> try:
        ...     parse_knowledge_file("version: 1\nentities: {pet: [dog, no]}", "mine.yaml")
        ... except KnowledgeError as error:
        ...     print(error)
        mine.yaml: entities.pet: no (line 2) reads as a boolean, not as text; quote it: "no"
    """
    root = _Node(origin, "", _load_yaml(text, origin))
    root.require_mapping(f"must be a mapping with the keys {', '.join(_TOP_LEVEL_KEYS)}")
    root.refuse_other_keys(_TOP_LEVEL_KEYS)
    version = root["version"]
    if version is None:
        fail(origin, "version", f"is missing; write `version: {VERSION}`")
    if str(version.value) != str(VERSION):
        shown = "a list" if isinstance(version.value, list) else "a mapping"
        if isinstance(version.value, (str, _Unquoted)):
            shown = str(version.value)[:20]
        version.fail(f"is {shown}; this package reads version {VERSION}")
    source, entities, knowledge = (root[key] for key in _TOP_LEVEL_KEYS[1:])
    return KnowledgeFile(
        source=source.text() if source else "",
        entities=_parse_entities(entities) if entities else {},
        knowledge=_parse_knowledge(knowledge) if knowledge else {},
    )


@dataclass(frozen=True, slots=True)
class _Unquoted:
    """A scalar that YAML reads as something other than text."""

    written: str
    meaning: str
    line: int

    def __str__(self) -> str:
        return self.written

    __repr__ = __str__


class _Loader(SafeLoader):  # type: ignore[misc]
    """Safe loader that keeps unquoted scalars as they are written."""


def _construct_unquoted(meaning: str) -> Any:
    def construct(loader: _Loader, node: yaml.ScalarNode) -> _Unquoted:
        return _Unquoted(str(node.value), meaning, node.start_mark.line + 1)

    return construct


for _tag, _meaning in {
    "bool": "a boolean",
    "int": "a number",
    "float": "a number",
    "timestamp": "a date",
    "null": "nothing",
}.items():
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _construct_unquoted(_meaning))


def _load_yaml(text: str, origin: str) -> Any:
    try:
        return load_yaml(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise KnowledgeError(f"{origin}:{line} {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise KnowledgeError(f"{origin}: is not YAML ({' '.join(str(error).split())})") from error


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of a file, with the file and the key that messages name."""

    origin: str
    key: str
    value: Any

    def __getitem__(self, name: str) -> _Node | None:
        """Return the value under a key of the mapping; None if the mapping lacks it."""
        return self.child(name, self.value[name]) if name in self.value else None

    def child(self, name: str, value: Any) -> _Node:
        return _Node(self.origin, f"{self.key}.{name}" if self.key else name, value)

    def sibling(self, value: Any) -> _Node:
        """Return another value, such as a list item or a key, that messages locate here."""
        return _Node(self.origin, self.key, value)

    def fail(self, reason: str) -> NoReturn:
        fail(self.origin, self.key, reason)

    @property
    def is_null(self) -> bool:
        unquoted_null = isinstance(self.value, _Unquoted) and self.value.meaning == "nothing"
        return self.value is None or unquoted_null

    def require_mapping(self, reason: str) -> None:
        if not isinstance(self.value, dict):
            self.fail(reason)

    def refuse_other_keys(self, known: Collection[str]) -> None:
        for key in self.value:
            if key not in known:
                hint = suggest(str(key), known, f" Known: {', '.join(known)}.")
                self.child(str(key), None).fail(f"unknown key.{hint}")

    def text(self) -> str:
        value = self.value
        if isinstance(value, _Unquoted):
            if not value.written:
                self.fail(f"is empty (line {value.line}); a text is needed")
            self.fail(
                f"{value.written} (line {value.line}) reads as {value.meaning}, not as text; "
                f'quote it: "{value.written}"'
            )
        if not isinstance(value, str):
            self.fail(f"must be a text, not a {type(value).__name__}")
        if not value.strip():
            self.fail("is an empty text")
        if value != value.strip() or "\n" in value:
            self.fail(f"{value!r} has space around it or a line break in it")
        return value

    def texts(self) -> tuple[str, ...]:
        """Return the items of a list without repetitions; a text counts as a list of one."""
        if not isinstance(self.value, list):
            return (self.text(),)
        if not self.value:
            self.fail("is an empty list")
        texts = tuple(self.sibling(item).text() for item in self.value)
        if len(set(texts)) < len(texts):
            repeated = next(text for text in texts if texts.count(text) > 1)
            self.fail(f"{repeated!r} is listed twice")
        return texts

    def name(self) -> str:
        """Return a name that can be used in `a->b`, in config keys and in lists."""
        name = self.text()
        for forbidden in _FORBIDDEN_IN_NAMES:
            if forbidden in name:
                self.child(name, None).fail(f"a name must not contain {forbidden!r}")
        if any(character.isspace() for character in name):
            self.child(name, None).fail(
                "a name must not contain a space; write an underscore instead"
            )
        return name

    def choice(self, known: tuple[str, ...]) -> str:
        text = self.text()
        if text not in known:
            self.fail(f"{text!r} is unknown; known: {', '.join(known)}")
        return text

    def flag(self) -> bool:
        written = str(self.value).lower() if isinstance(self.value, _Unquoted) else ""
        if written not in ("true", "false"):
            self.fail("must be true or false")
        return written == "true"

    def count(self) -> int:
        if not str(self.value).isdecimal() or len(str(self.value)) > _MAX_DIGITS:
            self.fail("must be a whole number")
        return int(str(self.value))

    def template(self) -> str:
        if isinstance(self.value, str) and self.value != self.value.rstrip():
            self.fail(f"{self.value!r} ends in a space; the space belongs to the answer")
        template = self.text()
        count = template.count("{}")
        if count != 1:
            self.fail(f"{template!r} has {count} placeholders {{}} for the subject; it needs one")
        return template


def _parse_entities(node: _Node) -> dict[str, dict[str, Entity]]:
    if node.is_null:
        return {}
    node.require_mapping("must map each kind to its entities")
    entities: dict[str, dict[str, Entity]] = {}
    for raw_kind, value in node.value.items():
        kind = node.sibling(raw_kind).name()
        members = node.child(kind, value)
        if kind in LANGUAGES:
            members.fail("is the name of a language and cannot be a kind")
        if kind in RESERVED_KINDS:
            members.fail("is a computed kind; choose another name")
        if members.is_null or not value:
            members.fail("has no entities")
        if isinstance(value, list):
            parsed = [Entity(identity, node.origin) for identity in members.texts()]
        elif isinstance(value, dict):
            parsed = [_parse_entity(members, identity, body) for identity, body in value.items()]
        else:
            members.fail("must be a list of names or a mapping from name to facts")
        entities[kind] = {entity.identity: entity for entity in parsed}
    return entities


def _parse_entity(members: _Node, raw_identity: Any, body: Any) -> Entity:
    identity = members.sibling(raw_identity).text()
    node = members.child(identity, body)
    if node.is_null:
        return Entity(identity, node.origin)
    node.require_mapping("must be a mapping of names by language and facts by kind")
    names: dict[str, tuple[str, ...]] = {}
    facts: dict[str, tuple[str, ...]] = {}
    for raw_name, value in body.items():
        name = node.sibling(raw_name).text()
        (names if name in LANGUAGES else facts)[name] = node.child(name, value).texts()
    return Entity(identity, node.origin, names, facts)


def _parse_knowledge(node: _Node) -> dict[str, RawKnowledge]:
    if node.is_null:
        return {}
    node.require_mapping("must map each name to its family, language, template, answers")
    names = {raw_name: node.sibling(raw_name).name() for raw_name in node.value}
    return {
        name: _parse_entry(name, node.child(name, node.value[raw_name]))
        for raw_name, name in names.items()
    }


def _parse_entry(name: str, node: _Node) -> RawKnowledge:
    if name in (*FAMILIES, "all"):
        node.fail("is the name of a family and cannot name a kind of knowledge")
    node.require_mapping(f"must be a mapping with {', '.join(_REQUIRED_KEYS)}")
    node.refuse_other_keys(_KNOWLEDGE_KEYS)
    for key in _REQUIRED_KEYS:
        if key not in node.value:
            node.child(key, None).fail("is missing")
    family, language, template, answers = (
        node.child(key, node.value[key]) for key in _REQUIRED_KEYS
    )
    if answers.is_null or answers.value == []:
        answers.fail("the domain is empty; name a kind or list the answers")
    space, printed, alike, size = (node[key] for key in _KNOWLEDGE_KEYS[len(_REQUIRED_KEYS) :])
    return RawKnowledge(
        name=name,
        origin=node.origin,
        language=language.choice(LANGUAGES),
        family=family.choice(FAMILIES),
        template=template.template(),
        answers=answers.texts() if isinstance(answers.value, list) else answers.text(),
        leading_space=space.flag() if space else language.value not in UNSPACED_LANGUAGES,
        printed_template=printed.text() if printed else None,
        alike=alike.text() if alike else None,
        paper_size=size.count() if size else None,
    )
