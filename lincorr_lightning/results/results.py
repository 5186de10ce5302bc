"""The results of a study: numbers, tables and figures, independent of where they are written."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from html import escape
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import as_output_error, atomic_write, regular_file, write_json
from lincorr_lightning.results.console import table_text
from lincorr_lightning.results.table import Table
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure as MatplotlibFigure

SCHEMA = 2  #: Version of the layout of ``results.json``.

RESULTS_FILE = "results.json"
EARLIER_FILE = "results.earlier.json"
"""Results of an earlier run in the same folder, until those of the current run are complete."""

SHARED_KEYS = ("study", "schema", "lm", "verdict", "versions", "settings", "tables", "figures")
"""Keys of ``results.json`` that all studies share."""
MAX_SENTENCES = 5  #: Of a verdict.
MAX_FIGURES = 8  #: Of those that a run draws, unless all are asked for.


def versions() -> dict[str, str]:
    """Return the versions of this package and of the libraries that its numbers depend on."""
    libraries = ("torch", "lightning", "transformers")
    return {"lincorr-lightning": __version__, **{name: version(name) for name in libraries}}


def set_earlier_results_aside(folder: Path) -> None:
    """Rename the ``results.json`` of an earlier run, with which this one would look finished."""
    path = folder / RESULTS_FILE
    if path.exists():
        with as_output_error(path):
            path.replace(path.with_name(EARLIER_FILE))


@dataclass(frozen=True, repr=False)
class Figure:
    """A figure of a study's results, ``figures/<name>.png``.

    It is drawn from tables alone, so that a finished run draws it as well.

    Attributes:
        name: Its name, that of the file.
        caption: What it shows, in one sentence.
        draw: Function of the tables' frames and the `options` that returns a matplotlib figure.
        tables: Tables of the results that it is drawn from, in the order of the arguments.
        options: Further arguments by name, plain data.
        file: Its picture, if a finished run has one.
        is_main: Whether a run draws it without being asked for all figures.
    """

    name: str
    caption: str
    draw: Callable[..., MatplotlibFigure] | None
    tables: Sequence[Table] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    file: Path | None = None
    is_main: bool = True

    def __repr__(self) -> str:
        return f"Figure {self.name}: {self.caption}"

    def matplotlib(self) -> MatplotlibFigure:
        """Draw it, in this package's style whatever style is in force.

        Raises ReportError where only the picture is left, as of tables that were deleted.
        """
        if self.draw is None:
            raise ReportError(f"{self.file} can no longer be drawn: its tables are gone.")
        import matplotlib

        from lincorr_lightning.results.plots import to_png, use_installed_fonts

        with matplotlib.rc_context():  # a style of the user's could hide parts, or need LaTeX
            matplotlib.rcdefaults()
            figure = self.draw(*(table.frame for table in self.tables), **self.options)
        use_installed_fonts(figure)
        # Without it a notebook shows no picture before pyplot is imported.
        figure._repr_png_ = partial(to_png, figure)  # type: ignore[attr-defined]
        return figure

    @cached_property
    def png(self) -> bytes:
        """The figure as the bytes of a PNG file; ReportError if its own is none, or cut short."""
        if self.file is None:
            from lincorr_lightning.results.plots import to_png

            return to_png(self.matplotlib())
        from PIL import Image

        try:
            png = regular_file(self.file).read_bytes()
            Image.open(BytesIO(png), formats=["PNG"]).verify()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = f"{self.file} cannot be read as PNG: {error}. Run the study again."
            raise ReportError(reason) from error
        return png

    def _repr_png_(self) -> bytes:
        return self.png

    def to_json(self) -> dict[str, Any]:
        """Return what ``results.json`` says about it, from which a finished run draws it."""
        draw = self.draw
        return {
            "name": self.name,
            "caption": self.caption,
            "draw": draw and f"{draw.__module__}:{getattr(draw, '__qualname__', '')}",
            "of": [table.name for table in self.tables],
            "options": dict(self.options),
        }


@dataclass
class Results:
    """Everything that a study, such as ``linear_probe``, found, as plain data.

    The `verdict` says it in a few sentences, the important one first. `values` are the study's own
    keys of ``results.json``, `scalars` the numbers for the loggers, by log key
    (``val/label_mean``). `lm` is `LanguageModel.info`, empty if the study has no LM; `settings` are
    its hyper-parameters, and under ``data`` those of its data. The results that are `included` are
    those of callbacks, which write their own tables and figures. A run draws the main figures, at
    most ``MAX_FIGURES``, in their order.
    """

    study: str
    values: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    lm: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    included: Sequence[Results] = ()
    verdict: Sequence[str] = ()

    def __repr__(self) -> str:
        """Return the verdict, headline tables in part, and what there is to take out."""
        on = f" of {self.lm['name_or_path']}" if self.lm else ""
        headlines = table_text(table.first(5) for table in self.all_tables if table.headline)
        parts = {
            "tables": [f"{table.name} ({len(table):,})" for table in self.all_tables],
            "figures": [figure.name for figure in self.all_figures],
        }
        lines = (f"{kind + ':':<9}{', '.join(names)}" for kind, names in parts.items() if names)
        wrap = partial(textwrap.fill, width=100, subsequent_indent=" " * 9)
        head = [f"{self.study}{on}", *self.all_sentences]
        return "\n".join([*head, "", headlines, *map(wrap, lines)])

    def _repr_html_(self) -> str:
        """Return the verdict and the headline tables, for notebooks."""
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.all_sentences)
        return sentences + "".join(t._repr_html_() for t in self.all_tables if t.headline)

    @property
    def all_sentences(self) -> list[str]:
        """The verdict, also of the callbacks."""
        parts = (self, *self.included)
        return [sentence for results in parts for sentence in results.verdict][:MAX_SENTENCES]

    @property
    def all_tables(self) -> list[Table]:
        """The tables, also of the callbacks."""
        return [table for results in (self, *self.included) for table in results.tables]

    @property
    def all_figures(self) -> list[Figure]:
        """The figures, also of the callbacks."""
        return [figure for results in (self, *self.included) for figure in results.figures]

    def main_figures(self, at_most: int = MAX_FIGURES) -> list[Figure]:
        """The figures that a run draws without being asked for all, without those of callbacks."""
        return [figure for figure in self.figures if figure.is_main][:at_most]

    def numbered(self, suffix: str) -> Results:
        """Return the results with a suffix to the names of tables and figures, if it is not empty.

        A run may have several callbacks of a kind.
        """
        tables = {table.name: replace(table, name=table.name + suffix) for table in self.tables}
        figures = [
            replace(each, name=each.name + suffix, tables=[tables[x.name] for x in each.tables])
            for each in self.figures
        ]
        return replace(self, tables=[*tables.values()], figures=figures)

    def table(self, name: str) -> Table:
        """Return the table of this name; raise ReportError with all names if there is none."""
        return _find(name, self.all_tables)

    def figure(self, name: str) -> MatplotlibFigure:
        """Draw the figure of this name; raise ReportError with all names if there is none."""
        figure: Figure = _find(name, self.all_figures)
        return figure.matplotlib()

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``results.json``."""
        return {
            "study": self.study,
            "schema": SCHEMA,
            "lm": dict(self.lm) or None,
            "verdict": self.all_sentences,
            "versions": versions(),
            **self.values,
            **{part.study: dict(part.values) for part in self.included if part.values},
            "settings": dict(self.settings),
            "tables": [table.to_json() for table in self.all_tables],
            "figures": [figure.to_json() for figure in self.all_figures],
        }

    def write(self, folder: Path) -> None:
        """Write tables, figures and, last, ``results.json``, with which a folder is complete."""
        set_earlier_results_aside(folder)
        self.write_parts(folder)
        self.write_values(folder)

    def write_parts(self, folder: Path, max_figures: int | None = MAX_FIGURES) -> None:
        """Write ``tables/*.csv`` and the first ``figures/*.png``; raise OutputError if it fails."""
        for table in self.tables:
            with atomic_write(folder / "tables" / f"{table.name}.csv") as part:
                table.frame.to_csv(part, index=False, errors="backslashreplace")
        chosen = self.main_figures(max_figures) if max_figures is not None else self.figures
        for figure in chosen:
            with atomic_write(folder / "figures" / f"{figure.name}.png") as part:
                part.write_bytes(figure.png)

    def write_values(self, folder: Path) -> None:
        """Write ``results.json``, see `to_json`; raise OutputError if that fails."""
        write_json(folder / RESULTS_FILE, self.to_json())
        earlier = folder / EARLIER_FILE
        with as_output_error(earlier):
            earlier.unlink(missing_ok=True)


def _find(name: str, parts: Iterable[Any]) -> Any:
    by_name = {part.name: part for part in parts}
    if name not in by_name:
        raise ReportError(f"there is no {name!r}; there are: {', '.join(by_name) or 'none'}.")
    return by_name[name]
