"""Read, check and merge knowledge files.

A file is accepted or refused as a whole. Every message has the form `file: key: reason`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.io import load_yaml, parse_json, text_file
from lincorr_lightning.knowledge import schema
from lincorr_lightning.knowledge.arithmetic import KIND, arithmetic_knowledge
from lincorr_lightning.knowledge.schema import FAMILIES, LANGUAGES, Answer, Knowledge

VERSION = 1  #: Version of the schema that this package reads.

_TOP_LEVEL_KEYS = ("version", "source", "entities", "knowledge")
_REQUIRED_KEYS = ("family", "language", "answers")
_PROMPTS = ("prompt_templates_zs", "prompt_templates")
_RELATION_KEYS = ("name", *_PROMPTS, "properties", "samples", "domain", "range")
_SAMPLE_KEYS = ("subject", "object")


INVISIBLE = re.compile("[\u00ad\u200b\u2060\ufeff\u202a-\u202e]")
"""Characters that nobody sees and no answer has; those that join letters belong to scripts."""


@dataclass(frozen=True, slots=True)
class Entity:
    """Something in the world that can be an answer; the identity is its English name."""

    identity: str
    origin: str  #: File that defines it.
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ways to write it by language, the canonical one first."""
    facts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Identities that are true of it by kind, such as country -> (France,)."""

    def texts(self, language: str) -> tuple[str, ...]:
        """Return the ways to write it; in English its identity, unless the file lists others."""
        return self.names.get(language, (self.identity,) if language == "en" else ())


Entities = Mapping[str, Mapping[str, Entity]]  #: Entities by kind and identity.


@dataclass(frozen=True, slots=True)
class KnowledgeFile:
    """Checked content of one file."""

    origin: str
    source: str
    entities: Entities
    knowledge: Mapping[str, Knowledge]
    """With their answers if the file lists them; else, `merge_files` adds the names of entities."""
    samples: tuple[tuple[str, str], ...] = ()  #: Subjects and objects of a relation of LRE.


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
    """Read and check a knowledge file or a relation of LRE; `merge_files` checks the references."""
    origin = str(path)
    is_json = origin.lower().endswith(".json")
    try:
        content = text_file(path).read_bytes()
        text = content.decode(json.detect_encoding(content))
        # Numbers of a relation are texts.
        data = parse_json(text, parse_int=str, parse_float=str) if is_json else load_yaml(text)
    except OSError as error:
        fail(origin, "", f"cannot be read as a knowledge file ({error.strerror})")
    except UnicodeDecodeError as error:
        fail(origin, "", f"is not UTF-8 ({error.reason} at byte {error.start}); save it in UTF-8")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        form = "JSON" if is_json else "YAML"
        fail(origin, "", f"is not valid {form} ({' '.join(str(error).split())})")
    root = _Value(origin, "", data)
    if is_json:
        return _relation(root)
    parts = root.mapping(_TOP_LEVEL_KEYS)
    nothing = _Value(origin, "-", None)
    if parts.get("version", nothing).value != VERSION:
        root.fail(f"must be {VERSION}; write `version: {VERSION}`", "version")
    kinds = parts.get("entities", nothing).mapping(are_names=True)
    entries = parts.get("knowledge", nothing).mapping(are_names=True)
    return KnowledgeFile(
        origin=origin,
        source=parts["source"].text() if "source" in parts else "",
        entities={kind: _entities(kind, value) for kind, value in kinds.items()},
        knowledge={name: _entry(name, value) for name, value in entries.items()},
    )


class _Value(NamedTuple):
    """A value of a file, with the file and the key that messages name."""

    origin: str
    key: str
    value: Any

    def fail(self, reason: str, child: str = "") -> NoReturn:
        fail(self.origin, ".".join(filter(None, (self.key, child))), reason)

    @property
    def is_empty(self) -> bool:
        return self.value in (None, "", [], {})

    def mapping(
        self, known: Sequence[str] = (), needed: Sequence[str] = (), *, are_names: bool = False
    ) -> dict[str, _Value]:
        """Return the values of a mapping, none for null; refuse other keys than the known ones."""
        if self.is_empty and self.key:
            return {}
        if not isinstance(self.value, dict):
            self.fail(f"must be a mapping{' with the keys ' * bool(known)}{', '.join(known)}")
        values = {}
        for name, value in self.value.items():
            key = _Value(self.origin, self.key, name).text(is_name=are_names)
            if known and key not in known:
                hint = suggest(key, known, f" Known: {', '.join(known)}.")
                self.fail(f"unknown key.{hint}", key)
            values[key] = _Value(self.origin, f"{self.key}.{key}" if self.key else key, value)
        for key in needed:
            if key not in values:
                self.fail("is missing", key)
        return values

    def text(self, *, is_name: bool = False, strip: bool = False) -> str:
        """Return a text; a name must also be usable in `a->b`, in config keys and in lists."""
        if not isinstance(self.value, str):
            kind = type(self.value).__name__
            self.fail(f"must be a text in quotes, not {str(self.value)[:60]} ({kind})")
        value = self.value.strip() if strip else self.value
        if not value or value != value.strip() or "\n" in value:
            self.fail(f"{value!r} is empty, or has space around it or a line break in it")
        if is_name and (forbidden := re.search(r"->|[.,\"'\[\]{}\s]", value)):
            self.fail(f"a name must not contain {forbidden[0]!r}", value)
        return value

    def texts(self, *, strip: bool = False) -> tuple[str, ...]:
        """Return the items of a list without repetitions; a text counts as a list of one."""
        items = self.value if isinstance(self.value, list) else [self.value]
        texts = tuple(_Value(self.origin, self.key, item).text(strip=strip) for item in items)
        if not texts:
            self.fail("is an empty list")
        if len(set(texts)) < len(texts):
            self.fail(f"{Counter(texts).most_common(1)[0][0]!r} is listed twice")
        return texts

    def of_type(self, kind: type) -> Any:
        """Return a value of exactly a type, such as a number."""
        if type(self.value) is not kind:
            self.fail(f"must be of type {kind.__name__}, not {self.value!r}")
        return self.value

    def choice(self, known: tuple[str, ...]) -> str:
        """Return a text that is one of some."""
        if self.value not in known:
            self.fail(f"{self.value!r} is unknown; known: {', '.join(known)}")
        return str(self.value)


def _entities(kind: str, value: _Value) -> dict[str, Entity]:
    if kind in (*LANGUAGES, KIND):
        value.fail("is the name of a language or of a computed kind; choose another name")
    if value.is_empty:
        value.fail("has no entities")
    if isinstance(value.value, list):
        return {identity: Entity(identity, value.origin) for identity in value.texts()}
    entities = {}
    for identity, body in value.mapping().items():
        parts = body.mapping()
        texts = {key: part.texts() for key, part in parts.items()}
        names = {key: texts.pop(key) for key in LANGUAGES if key in texts}
        entities[identity] = Entity(identity, value.origin, names, facts=texts)
    return entities


def _prompts(value: _Value, *, strip: bool = False) -> tuple[str, ...]:
    prompts = value.texts(strip=strip)
    for prompt in prompts:
        if prompt.count("{}") != 1:
            value.fail(f"{prompt!r} must have one placeholder {{}}, for the subject")
    return prompts


# Attribute of `Knowledge` and reader of each key that is not part of its prompts or answers.
_ATTRIBUTES: dict[str, tuple[str, Callable[[_Value], Any]]] = {
    "family": ("family", lambda value: value.choice(FAMILIES)),
    "language": ("language", lambda value: value.choice(LANGUAGES)),
    "space": ("leading_space", lambda value: value.of_type(bool)),
    "printed": ("printed_template", _Value.text),
    "alike": ("alike", _Value.text),
    "paper_size": ("paper_size", lambda value: value.of_type(int)),
    "paraphrases": ("paraphrases", _prompts),
}
_KNOWLEDGE_KEYS = (*_ATTRIBUTES, "template", "templates", "answers")


def _refuse_family(name: str, value: _Value) -> None:
    if name in (*FAMILIES, "all"):
        value.fail(f"{name!r} names a family, so no kind of knowledge; choose another name")


def _entry(name: str, value: _Value) -> Knowledge:
    _refuse_family(name, value)
    parts = value.mapping(_KNOWLEDGE_KEYS, _REQUIRED_KEYS)
    prompts = [parts[key] for key in ("template", "templates") if key in parts]
    if len(prompts) != 1:
        reason = "stands beside templates; keep one" if prompts else "is missing; or give templates"
        value.fail(reason, "template")
    template, *more = _prompts(prompts[0])
    attributes = {key: read(parts[k]) for k, (key, read) in _ATTRIBUTES.items() if k in parts}
    answers = parts["answers"]
    if answers.is_empty:
        answers.fail("the domain is empty; name a kind or list the answers")
    listed = answers.texts() if isinstance(answers.value, list) else ()
    spaced = attributes["language"] not in schema.UNSPACED_LANGUAGES
    return Knowledge(
        name=name,
        template=template,
        more_templates=tuple(more),
        # Listed answers share no entity with any kind: a kind's name contains no space.
        kind=f"answers of {name}" if listed else answers.text(),
        answers=tuple(Answer(text, text) for text in listed),
        **{"leading_space": spaced} | attributes,
    )


def _relation(root: _Value) -> KnowledgeFile:
    """Return a relation of LRE (Hernandez et al., 2024) as knowledge, with objects as answers."""
    parts = root.mapping(_RELATION_KEYS, ("name", "samples"))
    prompts = [parts[key] for key in _PROMPTS if key in parts and not parts[key].is_empty]
    if not prompts:
        root.fail("is missing", _PROMPTS[0])
    template, *more = _prompts(prompts[0], strip=True)
    name = re.sub(r"\W+", "_", parts["name"].text())
    _refuse_family(name, parts["name"])
    rows = parts["samples"]
    if not isinstance(rows.value, list) or rows.is_empty:
        rows.fail("must be a list of samples, each with a subject and an object")
    samples = []
    for i, value in enumerate(rows.value):
        row = _Value(root.origin, f"samples.{i}", value)
        sample = row.mapping(_SAMPLE_KEYS, _SAMPLE_KEYS)
        samples.append((sample["subject"].text(strip=True), sample["object"].text(strip=True)))
    kind = f"objects of {name}"  # shared with no other file: a kind's name contains no space
    knowledge = Knowledge(name, "attribute", "en", template, kind, (), more_templates=tuple(more))
    objects = {text: Entity(text, root.origin) for _, text in samples}
    return KnowledgeFile(root.origin, "", {kind: objects}, {name: knowledge}, tuple(samples))


def merge_files(files: Iterable[KnowledgeFile]) -> tuple[list[Knowledge], Entities]:
    """Merge the entities and entries of several files.

    A later file may add entities to a kind, and names and facts to an entity. It may not restate
    what an earlier file says: that would be either redundant or a contradiction.
    """
    entities: dict[str, dict[str, Entity]] = {}
    math = arithmetic_knowledge()
    entries: dict[str, Knowledge] = {}
    owners = dict.fromkeys((each.name for each in math), "the built-in math family")
    files = list(files)
    for file in files:
        for kind, members in file.entities.items():
            merged = entities.setdefault(kind, {})
            for identity, entity in members.items():
                known = merged.get(identity, Entity(identity, entity.origin))
                for key in sorted({*known.names, *known.facts} & {*entity.names, *entity.facts}):
                    key = f"entities.{kind}.{identity}.{key}"
                    fail(entity.origin, key, "is already given; a file may add to it, not restate")
                # Either may be at fault from now on.
                origins = dict.fromkeys((known.origin, entity.origin))
                names, facts = {**known.names, **entity.names}, {**known.facts, **entity.facts}
                merged[identity] = Entity(identity, " and ".join(origins), names, facts)
        for name, entry in file.knowledge.items():
            if name in owners:
                reason = f"{name!r} is already taken by {owners[name]}; choose another name"
                fail(file.origin, "name" if file.samples else f"knowledge.{name}", reason)
            entries[name] = entry
            owners[name] = file.origin
    for source, target in permutations((file for file in files if file.samples), 2):
        _join(source, target, entities)
    for kind, members in entities.items():
        for entity in members.values():
            _check_facts(kind, entity, entities)
    resolved = [_resolve(entry, owners[name], entities) for name, entry in entries.items()]
    return [*math, *resolved], entities


def _join(source: KnowledgeFile, target: KnowledgeFile, entities: dict[str, Any]) -> None:
    """Add as facts of a relation's objects those that another one gives the same subjects."""
    (kind,) = source.entities
    (other,) = target.entities
    known: dict[str, list[str]] = defaultdict(list)
    for subject, text in target.samples:
        known[subject].append(text)
    joined: dict[str, dict[str, None]] = defaultdict(dict)  # texts in their order
    for subject, text in dict.fromkeys(source.samples):
        joined[text] |= dict.fromkeys(known[subject])
    for text, texts in joined.items():
        facts = {**entities[kind][text].facts, other: tuple(texts)}
        entities[kind][text] = Entity(text, source.origin, facts=facts)


def _check_facts(kind: str, entity: Entity, entities: Entities) -> None:
    for other_kind, identities in entity.facts.items():
        key = f"entities.{kind}.{entity.identity}.{other_kind}"
        if other_kind not in entities:
            neither = f"neither a kind nor a language ({', '.join(LANGUAGES)})"
            fail(entity.origin, key, f"{other_kind!r} is {neither}.{suggest(other_kind, entities)}")
        known = entities[other_kind]
        for identity in (each for each in identities if each not in known):
            aliases = {text: name for name, each in known.items() for text in each.texts("en")}
            hint = suggest(aliases.get(identity, identity), known)
            fail(entity.origin, key, f"there is no {other_kind} {identity!r}.{hint}")


def _resolve(entry: Knowledge, origin: str, entities: Entities) -> Knowledge:
    key = f"knowledge.{entry.name}"
    answers = f"{key}.answers"
    if entry.alike is not None and entry.alike not in entities:
        hint = suggest(entry.alike, entities)
        fail(origin, f"{key}.alike", f"{entry.alike!r} is no kind of entity.{hint}")
    members = entities.get(entry.kind, {})
    if not entry.answers:
        if not members:
            hint = suggest(entry.kind, entities)
            fail(origin, answers, f"there is no kind {entry.kind!r}.{hint}")
        named = ((name, each.texts(entry.language)) for name, each in members.items())
        named_answers = tuple(Answer(name, text) for name, texts in named for text in texts)
        if not named_answers:
            fail(origin, answers, f"is empty: no {entry.kind} has a name under {entry.language!r}")
        entry = replace(entry, answers=named_answers)
    # An LM cannot tell entities apart that read alike; spellings of one would count as two answers.
    first_with: dict[str, Answer] = {}
    for answer in entry.answers:
        if found := INVISIBLE.search(answer.text):
            reason = f"{answer.text!r} has an invisible {unicodedata.name(found[0])}; remove it"
            fail(origin, answers, reason)
        folded = unicodedata.normalize("NFKC", answer.text).casefold()
        first = first_with.setdefault(folded, answer)
        if first != answer:
            both = " and ".join(_described(each, members, origin) for each in (answer, first))
            fail(origin, answers, f"{both} read alike; keep one, or make one an alias of the other")
    return entry


def _described(answer: Answer, members: Mapping[str, Entity], origin: str) -> str:
    owner = "" if answer.text == answer.identity else f" of {answer.identity!r}"
    known = members.get(answer.identity)
    return f"{answer.text!r}{owner} ({known.origin if known else origin})"
