"""Records that are tables: a row is a dataclass, its fields are the columns."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def column(heading: str = "", format: str = "", default: Any = dataclasses.MISSING) -> Any:
    """Declare a field of a record: a key of ``results.json`` and a column of a table.

    Args:
        heading: Name of the column for readers; empty for the field's name with spaces.
        format: Format specification of its numbers, such as ``.2f`` or ``.0%``; empty for text.
        default: Default of the field.
    """
    return field(default=default, metadata={"heading": heading, "format": format})


def columns_of(record: type[Any]) -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Return the names, headings and formats of a record's fields.

    Example:
        >>> @dataclass
        ... class Row:
        ...     pair: str
        ...     label_mean: float = column("r", ".2f")
        >>> columns_of(Row)
        (['pair', 'label_mean'], {'label_mean': 'r'}, {'label_mean': '.2f'})
    """
    fields = dataclasses.fields(record)
    headings, formats = (
        {one.name: text for one in fields if (text := one.metadata.get(kind))}
        for kind in ("heading", "format")
    )
    return [one.name for one in fields], headings, formats


def show(value: Any, form: str = "") -> str:
    """Return a cell as text: numbers by their format, nothing for a missing value.

    Example:
        >>> show(-0.987, ".2f"), show(None), show(-0.001, ".2f"), show(True)
        ('−0.99', '', '0.00', 'yes')
    """
    if value is None or value != value:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if not form or isinstance(value, str):
        return str(value)
    if form.endswith("d"):
        value = int(value)
    # A number that rounds to zero has no sign.
    return re.sub(r"^[+-](?=[0.,]+%?$)", "", format(value, form)).replace("-", "−")


@dataclass(frozen=True)
class Table:
    """A table of a study's results.

    Args:
        name: Name of the file ``tables/<name>.csv``.
        frame: The rows. The first columns identify a row: a report joins the tables of several runs
            on them.
        caption: What the table shows, one sentence.
        note: How to read it, or what is left out.
        headline: Whether the table is shown at the end of a run and first on a report page.
        headings: Headings of columns that are not named as they are read.
        formats: Format specifications of columns of numbers.
    """

    name: str
    frame: DataFrame
    caption: str = ""
    note: str = ""
    headline: bool = False
    headings: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        name: str,
        rows: Iterable[Any],
        columns: type[Any] | Sequence[str] = (),
        caption: str = "",
        note: str = "",
        headline: bool = False,
        headings: Mapping[str, str] | None = None,
        formats: Mapping[str, str] | None = None,
    ) -> Table:
        """Make a table of records, mappings or sequences.

        Args:
            name: See `Table`, and so are `caption`, `note` and `headline`.
            rows: The rows. Of records and mappings `columns` are taken; a key that a mapping lacks
                is an empty cell.
            columns: The record's class, or the columns' names; empty for those of the first row.
            caption: See `Table`.
            note: See `Table`.
            headline: See `Table`.
            headings: Headings by column, beside those of the record.
            formats: Formats by column, beside those of the record.
        """
        rows = list(rows)
        heads: dict[str, str] = {}
        forms: dict[str, str] = {}
        if not columns and rows:
            columns = list(rows[0]) if isinstance(rows[0], Mapping) else type(rows[0])
        record = columns if isinstance(columns, type) else type(rows[0]) if rows else None
        names = [] if isinstance(columns, type) else list(columns)
        if record is not None and dataclasses.is_dataclass(record):
            own, heads, forms = columns_of(record)
            names = names or own
        heads, forms = {**heads, **(headings or {})}, {**forms, **(formats or {})}
        return cls(
            name, make_frame(rows, names), caption, note, headline,
            {key: heads[key] for key in names if key in heads},
            {key: forms[key] for key in names if key in forms},
        )  # fmt: skip

    @property
    def keys(self) -> list[str]:
        """Names of the columns."""
        return [str(key) for key in self.frame.columns]

    @property
    def titles(self) -> list[str]:
        """Headings of the columns."""
        return [self.headings.get(key) or key.replace("_", " ") for key in self.keys]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.frame)

    def texts(self, limit: int | None = None) -> list[list[str]]:
        """Return the cells of the first rows as text, formatted."""
        forms = [self.formats.get(key, "") for key in self.keys]
        frame = self.frame if limit is None else self.frame.head(limit)
        rows = frame.astype(object).where(frame.notna(), None)
        return [
            [show(cell, form) for cell, form in zip(row, forms, strict=True)]
            for row in rows.itertuples(index=False, name=None)
        ]

    def markdown(self, limit: int | None = None) -> str:
        """Return the table as Markdown."""
        return markdown_table(self.titles, self.texts(limit))

    def _repr_markdown_(self) -> str:
        """Return what a notebook shows."""
        return self.markdown(limit=20)

    def to_json(self) -> dict[str, Any]:
        """Return what ``results.json`` says about the table; its cells are in the CSV file."""
        texts = ("object", "str", "string")
        kinds = [str(kind) for kind in self.frame.dtypes]
        kinds = ["object" if kind in texts else kind for kind in kinds]
        parts = zip(self.keys, self.titles, kinds, strict=True)
        return {
            "name": self.name,
            "caption": self.caption,
            "note": self.note,
            "headline": self.headline,
            "columns": [
                {"key": key, "heading": title, "format": self.formats.get(key, ""), "dtype": kind}
                for key, title, kind in parts
            ],
        }


def make_frame(rows: Sequence[Any], names: Sequence[str]) -> DataFrame:
    """Return a DataFrame of records, mappings or sequences, with whole numbers kept whole."""
    from pandas import DataFrame

    def cells(row: Any) -> Sequence[Any]:
        if isinstance(row, Mapping):
            return [row.get(name) for name in names]
        return [getattr(row, n) for n in names] if dataclasses.is_dataclass(row) else row

    columns = list(zip(*map(cells, rows), strict=True)) or [()] * len(names)
    parts = {i: typed_series(values) for i, values in enumerate(columns)}
    frame = DataFrame(parts)
    frame.columns = list(names)  # type: ignore[assignment]
    return frame


def typed_series(values: Sequence[Any]) -> Series[Any]:
    """Return a column, of pandas' nullable dtypes if whole numbers or truth values are missing."""
    from pandas import Series

    kinds = {type(value) for value in values if value is not None}
    if len(kinds) == 1 and None in values:
        dtype = {int: "Int64", bool: "boolean", float: "float64"}.get(kinds.pop(), "object")
        return Series(list(values), dtype=dtype)
    text = str in kinds or not kinds
    return Series(list(values), dtype="object" if text else None)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""Return a Markdown table; numbers get three decimals, None an empty cell.

    Example:
        >>> print(markdown_table(["pair", "r"], [["city->country", 0.98765], ["a|b", None]]))
        | pair | r |
        | --- | --- |
        | city-\>country | 0.988 |
        | a\|b |  |
    """

    def cell(value: Any) -> str:
        is_float = isinstance(value, (float, np.floating))
        return f"{value:.3f}" if is_float else escape_markdown("" if value is None else str(value))

    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in lines)


def escape_markdown(text: str) -> str:
    r"""Return text with Markdown's special characters escaped.

    Example:
        >>> escape_markdown("*a_b*")
        '\\*a\\_b\\*'
    """
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", re.sub(r"\s+", " ", text))
