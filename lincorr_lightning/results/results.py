"""The results of a study: numbers, tables and figures, independent of where they are written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from lincorr_lightning.errors import ResultsError
from lincorr_lightning.html import FIRST_ROWS, html_table
from lincorr_lightning.io import as_output_error, atomic_write, remove, write_csv, write_json
from lincorr_lightning.results.tables import markdown_table
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure as MatplotlibFigure
    from pandas import DataFrame

    from lincorr_lightning.results.style import Picture

SCHEMA = 2
"""Version of the layout of ``results.json``; 1 is what releases before 0.2 wrote."""

RESULTS_FILE = "results.json"
EARLIER_FILE = "results.earlier.json"
"""Results of an earlier run in the same folder, until those of the current run are complete."""

_LIBRARIES = ("torch", "lightning", "transformers")
_LITERALS = {"": None, "True": True, "False": False}
OWN_KEYS = ("study", "schema", "lm", "versions", "settings", "tables", "figures")
"""Keys of ``results.json`` that all studies share."""


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_T = TypeVar("_T", bound=_Named)


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that its numbers depend on."""
    return {"lincorr-lightning": __version__, **{name: version(name) for name in _LIBRARIES}}


def set_earlier_results_aside(folder: str | Path) -> None:
    """Rename the ``results.json`` of a folder before a new run writes to it.

    A folder with a ``results.json`` is that of a finished run. With an earlier run's, a run would
    look finished although its tables and figures are only partly replaced.

    Raises:
        OutputError: The file cannot be renamed.
    """
    path = Path(folder) / RESULTS_FILE
    if path.exists():
        with as_output_error(path):
            path.replace(path.with_name(EARLIER_FILE))


@dataclass(frozen=True)
class Column:
    """A column of a `Table`.

    Attributes:
        key: Name of the column in the CSV file.
        heading: Name of the column for readers; empty for the key with spaces.
        format: Format specification of its numbers, such as ``.2f`` or ``.0%``; empty for text.
    """

    key: str
    heading: str = ""
    format: str = ""

    @property
    def title(self) -> str:
        """The heading, or the key with spaces for underscores."""
        return self.heading or self.key.replace("_", " ")

    def show(self, value: Any) -> str:
        """Return a cell as text: numbers by `format`, None as an empty text.

        Example:
            >>> Column("r", format=".2f").show(-0.987), Column("pair").show(None)
            ('−0.99', '')
            >>> Column("r", format=".2f").show(-0.001), Column("reference").show(True)
            ('0.00', 'yes')
        """
        if value is None:
            return ""
        if isinstance(value, (bool, np.bool_)):
            return "yes" if value else "no"
        if not self.format or isinstance(value, str):
            return str(value)
        text = format(value, self.format)
        # A number that rounds to zero has no sign.
        return re.sub(r"^[+-](?=[0.,]+%?$)", "", text).replace("-", "−")

    def parse(self, text: str) -> Any:
        """Return the value of a cell of a CSV file; the counterpart of writing it.

        Texts stay texts, except where the column has a format for numbers.

        Example:
            >>> Column("r", format=".2f").parse("0.987"), Column("label").parse("007")
            (0.987, '007')
        """
        if text in _LITERALS:
            return _LITERALS[text]
        if self.format:
            for kind in (int,) if self.format.endswith("d") else (int, float):
                try:
                    float(value := kind(text))
                except (
                    ValueError,
                    OverflowError,
                ):  # a whole number may be beyond the range of floats
                    continue
                return value
        return text


@dataclass(frozen=True)
class Table:
    """A table of a study's results.

    Attributes:
        name: Name of the file ``tables/<name>.csv``.
        columns: The columns, or their keys alone. The first ones identify a row: a report joins
            the tables of several runs on them.
        rows: Cells of each row, one per column; None is an empty cell.
        caption: What the table shows, one sentence.
        note: How to read it, or what is left out.
        headline: Whether the table is shown at the end of a run and first on a report page.
    """

    name: str
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    note: str = ""
    headline: bool = False

    @classmethod
    def from_dicts(
        cls,
        name: str,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[Column | str],
        **options: Any,
    ) -> Table:
        """Make a table from rows given as mappings; a key that a row lacks is an empty cell."""
        keys = [column if isinstance(column, str) else column.key for column in columns]
        return cls(name, columns, [[row.get(key) for key in keys] for row in rows], **options)

    @cached_property
    def full_columns(self) -> list[Column]:
        """The columns, also of keys alone."""
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    @property
    def keys(self) -> list[str]:
        """Keys of the columns, as in the CSV file."""
        return [column.key for column in self.full_columns]

    def texts(self, limit: int | None = None) -> list[list[str]]:
        """Return the cells as text, formatted by their columns."""
        return [
            [column.show(cell) for column, cell in zip(self.full_columns, row, strict=True)]
            for row in self.rows[:limit]
        ]

    def markdown(self, limit: int | None = None) -> str:
        """Return the table as Markdown."""
        return markdown_table([column.title for column in self.full_columns], self.texts(limit))

    def to_pandas(self) -> DataFrame:
        """Return the table as a DataFrame, a column for each key; empty cells are missing values.

        Raises:
            ResultsError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ResultsError(
                f"the table {self.name!r} cannot become a DataFrame: pandas is not installed. Run "
                "`pip install pandas`, or use the table's keys and rows."
            ) from error
        return pandas.DataFrame([list(row) for row in self.rows], columns=self.keys)

    def _repr_html_(self) -> str:
        """Return the first rows as a notebook shows them."""
        return html_table(
            [column.title for column in self.full_columns],
            self.texts(FIRST_ROWS),
            [bool(column.format) for column in self.full_columns],
            self.caption,
            n_rows=len(self.rows),
        )

    def to_json(self) -> dict[str, Any]:
        """Return what ``results.json`` says about the table; its cells are in the CSV file."""
        return {
            "name": self.name,
            "caption": self.caption,
            "note": self.note,
            "headline": self.headline,
            "columns": [
                {"key": column.key, "heading": column.title, "format": column.format}
                for column in self.full_columns
            ],
        }


@dataclass(frozen=True)
class Figure:
    """A figure of a study's results, drawn once for all writers.

    Attributes:
        name: Name of the file ``figures/<name>.png``.
        caption: What the figure shows, one sentence.
        draw: Function that draws it.
    """

    name: str
    caption: str
    draw: Callable[[], MatplotlibFigure]

    @cached_property
    def picture(self) -> Picture:
        """The drawn figure as PNG."""
        from lincorr_lightning.results.style import to_picture

        return to_picture(self.draw())

    def _repr_png_(self) -> bytes:
        """Return the picture that a notebook shows."""
        return self.picture.png

    def to_json(self) -> dict[str, str]:
        """Return what ``results.json`` says about the figure."""
        return {"name": self.name, "caption": self.caption}


@dataclass
class Results:
    """Everything that a study found, as plain data.

    Attributes:
        study: Name of the study, as ``linear_probe``.
        values: The study's own keys of ``results.json``.
        scalars: Numbers for the loggers, by log key (``val/label_mean``).
        tables: Tables, written as CSV.
        figures: Figures, written as PNG.
        lm: Name, dtype, fingerprint and size of the LM, see `LanguageModel.info`; None if the study
            has none.
        settings: Hyper-parameters of the study, and under ``data`` those of its data.
        charts: Curves that TensorBoard lays over one another: group -> chart -> log keys.
        included: Results of callbacks, which write their own tables and figures.
    """

    study: str
    values: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    lm: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    charts: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    included: Sequence[Results] = ()

    def table(self, name: str) -> Table:
        """Return the table of this name, also of the callbacks.

        Raises:
            ResultsError: There is no such table; the message names similar ones.
        """
        return find_by_name("table", name, [t for one in self._all for t in one.tables])

    def figure(self, name: str) -> Figure:
        """Return the figure of this name, also of the callbacks.

        Raises:
            ResultsError: There is no such figure; the message names similar ones.
        """
        return find_by_name("figure", name, [f for one in self._all for f in one.figures])

    @property
    def _all(self) -> tuple[Results, ...]:
        return (self, *self.included)

    def _repr_html_(self) -> str:
        """Return a summary as a notebook shows it: numbers, the first headline table, names."""
        return summary_html(
            self.study,
            str((self.lm or {}).get("name_or_path", "")),
            self.values,
            [table for one in self._all for table in one.tables],
            [figure.name for one in self._all for figure in one.figures],
        )

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``results.json``.

        Raises:
            ValueError: A value has the key of another part, or two tables or figures have one name.
        """
        everything = self._all
        names = [
            *self.values,
            *(one.study for one in self.included if one.values),
            *OWN_KEYS,
            *(f"tables/{table.name}" for one in everything for table in one.tables),
            *(f"figures/{figure.name}" for one in everything for figure in one.figures),
        ]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"results of {self.study}: {', '.join(twice)} would be written twice")
        return {
            "study": self.study,
            "schema": SCHEMA,
            "lm": None if self.lm is None else dict(self.lm),
            "versions": versions(),
            **self.values,
            **{one.study: dict(one.values) for one in self.included if one.values},
            "settings": dict(self.settings),
            "tables": [table.to_json() for one in everything for table in one.tables],
            "figures": [figure.to_json() for one in everything for figure in one.figures],
        }

    def write(self, folder: str | Path, before_last: Callable[[], None] = lambda: None) -> None:
        """Write ``tables/*.csv``, ``figures/*.png`` and, last, ``results.json``.

        A folder with a ``results.json`` is complete, see `set_earlier_results_aside`.

        Args:
            folder: The run's folder.
            before_last: Called before ``results.json`` is written, for example to log the results.

        Raises:
            OutputError: A file cannot be written.
            ValueError: See `to_json`.
        """
        content, folder = self.to_json(), Path(folder)
        set_earlier_results_aside(folder)
        self.write_parts(folder)
        before_last()
        write_json(folder / RESULTS_FILE, content)
        remove(folder / EARLIER_FILE)

    def write_parts(self, folder: str | Path) -> None:
        """Write only tables and figures, for callbacks in another module's run."""
        from tqdm import tqdm

        folder = Path(folder)
        for table in self.tables:
            write_csv(folder / "tables" / f"{table.name}.csv", table.keys, table.rows)
        progress = tqdm(
            self.figures, desc="drawing figures", unit="figure", delay=2, leave=False, disable=None
        )
        for figure in progress:
            with atomic_write(folder / "figures" / f"{figure.name}.png") as part:
                part.write_bytes(figure.picture.png)


def find_by_name(kind: str, name: str, parts: Sequence[_T]) -> _T:
    """Return the table or figure of a name.

    Args:
        kind: ``table`` or ``figure``, for the message.
        name: The name.
        parts: All tables or figures.

    Raises:
        ResultsError: There is none; the message names similar ones.
    """
    for part in parts:
        if part.name == name:
            return part
    # Imported here: the package takes long to import.
    from lincorr_lightning.knowledge.yaml_file import suggest

    names = [part.name for part in parts]
    known = f" There are {', '.join(names)}." if names else f" There is no {kind} at all."
    raise ResultsError(f"there is no {kind} {name!r}.{suggest(name, names)}{known}")


def summary_html(
    study: str,
    lm: str,
    values: Mapping[str, Any],
    tables: Sequence[Table],
    figures: Sequence[str],
) -> str:
    """Return a summary of results as HTML: numbers, the first headline table, and all names.

    Args:
        study: Name of the study.
        lm: Name of the LM; empty if there is none.
        values: Content of ``results.json``, of which the numbers at the top level are shown.
        tables: All tables.
        figures: Names of all figures.
    """
    numbers = ", ".join(
        f"{key.replace('_', ' ')} {format(value, ',d' if isinstance(value, int) else '.4g')}"
        for key, value in values.items()
        if key not in OWN_KEYS and isinstance(value, (int, float)) and not isinstance(value, bool)
    )
    rest = (f" of {lm}" if lm else "") + (f": {numbers}" if numbers else "")
    lines = [f"<p><b>{escape(study)}</b>{escape(rest)}</p>"]
    lines += [table._repr_html_() for table in tables if table.headline][:1]
    for kind, names in (("table", [table.name for table in tables]), ("figure", figures)):
        if names:
            listed = escape(", ".join(names))
            lines.append(f"<p><code>{kind}(name)</code>: {listed}</p>")
    return "\n".join(lines)
