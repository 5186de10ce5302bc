"""The paper's tables and figures, and the runs that each one needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.knowledge.yaml_file import suggest
from lincorr_lightning.results.paper import paper_section

PROBED_FAMILIES = ("attribute", "math", "simile", "cross_language")
CITY = "city->country"
GRADIENTS = (
    CITY, "ceo->company", "city->city_es", "city->city_zh", "fruit_color->simile_color",
    "food_taste->simile_taste", "X+1->X+2", "X+1->X*2",
)  # fmt: skip
"""Relations of table 4."""
EDITED = (
    CITY, "country->continent", "city->city_es", "X+1->X+2", "X+1->X*2",
    "fruit_color->simile_color", "food_taste->simile_taste", "ceo->company",
    "language->continent", "city->city_zh", "city->city_ja",
)  # fmt: skip
"""Relations of table 5."""
ABLATED = (CITY, "country->continent", "ceo->company", "X+1->X+2")
"""Relations of table 7."""


def probe_run(family: str) -> str:
    """Return the name of the run that fits the maps of a family of prompts."""
    return f"probe_{family}"


def after_run(family: str) -> str:
    """Return the name of the run that scores these maps on the tuned LM."""
    return f"after_{family}"


def edit_run(relation: str) -> str:
    """Return the name of the run that trains edits of a relation."""
    return f"edits_{relation}"


def ablation_run(relation: str) -> str:
    """Return the name of the ablation of a relation."""
    return f"ablation_{relation}"


SUBWORD_PROBE, SUBWORD_EDITS = "probe_subwords", "edits_subwords"
"""Runs of city->country whose labels are also beginnings of words, for table 18."""
PRINTED_EDITS = "edits_printed"
"""Run that edits the cities which the paper prints, for table 6."""
PLACES = {SUBWORD_PROBE: "Table 18", SUBWORD_EDITS: "Table 18", PRINTED_EDITS: "Table 6"}
"""Runs that serve one table alone."""


@dataclass(frozen=True)
class Item:
    """One or more tables or figures of the paper that show the same quantity.

    Attributes:
        places: Their numbers, as ``Table 2``.
        title: What they show.
        runs: Names of the runs that they need.
        n_lms: How many LMs are needed.
        needs_after: Whether tuned LMs are needed.
    """

    places: tuple[str, ...]
    title: str
    runs: tuple[str, ...]
    n_lms: int = 1
    needs_after: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Names for the command line, as ``table2``."""
        return tuple(place.lower().replace(" ", "") for place in self.places)

    @property
    def numbers(self) -> str:
        """The numbers, as ``Tables 8 and 14``."""
        kind = self.places[0].split()[0]
        numbers = [place.split()[1] for place in self.places]
        if len(numbers) == 1:
            return self.places[0]
        return f"{kind}s {', '.join(numbers[:-1])} and {numbers[-1]}"

    def is_available(self, has_after: bool, n_lms: int) -> bool:
        """Return whether a number of LMs, with or without tuned ones, is enough."""
        return (has_after or not self.needs_after) and n_lms >= self.n_lms

    @property
    def heading(self) -> str:
        """The numbers, their sections in the paper, and the title."""
        sections = ", ".join(dict.fromkeys(map(paper_section, self.places)))
        return f"{self.numbers} ({sections}): {self.title}"


def _figures(*numbers: int) -> tuple[str, ...]:
    return tuple(f"Figure {number}" for number in numbers)


_PROBES = tuple(probe_run(family) for family in PROBED_FAMILIES)
_AFTER = tuple(after_run(family) for family in PROBED_FAMILIES[:3])

ITEMS = (
    Item(_figures(3, *range(11, 18)), "label-wise r of attributes", (_PROBES[0],)),
    Item(("Table 2",), "precision of W", _PROBES),
    Item(("Table 3",), "labels that W influences most", _PROBES[:2]),
    Item(_figures(4), "precision of W by the LM's size", (_PROBES[0],), n_lms=2),
    Item(
        ("Table 4",), "r of the logits, and of their change by an edit",
        (*_PROBES, *map(edit_run, GRADIENTS)),
    ),
    Item(("Table 5",), "edits of the source that generalize", (*_PROBES, *map(edit_run, EDITED))),
    Item(_figures(5), "W of generalized and of hallucinated edits", (_PROBES[0], edit_run(CITY))),
    Item(("Table 6",), "edits of city->country", (_PROBES[0], edit_run(CITY), PRINTED_EDITS)),
    Item(("Table 7",), "generalization by the vocabulary alone", tuple(map(ablation_run, ABLATED))),
    Item(_figures(7, 18), "label-wise r of arithmetic", (_PROBES[1],)),
    Item(("Table 8", "Table 14"), "label-wise r of similes", (_PROBES[2],)),
    Item(
        _figures(8, 19, 21), "label-wise r of attributes after post-training",
        (_PROBES[0], _AFTER[0]), 1, True,
    ),
    Item(
        ("Table 9",), "label-wise r of similes after post-training", (_PROBES[2], _AFTER[2]), 1,
        True,
    ),
    Item(
        _figures(9), "label-wise r of arithmetic after post-training", (_PROBES[1], _AFTER[1]), 1,
        True,
    ),
    Item(_figures(10), "instance-wise r of attributes", (_PROBES[0],)),
    Item(
        _figures(20), "r of attributes after post-training, by the LM's size",
        (_PROBES[0], _AFTER[0]), 2, True,
    ),
    Item(_figures(22), "r between languages", (_PROBES[3],)),
    Item(_figures(23), "standard deviation of label-wise r", (_PROBES[0],)),
    Item(
        _figures(24), "standard deviation of label-wise r after post-training",
        (_PROBES[0], _AFTER[0]), 1, True,
    ),
    Item(("Table 15",), "cities that influence a country most", (_PROBES[0],)),
    Item(("Table 16",), "mothers that influence a father most", (_PROBES[0],)),
    Item(("Table 17",), "objects that influence an attribute most", (_PROBES[2],)),
    Item(("Table 18",), "completeness of the answer's token", (SUBWORD_PROBE, SUBWORD_EDITS)),
)  # fmt: skip


def item_keys(items: Iterable[Item]) -> list[str]:
    """Return the first key of each item."""
    return [item.keys[0] for item in items]


def select_items(only: Sequence[str]) -> list[Item]:
    """Return the items of some tables and figures; all if none is named.

    Raises:
        ConfigError: There is no such table or figure; the message has similar ones.
    """
    by_key = {key: item for item in ITEMS for key in item.keys}
    chosen = []
    for name in only:
        key = name.lower().replace(" ", "")
        if key not in by_key:
            ordered = sorted(by_key, key=lambda one: (one.rstrip("0123456789"), len(one), one))
            known = f" There are {', '.join(ordered)}."
            # Of another number, no name is the nearest.
            hint = known if re.fullmatch(r"(table|figure)\d+", key) else suggest(key, by_key, known)
            raise ConfigError(f"there is no table or figure {name!r} to reproduce.{hint}")
        chosen.append(by_key[key])
    return [item for item in ITEMS if item in chosen] if only else list(ITEMS)


def needed_runs(items: Iterable[Item]) -> list[str]:
    """Return the names of the runs that items need, those that others build on first."""
    names = dict.fromkeys(name for item in items for name in item.runs)
    return sorted(names, key=lambda name: not name.startswith("probe"))
