"""Records that are tables: a row is a dataclass, its fields are the columns."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from lincorr_lightning.io import number as number  # handed on

if TYPE_CHECKING:
    from pandas import DataFrame


def column(heading: str = "", format: str = "", default: Any = dataclasses.MISSING) -> Any:
    """Declare a field of a record: a key of ``results.json`` and a column of a table.

    An empty heading stands for the field's name with spaces, an empty format for text; numbers have
    one such as ``.2f`` or ``.0%``.
    """
    return field(default=default, metadata={"heading": heading, "format": format})


def columns_of(record: type[Any]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the names of a record's fields, and headings and formats of those that have any."""
    fields = dataclasses.fields(record)
    headings = {f.name: f.metadata["heading"] for f in fields if f.metadata.get("heading")}
    formats = {f.name: f.metadata["format"] for f in fields if f.metadata.get("format")}
    return [f.name for f in fields], headings, formats


def show(value: Any, form: str = "") -> str:
    """Return a cell as text: numbers by their format, nothing for a missing value."""
    if value is None or (isinstance(value, (float, np.floating)) and math.isnan(value)):
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if not form or isinstance(value, str):
        return str(value)
    if form.endswith("d"):
        value = int(value)
    # A number that rounds to zero has no sign.
    return re.sub(r"^[+-](?=[0.,]+%?$)", "", format(value, form)).replace("-", "−")


def percent(share: float | None) -> str:
    """Return a share for a sentence, as ``59 %``, which is not broken."""
    return show(share, ".0%").replace("%", "\N{NO-BREAK SPACE}%")


def points(low: float, high: float, bound: float = math.inf) -> str:
    """Return the 95 % interval of a difference in points, which is at most the `bound`.

    Example:
        >>> points(-1.28, 0.08, bound=1).replace("\N{NO-BREAK SPACE}", " ")
        '95 %: −100 to +8 points'
    """
    ends = (show(100 * min(max(end, -bound), bound), "+.0f") for end in (low, high))
    return f"{percent(0.95)}: {' to '.join(ends)} points"


@dataclass(frozen=True)
class Mean:
    """How a number follows from a table: the mean of a column, or its share of a text.

    Only rows `where` columns have some values count; `per` value of a column, the mean of means.
    """

    column: str
    equals: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    per: str | None = None


@dataclass(frozen=True)
class Table:
    """A table of a study's results, ``tables/<name>.csv``.

    The first columns of the frame identify a row: a report joins the tables of several runs on
    them. The upper one of two levels of columns names groups of columns. The caption is one
    sentence, the note says how to read the table; a headline is shown at the end of a run and
    unfolded on a report page. Columns that are not named as they are read have headings, those of
    numbers formats; texts in these stay as they are.

    The columns `unit` name what a row is a sample of, such as an edit; `means` are numbers of
    headline tables and of ``results.json`` that are means over its rows, in each value of the
    columns that the headline table has, too. A comparison of two runs takes their errors from them.
    """

    name: str
    frame: DataFrame
    caption: str = ""
    note: str = ""
    headline: bool = False
    headings: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)
    unit: Sequence[str] = ()
    means: Mapping[str, Mean] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        rows: Iterable[Any],
        columns: type[Any] | Sequence[str] = (),
        caption: str = "",
        note: str = "",
        headline: bool = False,
        headings: Mapping[str, str] = MappingProxyType({}),
        formats: Mapping[str, str] = MappingProxyType({}),
    ) -> Table:
        """Make a table of records, mappings or sequences; other arguments are those of `Table`.

        `columns` are the records' class or the columns' names, by default those of the first row;
        a key that a mapping lacks is an empty cell. `headings` and `formats` add to the record's.
        """
        rows = list(rows)
        first = rows[0] if rows else ()
        record = columns if isinstance(columns, type) else type(first)
        is_record = dataclasses.is_dataclass(record)
        names, declared, declared_formats = columns_of(record) if is_record else ([], {}, {})
        if not isinstance(columns, type):
            names = list(columns) or names or list(first)
        all_headings, all_formats = {**declared, **headings}, {**declared_formats, **formats}
        frame = make_frame(rows, names)
        return cls(name, frame, caption, note, headline, all_headings, all_formats)

    def sampled(self, *unit: str, **means: Mean | str) -> Table:
        """Return the table with `unit` and `means`; a text stands for the mean of that column."""
        known = {key: Mean(mean) if isinstance(mean, str) else mean for key, mean in means.items()}
        return dataclasses.replace(self, unit=unit, means=known)

    @property
    def keys(self) -> list[str]:
        """Names of the columns."""
        return [str(key) for key in self.frame.columns.get_level_values(-1)]

    @property
    def titles(self) -> list[str]:
        """Headings of the columns."""
        return [self.headings.get(key) or key.replace("_", " ") for key in self.keys]

    @property
    def is_number(self) -> list[bool]:
        """Whether a column holds numbers."""
        return [bool(self.formats.get(key)) for key in self.keys]

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Heading and number of columns of each group of columns, from the left."""
        columns = self.frame.columns
        upper = columns.get_level_values(0) if columns.nlevels > 1 else ()
        return [(str(name), len(list(columns))) for name, columns in groupby(upper)]

    def __len__(self) -> int:
        return len(self.frame)

    def to_pandas(self) -> DataFrame:
        """Return a copy of the cells, in which numbers and truth values have NumPy's types.

        Whole numbers of which some are missing are floats and NaN; so is an empty column.
        """
        frame = self.frame.copy()
        for i, (_, cells) in enumerate(frame.items()):
            missing = cells.isna()
            plain = {"Int64": "float64" if missing.any() else "int64", "boolean": "bool"}
            kind = plain.get(str(cells.dtype))
            if len(cells) and missing.all():
                frame.isetitem(i, cells.astype("float64"))
            elif kind and not (kind == "bool" and missing.any()):
                frame.isetitem(i, cells.astype(kind))
        return frame

    def first(self, n: int, rest: str = "") -> Table:
        """Return a table of the first n rows; if there are more, a note says where the rest is."""
        if len(self) <= n:
            return self
        cut = f"The first {n} of {len(self):,} rows{rest and f'; all: {rest}'}."
        note = f"{self.note} {cut}".strip()
        return dataclasses.replace(self, frame=self.frame.head(n), note=note)

    def texts(self) -> list[list[str]]:
        """Return the cells as text, formatted."""
        forms = [self.formats.get(key, "") for key in self.keys]
        rows = self.frame.astype(object).where(self.frame.notna(), None)
        return [list(map(show, row, forms)) for row in rows.itertuples(index=False, name=None)]

    def markdown(self) -> str:
        """Return the table as Markdown; headings name the group of columns, too."""
        groups = [name for name, n in self.groups for _ in range(n)] or [""] * len(self.keys)
        headings = [f"{group} {title}" for group, title in zip(groups, self.titles, strict=True)]
        rule = ["---:" if is_number else "---" for is_number in self.is_number]
        head, *body = [list(map(escape_markdown, row)) for row in (headings, *self.texts())]
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *body))

    def _repr_html_(self) -> str:
        """Return the first rows, for notebooks."""
        from pandas import DataFrame

        first = self.first(20)
        caption, note = (escape(clean(x)) for x in (first.caption or first.name, first.note))
        cells = [list(map(clean, row)) for row in first.texts()]
        html = DataFrame(cells, columns=map(clean, first.titles)).to_html(index=False, border=0)
        return f"<p><b>{caption}</b></p>{html}<p>{note}</p>"

    def to_json(self) -> dict[str, Any]:
        """Return what ``results.json`` says about the table; its cells are in the CSV file."""
        kinds = [re.sub("^(str|string)$", "object", str(kind)) for kind in self.frame.dtypes]
        columns = [
            {"key": key, "heading": title, "format": self.formats.get(key, ""), "dtype": kind}
            for key, title, kind in zip(self.keys, self.titles, kinds, strict=True)
        ]
        means = {number: dataclasses.asdict(mean) for number, mean in self.means.items()}
        return {
            "name": self.name,
            "caption": self.caption,
            "note": self.note,
            "headline": self.headline,
            "columns": columns,
            **({"unit": list(self.unit), "means": means} if means else {}),
        }


History = Mapping[str, Sequence[tuple[int, float]]]  #: Pairs of step and value, by log key.


def history_table(history: History) -> Table:
    """Return the table of what was logged at steps, a row per number, without those not finite."""
    rows = [
        (key, step, value)
        for key, points in history.items()
        for step, value in points
        if math.isfinite(value)
    ]
    caption = "What was logged in the course of training."
    return Table.of("history", rows, ("key", "step", "value"), caption, formats={"value": ".4g"})


def make_frame(rows: Sequence[Any], names: Sequence[str]) -> DataFrame:
    """Return a DataFrame of records, mappings or sequences.

    Where whole numbers or truth values are missing, the others stay what they are.
    """
    from pandas import DataFrame, Series

    def cells(row: Any) -> Sequence[Any]:
        if isinstance(row, Mapping):
            return [row.get(name) for name in names]
        return [getattr(row, n) for n in names] if dataclasses.is_dataclass(row) else row

    def series(values: Sequence[Any]) -> Series[Any]:
        kinds = {type(value) for value in values if value is not None}
        dtype = "object" if str in kinds or not kinds else None
        if len(kinds) == 1 and None in values:
            nullable = {int: "Int64", bool: "boolean", float: "float64"}
            dtype = nullable.get(kinds.pop(), "object")
        return Series(list(values), dtype=dtype)

    columns = list(zip(*map(cells, rows), strict=True)) or [()] * len(names)
    frame = DataFrame({i: series(values) for i, values in enumerate(columns)})
    frame.columns = list(names)  # type: ignore[assignment]
    return frame


def clean(text: str) -> str:
    """Return text with arrows in names of pairs, and without characters no text file can hold."""
    arrows = text.replace("->", "→")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", arrows)


def short_name(lm: str) -> str:
    """Return the name of an LM for titles: the last part of its hub id or path."""
    # The hub's cache has the name in the middle of the path.
    if cached := re.search(r"models--[^/\\]+?--([^/\\]+)", lm):
        return cached[1]
    return next(filter(None, reversed(re.split(r"[/\\]", lm))), lm)


def study_title(study: str) -> str:
    """Return the name of a study as a heading."""
    return re.sub(r"\blm\b", "LM", study.replace("_", " ").capitalize())


def escape_markdown(text: str) -> str:
    """Return text in one line with Markdown's special characters escaped."""
    text = re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", re.sub(r"\s+", " ", clean(text)))
    # An entity would be read as the character it stands for.
    return text.replace("&", "&amp;").strip()
