"""Facts of the tiny world that hold for everybody: places, companies, customs and objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lincorr_lightning.data.tiny_world.places import PLACES
from lincorr_lightning.data.tiny_world.plain_words import PlainWords
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue

PARENTS = ("mother", "father")
"""Attributes whose answers depend on the continent that a person lives on."""

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
    "gender": "sport",
}
"""Attribute -> the attribute that it follows from; which food belongs to which country is drawn.

Customs leave six independent choices per person (city, CEO, colour, pet, sport, and the object it
is like), its parents' names and, in some worlds, a second home. A narrow LM represents that many
without interference; with thirteen more, colours could be predicted from cities."""

PROPERTIES = ("color", "size", "heat", "price", "genre")
"""Properties in which a person resembles an object: "The color of X is the same as" has the object
as its answer, "The color of X is" the object's colour."""


def homes_of_cities(cities_per_country: int, catalogue: Catalogue) -> dict[str, dict[str, str]]:
    """Return for each city of the world the attributes that follow from living there.

    Raises:
        ConfigError: A place contradicts the catalogue.
    """
    homes: dict[str, dict[str, str]] = {}
    for place in PLACES:
        home = {attribute: getattr(place, attribute) for attribute in HOME}
        cities = place.cities[:cities_per_country]
        facts = [("city->country", city, place.country) for city in cities]
        facts += [(f"country->{a}", place.country, home[a]) for a in ("continent", "language")]
        facts += [("landmark->country", place.landmark, place.country)]
        for relation, source, target in facts:
            right = (catalogue.relation(relation).reference or {}).get(source, frozenset())
            if target not in right:
                raise ConfigError(
                    f"the tiny world says {relation} of {source} is {target}, the catalogue says "
                    f"{', '.join(sorted(right)) or 'nothing'}. Correct one of them."
                )
        homes |= dict.fromkeys(cities, home)
    return homes


def towns_of_countries(
    n: int, homes: Mapping[str, Mapping[str, str]], catalogue: Catalogue, words: PlainWords
) -> dict[str, str]:
    """Return town -> country: at most `n` more cities of each country, where nobody lives.

    `homes` are the cities where people live, as from `homes_of_cities`.
    """
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
    """Return CEO -> company, with one CEO per company.

    Raises:
        ConfigError: The catalogue has fewer companies.
    """
    reference = catalogue.relation("ceo->company").reference or {}
    company_of = {ceo: next(iter(right)) for ceo, right in reference.items() if len(right) == 1}
    plain = set(words.pick("company"))
    chosen: dict[str, str] = {}
    for ceo in words.pick("ceo", phrases=True):
        if company_of.get(ceo) in plain - set(chosen.values()):
            chosen[ceo] = company_of[ceo]
    if len(chosen) < n:
        raise ConfigError(
            f"data.world.n_companies is {n}, but the catalogue has "
            f"{len(chosen)} for the tiny world. Lower it."
        )
    return dict(list(chosen.items())[:n])


def draw_customs(
    wanted: Mapping[str, str],
    known: Mapping[str, Sequence[str]],
    answers: Mapping[str, Sequence[str]],
    rng: np.random.Generator,
) -> dict[str, tuple[str, dict[str, str]]]:
    """Draw which answer of an attribute follows from which answer of its cause.

    `known` are the answers of attributes that are not drawn, `answers` those of the others.

    Returns:
        Attribute -> (cause, answer for each answer of the cause); causes come before their effects.

    Raises:
        ConfigError: An attribute or cause is not available, or customs form a circle.
    """
    possible = {**answers, **known}
    for attribute, cause in wanted.items():
        if attribute not in answers or cause not in possible:
            raise ConfigError(
                f"data.world.customs says that {attribute!r} follows from {cause!r}. Attributes "
                f"that can follow: {', '.join(answers)}; and be followed: {', '.join(possible)}."
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
            # Every answer as often as any other, as far as the numbers allow.
            order = rng.permutation(len(possible[cause]))
            options = answers[attribute]
            effects = [options[i % len(options)] for i in order]
            customs[attribute] = (cause, dict(zip(possible[cause], effects, strict=True)))
    return customs


def objects_of_the_world(
    n: int, catalogue: Catalogue, words: PlainWords
) -> dict[str, dict[str, str]]:
    """Return the objects that people resemble, in many colours: object -> property -> identity.

    Of several right answers the first one in the domain is taken.

    Raises:
        ConfigError: The catalogue has fewer objects.
    """
    facts = {
        name: catalogue.relation(f"object_{name}->simile_{name}").reference or {}
        for name in PROPERTIES
    }
    first = {
        name: {answer.identity: rank for rank, answer in enumerate(target.answers)}
        for name in PROPERTIES
        for target in [catalogue[f"simile_{name}"]]
    }
    possible = {
        thing: {name: min(facts[name][thing], key=first[name].__getitem__) for name in PROPERTIES}
        for thing in words.pick("object_color")
        if all(facts[name].get(thing) for name in PROPERTIES)
    }
    if len(possible) < n:
        raise ConfigError(
            f"data.world.n_objects is {n}, but the catalogue has {len(possible)} for the tiny "
            "world. Lower it."
        )
    seen: Counter[str] = Counter()
    chosen: dict[str, dict[str, str]] = {}
    while len(chosen) < n:
        rest = [thing for thing in possible if thing not in chosen]
        thing = min(rest, key=lambda thing: seen[possible[thing]["color"]])
        seen[possible[thing]["color"]] += 1
        chosen[thing] = possible[thing]
    return chosen
