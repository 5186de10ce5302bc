"""Kinds of knowledge, their answers, and relations between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

LANGUAGES = ("en", "es", "fr", "de", "zh", "ja")
"""Languages in which entities may be named; each is a key of a knowledge file."""
FAMILIES = ("attribute", "cross_language", "simile", "math", "control")
"""The paper's (section 3.3), and unrelated knowledge in the sentences of their prompts."""
UNSPACED_LANGUAGES = frozenset({"zh", "ja"})
"""Languages whose answers follow the prompt without a space, unless a file says otherwise."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One spelling of an answer."""

    identity: str  #: Canonical English name of the entity, which aliases ("USA", "America") share.
    text: str  #: Spelling in the prompt's language, without surrounding space.


@dataclass(frozen=True)
class Knowledge:
    """A kind of knowledge: a prompt about a subject, and its answers (paper, section 2)."""

    name: str  #: Name in the catalogue, such as ``city``, ``city_es`` or ``X+1``.
    family: str  #: One of `FAMILIES`.
    language: str  #: One of `LANGUAGES`.
    template: str  #: Prompt with one ``{}`` for the subject and no space at its end.
    kind: str  #: Kind of entity of the answers; knowledge with equal `kind` shares identities.
    answers: tuple[Answer, ...]  #: All possible answers, in the order of the file.
    leading_space: bool = True  #: Whether a space separates the prompt and its answer.
    printed_template: str | None = None  #: Wording in the paper where that has an error, else None.
    alike: str | None = None
    """The only kind of fact that the subject of a simile shares with the answer, as an object of
    the same color as X says nothing else about X; None if all facts follow."""
    paper_size: int | None = None
    """Size of the domain in the paper; None if it has no such prompt."""
    more_templates: tuple[str, ...] = ()  #: Other wordings, which a file lists as ``templates``.
    paraphrases: tuple[str, ...] = ()  #: Other wordings, which are read only where asked for.

    @property
    def templates(self) -> tuple[str, ...]:
        """All wordings that the probe reads, `template` first."""
        return (self.template, *self.more_templates)

    @cached_property
    def canonical(self) -> dict[str, Answer]:
        """The first answer of each identity."""
        first: dict[str, Answer] = {}
        for answer in self.answers:
            first.setdefault(answer.identity, answer)
        return first

    def prompt(self, subject: str) -> str:
        """Return the prompt for a subject; braces in it are left as they are."""
        return self.template.replace("{}", subject, 1)

    def statement(self, subject: str, answer: str) -> str:
        """Return the prompt for a subject with an answer."""
        return self.prompt(subject) + (" " if self.leading_space else "") + answer


@dataclass(frozen=True, slots=True)
class Relation:
    """An ordered pair of kinds of knowledge, of which the target follows from the source."""

    source: Knowledge
    target: Knowledge
    reference: Mapping[str, frozenset[str]] | None
    """Identities of the right target answers by source identity; source identities without any are
    left out. None if no reference is known."""

    @property
    def name(self) -> str:
        """Name in configs and tables, ``source->target``."""
        return f"{self.source.name}->{self.target.name}"
