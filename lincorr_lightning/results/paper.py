"""The paper's own numbers, and the same quantities of a run.

The paper is "Linear Correlation in LM's Compositional Generalization and Hallucination" (arXiv
2502.04520). ``paper.yaml`` has its numbers, and the path of each quantity in ``results.json``.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import short_name, show


class Quantity(NamedTuple):
    """A kind of number that the paper prints."""

    name: str  # as ``influenced_1``
    heading: str  # its name for readers
    format: str  # of its numbers
    study: str  # that measures it
    path: str  # in the study's ``results.json``, see ``paper.yaml``

    def show(self, value: float | None) -> str:
        """Return such a number as text."""
        return show(value, self.format)

    def difference(self, value: float) -> str:
        """Return a difference of two such numbers as text; that of two shares in points."""
        return show(value, f"+{self.format}").replace("%", " points")

    def of(self, run: SavedRun, relation: str, answer: str = "") -> float | None:
        """Return the quantity of a run, for some a source answer's; None if it has none."""
        if run.study != self.study:
            return None
        source, _, target = relation.partition("->")
        used = run.tables if "tables" in self.path else ()
        tables = {table.name: table.frame.to_dict("records") for table in used}
        ends = {"relation": relation, "source": source, "target": target}
        value = _look_up({**run.values, "tables": tables}, self.path, answer=answer, **ends)
        return None if value is None or math.isnan(value) else float(value)


class PaperNumber(NamedTuple):
    """A number that the paper prints."""

    place: str  # table of the paper, as ``Table 2``
    lm: str  # its name in the paper
    relation: str  # as ``city->country``
    quantity: Quantity
    value: float  # shares are fractions of one
    answer: str = ""  # the source answer, if the number belongs to one

    def is_about(self, lm: str) -> bool:
        """Return whether the number is about an LM, by its hub id or path."""
        name = short_name(lm).lower().removeprefix("meta-")
        known = _data()["lms"]
        # Table 7 names a family: the vocabulary is the same in LMs of all its sizes.
        is_family = self.lm not in known
        return name in known and (name == self.lm or (is_family and name.startswith(self.lm)))


@cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """Return all numbers of ``paper.yaml``."""
    known = quantities()
    return tuple(
        PaperNumber(
            block["place"],
            block["lm"],
            block.get("relation") or row,
            known[name],
            float(value),
            row if "answers" in block else "",
        )
        for block in _data()["numbers"]
        for row, values in (block.get("answers") or block["relations"]).items()
        for name, value in zip(block["quantities"], values, strict=True)
    )


def differing_settings(run: SavedRun) -> list[str]:
    """Return the settings of a run that are not the paper's, beside those of the paper."""
    return [
        f"{path.removeprefix('settings.')} {value} (in the paper {paper})"
        for path, paper in _data()["settings"].get(run.study, {}).items()
        if (value := _look_up(run.values, path)) not in (None, paper)
    ]


class PaperInfluences(NamedTuple):
    """Labels with the highest weights in W that the paper prints."""

    place: str  # table of the paper, as ``Table 15``
    lm: str  # its name in the paper
    relation: str  # as ``city->country``
    direction: str  # ``influenced`` or ``influencing``, of target labels or of source labels
    labels: Mapping[str, tuple[str, ...]]  # at the other end of each, the highest weight first

    @property
    def n(self) -> int:
        """Number of labels in each list."""
        return len(next(iter(self.labels.values())))


@cache
def paper_influences() -> tuple[PaperInfluences, ...]:
    """Return all lists of labels of ``paper.yaml``."""
    return tuple(
        PaperInfluences(
            **{**block, "labels": {x: tuple(y.split(", ")) for x, y in block["labels"].items()}}
        )
        for block in _data()["influences"]
    )


@cache
def quantities() -> dict[str, Quantity]:
    """Return the quantities of ``paper.yaml`` by name."""
    known = {}
    for name, (heading, form, study, path) in _data()["quantities"].items():
        for part, long in _data()["paths"].items():
            path = path.replace(f"{{{part}}}", long)
        known[name] = Quantity(name, heading, form, study, path)
    return known


def paper_section(place: str) -> str:
    """Return where the paper has a table or figure, as ``section 5`` or ``appendix J``."""
    name = next(name for name, places in _data()["sections"].items() if place in places)
    return f"{'appendix' if name.isalpha() else 'section'} {name}"


def size_figure() -> tuple[str, list[Quantity]]:
    """Return the paper's figure over LMs of several sizes: its place, and a quantity per line."""
    figure = _data()["size_figure"]
    return str(figure["place"]), [quantities()[name] for name in figure["quantities"]]


@cache
def _data() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8")))


def _look_up(values: Any, path: str, **names: str) -> Any:
    """Follow a path, with names filled in, through mappings and lists; None if it leads nowhere."""
    for step in re.findall(r"\[[^]]*\]|[^.\[]+", path):
        if step.startswith("["):
            entries = [values] if isinstance(values, Mapping) else values
            for key, value in [part.split("=", 1) for part in step[1:-1].split(",")]:
                text = value.format(**names)
                entries = [entry for entry in entries if str(entry.get(key)) == text]
            values = entries[0] if entries else None
        else:
            values = values.get(step.format(**names))
        if values is None:
            break
    return values
