"""The tiny world: invented people in real places, whose attributes follow a known graph.

    city -> country -> continent, language, landmark
    city ~> birthplace            (usually the same)
    continent ~> mother, father   (parents' names by origin)
    ceo -> company
    everything else is independent

It is the ground truth of the embedded LM: which knowledges are tied in it is known, because it is
written here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from lincorr_lightning.data.invented_names import invent_names
from lincorr_lightning.data.word_tokenizer import words_of
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Answer, Catalogue, Knowledge

PARENTS = ("mother", "father")
"""Attributes that a person's origin makes likely; an origin is a continent."""

MAY_SHARE = {"city": {"vacation"}, "color": {"flower", "food", "drink"}}
"""Kinds whose answers are taken even if the same word also answers another kind: otherwise no
Paris and no orange would be left. All other words of the world answer one kind only, so that a
correlation never comes from two domains that share a token."""


@dataclass(frozen=True)
class WorldConfig:
    """How large the world is.

    Attributes:
        n_people: Invented people; each is one word, and each has every attribute.
        n_countries: Countries they live in, spread evenly over the continents.
        n_cities: Cities they live in; should stay well below the LM's width.
        n_companies: Companies, each with one CEO.
        n_parent_names: Mothers' names per continent, and as many fathers' names.
        n_answers: Answers of each other knowledge, as far as it has so many.
        born_at_home: Share of people who were born in the city they live in; the others were born
            in any city.
        largest_number: Largest X of the calculations; only results from 0 to 10 are stated.
        seed: Seed of everything that is drawn.
    """

    n_people: int = 1500
    n_countries: int = 20
    n_cities: int = 48
    n_companies: int = 12
    n_parent_names: int = 3
    n_answers: int = 12
    born_at_home: float = 0.85
    largest_number: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no world can have."""
        for name, value in asdict(self).items():
            if name != "seed" and value <= 0:
                raise ConfigError(f"data.world.{name} is {value}; it must be greater than 0.")
        if self.born_at_home > 1:
            raise ConfigError(f"data.world.born_at_home is {self.born_at_home}; it is a share.")
        if self.n_cities < self.n_countries:
            raise ConfigError(
                f"data.world.n_cities is {self.n_cities}, data.world.n_countries is "
                f"{self.n_countries}; each country needs a city."
            )


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
        """Prompt and answer, without a full stop."""
        gap = " " if self.knowledge.leading_space else ""
        return f"{self.prompt}{gap}{self.answer.text}"


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
            ConfigError: The catalogue has too few countries, cities or companies whose names are
                one word; the message says how many there are.
        """
        rng = np.random.default_rng(config.seed)
        words = _PlainWords(catalogue, rng)
        home = _homes(config, catalogue, words)
        cities = list(home)
        company_of = _companies(config, catalogue, words)
        parents = {name: words.pick(name, None) for name in PARENTS}
        origins = sorted({home[city]["continent"] for city in cities})
        own = {name for city in cities for name in home[city]}
        own |= {"city", "birthplace", "ceo", "company", *PARENTS}
        free = {
            knowledge.name: words.pick(knowledge.name, config.n_answers)
            for knowledge in catalogue.select(["attribute"])
            if knowledge.name not in own
        }
        people: dict[str, Mapping[str, str]] = {}
        for name in invent_names(config.n_people, rng, taken=words.all):
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
            facts |= {attribute: _one_of(answers, rng) for attribute, answers in free.items()}
            people[name] = facts
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
            named = {}
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


class _PlainWords:
    """Answers that a word-level LM can give as one token, which means one thing only."""

    def __init__(self, catalogue: Catalogue, rng: np.random.Generator) -> None:
        self._catalogue, self._rng = catalogue, rng
        self.all: set[str] = set()
        kinds: dict[str, set[str]] = {}
        for knowledge in catalogue.select(["attribute"]):
            self.all.update(words_of(knowledge.prompt("X")))
            for answer in knowledge.answers:
                words = words_of(answer.text)
                self.all.update(words)
                kinds.setdefault(words[0], set()).add(knowledge.kind)
        self._kinds = kinds

    def is_plain(self, knowledge: Knowledge, text: str, *, whole: bool = True) -> bool:
        words = words_of(text)
        others = self._kinds[words[0]] - {knowledge.kind} - MAY_SHARE.get(knowledge.kind, set())
        first = [answer for answer in knowledge.answers if words_of(answer.text)[0] == words[0]]
        # Two answers that begin alike would be one label.
        return not others and len(first) == 1 and (len(words) == 1 or not whole)

    def pick(
        self,
        name: str,
        n: int | None,
        *,
        whole: bool = True,
        fits: Callable[[str], bool] = lambda identity: True,
    ) -> list[str]:
        """Identities of n plain answers (None: all), drawn; fewer if there are fewer."""
        knowledge = self._catalogue[name]
        seen, plain = set(), []
        for answer in knowledge.answers:
            # The first name of an entity is the one that the corpus uses.
            if answer.identity not in seen and fits(answer.identity):
                seen.add(answer.identity)
                if self.is_plain(knowledge, answer.text, whole=whole):
                    plain.append(answer.identity)
        order = self._rng.permutation(len(plain))
        return [plain[i] for i in order[:n]]


def _one_of(options: Sequence[str], rng: np.random.Generator) -> str:
    return options[int(rng.integers(len(options)))]


def _homes(
    config: WorldConfig, catalogue: Catalogue, words: _PlainWords
) -> dict[str, dict[str, str]]:
    """For each city of the world, what follows from living there."""
    facts = {
        "country": _only(catalogue, "city->country"),
        "continent": _only(catalogue, "country->continent"),
        "language": _only(catalogue, "country->language"),
        "landmark": _only(catalogue, "landmark->country"),
    }
    cities: dict[str, list[str]] = {}
    for city in words.pick("city", None, fits=facts["country"].__contains__):
        cities.setdefault(facts["country"][city], []).append(city)
    sights: dict[str, str] = {}
    for landmark in words.pick("landmark", None, fits=facts["landmark"].__contains__):
        sights.setdefault(facts["landmark"][landmark], landmark)
    spoken = set(words.pick("language", None))
    candidates = [
        country
        for country in words.pick("country", None, fits=facts["continent"].__contains__)
        if country in cities and country in sights and facts["language"].get(country) in spoken
    ]
    by_continent: dict[str, list[str]] = {}
    for country in sorted(candidates, key=lambda country: -len(cities[country])):
        by_continent.setdefault(facts["continent"][country], []).append(country)
    countries = _in_turns(by_continent, config.n_countries)
    chosen = _in_turns({country: cities[country] for country in countries}, config.n_cities)
    for what, found in (("countries", countries), ("cities", chosen)):
        if len(found) < getattr(config, f"n_{what}"):
            raise ConfigError(
                f"data.world.n_{what} is {getattr(config, f'n_{what}')}, but the catalogue has "
                f"{len(found)} {what} for the tiny world: named by one word that means nothing "
                "else, with one continent, language and landmark. Ask for fewer."
            )
    return {
        city: {
            "country": country,
            "continent": facts["continent"][country],
            "language": facts["language"][country],
            "landmark": sights[country],
        }
        for city in chosen
        for country in [facts["country"][city]]
    }


def _companies(
    config: WorldConfig, catalogue: Catalogue, words: _PlainWords
) -> dict[str, str]:
    """CEO -> company, one CEO each."""
    company_of = _only(catalogue, "ceo->company")
    plain = set(words.pick("company", None))
    chosen: dict[str, str] = {}
    for ceo in words.pick("ceo", None, whole=False, fits=company_of.__contains__):
        if company_of[ceo] in plain and company_of[ceo] not in chosen.values():
            chosen[ceo] = company_of[ceo]
    if len(chosen) < config.n_companies:
        raise ConfigError(
            f"data.world.n_companies is {config.n_companies}, but the catalogue has "
            f"{len(chosen)} for the tiny world. Ask for fewer."
        )
    return dict(list(chosen.items())[: config.n_companies])


def _only(catalogue: Catalogue, relation: str) -> dict[str, str]:
    """The reference of a relation where it has one right answer."""
    reference = catalogue.relation(relation).reference or {}
    return {source: next(iter(right)) for source, right in reference.items() if len(right) == 1}


def _in_turns(groups: Mapping[str, Sequence[str]], n: int) -> list[str]:
    """The first members of all groups, then the second ones, ...; n in all."""
    longest = max(map(len, groups.values()), default=0)
    taken = [group[i] for i in range(longest) for group in groups.values() if i < len(group)]
    return taken[:n]


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
