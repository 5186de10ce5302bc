"""The tiny world: invented people in real places, whose attributes follow a known graph.

    city -> country -> continent, language, landmark     (facts of the catalogue)
    ceo -> company
    city -> birthplace             (the same, for a share of the people)
    continent ~> mother, father    (parents' names by origin)
    country -> food, ...           (invented customs, `CUSTOMS`)
    everything else is independent

It is the ground truth of the embedded LM: which knowledges are tied in it is known, because it is
written here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lincorr_lightning.data.invented_names import invent_names
from lincorr_lightning.data.places import PLACES
from lincorr_lightning.data.plain_words import PlainWords
from lincorr_lightning.data.word_tokenizer import words_of
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Answer, Catalogue, Knowledge

PARENTS = ("mother", "father")
"""Attributes that a person's origin makes likely; an origin is a continent."""

HOME = ("country", "continent", "language", "landmark")
"""Attributes that follow from the city that a person lives in."""

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
}
"""Attribute -> what it follows from. Which food goes with which country is drawn. With customs a
person is six independent choices (city, CEO, colour, pet, gender, sport) and their parents' names;
that many lie side by side in a narrow LM without touching. With thirteen more of them they did not:
colours could then be read off cities."""


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
        n_answers: Answers of each other knowledge, as far as it has so many.
        customs: Attribute -> the attribute that it follows from; attributes that follow from
            nothing are independent. None stands for `CUSTOMS`.
        born_at_home: Share of people who were born in the city they live in; the others were born
            in any city.
        largest_number: Largest X of the calculations; only results from 0 to 10 are stated.
        seed: Seed of everything that is drawn.
    """

    n_people: int = 1650
    nicknames: bool = True
    cities_per_country: int = 3
    n_companies: int = 12
    n_parent_names: int = 3
    n_answers: int = 12
    born_at_home: float = 1.0
    customs: dict[str, str] | None = None
    largest_number: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no world can have."""
        for name, value in asdict(self).items():
            if name not in {"seed", "customs", "nicknames"} and value <= 0:
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
        return f"{self.prompt}{gap}{self.answer.text.split()[0]}"


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
    def generate(cls, config: WorldConfig, catalogue: Catalogue) -> World:
        """Make the world of a seed.

        Args:
            config: Sizes and seed.
            catalogue: Where prompts, answers and facts come from.

        Raises:
            ConfigError: The catalogue contradicts a place, or has too few companies or names that
                are one word; the message says which or how many there are.
        """
        rng = np.random.default_rng(config.seed)
        words = PlainWords(catalogue)
        home = _homes(config, catalogue)
        cities = list(home)
        company_of = _companies(config, catalogue, words)
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
        answers = {
            knowledge.name: words.pick(knowledge.name, config.n_answers, used)
            for knowledge in catalogue.select(["attribute"])
            if knowledge.name not in own
        }
        known = {name: sorted({home[city][name] for city in cities}) for name in HOME}
        known |= {"city": cities, "ceo": list(company_of), "company": list(company_of.values())}
        customs = _customs(config, known, answers, rng)
        free = [name for name in answers if name not in customs]

        def somebody() -> dict[str, str]:
            city = _one_of(cities, rng)
            at_home = rng.random() < config.born_at_home
            facts = {"birthplace": city if at_home else _one_of(cities, rng), "city": city}
            facts |= home[city]
            facts["ceo"] = _one_of(list(company_of), rng)
            facts["company"] = company_of[facts["ceo"]]
            origin = origins.index(facts["continent"])
            for parent, names in parents.items():
                first = origin * config.n_parent_names
                facts[parent] = _one_of(names[first : first + config.n_parent_names], rng)
            facts |= {attribute: _one_of(answers[attribute], rng) for attribute in free}
            for attribute, (cause, effects) in customs.items():
                facts[attribute] = effects[facts[cause]]
            return facts

        names = invent_names(config.n_people, rng, taken=words.all)
        people: dict[str, Mapping[str, str]] = {}
        while names:
            people |= {name: somebody() for name in names}
            if not config.nicknames:
                break
            # Whoever is added may be the first to give some answer.
            said = cls(people, config).statements(catalogue.select(["attribute", "math"]))
            words_said = dict.fromkeys(word for fact in said for word in words_of(f"{fact.text}."))
            names = [word for word in words_said if word not in people]
        return cls(people, config)

    def statements(self, knowledges: Sequence[Knowledge]) -> Iterator[Statement]:
        """Everything that is true in the world and can be said with these knowledges.

        A knowledge in another language ("city_es") states the same fact by that language's name.

        Args:
            knowledges: What may be said: attributes, in any language, and math.

        Raises:
            ConfigError: A knowledge is about nothing in this world, or cannot name its answer.
        """
        for knowledge in knowledges:
            named: dict[str, Answer] = {}
            for answer in knowledge.answers:
                named.setdefault(answer.identity, answer)
            if knowledge.family == "math":
                yield from _calculations(knowledge, named, self.config.largest_number)
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


def _one_of(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]


def _homes(config: WorldConfig, catalogue: Catalogue) -> dict[str, dict[str, str]]:
    """For each city of the world, what follows from living there."""
    homes: dict[str, dict[str, str]] = {}
    for place in PLACES:
        home = {attribute: getattr(place, attribute) for attribute in HOME}
        cities = place.cities[: config.cities_per_country]
        facts = [("city->country", city, place.country) for city in cities]
        facts += [(f"country->{a}", place.country, home[a]) for a in ("continent", "language")]
        facts += [("landmark->country", place.landmark, place.country)]
        for relation, source, target in facts:
            right = (catalogue.relation(relation).reference or {}).get(source, frozenset())
            if target not in right:
                raise ConfigError(
                    f"the tiny world says {relation} of {source} is {target}, the catalogue says "
                    f"{', '.join(sorted(right)) or 'nothing'}. Mend one of them."
                )
        homes |= dict.fromkeys(cities, home)
    return homes


def _companies(config: WorldConfig, catalogue: Catalogue, words: PlainWords) -> dict[str, str]:
    """CEO -> company, one CEO each."""
    company_of = _only(catalogue, "ceo->company")
    plain = set(words.pick("company"))
    chosen: dict[str, str] = {}
    for ceo in words.pick("ceo", phrases=True):
        if company_of.get(ceo) in plain - set(chosen.values()):
            chosen[ceo] = company_of[ceo]
    if len(chosen) < config.n_companies:
        raise ConfigError(
            f"data.world.n_companies is {config.n_companies}, but the catalogue has "
            f"{len(chosen)} for the tiny world. Ask for fewer."
        )
    return dict(list(chosen.items())[: config.n_companies])


def _customs(
    config: WorldConfig,
    known: Mapping[str, Sequence[str]],
    answers: Mapping[str, Sequence[str]],
    rng: np.random.Generator,
) -> dict[str, tuple[str, dict[str, str]]]:
    """Attribute -> (cause, answer for each answer of the cause), causes before their effects."""
    wanted = CUSTOMS if config.customs is None else config.customs
    possible = {**answers, **known}
    for attribute, cause in wanted.items():
        if attribute not in answers or cause not in possible:
            raise ConfigError(
                f"data.world.customs says that {attribute!r} follows from {cause!r}; free to "
                f"follow are {', '.join(answers)}, and they may follow from {', '.join(possible)}."
            )
    customs: dict[str, tuple[str, dict[str, str]]] = {}
    while len(customs) < len(wanted):
        ready = [
            (attribute, cause)
            for attribute, cause in wanted.items()
            if attribute not in customs and (cause not in wanted or cause in customs)
        ]
        if not ready:
            raise ConfigError("data.world.customs follow from each other in a circle.")
        for attribute, cause in ready:
            # All answers equally often, as far as that goes.
            order = rng.permutation(len(possible[cause]))
            options = answers[attribute]
            customs[attribute] = (
                cause,
                {
                    value: options[order[i] % len(options)]
                    for i, value in enumerate(possible[cause])
                },
            )
    return customs


def _only(catalogue: Catalogue, relation: str) -> dict[str, str]:
    """The reference of a relation where it has one right answer."""
    reference = catalogue.relation(relation).reference or {}
    return {source: next(iter(right)) for source, right in reference.items() if len(right) == 1}


def _calculations(
    knowledge: Knowledge, named: Mapping[str, Answer], largest: int
) -> Iterator[Statement]:
    """What a math prompt answers over the numbers up to the largest one."""
    operator, operand = knowledge.name[1], int(knowledge.name[2:])
    for x in range(largest + 1):
        if operator == "/" and x % operand:
            continue
        results = {"+": x + operand, "-": x - operand, "*": x * operand, "/": x // operand}
        answer = named.get(str(results[operator]))
        if answer is not None:
            yield Statement(knowledge, str(x), answer)
