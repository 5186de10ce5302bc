"""Reading the folder of a finished run."""

import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import read_json, regular_file
from lincorr_lightning.results.console import sentences_text, table_text
from lincorr_lightning.results.results import RESULTS_FILE, SCHEMA, Figure, Results
from lincorr_lightning.results.table import Mean, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as MatplotlibFigure
    from pandas import DataFrame

CONFIG_FILE = "config.yaml"
PACKAGE = "lincorr-lightning"
MAX_CONSOLE_ROWS = 20

# Keys of all studies, and their types.
_KEYS: dict[str, Any] = {
    "study": str,
    "lm": (dict, NoneType),
    "verdict": list,
    "versions": dict,
    "settings": dict,
    "tables": list,
    "figures": list,
}
# In files of unknown origin: names stay in the folder, and formats are short and never fail.
_NAME = re.compile(r"[^/\\\0]{1,100}")
_DRAWS = re.compile(r"lincorr_lightning(\.\w+)*\.(figures|plots):[a-z]\w*")
_FORMAT = re.compile(r"\+?,?(\.\d{1,2}[efg%]|d)?")
# A column without missing values may have got some in a file that was changed by hand.
_NULLABLE = {"int64": "Int64", "bool": "boolean"}
_RUN_AGAIN = "Run the study again with this version, or leave out what is damaged."


@dataclass(repr=False)
class SavedRun(Results):
    """The results of a finished run, read from its folder, as the user named that.

    `values` are the whole content of ``results.json``, tables and figures those whose file is
    there, and `config` is the text of ``config.yaml``, empty if there is none.
    """

    folder: Path = Path()
    config: str = ""

    @classmethod
    def read(cls, folder: str | Path) -> "SavedRun":
        """Read the folder of a run, or its ``results.json``.

        Raises ReportError if the folder is missing or not a run's, the run did not finish, another
        version of this package wrote it, or its files are damaged.
        """
        folder = Path(folder)
        if folder.name == RESULTS_FILE:
            folder = folder.parent
        if not folder.is_dir():
            raise ReportError(f"{folder} is no folder. Name that of a run, with {RESULTS_FILE}.")
        path = folder / RESULTS_FILE
        config = _read_config(folder)
        if not path.is_file():
            command = cls("", folder=folder, config=config).command
            raise ReportError(
                f"{folder} has no {RESULTS_FILE}: it is not the folder of a run, or the run did "
                f"not finish. Run it again{f' ({command})' if command else ''}, or leave it out."
            )
        values = read_json(path, ReportError, _RUN_AGAIN)
        if values.get("schema") != SCHEMA:
            raise ReportError(
                f"{path} is not of schema {SCHEMA}: another version of {PACKAGE} wrote it. "
                f"{_RUN_AGAIN}"
            )
        try:
            for key, kind in _KEYS.items():
                if not isinstance(values.get(key), kind):
                    raise ValueError(f"key {key!r} is missing, or holds something else")
            tables = list(_tables(folder, values["tables"]))
            figures = list(_figures(folder, values["figures"], tables))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ReportError(f"{path} was changed: {str(error)[:100]}. {_RUN_AGAIN}") from error
        return cls(
            values["study"],
            values,
            tables=tables,
            figures=figures,
            lm=values["lm"] or {},
            settings=values["settings"],
            folder=folder,
            config=config,
            verdict=[str(sentence) for sentence in values["verdict"]],
        )

    def __repr__(self) -> str:
        """Return a summary: that of `Results`, and the folder."""
        return f"{super().__repr__()}\nfolder:  {self.folder}"

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``results.json``."""
        return dict(self.values)

    @property
    def lm_name(self) -> str:
        """Hub id or path of the LM; the run's folder if the study has no LM of its own."""
        return str(self.lm.get("name_or_path") or self.folder)

    @property
    def n_parameters(self) -> int | None:
        """Number of the LM's parameters, if it is known."""
        n = self.lm.get("n_parameters")
        return n if isinstance(n, int) else None

    @property
    def size(self) -> str:
        """Number of the LM's parameters in three digits, as ``8.03B``; empty if unknown."""
        n = self.n_parameters or 0
        letters = {"B": 1e9, "M": 1e6, "k": 1e3}.items()
        return next((f"{n / unit:.3g}{x}" for x, unit in letters if n >= unit), str(n or ""))

    @property
    def version(self) -> str:
        """Version of this package that wrote it."""
        return str(self.values["versions"].get(PACKAGE, "an unknown version"))

    @property
    def command(self) -> str | None:
        """Command that repeats the run; None if the run left no config."""
        path = shlex.quote(str(self.folder / CONFIG_FILE))
        return f"lincorr {config_verb(self.config)} --config {path}" if self.config else None


def config_verb(text: str) -> str:
    """Return the `lincorr` command in the head comment of a config, by default ``fit``."""
    verbs = "fit|validate|test|predict|reproduce"
    command = re.search(rf"^#\s*lincorr ({verbs}) --config", text, re.MULTILINE)
    return command[1] if command else "fit"


def _read_config(folder: Path) -> str:
    path = folder / CONFIG_FILE
    try:
        return regular_file(path).read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}. {_RUN_AGAIN}") from error


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"{str(text)[:50]!r} is not the name of a table, or no format of numbers")
    return text


def _tables(folder: Path, entries: Sequence[Mapping[str, Any]]) -> Iterator[Table]:
    for entry in entries:
        name = _matching(_NAME, entry["name"])
        columns = entry["columns"]
        unit = list(entry.get("unit", ()))
        means = {number: Mean(**mean) for number, mean in entry.get("means", {}).items()}
        table = Table(
            name,
            frame=None,  # type: ignore[arg-type]  # read below
            caption=str(entry["caption"]),
            note=str(entry["note"]),
            headline=entry["headline"],
            headings={column["key"]: str(column["heading"]) for column in columns},
            formats={column["key"]: _matching(_FORMAT, column["format"]) for column in columns},
            unit=unit,
            means=means,
        )
        of_means = ((mean.column, mean.per or mean.column, *mean.where) for mean in means.values())
        if not set(unit).union(*of_means) <= table.headings.keys():
            raise ValueError(f"the unit or means of {name} name a column that it lacks")
        path = folder / "tables" / f"{name}.csv"
        if path.is_file():
            yield replace(table, frame=_read_csv(path, columns))


def _read_csv(path: Path, columns: Sequence[Mapping[str, Any]]) -> "DataFrame":
    """Return a table with the dtypes that ``results.json`` has for its columns."""
    from pandas import RangeIndex, read_csv

    dtypes = {each["key"]: _NULLABLE.get(each["dtype"], each["dtype"]) for each in columns}
    # pandas before 3.1 rounds the numbers that it reads itself.
    read_as = {key: "object" if "float" in kind.lower() else kind for key, kind in dtypes.items()}
    empty: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
    try:
        frame = read_csv(regular_file(path), dtype=read_as, **empty)
        # Where rows have more cells than there are columns, their first ones are the index.
        if list(frame.columns) != list(dtypes) or not isinstance(frame.index, RangeIndex):
            raise ValueError(f"its columns are not {', '.join(dtypes)}, as in {RESULTS_FILE}")
        return frame.astype(dtypes)
    except (OSError, ValueError, TypeError) as error:
        raise ReportError(f"{path} cannot be read as a table: {error}. {_RUN_AGAIN}") from error


def _figures(
    folder: Path, entries: Sequence[Mapping[str, Any]], tables: Sequence[Table]
) -> Iterator[Figure]:
    by_name = {table.name: table for table in tables}
    for entry in entries:
        name = _matching(_NAME, entry["name"])
        draw = None
        # A file of unknown origin must not name other functions.
        if set(entry["of"]) <= by_name.keys() and _DRAWS.fullmatch(entry["draw"] or ""):
            draw = partial(_draw, entry["draw"])
        path = folder / "figures" / f"{name}.png"
        if draw or path.is_file():
            yield Figure(
                name,
                str(entry["caption"]),
                draw,
                [by_name[each] for each in entry["of"]] if draw else (),
                entry["options"],
                path if path.is_file() else None,
            )


def _draw(name: str, *frames: "DataFrame", **options: Any) -> "MatplotlibFigure":
    draw: Callable[..., MatplotlibFigure] = pkgutil.resolve_name(name)  # imports matplotlib
    return draw(*frames, **options)


def describe_run(folder: Path, results: Results | None) -> str:
    """Return what a run prints at its end: verdict, headline tables, and where its files are.

    A run that was only fitted, or predicted, has no results.
    """
    text = ""
    if results is not None:
        headlines = (table for table in results.all_tables if table.headline)
        text = sentences_text(results.all_sentences)
        text += table_text(table.first(MAX_CONSOLE_ROWS) for table in headlines)
    text += f"Run folder:  {folder}\n"
    if figures := sorted(path.name for path in (folder / "figures").glob("*.png")):
        named = figures[0] if len(figures) == 1 else f"{len(figures)}, such as {figures[0]}"
        text += f"Figures:     {folder / 'figures'} ({named})\n"
    if list(folder.glob("events.out.tfevents.*")):
        text += f"TensorBoard: tensorboard --logdir={shlex.quote(str(folder))}\n"
    return text
