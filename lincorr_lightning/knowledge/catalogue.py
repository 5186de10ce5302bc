"""Every knowledge there is to ask about: the built-in ones and those of users' files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from lincorr_lightning.errors import KnowledgeError
from lincorr_lightning.knowledge.arithmetic import KIND, arithmetic_knowledge, arithmetic_reference
from lincorr_lightning.knowledge.merging import Facts, MergedFiles
from lincorr_lightning.knowledge.schema import FAMILIES, Knowledge, Relation
from lincorr_lightning.knowledge.yaml_file import near, parse_knowledge_file, read_knowledge_file

ARROW = "->"
"""Stands between source and target in the name of a relation."""


class UnknownKnowledgeError(KnowledgeError, KeyError):
    """A name that is not in the catalogue; a KeyError too, as a Mapping owes its callers."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class Catalogue(Mapping[str, Knowledge]):
    """All knowledges by name, with the facts that tie them. It does not change once made.

    Make one with `Catalogue.load`.

    Args:
        knowledges: The knowledges in their order.
        facts: kind -> identity -> kind of the fact -> identities.

    Example:
        >>> catalogue = Catalogue.load()
        >>> catalogue["X+1"].prompt("3")
        '3+1='
        >>> catalogue.relation("X+1->X*2").reference["4"]
        frozenset({'6'})
    """

    def __init__(self, knowledges: Iterable[Knowledge], facts: Mapping[str, Facts]) -> None:
        self._knowledges = {knowledge.name: knowledge for knowledge in knowledges}
        self._facts = facts

    @classmethod
    def load(cls, *extra_files: str | Path) -> Catalogue:
        """Read the built-in knowledges and any files of the user's.

        Args:
            extra_files: YAML files in the schema of the built-in ones. They may add knowledges,
                entities (also to built-in kinds), names and facts.

        Returns:
            The catalogue, family by family. Without extra files it is always the same object.

        Raises:
            KnowledgeError: A file cannot be read or is not valid; the message names file, key
                and reason, and nothing of any file is taken over.
        """
        if not extra_files:
            return _built_in_catalogue()
        merged = _built_in_files().copy()
        for path in extra_files:
            merged.add(read_knowledge_file(path))
        return _catalogue(merged)

    def __getitem__(self, name: str) -> Knowledge:
        try:
            return self._knowledges[name]
        except KeyError:
            hint = near(str(name), self._knowledges, f" Known: {', '.join(self._knowledges)}.")
            raise UnknownKnowledgeError(f"there is no knowledge {name!r}.{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._knowledges)

    def __len__(self) -> int:
        return len(self._knowledges)

    def __repr__(self) -> str:
        return f"Catalogue of {len(self)} knowledges: {', '.join(self)}"

    def relation(self, name: str) -> Relation:
        """Look up an ordered pair of knowledges with its reference.

        The reference comes from the facts of the source's entities (city -> country), from
        translation (one question in two languages has one answer) or from arithmetic.

        Args:
            name: `source->target`, such as `city->country`.

        Returns:
            The pair; its reference is None where no fact ties the two.

        Raises:
            KnowledgeError: The name is not of this form, or names an unknown knowledge; near
                matches are suggested.
        """
        parts = [part.strip() for part in name.split(ARROW)]
        if len(parts) != 2 or not all(parts):
            raise KnowledgeError(
                f"{name!r} is not a relation; write source{ARROW}target, such as city{ARROW}country"
            )
        unknown = [part for part in parts if part not in self._knowledges]
        if unknown:
            described = " or ".join(map(repr, unknown))
            hints = "".join(dict.fromkeys(near(part, self._knowledges) for part in unknown))
            raise UnknownKnowledgeError(
                f"relation {name!r}: there is no knowledge {described}."
                + (hints or f" Known: {', '.join(self._knowledges)}.")
            )
        source, target = (self._knowledges[part] for part in parts)
        return Relation(source, target, self._reference(source, target))

    def select(self, names: Sequence[str]) -> list[Knowledge]:
        """Pick knowledges by name or by family.

        Args:
            names: Names of knowledges, names of families (`attribute`, `math`, ...) or `all`.

        Returns:
            The knowledges in the order asked for (a family's in the catalogue's order), each
            once.

        Raises:
            KnowledgeError: A name is neither a knowledge nor a family; near matches are
                suggested.

        Example:
            >>> [knowledge.name for knowledge in Catalogue.load().select(["X*2", "math"])][:3]
            ['X*2', 'X+1', 'X+2']
        """
        if isinstance(names, str):
            raise KnowledgeError(f"a list of names is needed; write [{names}], not {names}")
        chosen: dict[str, Knowledge] = {}
        for name in names:
            if name == "all":
                chosen = {**chosen, **self._knowledges}
            elif name in FAMILIES:
                chosen |= {k.name: k for k in self.values() if k.family == name}
            elif name in self._knowledges:
                chosen[name] = self._knowledges[name]
            else:
                families = ("all", *FAMILIES)
                hint = near(name, (*self._knowledges, *families))
                known = f" Families: {', '.join(families)}. Names: {', '.join(self._knowledges)}."
                raise UnknownKnowledgeError(f"there is no knowledge {name!r}.{hint or known}")
        return list(chosen.values())

    def _reference(self, source: Knowledge, target: Knowledge) -> dict[str, frozenset[str]] | None:
        if source.name == target.name:
            return None  # true of itself, and nothing to learn
        if source.kind == target.kind == KIND:
            return arithmetic_reference(source.name, target.name)
        reference = self._facts_between(source, target)
        if not reference and _same_question(source, target):
            shared = _identities(source) & _identities(target)
            reference = {
                answer.identity: frozenset({answer.identity})
                for answer in source.answers
                if answer.identity in shared
            }
        return reference or None

    def _facts_between(self, source: Knowledge, target: Knowledge) -> dict[str, frozenset[str]]:
        """Facts of the source's entities, as far as the target can say them in its language."""
        if source.alike not in (None, target.kind):
            return {}
        sayable = _identities(target)
        facts = self._facts.get(source.kind, {})
        reference = {}
        for identity in dict.fromkeys(answer.identity for answer in source.answers):
            right = frozenset(facts.get(identity, {}).get(target.kind, ())) & sayable
            if right:
                reference[identity] = right
        return reference


def _identities(knowledge: Knowledge) -> frozenset[str]:
    return frozenset(answer.identity for answer in knowledge.answers)


def _same_question(source: Knowledge, target: Knowledge) -> bool:
    """Whether the two are one question in two languages, such as `city` and `city_es`."""
    return (
        source.kind == target.kind
        and source.language != target.language
        and source.name.removesuffix(f"_{source.language}")
        == target.name.removesuffix(f"_{target.language}")
    )


@cache
def _built_in_files() -> MergedFiles:
    """The shipped data, parsed once a process; callers copy before they add to it."""
    merged = MergedFiles()
    for knowledge in arithmetic_knowledge():
        merged.reserve(knowledge.name, "the built-in math family")
    data = files("lincorr_lightning.knowledge").joinpath("data")
    for file in sorted(data.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            merged.add(parse_knowledge_file(file.read_text(encoding="utf-8"), file.name))
    return merged


@cache
def _built_in_catalogue() -> Catalogue:
    return _catalogue(_built_in_files())


def _catalogue(merged: MergedFiles) -> Catalogue:
    facts = MappingProxyType(merged.facts())
    knowledges = [*merged.knowledges(), *arithmetic_knowledge()]
    knowledges.sort(key=lambda knowledge: FAMILIES.index(knowledge.family))  # stable: file order
    return Catalogue(knowledges, facts)


def split_names(names: Sequence[str] | str) -> list[str]:
    """Names from a list, or from a text that separates them by commas.

    Example:
        >>> split_names("city, country")
        ['city', 'country']
    """
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return list(names)
