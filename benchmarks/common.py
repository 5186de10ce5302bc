"""What the benchmarks share: runs of `lincorr`, files of numbers, and the documents' tables.

Each benchmark runs as a module, from the root of the repository:

    python -m benchmarks.FOLDER.NAME --help

It measures, writes what it measured to ``benchmarks/results``, and puts the tables of it between
their markers in the documents. A number is declared once, as a field of a record
(`lincorr_lightning.results.table`); a document shows some rows and columns of a record's table,
a CSV file has all of them.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import textwrap
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from lincorr_lightning.results.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "benchmarks" / "figures"
QUIET = "--trainer.enable_progress_bar=false"
T = TypeVar("T")


class Estimate(NamedTuple):
    """A number with its 95 % interval, or its range: ``f"{x:.2f}"`` is 0.04 (0.00 to 0.08)."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        if np.isnan(self.value):
            return "–"
        # What rounds to zero has no minus.
        value, low, high = (format(number, spec.replace(".", "z.")) for number in self)
        return value if self.low == self.high else f"{value} ({low} to {high})"


def scored(path: str, heading: str = "", format: str = ".2f") -> Any:
    """Declare a column by the path of its number in ``results.json``, see `record`."""
    return field(default=None, metadata={"heading": heading, "format": format, "path": path})


def number_at(values: Any, path: str) -> Any:
    """Return what a path leads to: a number, an `Estimate` of a mean with an interval, or None."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    if isinstance(values, Mapping):
        mean = values["mean"] if "mean" in values else values["difference"]
        return Estimate(mean, values["low"], values["high"])
    return values


def record(kind: type[T], values: Mapping[str, Any], **known: Any) -> T:
    """Return a record whose `scored` columns have the values at their paths."""
    columns: Any = fields(kind)  # type: ignore[arg-type]
    paths = {each.name: each.metadata["path"] for each in columns if "path" in each.metadata}
    return kind(**known, **{name: number_at(values, path) for name, path in paths.items()})


def picked(rows: Iterable[Mapping[str, Any]], columns: str) -> DataFrame:
    """Return entries of mappings as columns, with spaces between; ``new=old`` renames one."""
    from pandas import DataFrame

    names = [column.rpartition("=")[::2] for column in columns.split()]
    return DataFrame([{new or key: row[key] for new, key in names} for row in rows])


def half_interval(values: Any) -> float:
    """Return half of the 95 % interval (Student's t) of a series' mean; NaN of a single number."""
    from scipy import stats  # not at the top: processes that measure others are to be small

    return float(stats.t.ppf(0.975, values.count() - 1) * values.sem())


def mean_estimate(values: Any) -> Estimate:
    """Return the mean of a series with its 95 % interval (Student's t)."""
    mean = values.mean()
    half = half_interval(values)
    return Estimate(mean, mean - half, mean + half)


def mean_interval(shares: Any) -> str:
    """Return the mean of shares in percent; with several, half of its 95 % interval (t), too."""
    import pandas as pd

    shares = pd.Series(shares, dtype=float).dropna()
    if shares.empty:
        return "–"
    half = 100 * half_interval(shares)
    ending = "" if pd.isna(half) else f" ± {half:.0f}"
    return f"{100 * shares.mean():z.0f}{ending}".replace("-", "−")


def results_of(*arguments: str) -> dict[str, Any]:
    """Run `lincorr` in this process and return the content of its results.json."""
    from lincorr_lightning.cli import main as lincorr

    return read_numbers(Path(lincorr([*arguments, QUIET]).trainer.log_dir) / "results.json")


class Cost(NamedTuple):
    """What a process took: seconds by the clock and of the processor, and peak memory in MiB."""

    wall: float
    processor: float
    peak_mib: float


def cost_of(command: Sequence[str], errors: Path | None = None, **options: Any) -> Cost:
    """Run a process, with options of `subprocess.Popen`, and return what it took.

    Its standard error goes to a file, or nowhere; a `SystemExit` if it fails.
    """
    with Path(errors or os.devnull).open("w") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, **options)
        # wait4 gives the peak of this process, not that of the largest child so far.
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"`{' '.join(command)}` failed")
    wall = time.perf_counter() - start
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def write_text(path: str | Path, text: str) -> None:
    """Write a file, the whole of it or nothing; compressed if its name ends in ``.gz``."""
    content = text.encode()
    if str(path).endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    part = Path(path).with_name(f".{Path(path).name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(content)
    part.replace(path)


def write_numbers(path: str | Path, content: Any) -> None:
    """Write numbers, with four significant digits, within lists and mappings as JSON."""

    def short(number: str) -> float:
        return float(f"{float(number):.4g}")

    write_text(path, json.dumps(json.loads(json.dumps(content), parse_float=short)) + "\n")


def read_numbers(path: Path) -> Any:
    """Return the content of a file of numbers, or of a run's results."""
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def write_csv(path: str | Path, table: DataFrame) -> None:
    """Write a table, with four significant digits, without its index."""
    write_text(path, table.to_csv(index=False, float_format="%.4g"))


def write_table(table: Table, folder: Path) -> None:
    """Write all cells of a table as ``NAME.csv``, numbers with four significant digits."""
    from pandas import DataFrame

    cells: dict[str, Any] = {}
    for name, column in table.frame.items():
        if any(isinstance(cell, Estimate) for cell in column):
            for i, key in enumerate((name, f"{name}_low", f"{name}_high")):
                cells[key] = [x[i] if isinstance(x, Estimate) else None for x in column]
        else:
            cells[name] = column
    write_csv(folder / f"{table.name}.csv", DataFrame(cells))


def add_rows(table: Table, *keys: str) -> Table:
    """Print a table of speed, and put its rows into its file; return all rows of the file.

    They take the place of rows with the same keys.
    """
    from pandas import concat

    print(table.markdown())
    path = RESULTS / "speed" / f"{table.name}.csv"
    frame = table.frame
    if path.exists():
        known = read_csv(path)
        again = known.set_index([*keys]).index.isin(frame.set_index([*keys]).index)
        frame = concat([known[~again], frame], ignore_index=True)
    everything = replace(table, frame=frame)
    write_table(everything, path.parent)
    return everything


def read_csv(path: str | Path, **options: Any) -> DataFrame:
    """Return the table of a CSV file; all digits of its numbers count."""
    import pandas as pd

    with warnings.catch_warnings():
        # pandas before 3.1 rounds numbers without the option, of which later ones warn.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pd.read_csv(path, float_precision="round_trip", **options)


def has_row(table: DataFrame, **values: Any) -> bool:
    """Return whether a row of the table has these values in the columns of their names."""
    return any(values.items() <= row.items() for row in table.to_dict("records"))


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table of texts; floats get three decimals, None an empty cell."""
    cells = [[f"{x:.3f}" if isinstance(x, float) else x for x in row] for row in rows]
    return Table.of("", cells, columns, headings={name: name for name in columns}).markdown()


def markdown_frame(table: DataFrame, *names: str) -> str:
    """Return a Markdown table of a data frame, whose index makes the first columns, with names."""
    return markdown_table([*names, *table.columns], table.reset_index().to_numpy().tolist())


def shown(table: Table, columns: str = "", rows: str = "") -> str:
    """Return a table as Markdown: columns by their names with spaces between, rows by a query."""
    frame = table.frame.query(rows) if rows else table.frame
    names = columns.split() or list(frame)
    return replace(table, frame=frame[names]).markdown()


def arrow(pair: str) -> str:
    """Return the name of a pair as tables have it."""
    return pair.replace("->", "→")


def lms_in(folder: str | Path) -> list[Path]:
    """Return the folders of LMs in a folder, but those within the folder of another LM.

    A `SystemExit` if there are none, or two of one name, as which their results would be kept.
    """
    # Unlike Path's, through links.
    files = glob("**/config.json", root_dir=folder, recursive=True)  # noqa: PTH207
    folders = sorted(Path(folder, file).parent for file in files)
    folders = [path for path in folders if not {*path.parents} & {*folders}]
    if not folders:
        raise SystemExit(
            f"{folder} holds no folder of an LM, with a config.json: "
            "`python -m benchmarks.real_lms.fetch_lms FOLDER` downloads some."
        )
    names = [path.name for path in folders]
    if twice := [path for path in folders if names.count(path.name) > 1]:
        raise SystemExit(f"{twice[0]} and {twice[1]} have one name. Name one of their folders.")
    return folders


def documents() -> list[Path]:
    """Return README.md and the pages, in the order in which they are read."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    lines = [line for tree in trees for line in tree.split("\n") if line and line[0] != ":"]
    names = [ROOT / "docs" / line for line in lines]
    pages = [name.with_suffix(suffix) for name in names for suffix in (".md", ".ipynb")]
    return [ROOT / "README.md", *filter(Path.exists, pages)]


def all_text() -> str:
    """Return the text of all documents."""
    return "\n".join(path.read_text(encoding="utf-8") for path in documents())


def placed(text: str, tables: Mapping[str, str]) -> str:
    """Return a text with each of some tables between its markers, if it has them."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def place_tables(tables: Mapping[str, str]) -> None:
    """Put tables between their markers in whichever documents have them; ValueError if none has."""
    text = all_text()
    lacking = [name for name in tables if f"<!-- {name}: begin -->" not in text]
    if lacking:
        raise ValueError(f"no document has the marker <!-- {lacking[0]}: begin -->")
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = placed(before, tables)
        if after != before:
            write_text(path, after)


def new_figure(width: float, height: float, title: str, subtitle: str) -> Any:
    """Return an empty figure with a title and small text below it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    lines = textwrap.wrap(subtitle, int(width * 13))
    figure.suptitle(f"{title}\n" + "\n".join(lines), x=0.01, ha="left", fontsize=9)
    return figure
