"""What the benchmarks share: runs of `lincorr`, files of numbers, times, and the documents' tables.

Each benchmark runs as a module, from the root of the repository:

    python -m benchmarks.FOLDER.NAME --help
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pandas import DataFrame

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "benchmarks" / "figures"
QUIET = "--trainer.enable_progress_bar=false"
N_RESAMPLES = 1000
FLOATS = npt.NDArray[np.float64]
T = TypeVar("T")


def results_of(*arguments: str) -> dict[str, Any]:
    """Run `lincorr` in this process and return the content of its results.json."""
    from lincorr_lightning.cli import main as lincorr

    return read_numbers(Path(lincorr([*arguments, QUIET]).trainer.log_dir) / "results.json")


def half_interval(values: Any) -> float:
    """Return half of the 95 % interval (Student's t) of a series' mean; NaN of a single number."""
    from scipy import stats

    return float(stats.t.ppf(0.975, values.count() - 1) * values.sem())


def mean_interval(shares: Any) -> str:
    """Return the mean of shares in percent; with several, half of its 95 % interval (t), too."""
    import pandas as pd  # not at the top: the processes that are timed import this module

    shares = pd.Series(shares, dtype=float).dropna()
    if shares.empty:
        return "–"
    half = 100 * half_interval(shares)
    ending = "" if pd.isna(half) else f" ± {half:.0f}"
    return f"{100 * shares.mean():z.0f}{ending}".replace("-", "−")


def drawn(group: npt.NDArray[Any], n_samples: int, rng: np.random.Generator) -> FLOATS:
    """Return how often each group is in the data, 1, and in each sample of groups.

    The shape is ``(1 + n_samples, n_groups)``.
    """
    n = int(group.max()) + 1
    samples = rng.multinomial(n, np.full(n, 1 / n), size=n_samples)
    return np.concatenate([np.ones((1, n)), samples])


def interval(values: FLOATS) -> tuple[float, float, float]:
    """Return a score with its 95 % interval, from the score and those of samples."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)


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


def least_time(work: Callable[[], T], repeats: int = 1, device: str = "cpu") -> tuple[T, float]:
    """Return what `work` returns, and its seconds: the least of some repeats."""
    import torch

    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = work()
        if device != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


def write_text(path: str | Path, text: str) -> None:
    """Write a file, the whole of it or nothing."""
    part = Path(path).with_name(f".{Path(path).name}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def write_numbers(path: str | Path, content: Any) -> None:
    """Write numbers, with four significant digits, within lists and mappings as JSON."""
    write_text(path, json.dumps(_short(content)) + "\n")


def read_numbers(path: Path) -> Any:
    """Return the content of a file of numbers, or of a run's results."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_csv(path: str | Path, **options: Any) -> DataFrame:
    """Return the table of a CSV file; all digits of its numbers count."""
    import pandas as pd  # as above

    with warnings.catch_warnings():
        # pandas before 3.1 rounds numbers without the option, of which later ones warn.
        warnings.simplefilter("ignore", DeprecationWarning)
        return pd.read_csv(path, float_precision="round_trip", **options)


def write_csv(path: str | Path, table: DataFrame) -> None:
    """Write a table, with four significant digits, without its index."""
    write_text(path, table.to_csv(index=False, float_format="%.4g"))


def has_row(table: DataFrame, **values: Any) -> bool:
    """Return whether a row of the table has these values in the columns of their names."""
    return any(values.items() <= row.items() for row in table.to_dict("records"))


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; numbers get three decimals, None an empty cell."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def markdown_frame(table: DataFrame, *names: str) -> str:
    """Return a Markdown table of a data frame, whose index makes the first columns, with names."""
    return markdown_table([*names, *table.columns], table.reset_index().to_numpy().tolist())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float | np.floating):
        return f"{value:.3f}"
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", re.sub(r"\s+", " ", str(value)))


def arrow(pair: str) -> str:
    """Return the name of a pair as tables have it."""
    return pair.replace("->", "→")


def two(value: float | None) -> str:
    """Return a number with two digits."""
    return "" if value is None else f"{value:.2f}"


def lms_in(folder: str | Path) -> list[Path]:
    """Return the folders of LMs in a folder, but those within the folder of another LM.

    A `SystemExit` if there are none, or two of one name, as which their results would be kept.
    """
    # Unlike Path's, through links.
    files = glob("**/config.json", root_dir=folder, recursive=True)  # noqa: PTH207
    folders = sorted(Path(folder, file).parent for file in files)
    folders = [one for one in folders if not {*one.parents} & {*folders}]
    if not folders:
        raise SystemExit(
            f"{folder} holds no folder of an LM, with a config.json: "
            "`python -m benchmarks.real_lms.fetch_lms FOLDER` downloads some."
        )
    names = [one.name for one in folders]
    if twice := [one for one in folders if names.count(one.name) > 1]:
        raise SystemExit(f"{twice[0]} and {twice[1]} have one name. Name one of their folders.")
    return folders


def percent(value: float | None) -> str:
    """Return a share in percent; nothing for None and NaN."""
    return "" if value is None or value != value else f"{value:.0%}"


def documents() -> list[Path]:
    """Return README.md and the pages, in the order in which they are read."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines()]
    names = [line for line in lines if line and not line.startswith(":")]
    return [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in names)]


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


def plain_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Give a panel a title, axis labels and a pale grid."""
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
