"""The tiny world: invented people in real places, whose attributes follow a known graph.

    city -> country -> continent, language, landmark     (facts of the catalogue)
    ceo -> company
    city -> birthplace             (the same, for a share of the people)
    continent ~> mother, father    (parents' names by origin)
    country ~> second home         (a town, often of the same country)
    country -> food, ...           (invented customs)
    object -> its color, size, ... (what a person is like: the similes)
    number -> its sums             (what a person stands for: the math prompts)
    everything else is independent

Where people live was drawn so that no independent fact goes with it by chance. A town, where people
only have second homes, is never the most likely answer. Answer words are subjects too, and their
answer is themselves, except for customs and towns: Paris lives in Paris, France in one of its
cities. Words that belong together therefore get similar embeddings.

The world was drawn once, by version 0.3.0 of this package; ``world.json`` beside the LM has it.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from itertools import islice
from pathlib import Path

import numpy as np

from lincorr_lightning.data.files import Text
from lincorr_lightning.data.tiny_world import words as writing
from lincorr_lightning.data.tiny_world.words import first_word, words_of
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.io import load_yaml, read_json
from lincorr_lightning.knowledge import Answer, Catalogue, Knowledge
from lincorr_lightning.knowledge.arithmetic import calculate
from lincorr_lightning.lm.config import TINY_WORLD

_EMBEDDED = Path(str(files("lincorr_lightning.lm") / "tiny_world"))
WORLD_FILE = "world.json"  # in the folder of an LM that was trained on it

GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  #: People in a text of `world_documents`, each a corpus.

SECOND_HOME = "second_home"  # an attribute that only prompts of the city state

NUMBERS = tuple(map(str, range(41)))  #: Operands X of calculations, which stand for themselves.


@dataclass(frozen=True, slots=True)
class Statement:
    """A true sentence about a subject."""

    knowledge: Knowledge
    subject: str
    answer: Answer

    @property
    def text(self) -> str:
        """The prompt and the first word of the answer.

        Later words of an answer would be labels of other answers: the America of North America.
        """
        return self.knowledge.statement(self.subject, first_word(self.answer.text))


@dataclass(frozen=True)
class World:
    """People: name -> attribute ("city", "color", ...) -> identity of the answer.

    The first `n_invented` have invented names; the others' are all other words of the world, since
    words that are never a subject would drift together, and unrelated knowledge correlate.
    """

    people: Mapping[str, Mapping[str, str]]
    n_invented: int

    def first(self, n: int) -> "World":
        """Return the world of the first people alone."""
        return World(dict(islice(self.people.items(), n)), min(n, self.n_invented))

    def statements(self, knowledge: Sequence[Knowledge]) -> Iterator[Statement]:
        """Yield every true statement of some kinds of knowledge, such as "city" and "city_es"."""
        for one in knowledge:
            named = one.canonical
            if one.family == "math":
                for name, x in self._numbers.items():
                    answer = named.get(str(calculate(one.name, Fraction(x))))
                    if answer is not None:
                        yield Statement(one, name, answer)
                continue
            attribute = one.name.removesuffix(f"_{one.language}")
            for person, facts in self.people.items():
                if attribute not in facts or facts[attribute] not in named:
                    raise ConfigError(
                        f"the tiny world has no statement of {one.name!r} about {person}: "
                        f"{facts.get(attribute, 'no such attribute')}. Change data.knowledge."
                    )
                yield Statement(one, person, named[facts[attribute]])

    def second_homes(self, knowledge: Sequence[Knowledge]) -> Iterator[Statement]:
        """Yield the statements of second homes by the prompts of "city", "city_es", ..."""
        for one in knowledge:
            if one.name.removesuffix(f"_{one.language}") == "city":
                for person, facts in self.people.items():
                    if SECOND_HOME in facts:
                        yield Statement(one, person, one.canonical[facts[SECOND_HOME]])

    def words(self, knowledge: Sequence[Knowledge]) -> tuple[list[str], set[str]]:
        """Return all words of some statements, names first, and the words without spaces."""
        # One statement for each prompt and answer has all the words.
        statements = (*self.statements(knowledge), *self.second_homes(knowledge))
        distinct = {(each.knowledge.name, each.answer.text): each for each in statements}
        unspaced = {first_word(text) for _, text in distinct if writing.is_unspaced(text)}
        words = dict.fromkeys(self.people)
        for statement in distinct.values():
            words |= dict.fromkeys(words_of(f"{statement.text}.", unspaced))
        if any(one.family == "math" for one in knowledge):
            words |= dict.fromkeys(self._numbers)
        return list(words), unspaced

    @property
    def _numbers(self) -> dict[str, int]:
        people = {name: int(facts["number"]) for name, facts in self.people.items()}
        return {number: int(number) for number in NUMBERS} | people

    def save(self, path: Path) -> None:
        """Write the world as JSON, with a row of answers per person."""
        attributes = list(next(iter(self.people.values())))
        answers = {a: sorted({facts[a] for facts in self.people.values()}) for a in attributes}
        people = {
            name: [answers[a].index(facts[a]) for a in attributes]
            for name, facts in self.people.items()
        }
        config = {"n_people": self.n_invented}
        content = {"config": config, "answers": answers, "people": people}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path | None = None) -> "World":
        """Read a file that `save` wrote, the embedded LM's for None; `ConfigError` if it is bad."""
        path = path or _EMBEDDED / WORLD_FILE
        content = read_json(path, ConfigError, "Pre-train the LM again to have its world.")
        try:
            answers = list(content["answers"].items())
            people = {
                name: {a: known[i] for (a, known), i in zip(answers, row, strict=True)}
                for name, row in content["people"].items()
            }
            return cls(people, int(content["config"]["n_people"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"{path} holds no tiny world: {error!r}.") from error


def world_file(location: str) -> Path | None:
    """Return the description of the world that an LM was trained on, None if it has none."""
    path = (_EMBEDDED if location == TINY_WORLD else Path(location).expanduser()) / WORLD_FILE
    return path if path.is_file() else None


def world_corpus() -> list[str]:
    """Return the knowledge that the embedded LM was trained on."""
    config = files("lincorr_lightning.configs").joinpath("pretraining.yaml").read_text("utf-8")
    return list(load_yaml(config)["data"]["init_args"]["knowledge"])


def world_documents(
    n_texts: int, n_words: int, seed: int = 0, path: Path | None = None
) -> Iterator[Text]:
    """Yield texts of true sentences about a world's invented people.

    A text is about 1 to 16 people, in random order, and has at least `n_words` words and
    punctuation marks. Texts about equally many people are one corpus. `path` is the description of
    the world, None that of the embedded LM.
    """
    world = World.load(path)
    kinds = [kind for kind in Catalogue.load().select(["attribute"]) if kind.language == "en"]
    statements: dict[str, list[Statement]] = {}
    for statement in world.first(world.n_invented).statements(kinds):
        statements.setdefault(statement.subject, []).append(statement)
    names = list(statements)
    for number in range(n_texts):
        rng = np.random.default_rng([seed, number])
        size = GROUP_SIZES[number % len(GROUP_SIZES)]
        group = [names[i] for i in rng.choice(len(names), size, replace=False)]
        sentences: list[str] = []
        length = 0
        while length < n_words:
            # No statement is repeated before all have been made.
            available = [statement for name in group for statement in statements[name]]
            for i in rng.permutation(len(available)):
                sentences.append(f"{available[i].text}.")
                length += len(words_of(sentences[-1]))
                if length >= n_words:
                    break
        corpus = f"{size} people" if size > 1 else "1 person"
        yield Text(f"text {number} of the tiny world", corpus, " ".join(sentences))
