"""What a piece of knowledge, its answers and a pair of knowledges are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LANGUAGES = ("en", "es", "fr", "de", "zh", "ja")
"""Languages in which entities may be named; each is a key of a knowledge file."""

FAMILIES = ("attribute", "cross_language", "simile", "math")
"""The paper's four families of prompts (section 3.3)."""

UNSPACED_LANGUAGES = frozenset({"zh", "ja"})
"""Languages whose answers follow the prompt without a space, unless a file says otherwise."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One way to write one right or wrong answer.

    Attributes:
        identity: The entity that is meant, by its canonical English name. Aliases ("USA",
            "America") share one identity.
        text: The answer as it is written in the prompt's language, without surrounding space.
    """

    identity: str
    text: str


@dataclass(frozen=True, slots=True)
class Knowledge:
    """A prompt over a subject X with the answers it may have (paper, section 2).

    Attributes:
        name: Name in the catalogue, such as `city`, `city_es` or `X+1`.
        family: One of `FAMILIES`.
        language: One of `LANGUAGES`.
        template: The prompt, with one `{}` for the subject and no space at its end.
        kind: The kind of entity that answers it; two knowledges of one kind share identities.
        answers: The domain, in the order of the file.
        leading_space: Whether a space stands between the prompt and its answer.
        printed_template: The paper's wording where the paper has a slip, else None.
        alike: For a simile, the kind of fact that X shares with the answer: of a thing that has
            X's color, only the color is X's as well. None: all facts of the answer follow.
    """

    name: str
    family: str
    language: str
    template: str
    kind: str
    answers: tuple[Answer, ...]
    leading_space: bool = True
    printed_template: str | None = None
    alike: str | None = None

    def prompt(self, x: str) -> str:
        """Fill the template with a subject.

        Args:
            x: Any string; braces in it are left as they are.

        Returns:
            The prompt, without a space at its end.

        Example:
            >>> city = Knowledge("city", "attribute", "en", "{} lives in the city of", "city", ())
            >>> city.prompt("Ada")
            'Ada lives in the city of'
        """
        return self.template.replace("{}", x, 1)


@dataclass(frozen=True, slots=True)
class Relation:
    """An ordered pair of knowledges: does the target follow from the source?

    Attributes:
        source: The knowledge that is given.
        target: The knowledge that should follow.
        reference: For each source identity that has one, the identities that are right answers
            of the target; None where no reference is known.
    """

    source: Knowledge
    target: Knowledge
    reference: Mapping[str, frozenset[str]] | None

    @property
    def name(self) -> str:
        """The pair as it is written in configs and tables, `source->target`."""
        return f"{self.source.name}->{self.target.name}"
