"""The paper's own numbers, and the same quantities of a run.

The paper is "Linear Correlation in LM's Compositional Generalization and Hallucination" (arXiv
2502.04520). ``paper.yaml`` has its numbers, and the path of each quantity in ``results.json``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.table import show


@dataclass(frozen=True)
class Quantity:
    """A kind of number that the paper prints.

    Attributes:
        name: Its name, as ``influenced_1``.
        heading: Its name for readers.
        format: Format specification of its numbers.
        study: Study that measures it.
        path: Its path in the study's ``results.json``, see ``paper.yaml``.
    """

    name: str
    heading: str
    format: str
    study: str
    path: str

    def show(self, value: float | None) -> str:
        """Return such a number as text."""
        return show(value, self.format)

    def difference(self, value: float) -> str:
        """Return a difference of two such numbers as text; that of two shares in points."""
        text = show(value, f"+{self.format}")
        return text.replace("%", " points")

    def of(self, run: SavedRun, relation: str, answer: str = "") -> float | None:
        """Return the quantity of a run, for some a source answer's; None if it has none."""
        if run.study != self.study:
            return None
        source, _, target = relation.partition("->")
        names = {"relation": relation, "source": source, "target": target, "answer": answer}
        used = run.tables if "tables" in self.path else ()
        tables = {table.name: table.frame.to_dict("records") for table in used}
        return _look_up({**run.values, "tables": tables}, self.path, names)


@dataclass(frozen=True)
class PaperNumber:
    """A number that the paper prints.

    Attributes:
        place: Table of the paper, as ``Table 2``.
        lm: Name of the LM in the paper.
        relation: Relation, as ``city->country``.
        quantity: What the number is.
        value: The number; shares are fractions of one.
        answer: Source answer, if the number belongs to one.
    """

    place: str
    lm: str
    relation: str
    quantity: Quantity
    value: float
    answer: str = ""

    @property
    def heading(self) -> str:
        """The quantity and the answer."""
        return self.quantity.heading + (f", {self.answer}" if self.answer else "")

    def is_about(self, lm: str) -> bool:
        """Return whether the number is about this LM."""
        name = paper_lm(lm)
        if name is None:
            return False
        # Table 7 names a family: the vocabulary is the same in LMs of all its sizes.
        is_family = self.lm not in _data()["lms"]
        return name == self.lm or (is_family and name.startswith(self.lm))


def paper_lm(name: str) -> str | None:
    """Return the paper's name of an LM; None if the paper does not use the LM.

    Example:
        >>> paper_lm("meta-llama/Meta-Llama-3-8B"), paper_lm("tiny-world")
        ('llama-3-8b', None)
        >>> paper_lm("/hub/models--mistralai--Mistral-7B-v0.3/snapshots/0a1b")
        'mistral-7b-v0.3'
    """
    stem = short_name(name).lower().removeprefix("meta-")
    return stem if stem in _data()["lms"] else None


@cache
def paper_numbers() -> tuple[PaperNumber, ...]:
    """Return all numbers of ``paper.yaml``."""
    known = quantities()
    return tuple(
        PaperNumber(
            block["place"], block["lm"], block.get("relation") or row, known[name], float(value),
            row if "answers" in block else "",
        )
        for block in _data()["numbers"]
        for row, values in (block.get("answers") or block["relations"]).items()
        for name, value in zip(block["quantities"], values, strict=True)
    )  # fmt: skip


def differing_settings(run: SavedRun) -> list[str]:
    """Return the settings of a run that are not the paper's, beside those of the paper."""
    differ = []
    for path, paper in _data()["settings"].get(run.study, {}).items():
        value: Any = run.values
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, paper):
            differ.append(f"{path.removeprefix('settings.')} {value} (in the paper {paper})")
    return differ


@dataclass(frozen=True)
class PaperInfluences:
    """Labels with the highest weights in W that the paper prints.

    Attributes:
        place: Table of the paper, as ``Table 15``.
        lm: Name of the LM in the paper.
        relation: Relation, as ``city->country``.
        direction: ``influenced`` or ``influencing``, see `probe.results.Influence`.
        labels: The labels at the other end of each label, that with the highest weight first.
    """

    place: str
    lm: str
    relation: str
    direction: str
    labels: Mapping[str, tuple[str, ...]]

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
    parts = _data()["paths"]

    def expand(path: str) -> str:
        for name, part in parts.items():
            path = path.replace(f"{{{name}}}", part)
        return path

    return {
        name: Quantity(name, heading, form, study, expand(path))
        for name, (heading, form, study, path) in _data()["quantities"].items()
    }


def paper_section(place: str) -> str:
    """Return where the paper has a table or figure.

    Example:
        >>> paper_section("Table 5"), paper_section("Figure 24")
        ('section 5', 'appendix J')
    """
    name = next(name for name, places in _data()["sections"].items() if place in places)
    return f"{'appendix' if name.isalpha() else 'section'} {name}"


def size_figure() -> tuple[str, list[Quantity]]:
    """Return the paper's figure over LMs of several sizes: its place, and a quantity per line."""
    figure = _data()["size_figure"]
    return str(figure["place"]), [quantities()[name] for name in figure["quantities"]]


@cache
def _data() -> dict[str, Any]:
    text = Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text))


def _look_up(values: Any, path: str, names: Mapping[str, str]) -> float | None:
    """Follow a path through mappings and lists; None where it leads nowhere."""
    for step in re.findall(r"\[[^]]*\]|[^.\[]+", path):
        if step.startswith("["):
            wanted = dict(part.split("=", 1) for part in step[1:-1].split(","))
            entries = [values] if isinstance(values, Mapping) else values
            values = _select(entries, {key: value.format(**names) for key, value in wanted.items()})
        else:
            key = step.format(**names)
            values = values.get(key) if isinstance(values, Mapping) else None
        if values is None:
            return None
    is_number = isinstance(values, (int, float)) and not isinstance(values, bool)
    return float(values) if is_number and values == values else None  # not NaN


def _select(entries: Any, wanted: Mapping[str, str]) -> Any:
    for entry in entries if isinstance(entries, Iterable) else ():
        if isinstance(entry, Mapping) and all(str(entry.get(k)) == v for k, v in wanted.items()):
            return entry
    return None
