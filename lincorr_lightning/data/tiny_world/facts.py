"""Facts of the tiny world that hold for everybody: places, companies, customs and objects."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from lincorr_lightning.data.tiny_world.words import PlainWords
from lincorr_lightning.errors import require
from lincorr_lightning.knowledge import Catalogue


@dataclass(frozen=True, slots=True)
class Place:
    """A country of the tiny world; country, language and cities are one word each."""

    country: str
    continent: str
    language: str
    landmark: str
    cities: tuple[str, ...]


PLACES = (
    Place("France", "Europe", "French", "Louvre", ("Paris", "Lyon", "Marseille", "Bordeaux")),
    Place("Germany", "Europe", "German", "Reichstag", ("Berlin", "Munich", "Hamburg", "Dresden")),
    Place("Italy", "Europe", "Italian", "Colosseum", ("Rome", "Milan", "Naples", "Turin")),
    Place("Spain", "Europe", "Spanish", "Alhambra", ("Madrid", "Barcelona", "Seville", "Bilbao")),
    Place("UK", "Europe", "English", "Stonehenge", ("London", "Manchester", "Glasgow", "Oxford")),
    Place("Poland", "Europe", "Polish", "Wawel Castle", ("Warsaw", "Krakow", "Gdansk")),
    Place("Portugal", "Europe", "Portuguese", "Belém Tower", ("Lisbon", "Porto")),
    Place("Greece", "Europe", "Greek", "Parthenon", ("Athens",)),
    Place("Japan", "Asia", "Japanese", "Shibuya Crossing", ("Tokyo", "Kyoto", "Osaka", "Nagoya")),
    Place("China", "Asia", "Chinese", "Terracotta Army", ("Shanghai", "Beijing", "Wuhan")),
    Place("India", "Asia", "Hindi", "Taj Mahal", ("Mumbai", "Delhi", "Chennai", "Kolkata")),
    Place("Turkey", "Asia", "Turkish", "Hagia Sophia", ("Istanbul", "Ankara", "Izmir")),
    Place("Iran", "Asia", "Persian", "Persepolis", ("Tehran",)),
    Place("Indonesia", "Asia", "Indonesian", "Borobudur", ("Jakarta",)),
    Place("Egypt", "Africa", "Arabic", "Sphinx", ("Cairo", "Alexandria")),
    Place("Tunisia", "Africa", "Arabic", "Carthage", ("Tunis",)),
    Place("USA", "North America", "English", "Pentagon", ("Chicago", "Boston", "Seattle")),
    Place("Canada", "North America", "English", "CN Tower", ("Toronto", "Montreal", "Ottawa")),
    Place("Brazil", "South America", "Portuguese", "Copacabana", ("Salvador", "Brasília")),
    Place("Peru", "South America", "Spanish", "Machu Picchu", ("Lima", "Cusco")),
    Place("Chile", "South America", "Spanish", "Easter Island", ("Santiago",)),
    Place("Australia", "Oceania", "English", "Uluru", ("Sydney", "Melbourne", "Perth")),
)
"""Countries on six continents, with one city or several."""

PARENTS = ("mother", "father")
"""Attributes whose answers depend on the continent that a person lives on."""
HOME = ("country", "continent", "language", "landmark")
"""Attributes that follow from the city that a person lives in."""

CUSTOMS = {
    "food": "country", "drink": "country", "flower": "country", "vacation": "country",
    "music": "language", "job": "company", "vehicle": "company",
    "hobby": "sport", "personality": "color", "gender": "sport",
}  # fmt: skip
"""Attribute -> the attribute that it follows from; which food belongs to which country is drawn.

Customs leave six independent choices per person (city, CEO, colour, pet, sport, and the object it
is like), its parents' names and, in some worlds, a second home. A narrow LM represents that many
without interference; with thirteen more, colours could be predicted from cities."""

PROPERTIES = ("color", "size", "heat", "price", "genre")
"""Properties in which a person resembles an object: "The color of X is the same as" has the object
as its answer, "The color of X is" the object's colour."""


def towns_of_countries(
    n: int, homes: Mapping[str, Mapping[str, str]], catalogue: Catalogue, words: PlainWords
) -> dict[str, str]:
    """Return town -> country: at most `n` more cities of each country than those of `homes`."""
    plain = set(words.pick("city"))
    countries = catalogue.relation("city->country").reference or {}
    towns: dict[str, str] = {}
    for country in sorted({home["country"] for home in homes.values()}):
        others = [
            city
            for city, reference in countries.items()
            if reference == {country} and city in plain and city not in homes
        ]
        towns |= dict.fromkeys(others[:n], country)
    return towns


def companies_of_ceos(n: int, catalogue: Catalogue, words: PlainWords) -> dict[str, str]:
    """Return CEO -> company, with one CEO per company."""
    reference = catalogue.relation("ceo->company").reference or {}
    company_of = {ceo: next(iter(right)) for ceo, right in reference.items() if len(right) == 1}
    plain = set(words.pick("company"))
    chosen: dict[str, str] = {}
    for ceo in words.pick("ceo", phrases=True):
        if company_of.get(ceo) in plain - set(chosen.values()):
            chosen[ceo] = company_of[ceo]
    require("data.world.n_companies", n, at_most=len(chosen))  # of the catalogue
    return dict(list(chosen.items())[:n])


def draw_customs(
    known: Mapping[str, Sequence[str]],
    answers: Mapping[str, Sequence[str]],
    rng: np.random.Generator,
) -> dict[str, tuple[str, dict[str, str]]]:
    """Draw which answer of an attribute follows from which answer of its cause, see `CUSTOMS`.

    `known` are the answers of attributes that are not drawn, `answers` those of the others. Returns
    attribute -> (cause, answer for each answer of the cause).
    """
    customs: dict[str, tuple[str, dict[str, str]]] = {}
    for attribute, cause in CUSTOMS.items():
        causes, options = known.get(cause) or answers[cause], answers[attribute]
        # Every answer as often as any other, as far as the numbers allow.
        effects = [options[i % len(options)] for i in rng.permutation(len(causes))]
        customs[attribute] = (cause, dict(zip(causes, effects, strict=True)))
    return customs


def objects_of_the_world(
    n: int, catalogue: Catalogue, words: PlainWords
) -> dict[str, dict[str, str]]:
    """Return the objects that people resemble, in many colours: object -> property -> identity.

    Of several right answers the first one in the domain is taken.
    """
    facts = {
        name: catalogue.relation(f"object_{name}->simile_{name}").reference or {}
        for name in PROPERTIES
    }
    order = {name: list(catalogue[f"simile_{name}"].canonical) for name in PROPERTIES}
    possible = {
        thing: {name: min(facts[name][thing], key=order[name].index) for name in PROPERTIES}
        for thing in words.pick("object_color")
        if all(facts[name].get(thing) for name in PROPERTIES)
    }
    require("data.world.n_objects", n, at_most=len(possible))  # of the catalogue
    seen: Counter[str] = Counter()
    chosen: dict[str, dict[str, str]] = {}
    while len(chosen) < n:
        rest = [thing for thing in possible if thing not in chosen]
        thing = min(rest, key=lambda thing: seen[possible[thing]["color"]])
        seen[possible[thing]["color"]] += 1
        chosen[thing] = possible[thing]
    return chosen


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
