"""All kinds of knowledge: the built-in ones and those of users' files."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from lincorr_lightning.errors import KnowledgeError, listed
from lincorr_lightning.knowledge import yaml_file
from lincorr_lightning.knowledge.arithmetic import KIND, arithmetic_reference
from lincorr_lightning.knowledge.schema import FAMILIES, Knowledge, Relation
from lincorr_lightning.knowledge.yaml_file import Entities, KnowledgeFile, read_knowledge_file


class Catalogue(dict[str, Knowledge]):
    """Mapping from names to kinds of knowledge, with the facts that relate them.

    Create one with `Catalogue.load`.

    Example:
        >>> catalogue = Catalogue.load()
        >>> catalogue["X+1"].prompt("3")
        '3+1='
        >>> catalogue.relation("X+1->X*2").reference["4"]
        frozenset({'6'})
    """

    def __init__(self, knowledge: Iterable[Knowledge], entities: Entities) -> None:
        super().__init__({each.name: each for each in knowledge})
        self._entities = entities

    @classmethod
    def load(cls, *extra_files: str | Path) -> "Catalogue":
        """Read the built-in knowledge and any number of users' files, family by family.

        Extra files have the schema of the built-in ones, or are relation files of LRE. They may add
        kinds of knowledge, entities (also to built-in kinds), names and facts.
        """
        if not extra_files:
            return _built_in_catalogue()
        return _catalogue([*built_in_files().values(), *map(read_knowledge_file, extra_files)])

    def __missing__(self, name: str) -> Knowledge:
        hint = yaml_file.suggest(name, ("all", *FAMILIES, *self))
        # Families stand for the rest, which `lincorr audit` shows.
        own = [k.name for k in self.values() if (k.family, k.language) == ("attribute", "en")]
        known = ("all", *FAMILIES, *own)
        raise KnowledgeError(
            f"there is no knowledge {name!r}.{hint} Known: {listed(known, 60)}; `lincorr audit` "
            "shows all."
        )

    def relation(self, name: str) -> Relation:
        """Return an ordered pair, such as ``city->country``, with its reference.

        The reference comes from the facts of the source's entities (city -> country), from
        translation (the same prompt in two languages has the same answer) or from arithmetic; it is
        None if no fact relates the two.
        """
        parts = [part.strip() for part in name.split("->")]
        if len(parts) != 2 or not all(parts):
            reason = "write source->target, such as city->country"
            raise KnowledgeError(f"{name!r} is not a relation; {reason}")
        try:
            source, target = (self[part] for part in parts)
        except KnowledgeError as error:
            raise KnowledgeError(f"relation {name!r}: {error}") from None
        return Relation(source, target, self._reference(source, target))

    def select(self, names: Sequence[str] | str) -> list[Knowledge]:
        """Return kinds of knowledge by name or by family (``attribute``, ..., or ``all``).

        They are in the order of `names` (see `split_names`), once; a family in the catalogue's.
        """
        selected: dict[str, Knowledge] = {}
        for name in split_names(names):
            if name in ("all", *FAMILIES):
                members = [each for each in self.values() if name in ("all", each.family)]
            else:
                members = [self[name]]
            selected |= {each.name: each for each in members}
        return list(selected.values())

    def _reference(self, source: Knowledge, target: Knowledge) -> dict[str, frozenset[str]] | None:
        if source.name == target.name:
            return None  # trivial
        if source.kind == target.kind == KIND:
            return arithmetic_reference(source.name, target.name)
        reference = self._facts_between(source, target)
        # One prompt in two languages, such as ``city`` and ``city_es``.
        prompts = {each.name.removesuffix(f"_{each.language}") for each in (source, target)}
        is_translation = len(prompts) == 1 and source.language != target.language
        if not reference and is_translation and source.kind == target.kind:
            shared = (name for name in source.canonical if name in target.canonical)
            reference = {identity: frozenset({identity}) for identity in shared}
        return reference or None

    def _facts_between(self, source: Knowledge, target: Knowledge) -> dict[str, frozenset[str]]:
        if source.alike not in (None, target.kind):
            return {}
        answers = frozenset(target.canonical)
        entities = self._entities.get(source.kind, {})
        known = {
            name: answers & {*entities[name].facts.get(target.kind, ())}
            for name in source.canonical
            if name in entities
        }
        return {name: right for name, right in known.items() if right}


@cache
def built_in_files() -> Mapping[str, KnowledgeFile]:
    """Return the files that come with the package, by name."""
    paths = sorted((Path(__file__).parent / "data").glob("*.yaml"))
    return {path.name: read_knowledge_file(path) for path in paths}


@cache
def _built_in_catalogue() -> "Catalogue":
    return _catalogue(built_in_files().values())


def _catalogue(knowledge_files: Iterable[KnowledgeFile]) -> "Catalogue":
    knowledge, entities = yaml_file.merge_files(knowledge_files)
    return Catalogue(sorted(knowledge, key=lambda each: FAMILIES.index(each.family)), entities)


def split_names(names: Sequence[str] | str) -> list[str]:
    """Return a list of names; a string is split at its commas."""
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    if names is None:  # jsonargparse passes null even where it is not allowed
        raise KnowledgeError("knowledge is null. Name some, such as [city, country], or all.")
    return list(names)
