"""The results of a study: numbers, tables and figures, independent of where they are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import as_output_error, atomic_write, remove, write_json
from lincorr_lightning.results.table import Table
from lincorr_lightning.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure as MatplotlibFigure

    from lincorr_lightning.results.style import Picture

SCHEMA = 2
"""Version of the layout of ``results.json``; 1 is what releases before 0.2 wrote."""

RESULTS_FILE = "results.json"
EARLIER_FILE = "results.earlier.json"
"""Results of an earlier run in the same folder, until those of the current run are complete."""

_LIBRARIES = ("torch", "lightning", "transformers")
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
            ReportError: There is no such table; the message names similar ones.
        """
        return find_by_name("table", name, [t for one in self._all for t in one.tables])

    def figure(self, name: str) -> Figure:
        """Return the figure of this name, also of the callbacks.

        Raises:
            ReportError: There is no such figure; the message names similar ones.
        """
        return find_by_name("figure", name, [f for one in self._all for f in one.figures])

    @property
    def _all(self) -> tuple[Results, ...]:
        return (self, *self.included)

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
            with atomic_write(folder / "tables" / f"{table.name}.csv") as part:
                table.frame.to_csv(part, index=False, errors="backslashreplace")
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
        ReportError: There is none; the message names similar ones.
    """
    for part in parts:
        if part.name == name:
            return part
    # Imported here: the package takes long to import.
    from lincorr_lightning.knowledge.yaml_file import suggest

    names = [part.name for part in parts]
    known = f" There are {', '.join(names)}." if names else f" There is no {kind} at all."
    raise ReportError(f"there is no {kind} {name!r}.{suggest(name, names)}{known}")
