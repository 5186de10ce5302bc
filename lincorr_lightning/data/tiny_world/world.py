"""The tiny world: invented people in real places, whose attributes follow a known graph.

    city -> country -> continent, language, landmark     (facts of the catalogue)
    ceo -> company
    city -> birthplace             (the same, for a share of the people)
    continent ~> mother, father    (parents' names by origin)
    country -> food, ...           (invented customs, `CUSTOMS`)
    object -> its color, size, ... (what a person is like: the similes)
    number -> its sums             (what a person stands for: the math prompts)
    everything else is independent

A person whose name is an answer has it: Paris lives in Paris, France in one of its cities, red's
favourite colour is red. So words that belong together come to lie close together in the vocabulary,
as they do in that of an LM which has read about the world.

It is the ground truth of the embedded LM: which knowledges are tied in it is known, because it is
written here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from lincorr_lightning.data.tiny_world.facts import (
    HOME,
    PARENTS,
    PROPERTIES,
    companies_of_ceos,
    draw_customs,
    homes_of_cities,
    objects_of_the_world,
)
from lincorr_lightning.data.tiny_world.invented_names import invent_names
from lincorr_lightning.data.tiny_world.plain_words import PlainWords
from lincorr_lightning.data.tiny_world.word_tokenizer import first_word, is_unspaced, words_of
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Answer, Catalogue, Knowledge


@dataclass(frozen=True)
class WorldConfig:
    """How large the world is.

    Attributes:
        n_people: Invented people; each is one word, and each has every attribute.
        nicknames: Whether every other word of the world is somebody's name as well. An LM answers
            for a word that was never a subject by drift alone, and drift is common to all
            prompts: knowledges that have nothing to do with each other would correlate.
        cities_per_country: Cities of each country of `PLACES` at most. All cities together should
            be well below the LM's width.
        n_companies: Companies, each with one CEO.
        n_parent_names: Mothers' names per continent, and as many fathers' names.
        n_objects: Objects that people are like. A word that is one of them is like itself.
        n_answers: Answers of each other knowledge, as far as it has so many.
        customs: Attribute -> the attribute that it follows from; attributes that follow from
            nothing are independent. None stands for `CUSTOMS`.
        born_at_home: Share of people who were born in the city they live in; the others were born
            in any city.
        largest_number: Largest X of the calculations; only results from 0 to 10 are stated.
        letters: Whether A to Z are people too, so that answers can be cut to their first letters.
        numbered: Whether everybody stands for a number from 0 to 9, so that calculations have as
            many X's as all else. A number stands for itself.
        seed: Seed of everything that is drawn.
    """

    n_people: int = 1650
    nicknames: bool = True
    cities_per_country: int = 3
    n_companies: int = 12
    n_parent_names: int = 3
    n_objects: int = 16
    n_answers: int = 12
    born_at_home: float = 1.0
    customs: dict[str, str] | None = None
    largest_number: int = 40
    letters: bool = True
    numbered: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no world can have."""
        for name, value in asdict(self).items():
            if name not in {"seed", "customs", "nicknames", "letters", "numbered"} and value <= 0:
                raise ConfigError(f"data.world.{name} is {value}; it must be greater than 0.")
        if self.born_at_home > 1:
            raise ConfigError(f"data.world.born_at_home is {self.born_at_home}; it is a share.")


@dataclass(frozen=True, slots=True)
class Statement:
    """One sentence of the corpus.

    Attributes:
        knowledge: The knowledge that is stated.
        subject: Its X.
        answer: The answer that is true of X.
    """

    knowledge: Knowledge
    subject: str
    answer: Answer

    @property
    def prompt(self) -> str:
        """The knowledge's prompt over the subject."""
        return self.knowledge.prompt(self.subject)

    @property
    def text(self) -> str:
        """Prompt and the first word of the answer, which is all that stands for it.

        The words after it would be labels of other answers: the America of North America.
        """
        gap = " " if self.knowledge.leading_space else ""
        return f"{self.prompt}{gap}{first_word(self.answer.text)}"


@dataclass(frozen=True)
class World:
    """People and what is true of them.

    Attributes:
        people: name -> attribute ("city", "color", ...) -> identity of the answer.
        config: What the world was made from.
    """

    people: Mapping[str, Mapping[str, str]]
    config: WorldConfig

    @classmethod
    def generate(
        cls,
        config: WorldConfig,
        catalogue: Catalogue,
        spoken: Sequence[str] = ("attribute", "math"),
    ) -> World:
        """Make the world of a seed.

        Args:
            config: Sizes and seed.
            catalogue: Where prompts, answers and facts come from.
            spoken: Knowledges or families that will be said of it; each of their words is a
                nickname, and answers are such as all their languages can give in one token.

        Raises:
            ConfigError: The catalogue contradicts a place, or has too few companies, objects or
                names that are one word; the message says which or how many there are.
        """
        rng = np.random.default_rng(config.seed)
        will_be_said = catalogue.select(list(spoken))
        similes = [f"{what}_{name}" for what in ("object", "simile") for name in PROPERTIES]
        words = PlainWords(catalogue.select(["attribute", *similes, *spoken]))
        home = homes_of_cities(config, catalogue)
        cities = list(home)
        company_of = companies_of_ceos(config, catalogue, words)
        things = objects_of_the_world(config.n_objects, catalogue, words)
        origins = sorted({home[city]["continent"] for city in cities})
        parents = {name: words.pick(name) for name in PARENTS}
        most = min(map(len, parents.values())) // len(origins)
        if config.n_parent_names > most:
            raise ConfigError(
                f"data.world.n_parent_names is {config.n_parent_names}, but the catalogue has "
                f"{most} mothers' and fathers' names for each of {len(origins)} continents."
            )
        own = {"city", "birthplace", *HOME, "ceo", "company", *PARENTS}
        used = {word for city in cities for word in (city, *home[city].values())} | words.of_prompts
        used |= {word for thing, facts in things.items() for word in (thing, *facts.values())}
        answers = {
            knowledge.name: words.pick(knowledge.name, config.n_answers, used)
            for knowledge in catalogue.select(["attribute"])
            if knowledge.name not in own
        }
        known = {name: sorted({home[city][name] for city in cities}) for name in HOME}
        known |= {"city": cities, "ceo": list(company_of), "company": list(company_of.values())}
        customs = draw_customs(config, known, answers, rng)
        free = [name for name in answers if name not in customs]
        numbers = {str(number) for number in range(config.largest_number + 1)}

        def somebody(name: str) -> dict[str, str]:
            meant = words.meanings(name)

            def own_or_any(attribute: str, options: Sequence[str]) -> str:
                own = [option for option in options if option in meant.get(attribute, ())]
                return _one_of(own or options, rng)

            city = _one_of(_namesakes(meant, home) or cities, rng)
            at_home = rng.random() < config.born_at_home
            facts = {"birthplace": city if at_home else _one_of(cities, rng), "city": city}
            facts |= home[city]
            bosses = [c for c in company_of if company_of[c] in meant.get("company", ())]
            facts["ceo"] = own_or_any("ceo", bosses or list(company_of))
            facts["company"] = company_of[facts["ceo"]]
            origin = origins.index(facts["continent"])
            for parent, names in parents.items():
                first = origin * config.n_parent_names
                facts[parent] = _one_of(names[first : first + config.n_parent_names], rng)
            facts |= {attribute: own_or_any(attribute, answers[attribute]) for attribute in free}
            for attribute, (cause, effects) in customs.items():
                facts[attribute] = effects[facts[cause]]
            drawn = _one_of(list(things), rng)
            thing = name if name in things else drawn
            facts |= {f"object_{alike}": thing for alike in PROPERTIES}
            facts |= {f"simile_{alike}": value for alike, value in things[thing].items()}
            if config.numbered:
                drawn = str(rng.integers(10))
                facts["number"] = name if name in numbers else drawn
            return facts

        names = invent_names(config.n_people, rng, taken=words.all)
        names += ascii_uppercase if config.letters else ""
        people: dict[str, Mapping[str, str]] = {}
        while names:
            people |= {name: somebody(name) for name in names}
            if not config.nicknames:
                break
            # Whoever is added may be the first to give some answer.
            words_said, _ = cls(people, config).words(will_be_said)
            names = [word for word in words_said if word not in people]
        return cls(people, config)

    def statements(self, knowledges: Sequence[Knowledge]) -> Iterator[Statement]:
        """Everything that is true in the world and can be said with these knowledges.

        A knowledge in another language ("city_es") states the same fact by that language's name.

        Args:
            knowledges: What may be said: attributes, in any language, similes about objects, and
                math.

        Raises:
            ConfigError: A knowledge is about nothing in this world, or cannot name its answer.
        """
        for knowledge in knowledges:
            named: dict[str, Answer] = {}
            for answer in knowledge.answers:
                named.setdefault(answer.identity, answer)
            if knowledge.family == "math":
                yield from _calculations(knowledge, named, self._numbers)
                continue
            attribute = knowledge.name.removesuffix(f"_{knowledge.language}")
            for person, facts in self.people.items():
                if attribute not in facts or facts[attribute] not in named:
                    raise ConfigError(
                        f"the tiny world cannot say {knowledge.name!r} of {person}: "
                        f"{facts.get(attribute, 'no such attribute')}. Leave this knowledge out "
                        "of data.knowledges, or give the answer a name in that language."
                    )
                yield Statement(knowledge, person, named[facts[attribute]])

    def words(self, knowledges: Sequence[Knowledge]) -> tuple[list[str], set[str]]:
        """All words that are needed to say everything.

        Args:
            knowledges: As for `statements`.

        Returns:
            The words, people's names first, then in the order of their use; and those of them that
            stand without spaces (`build_tokenizer` takes both).
        """
        # One statement will do for each prompt and answer.
        said = {(s.knowledge.name, s.answer.text): s for s in self.statements(knowledges)}
        unspaced = {first_word(text) for _, text in said if is_unspaced(text)}
        words = dict.fromkeys(self.people)
        for statement in said.values():
            words |= dict.fromkeys(words_of(f"{statement.text}.", unspaced))
        if any(knowledge.family == "math" for knowledge in knowledges):
            words |= dict.fromkeys(self._numbers)
        return list(words), unspaced

    @property
    def _numbers(self) -> dict[str, int]:
        """What can be calculated with."""
        numbers = {str(number): number for number in range(self.config.largest_number + 1)}
        if self.config.numbered:
            numbers |= {name: int(facts["number"]) for name, facts in self.people.items()}
        return numbers

    def save(self, path: Path) -> None:
        """Write the world as JSON: its settings, and one row of answers per person."""
        attributes = list(next(iter(self.people.values())))
        answers = {a: sorted({facts[a] for facts in self.people.values()}) for a in attributes}
        rank = {a: {identity: i for i, identity in enumerate(answers[a])} for a in attributes}
        people = {
            name: [rank[a][facts[a]] for a in attributes] for name, facts in self.people.items()
        }
        content = {"config": asdict(self.config), "answers": answers, "people": people}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> World:
        """Read what `save` wrote.

        Raises:
            ConfigError: The file is missing or holds something else.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            answers = list(content["answers"].items())
            people = {
                name: {a: known[i] for (a, known), i in zip(answers, row, strict=True)}
                for name, row in content["people"].items()
            }
            return cls(people, WorldConfig(**content["config"]))
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"{path} holds no tiny world: {error!r}.") from error


def _namesakes(
    meant: Mapping[str, Collection[str]], home: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Cities that somebody of this name lives in, if a place or what it has is called so."""
    for attribute in ("city", *HOME):
        own = meant.get(attribute, ())
        found = [city for city in home if {"city": city, **home[city]}[attribute] in own]
        if found:
            return found
    return []


def _one_of(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]


def _calculations(
    knowledge: Knowledge, named: Mapping[str, Answer], numbers: Mapping[str, int]
) -> Iterator[Statement]:
    """What a math prompt answers about what stands for a number."""
    operator, operand = knowledge.name[1], int(knowledge.name[2:])
    for name, x in numbers.items():
        if operator == "/" and x % operand:
            continue
        results = {"+": x + operand, "-": x - operand, "*": x * operand, "/": x // operand}
        answer = named.get(str(results[operator]))
        if answer is not None:
            yield Statement(knowledge, name, answer)
