"""The results of a study: numbers, tables and figures, independent of where they are written."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import as_output_error, atomic_write, write_json
from lincorr_lightning.results.table import Table
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure as MatplotlibFigure

SCHEMA = 2  #: Version of the layout of ``results.json``.

RESULTS_FILE = "results.json"
EARLIER_FILE = "results.earlier.json"
"""Results of an earlier run in the same folder, until those of the current run are complete."""

SHARED_KEYS = ("study", "schema", "lm", "versions", "settings", "tables", "figures")
"""Keys of ``results.json`` that all studies share."""


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


@dataclass(frozen=True)
class Figure:
    """A figure of a study's results, ``figures/<name>.png``, drawn once for all writers.

    The caption is one sentence; `draw` returns the figure, or the bytes of a PNG file.
    """

    name: str
    caption: str
    draw: Callable[[], MatplotlibFigure | bytes]
    is_stored: bool = False  #: Whether it returns the bytes of a file, which needs no matplotlib.

    @cached_property
    def png(self) -> bytes:
        """The drawn figure as the bytes of a PNG file."""
        if self.is_stored:
            return bytes(self.draw())  # type: ignore[arg-type]
        import matplotlib  # here: not every run draws

        with matplotlib.rc_context():  # a style of the user's could hide parts, or need LaTeX
            matplotlib.rcdefaults()
            drawn = self.draw()
            if isinstance(drawn, bytes):
                return drawn
            from lincorr_lightning.results.plots import to_png

            return to_png(drawn)

    def _repr_png_(self) -> bytes:
        return self.png

    def __reduce__(self) -> tuple[Any, ...]:
        """Go to another process as a picture: what draws it may hold an LM."""
        return type(self), (self.name, self.caption, partial(bytes, self.png), True)


@dataclass
class Results:
    """Everything that a study, such as ``linear_probe``, found, as plain data.

    `values` are the study's own keys of ``results.json``, `scalars` the numbers for the loggers, by
    log key (``val/label_mean``). `lm` is `LanguageModel.info`, empty if the study has no LM;
    `settings` are its hyper-parameters, and under ``data`` those of its data. The results that are
    `included` are those of callbacks, which write their own tables and figures.
    """

    study: str
    values: Mapping[str, Any] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    lm: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    included: Sequence[Results] = ()

    def __repr__(self) -> str:
        """Return a summary: what was measured, and what there is to take out."""
        on = f" of {self.lm['name_or_path']}" if self.lm else ""
        parts = {
            "tables": [f"{table.name} ({len(table):,})" for table in self.all_tables],
            "figures": [figure.name for figure in self.all_figures],
            "values": [key for key in self.values if key not in SHARED_KEYS],
        }
        lines = (f"{kind + ':':<9}{', '.join(names)}" for kind, names in parts.items() if names)
        wrap = partial(textwrap.fill, width=100, subsequent_indent=" " * 9)
        return "\n".join([f"{type(self).__name__}: {self.study}{on}", *map(wrap, lines)])

    @property
    def all_tables(self) -> list[Table]:
        """The tables, also of the callbacks."""
        return [table for results in (self, *self.included) for table in results.tables]

    @property
    def all_figures(self) -> list[Figure]:
        """The figures, also of the callbacks."""
        return [figure for results in (self, *self.included) for figure in results.figures]

    def table(self, name: str) -> Table:
        """Return the table of this name; raise ReportError with all names if there is none."""
        return _find(name, self.all_tables)

    def figure(self, name: str) -> Figure:
        """Return the figure of this name; raise ReportError with all names if there is none."""
        return _find(name, self.all_figures)

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``results.json``."""
        return {
            "study": self.study,
            "schema": SCHEMA,
            "lm": dict(self.lm) or None,
            "versions": versions(),
            **self.values,
            **{part.study: dict(part.values) for part in self.included if part.values},
            "settings": dict(self.settings),
            "tables": [table.to_json() for table in self.all_tables],
            "figures": [{"name": fig.name, "caption": fig.caption} for fig in self.all_figures],
        }

    def write(self, folder: Path) -> None:
        """Write tables, figures and, last, ``results.json``, with which a folder is complete."""
        set_earlier_results_aside(folder)
        self.write_parts(folder)
        self.write_values(folder)

    def write_parts(self, folder: Path) -> None:
        """Write ``tables/*.csv`` and ``figures/*.png``; raise OutputError if that fails."""
        for table in self.tables:
            with atomic_write(folder / "tables" / f"{table.name}.csv") as part:
                table.frame.to_csv(part, index=False, errors="backslashreplace")
        for figure in self.figures:
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
