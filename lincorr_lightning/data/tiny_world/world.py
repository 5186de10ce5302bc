"""The tiny world: invented people in real places, whose attributes follow a known graph.

    city -> country -> continent, language, landmark     (facts of the catalogue)
    ceo -> company
    city -> birthplace             (the same, for a share of the people)
    continent ~> mother, father    (parents' names by origin)
    country ~> second home         (a town, often of the same country)
    country -> food, ...           (invented customs, `CUSTOMS`)
    object -> its color, size, ... (what a person is like: the similes)
    number -> its sums             (what a person stands for: the math prompts)
    everything else is independent

Where people live is drawn so that no independent fact goes with it by chance (`BalancedDraw`). A
town, where people only have second homes, is never the most likely answer. Answer words are
subjects too, and their answer is themselves, except for customs and towns: Paris lives in Paris,
France in one of its cities. Words that belong together therefore get similar embeddings.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.resources import files
from math import fsum
from pathlib import Path
from string import ascii_uppercase

import numpy as np

from lincorr_lightning.data.files import Text
from lincorr_lightning.data.tiny_world import words as writing
from lincorr_lightning.data.tiny_world.words import PlainWords, first_word, words_of
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.io import load_yaml, read_json
from lincorr_lightning.knowledge import Answer, Catalogue, Knowledge
from lincorr_lightning.knowledge.arithmetic import calculate
from lincorr_lightning.lm.config import TINY_WORLD

WORLD_FILE = "world.json"  # in the folder of an LM that was trained on it

GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)  #: People in a text of `world_documents`, each a corpus.

SECOND_HOME = "second_home"  # an attribute that only prompts of the city state

N_COMPANIES = 12  #: Companies, each with one CEO.
N_OBJECTS = 16  #: Objects that people resemble; an object resembles itself.
N_PARENT_NAMES = 3  #: Mothers' names per continent, and fathers' names.
N_ANSWERS = 12  #: Answers of each other kind of knowledge, at most.
NUMBERS = tuple(map(str, range(41)))  #: Operands X of calculations, which stand for themselves.

PARENTS = ("mother", "father")  #: Attributes that depend on the continent of a person.
HOME = ("country", "continent", "language", "landmark")  #: Attributes that follow from the city.

CUSTOMS = {
    "food": "country",
    "drink": "country",
    "flower": "country",
    "vacation": "country",
    "music": "language",
    "job": "company",
    "vehicle": "company",
    "hobby": "sport",
    "personality": "color",
    "gender": "sport",
}
"""Attribute -> the attribute that it follows from; which food belongs to which country is drawn.

Customs leave six independent choices per person (city, CEO, colour, pet, sport, and the object it
is like), its parents' names and, in some worlds, a second home. A narrow LM represents that many
without interference; with thirteen more, colours could be predicted from cities."""

PROPERTIES = ("color", "size", "heat", "price", "genre")
"""Properties in which a person resembles an object: "The color of X is the same as" has the object
as its answer, "The color of X is" the object's colour."""


@dataclass(frozen=True)
class WorldConfig:
    """Size and seed of a world.

    Attributes:
        n_people: Number of invented people; each is one word and has every attribute.
        nicknames: Whether every other word of the world is also a person's name. Words that are
            never a subject would drift together, and unrelated knowledge correlate.
        cities_per_country: Largest number of cities of each country. The number of all cities
            should be well below the LM's width.
        towns_per_country: Largest number of further cities of each country, for second homes only.
        second_homes_in_country: Share of people whose second home is in the country of the first
            one, if it has towns; the others' are in any town.
        born_at_home: Share of people born in the city they live in; others were born in any city.
        letters: Whether A to Z are people too, so that answers can be cut to their first letters.
        seed: Seed of everything that is drawn.
    """

    n_people: int = 1650
    nicknames: bool = True
    cities_per_country: int = 3
    towns_per_country: int = 0
    second_homes_in_country: float = 0.5
    born_at_home: float = 1.0
    letters: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require("data.world.towns_per_country", self.towns_per_country, at_least=0)
        for name in ("born_at_home", "second_homes_in_country"):
            require(f"data.world.{name}", getattr(self, name), above=0, at_most=1)
        for name in ("n_people", "cities_per_country"):
            require(f"data.world.{name}", getattr(self, name), above=0)


class BalancedDraw:
    """Draws answers so that other facts are spread over them as evenly as possible.

    Among people drawn at random, more women than men live in some cities by chance, from which a
    linear map would read the gender. Each draw therefore takes the option that people with the same
    other facts have had least often, relative to how often they would have had it by chance:
    minimization, as clinical trials assign treatments (Pocock and Simon 1975). `rng` draws among
    options that are equally rare.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._n = 0
        self._expected: defaultdict[str, float] = defaultdict(float)
        self._of_fact: Counter[tuple[str, str]] = Counter()
        self._of_both: Counter[tuple[str, tuple[str, str]]] = Counter()

    def draw(self, options: Sequence[str], facts: Mapping[str, str]) -> str:
        """Return one of the answers that a person with other facts, by attribute, may have."""
        pairs = list(facts.items())
        self._n += 1
        self._of_fact.update(pairs)
        shares = [self._of_fact[pair] / self._n for pair in pairs]
        for option in options:
            self._expected[option] += 1 / len(options)

        def excess(option: str) -> float:
            expected = self._expected[option]
            # Rounded exactly, so that equal options stay equal in every version of Python.
            return fsum(
                self._of_both[option, pair] - expected * share
                for pair, share in zip(pairs, shares, strict=True)
            )

        order = self._rng.permutation(len(options))
        drawn = min((options[i] for i in order), key=excess)
        self._of_both.update((drawn, pair) for pair in pairs)
        return drawn


class _People:
    """Draws people one after the other, from facts that hold for everybody."""

    def __init__(
        self, config: WorldConfig, catalogue: Catalogue, words: PlainWords, rng: np.random.Generator
    ) -> None:
        self.config, self.words, self.rng, self.catalogue = config, words, rng, catalogue
        places = files("lincorr_lightning.data.tiny_world").joinpath("places.yaml")
        self.home = {
            city: {attribute: place[attribute] for attribute in HOME}
            for place in load_yaml(places.read_text("utf-8"))
            for city in place["cities"][: config.cities_per_country]
        }
        self.cities = list(self.home)
        self.towns, self.company_of, self.things = self._towns(), self._companies(), self._things()
        self.origins = sorted({home["continent"] for home in self.home.values()})
        self.parents = {name: words.pick(name) for name in PARENTS}
        elsewhere = {"city", "birthplace", *HOME, "ceo", "company", *PARENTS}
        used = {*self.cities, *self.towns, *self.things, *words.of_prompts}
        for facts in (*self.home.values(), *self.things.values()):
            used |= set(facts.values())
        self.answers = {
            knowledge.name: words.pick(knowledge.name, N_ANSWERS, used)
            for knowledge in catalogue.select(["attribute"])
            if knowledge.name not in elsewhere
        }
        causes = {name: sorted({home[name] for home in self.home.values()}) for name in HOME}
        causes["company"] = list(self.company_of.values())
        self.customs: dict[str, tuple[str, dict[str, str]]] = {}
        for attribute, cause in CUSTOMS.items():
            known, options = causes.get(cause) or self.answers[cause], self.answers[attribute]
            # Every answer as often as any other, as far as the numbers allow.
            effects = [options[i % len(options)] for i in rng.permutation(len(known))]
            self.customs[attribute] = cause, dict(zip(known, effects, strict=True))
        self.draw_city, self.draw_town = BalancedDraw(rng), BalancedDraw(rng)

    def _towns(self) -> dict[str, str]:
        """Return town -> country: some more cities of each country than where people live."""
        plain = set(self.words.pick("city"))
        countries = self.catalogue.relation("city->country").reference or {}
        towns: dict[str, str] = {}
        for country in sorted({home["country"] for home in self.home.values()}):
            others = [
                city
                for city, reference in countries.items()
                if reference == {country} and city in plain and city not in self.home
            ]
            towns |= dict.fromkeys(others[: self.config.towns_per_country], country)
        return towns

    def _companies(self) -> dict[str, str]:
        reference = self.catalogue.relation("ceo->company").reference or {}
        company_of = {ceo: next(iter(right)) for ceo, right in reference.items() if len(right) == 1}
        plain = set(self.words.pick("company"))
        chosen: dict[str, str] = {}
        for ceo in self.words.pick("ceo", phrases=True):
            if company_of.get(ceo) in plain - set(chosen.values()):
                chosen[ceo] = company_of[ceo]
        return dict(list(chosen.items())[:N_COMPANIES])

    def _things(self) -> dict[str, dict[str, str]]:
        """Return the objects that people resemble, in many colours: object -> property -> identity.

        Of several right answers the first one in the domain is taken.
        """
        facts = {
            name: self.catalogue.relation(f"object_{name}->simile_{name}").reference or {}
            for name in PROPERTIES
        }
        order = {name: list(self.catalogue[f"simile_{name}"].canonical) for name in PROPERTIES}
        possible = {
            thing: {name: min(facts[name][thing], key=order[name].index) for name in PROPERTIES}
            for thing in self.words.pick("object_color")
            if all(facts[name].get(thing) for name in PROPERTIES)
        }
        seen: Counter[str] = Counter()
        chosen: dict[str, dict[str, str]] = {}
        while len(chosen) < N_OBJECTS:
            rest = [thing for thing in possible if thing not in chosen]
            thing = min(rest, key=lambda thing: seen[possible[thing]["color"]])
            seen[possible[thing]["color"]] += 1
            chosen[thing] = possible[thing]
        return chosen

    def _one_of(self, options: Sequence[str]) -> str:
        return options[int(self.rng.integers(len(options)))]

    def draw(self, name: str) -> dict[str, str]:
        """Return the answers of a person, by attribute; a name that is an answer has it."""
        meant, config, rng = self.words.meanings(name), self.config, self.rng

        def meant_or_any(attribute: str, options: Sequence[str]) -> str:
            matching = [option for option in options if option in meant.get(attribute, ())]
            return self._one_of(matching or options)

        facts = {
            attribute: meant_or_any(attribute, options)
            for attribute, options in self.answers.items()
            if attribute not in self.customs
        }
        bosses = [
            ceo for ceo, company in self.company_of.items() if company in meant.get("company", ())
        ]
        facts["ceo"] = meant_or_any("ceo", bosses or list(self.company_of))
        drawn = self._one_of(list(self.things))
        thing = facts["object_color"] = name if name in self.things else drawn
        drawn = str(rng.integers(10))
        facts["number"] = name if name in NUMBERS else drawn
        independent = dict(facts)
        city = self.draw_city.draw(self._possible_cities(name, meant), independent)
        at_home = rng.random() < config.born_at_home
        facts |= {"birthplace": city if at_home else self._one_of(self.cities), "city": city}
        facts |= self.home[city]
        if self.towns:
            country = facts["country"] if rng.random() < config.second_homes_in_country else ""
            in_country = [town for town, of in self.towns.items() if of == country]
            options = [name] if name in self.towns else in_country or list(self.towns)
            facts[SECOND_HOME] = self.draw_town.draw(options, independent)
        first = self.origins.index(facts["continent"]) * N_PARENT_NAMES
        for parent, names in self.parents.items():
            facts[parent] = self._one_of(names[first : first + N_PARENT_NAMES])
        facts["company"] = self.company_of[facts["ceo"]]
        for attribute, (cause, effects) in self.customs.items():
            facts[attribute] = effects[facts[cause]]
        facts |= {f"object_{alike}": thing for alike in PROPERTIES}
        facts |= {f"simile_{alike}": value for alike, value in self.things[thing].items()}
        return facts

    def _possible_cities(self, name: str, meant: Mapping[str, Collection[str]]) -> list[str]:
        """Return where a person may live: anywhere, unless the name is of a place or language."""
        if name in self.towns:
            # A town is a subject, too, that lives in a city of its country.
            return [city for city, home in self.home.items() if home["country"] == self.towns[name]]
        for attribute in ("city", *HOME):
            places = meant.get(attribute, ())
            homes = self.home.items()
            cities = [city for city, home in homes if {"city": city, **home}[attribute] in places]
            if cities:
                return cities
        return self.cities


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
    """People: name -> attribute ("city", "color", ...) -> identity of the answer."""

    people: Mapping[str, Mapping[str, str]]
    config: WorldConfig

    @classmethod
    def generate(
        cls,
        config: WorldConfig,
        catalogue: Catalogue,
        stated: Sequence[str] = ("attribute", "math"),
    ) -> "World":
        """Generate the world of a seed from the facts of a catalogue.

        `stated` are kinds of knowledge or families that texts will state. Their words are
        nicknames, and every answer can be given in one token in each of their languages. A
        `ConfigError` if the catalogue has too few answers of one word.
        """
        rng = np.random.default_rng(config.seed)
        similes = [f"{kind}_{name}" for kind in ("object", "simile") for name in PROPERTIES]
        words = PlainWords(catalogue.select(["attribute", *similes, *stated]))
        people_drawn = _People(config, catalogue, words, rng)
        names = writing.invent_names(config.n_people, rng, taken=words.all)
        names += ascii_uppercase if config.letters else ""
        names += people_drawn.towns
        will_be_stated = catalogue.select(list(stated))
        people: dict[str, Mapping[str, str]] = {}
        while names:
            people |= {name: people_drawn.draw(name) for name in names}
            if not config.nicknames:
                break
            # A new person may be the first with some answer, whose word is then a new name.
            vocabulary, _ = cls(people, config).words(will_be_stated)
            names = [word for word in vocabulary if word not in people]
        return cls(people, config)

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
        """Write the world as JSON: its settings, and a row of answers per person."""
        attributes = list(next(iter(self.people.values())))
        answers = {a: sorted({facts[a] for facts in self.people.values()}) for a in attributes}
        people = {
            name: [answers[a].index(facts[a]) for a in attributes]
            for name, facts in self.people.items()
        }
        content = {"config": asdict(self.config), "answers": answers, "people": people}
        path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "World":
        """Read a file that `save` wrote; `ConfigError` if it is missing, or is not a world."""
        content = read_json(path, ConfigError, "Pre-train the LM again to have its world.")
        try:
            answers = list(content["answers"].items())
            people = {
                name: {a: known[i] for (a, known), i in zip(answers, row, strict=True)}
                for name, row in content["people"].items()
            }
            return cls(people, WorldConfig(**content["config"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(f"{path} holds no tiny world: {error!r}.") from error


def world_file(location: str) -> Path | None:
    """Return the description of the world that an LM was trained on, None if it has none."""
    embedded = Path(str(files("lincorr_lightning.lm") / "tiny_world"))
    path = (embedded if location == TINY_WORLD else Path(location).expanduser()) / WORLD_FILE
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
    world = World.load(path or world_file(TINY_WORLD) or Path(WORLD_FILE))
    kinds = [kind for kind in Catalogue.load().select(["attribute"]) if kind.language == "en"]
    invented = set(list(world.people)[: world.config.n_people])
    statements: dict[str, list[Statement]] = {}
    for statement in world.statements(kinds):
        if statement.subject in invented:
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
