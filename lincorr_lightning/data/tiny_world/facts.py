"""What is true in the tiny world beyond its people: places, firms, customs and things."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lincorr_lightning.data.tiny_world.places import PLACES
from lincorr_lightning.data.tiny_world.plain_words import PlainWords
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge import Catalogue

if TYPE_CHECKING:
    from lincorr_lightning.data.tiny_world.world import WorldConfig

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
person is seven independent choices (city, CEO, colour, pet, gender, sport, and the object it is
like) and its parents' names; that many lie side by side in a narrow LM without touching. With
thirteen more of them they did not: colours could then be read off cities."""

PROPERTIES = ("color", "size", "heat", "price", "genre")
"""What objects are alike in: "The color of X is the same as" asks for the object that X is like,
"The color of X is" for that object's colour."""


def homes_of_cities(config: WorldConfig, catalogue: Catalogue) -> dict[str, dict[str, str]]:
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


def companies_of_ceos(
    config: WorldConfig, catalogue: Catalogue, words: PlainWords
) -> dict[str, str]:
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


def draw_customs(
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


def objects_of_the_world(
    n: int, catalogue: Catalogue, words: PlainWords
) -> dict[str, dict[str, str]]:
    """Things that people are like, with their properties; of as many colours as there are.

    Args:
        n: How many.
        catalogue: Where the objects and their properties come from. Of several right answers the
            world knows the one that comes first in the domain.
        words: Which objects are plain words.

    Returns:
        Object -> property -> identity of the answer.

    Raises:
        ConfigError: There are fewer.
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
            "world. Ask for fewer."
        )
    seen: Counter[str] = Counter()
    chosen: dict[str, dict[str, str]] = {}
    while len(chosen) < n:
        rest = [thing for thing in possible if thing not in chosen]
        thing = min(rest, key=lambda thing: seen[possible[thing]["color"]])
        seen[possible[thing]["color"]] += 1
        chosen[thing] = possible[thing]
    return chosen


def _only(catalogue: Catalogue, relation: str) -> dict[str, str]:
    """The reference of a relation where it has one right answer."""
    reference = catalogue.relation(relation).reference or {}
    return {source: next(iter(right)) for source, right in reference.items() if len(right) == 1}
