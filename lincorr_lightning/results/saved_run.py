"""Reading the folder of a finished run."""

import io
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from types import NoneType
from typing import TYPE_CHECKING, Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import read_json, regular_file
from lincorr_lightning.results.results import RESULTS_FILE, SCHEMA, Figure, Results
from lincorr_lightning.results.table import Mean, Table

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.console import Console

CONFIG_FILE = "config.yaml"
PACKAGE = "lincorr-lightning"
MAX_CONSOLE_ROWS = 20

# Keys of all studies, and their types.
_KEYS: dict[str, Any] = {
    "study": str,
    "lm": (dict, NoneType),
    "versions": dict,
    "settings": dict,
    "tables": list,
    "figures": list,
}
# In files of unknown origin: names stay in the folder, and formats are short and never fail.
_NAME = re.compile(r"[^/\\\0]{1,100}")
_FORMAT = re.compile(r"\+?,?(\.\d{1,2}[efg%]|d)?")
# A column without missing values may have got some in a file that was changed by hand.
_NULLABLE = {"int64": "Int64", "bool": "boolean"}
_CONSOLE_WIDTH = 110
_WAY_OUT = "Run the study again, or delete the file to have the page without it."


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
        folder, way_out = Path(folder), f"Name the folder of a run, which holds {RESULTS_FILE}."
        if folder.name == RESULTS_FILE and folder.is_file():
            folder = folder.parent
        if not folder.is_dir():
            problem = "is a file" if folder.exists() else "does not exist"
            raise ReportError(f"{folder} {problem}. {way_out}")
        path, config = folder / RESULTS_FILE, _read_config(folder)
        if not path.is_file():
            raise ReportError(_why_no_results(folder, config))
        values = read_json(path, ReportError, "It was cut short or changed; run the study again.")
        if values.get("schema") != SCHEMA:
            raise ReportError(
                f"{path} is not of schema {SCHEMA}: another version of {PACKAGE} wrote it. Run the "
                "study again with this version, or make the report with that one."
            )
        try:
            for key, kind in _KEYS.items():
                if not isinstance(values.get(key), kind):
                    raise ValueError(f"key {key!r} is missing, or holds something else")
            tables, figures = [*_tables(folder, values)], [*_figures(folder, values)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            way_out = "Run the study again."
            raise ReportError(f"{path} was changed: {str(error)[:100]}. {way_out}") from error
        parts = tables, figures, values["lm"] or {}, values["settings"]
        return cls(values["study"], values, {}, *parts, folder=folder, config=config)

    def __repr__(self) -> str:
        """Return a summary: that of `Results`, the folder, and headline tables in part."""
        tables = table_text(table.first(5) for table in self.tables if table.headline)
        return f"{super().__repr__()}\nfolder:  {self.folder}\n\n{tables}".rstrip()

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


def _why_no_results(folder: Path, config: str) -> str:
    below = [shlex.quote(str(path.parent)) for path in sorted(folder.glob(f"**/{RESULTS_FILE}"))]
    if below:
        named = " ".join([*below[:5], *(["..."] if len(below) > 5 else ())])
        return f"{folder} is not the folder of a run, but holds some. Name them: {named}"
    command = SavedRun("", folder=folder, config=config).command
    return (
        f"{folder} has no {RESULTS_FILE}: it is not the folder of a run, or the run did not "
        f"finish. Run it again{f' ({command})' if command else ''}, or leave it out."
    )


def _read_config(folder: Path) -> str:
    path = folder / CONFIG_FILE
    try:
        return regular_file(path).read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}. Run the study again.") from error


def _matching(pattern: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError(f"{str(text)[:50]!r} is not the name of a table, or no format of numbers")
    return text


def _tables(folder: Path, values: Mapping[str, Any]) -> Iterator[Table]:
    for entry in values["tables"]:
        name, columns = _matching(_NAME, entry["name"]), entry["columns"]
        path = folder / "tables" / f"{name}.csv"
        headings = {column["key"]: str(column["heading"]) for column in columns}
        formats = {column["key"]: _matching(_FORMAT, column["format"]) for column in columns}
        texts = str(entry["caption"]), str(entry["note"])
        means = {number: Mean(**mean) for number, mean in entry.get("means", {}).items()}
        of_means = [(mean.column, mean.per or mean.column, *mean.where) for mean in means.values()]
        unit = [*entry.get("unit", ())]
        if not {*unit}.union(*of_means) <= headings.keys():
            raise ValueError(f"the unit or means of {name} name a column that it lacks")
        if path.is_file():
            frame, is_headline = _read_csv(path, columns), entry["headline"]
            words = {key: str(word) for key, word in entry.get("words", {}).items()}
            yield Table(name, frame, *texts, is_headline, headings, formats, unit, means, words)


def _read_csv(path: Path, columns: Sequence[Mapping[str, Any]]) -> "DataFrame":
    """Return a table with the dtypes that ``results.json`` has for its columns."""
    from pandas import RangeIndex, read_csv

    dtypes = {each["key"]: _NULLABLE.get(each["dtype"], each["dtype"]) for each in columns}
    # pandas before 3.1 rounds the numbers of a file, and cuts its texts at a NUL in its own parser.
    read_as = {key: "object" if "float" in kind.lower() else kind for key, kind in dtypes.items()}
    empty: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
    try:
        content = regular_file(path).read_bytes()
        engine: Any = "python" if b"\0" in content else "c"
        frame = read_csv(io.BytesIO(content), dtype=read_as, engine=engine, **empty)
        # Where rows have more cells than there are columns, their first ones are the index.
        if list(frame.columns) != list(dtypes) or not isinstance(frame.index, RangeIndex):
            raise ValueError(f"its columns are not {', '.join(dtypes)}, as in {RESULTS_FILE}")
        return frame.astype(dtypes)
    except (OSError, ValueError, TypeError) as error:
        raise ReportError(f"{path} cannot be read as a table: {error}. {_WAY_OUT}") from error


def _figures(folder: Path, values: Mapping[str, Any]) -> Iterator[Figure]:
    for entry in values["figures"]:
        name = _matching(_NAME, entry["name"])
        path = folder / "figures" / f"{name}.png"
        if path.is_file():
            yield Figure(name, str(entry["caption"]), partial(_read_png, path))


def _read_png(path: Path) -> bytes:
    """Return a file; raise ReportError if it is no PNG, or is cut short."""
    try:
        png = regular_file(path).read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read {path}: {error.strerror}.") from error
    if not png.startswith(b"\x89PNG\r\n\x1a\n") or b"IEND" not in png[-12:]:
        raise ReportError(f"{path} is no PNG, or was cut short. {_WAY_OUT}")
    return png


def describe_run(folder: Path) -> str:
    """Return what a run prints at its end: its headline tables, and where its files are."""
    text = ""
    with suppress(ReportError):  # a run that was only fitted, or predicted, has no results
        headlines = (table for table in SavedRun.read(folder).tables if table.headline)
        text = table_text(table.first(MAX_CONSOLE_ROWS) for table in headlines)
    text += f"Run folder:  {folder}\n"
    if figures := sorted(path.name for path in (folder / "figures").glob("*.png")):
        named = figures[0] if len(figures) == 1 else f"{len(figures)}, such as {figures[0]}"
        text += f"Figures:     {folder / 'figures'} ({named})\n"
    if list(folder.glob("events.out.tfevents.*")):
        text += f"TensorBoard: tensorboard --logdir={shlex.quote(str(folder))}\n"
    return text


def table_text(tables: Iterable[Table]) -> str:
    """Return tables as text as wide as the console, or ``COLUMNS``; no word or number is cut."""
    from rich.console import Console

    out, width = io.StringIO(), get_terminal_size((_CONSOLE_WIDTH, 24)).columns
    console = Console(file=out, width=min(width, _CONSOLE_WIDTH))
    for table in tables:
        _print_table(console, table)
    return out.getvalue()


def _print_table(console: "Console", table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    columns, is_number = list(zip(table.titles, *table.texts(), strict=True)), table.is_number
    blocks = list(_blocks(columns, [*is_number[1:], True].index(True) + 1, console.width))
    if len(blocks) > 1 and len(table) < len(columns):  # a line for each column
        columns = list(zip(*columns, strict=True))
        is_number = [number > 0 for number in range(len(columns))]
        blocks = list(_blocks(columns, 1, console.width))
    # A title of the grid's own would be broken to its width.
    console.print(Text(table.caption or table.name), end="\n\n")
    for block in blocks:
        grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        for i, width in block.items():
            justify: Any = "right" if is_number[i] else "left"
            grid.add_column(Text(columns[i][0]), justify=justify, width=width, overflow="fold")
        for row in zip(*(columns[i][1:] for i in block), strict=True):
            grid.add_row(*map(Text, row))
        console.print(grid)
    console.print(Text(f"\n{table.note}\n" if table.note else ""))


def _blocks(columns: Sequence[Sequence[str]], n_keys: int, room: int) -> Iterator[dict[int, int]]:
    """Yield columns that stand side by side, and their widths: the first ones beside all others."""
    from rich.cells import cell_len

    # Headings and texts break between words.
    words = (max(map(cell_len, " ".join(column).split()), default=1) for column in columns)
    least = [min(word, room // 2) + 2 for word in words]
    most = [
        max([n, *(cell_len(cell) + 2 for cell in c[1:])])
        for n, c in zip(least, columns, strict=True)
    ]
    while n_keys > 1 and sum(least[:n_keys]) > room // 2:
        n_keys -= 1
    rest = list(range(n_keys, len(columns)))
    while True:
        block = [*range(n_keys), *rest[:1]]
        while rest[1:] and sum(least[i] for i in (*block, rest[1])) <= room + 2:
            block.append(rest.pop(1))
        widths, rest = {i: most[i] for i in block}, rest[1:]
        while sum(widths.values()) > room + 2 and any(widths[i] > least[i] for i in block):
            widths[max(block, key=lambda i: widths[i] * (widths[i] > least[i]))] -= 1
        yield {i: width - 2 for i, width in widths.items()}
        if not rest:
            return
