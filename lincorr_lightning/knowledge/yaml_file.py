"""One knowledge file: YAML in, checked entities and queries out.

A file is read whole and refused whole. Every message has the form `file: key: reason`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

import yaml

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge.schema import FAMILIES, LANGUAGES, UNSPACED_LANGUAGES

try:
    from yaml import CSafeLoader as _SafeLoader
except ImportError:  # PyYAML built without libyaml: slower, same result
    from yaml import SafeLoader as _SafeLoader  # type: ignore[assignment]

VERSION = 1
"""The version of the schema that this package reads."""

RESERVED_KINDS = frozenset({"number"})
"""Kinds whose entities are computed, not listed."""

_TOP_LEVEL_KEYS = ("version", "source", "entities", "knowledge")
_QUESTION_KEYS = ("family", "language", "template", "answers", "space", "printed", "alike")
_REQUIRED_QUESTION_KEYS = _QUESTION_KEYS[:4]
_FORBIDDEN_IN_NAMES = ("->", ".", ",", '"', "'", "[", "]", "{", "}")


@dataclass(frozen=True, slots=True)
class Entity:
    """Something in the world that can be an answer.

    Attributes:
        identity: Its key in the file.
        names: Per language the ways to write it, the canonical one first.
        facts: Per kind the identities that are true of it, such as country -> (France,).
    """

    identity: str
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def texts(self, language: str) -> tuple[str, ...]:
        """The ways to write it in a language; in English its identity unless `en` says more."""
        default = (self.identity,) if language == "en" else ()
        return self.names.get(language, default)


@dataclass(frozen=True, slots=True)
class Query:
    """A knowledge as a file states it: its answers are still a kind or a list of its own."""

    name: str
    family: str
    language: str
    template: str
    answers: str | tuple[str, ...]
    leading_space: bool
    printed_template: str | None
    alike: str | None


@dataclass(frozen=True, slots=True)
class KnowledgeFile:
    """The checked content of one file.

    Attributes:
        origin: The file as messages call it.
        source: Where the facts come from.
        entities: kind -> identity -> entity.
        queries: name -> question.
    """

    origin: str
    source: str
    entities: Mapping[str, Mapping[str, Entity]]
    queries: Mapping[str, Query]


def fail(origin: str, key: str, reason: str) -> NoReturn:
    """Raise a KnowledgeError that names file, key and reason."""
    place = f"{origin}: {key}" if key else origin
    raise KnowledgeError(f"{place}: {reason}")


def near(name: str, known: Iterable[str], ending: str = "") -> str:
    """Return " Did you mean 'a' or 'b'?" for near matches, else an empty string or the ending."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    matches = get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.6)
    if not matches:
        return ending
    return f" Did you mean {' or '.join(repr(by_folded[match]) for match in matches)}?"


def read_knowledge_file(path: str | Path) -> KnowledgeFile:
    """Read and check one knowledge file.

    Args:
        path: A YAML file in UTF-8.

    Returns:
        Its entities and queries. Facts that point into other files are not checked yet.

    Raises:
        KnowledgeError: The file cannot be read or breaks the schema.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise KnowledgeError(
            f"{path}: cannot be read as a knowledge file ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        raise KnowledgeError(f"{path}: is not UTF-8 text ({error})") from error
    return parse_knowledge_file(text, str(path))


def parse_knowledge_file(text: str, origin: str) -> KnowledgeFile:
    r"""Check the text of one knowledge file.

    Args:
        text: YAML.
        origin: The file as messages shall call it.

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
    content = _load_yaml(text, origin)
    if not isinstance(content, dict):
        fail(origin, "", f"must be a mapping with the keys {', '.join(_TOP_LEVEL_KEYS)}")
    for key in content:
        if key not in _TOP_LEVEL_KEYS:
            hint = near(str(key), _TOP_LEVEL_KEYS, f" Known: {', '.join(_TOP_LEVEL_KEYS)}.")
            fail(origin, str(key), f"unknown top-level key.{hint}")
    if "version" not in content:
        fail(origin, "version", f"is missing; write `version: {VERSION}`")
    if str(content["version"]) != str(VERSION):
        found = content["version"]
        fail(origin, "version", f"is {found}; this package reads version {VERSION}")
    return KnowledgeFile(
        origin=origin,
        source=_text(content["source"], origin, "source") if "source" in content else "",
        entities=_entities(content.get("entities"), origin),
        queries=_questions(content.get("knowledge"), origin),
    )


@dataclass(frozen=True, slots=True)
class _Unquoted:
    """A scalar that YAML would turn into something else than text."""

    written: str
    meaning: str
    line: int

    def __str__(self) -> str:
        return self.written


class _Loader(_SafeLoader):
    """Safe loader that refuses repeated keys and keeps what was written of unquoted scalars."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # PyYAML keeps the last of two equal keys without a word: an entity would vanish.
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice",
                        problem_mark=key.start_mark,
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


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
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise KnowledgeError(f"{origin}:{line} {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise KnowledgeError(f"{origin}: is not YAML ({error})") from error
    except RecursionError as error:
        raise KnowledgeError(f"{origin}: is nested too deeply") from error


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, _Unquoted) and value.meaning == "nothing")


def _text(value: Any, origin: str, key: str) -> str:
    if isinstance(value, _Unquoted):
        if not value.written:
            fail(origin, key, f"is empty (line {value.line}); a text is needed")
        fail(
            origin,
            key,
            f"{value.written} (line {value.line}) reads as {value.meaning}, not as text; "
            f'quote it: "{value.written}"',
        )
    if not isinstance(value, str):
        fail(origin, key, f"must be a text, not a {type(value).__name__}")
    if not value.strip():
        fail(origin, key, "is an empty text")
    if value != value.strip() or "\n" in value:
        fail(origin, key, f"{value!r} has space around it or a line break in it")
    return value


def _texts(value: Any, origin: str, key: str) -> tuple[str, ...]:
    """One text or a list of them, each once."""
    if not isinstance(value, list):
        return (_text(value, origin, key),)
    if not value:
        fail(origin, key, "is an empty list")
    texts = tuple(_text(item, origin, key) for item in value)
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        fail(origin, key, f"{twice!r} is listed twice")
    return texts


def _name(value: Any, origin: str, key: str) -> str:
    """The name of a knowledge or a kind; it must survive in `a->b`, config keys and lists."""
    name = _text(value, origin, key)
    for forbidden in _FORBIDDEN_IN_NAMES:
        if forbidden in name:
            fail(origin, f"{key}.{name}", f"a name must not contain {forbidden!r}")
    if any(character.isspace() for character in name):
        fail(origin, f"{key}.{name}", "a name must not contain a space; write an underscore")
    return name


def _entities(value: Any, origin: str) -> dict[str, dict[str, Entity]]:
    if _is_nothing(value):
        return {}
    if not isinstance(value, dict):
        fail(origin, "entities", "must map each kind to its entities")
    entities: dict[str, dict[str, Entity]] = {}
    for raw_kind, members in value.items():
        kind = _name(raw_kind, origin, "entities")
        key = f"entities.{kind}"
        if kind in LANGUAGES:
            fail(origin, key, "is the name of a language and cannot be a kind")
        if kind in RESERVED_KINDS:
            fail(origin, key, "is a computed kind; choose another name")
        if _is_nothing(members) or not members:
            fail(origin, key, "has no entities")
        if isinstance(members, list):
            identities = _texts(members, origin, key)
            entities[kind] = {identity: Entity(identity) for identity in identities}
        elif isinstance(members, dict):
            entities[kind] = {
                _text(identity, origin, key): _entity(identity, body, origin, key)
                for identity, body in members.items()
            }
        else:
            fail(origin, key, "must be a list of names or a mapping from name to facts")
    return entities


def _entity(identity: Any, body: Any, origin: str, key: str) -> Entity:
    identity = _text(identity, origin, key)
    key = f"{key}.{identity}"
    if _is_nothing(body):
        return Entity(identity)
    if not isinstance(body, dict):
        fail(origin, key, "must be a mapping of names by language and facts by kind")
    names: dict[str, tuple[str, ...]] = {}
    facts: dict[str, tuple[str, ...]] = {}
    for raw_name, value in body.items():
        name = _text(raw_name, origin, key)
        (names if name in LANGUAGES else facts)[name] = _texts(value, origin, f"{key}.{name}")
    return Entity(identity, names, facts)


def _questions(value: Any, origin: str) -> dict[str, Query]:
    if _is_nothing(value):
        return {}
    if not isinstance(value, dict):
        fail(origin, "knowledge", "must map each name to its family, language, template, answers")
    queries = (
        _question(_name(name, origin, "knowledge"), body, origin) for name, body in value.items()
    )
    return {question.name: question for question in queries}


def _question(name: str, body: Any, origin: str) -> Query:
    key = f"knowledge.{name}"
    if name in (*FAMILIES, "all"):
        fail(origin, key, "is the name of a family and cannot name a knowledge")
    if not isinstance(body, dict):
        fail(origin, key, f"must be a mapping with {', '.join(_REQUIRED_QUESTION_KEYS)}")
    for given in body:
        if given not in _QUESTION_KEYS:
            hint = near(str(given), _QUESTION_KEYS, f" Known: {', '.join(_QUESTION_KEYS)}.")
            fail(origin, f"{key}.{given}", f"unknown key.{hint}")
    for required in _REQUIRED_QUESTION_KEYS:
        if required not in body:
            fail(origin, f"{key}.{required}", "is missing")
    language = _choice(body["language"], LANGUAGES, origin, f"{key}.language")
    answers = body["answers"]
    if _is_nothing(answers) or answers == []:
        fail(origin, f"{key}.answers", "the domain is empty; name a kind or list the answers")
    return Query(
        name=name,
        family=_choice(body["family"], FAMILIES, origin, f"{key}.family"),
        language=language,
        template=_template(body["template"], origin, f"{key}.template"),
        answers=_texts(answers, origin, f"{key}.answers")
        if isinstance(answers, list)
        else _text(answers, origin, f"{key}.answers"),
        leading_space=_flag(body["space"], origin, f"{key}.space")
        if "space" in body
        else language not in UNSPACED_LANGUAGES,
        printed_template=_text(body["printed"], origin, f"{key}.printed")
        if "printed" in body
        else None,
        alike=_text(body["alike"], origin, f"{key}.alike") if "alike" in body else None,
    )


def _choice(value: Any, known: tuple[str, ...], origin: str, key: str) -> str:
    text = _text(value, origin, key)
    if text not in known:
        fail(origin, key, f"{text!r} is unknown; known: {', '.join(known)}")
    return text


def _template(value: Any, origin: str, key: str) -> str:
    if isinstance(value, str) and value != value.rstrip():
        fail(origin, key, f"{value!r} ends in a space; the space belongs to the answer")
    template = _text(value, origin, key)
    if template.count("{}") != 1:
        count = template.count("{}")
        fail(origin, key, f"{template!r} has {count} places {{}} for the subject; it needs one")
    return template


def _flag(value: Any, origin: str, key: str) -> bool:
    written = str(value).lower() if isinstance(value, _Unquoted) else ""
    if written not in ("true", "false"):
        fail(origin, key, "must be true or false")
    return written == "true"
