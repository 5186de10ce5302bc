"""The command ``lincorr compare``: finished runs of one study side by side."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import atomic_write
from lincorr_lightning.results.compare import compare_runs, readable
from lincorr_lightning.results.console import sentences_text, table_text
from lincorr_lightning.results.report import PageSection, page_text, write_page
from lincorr_lightning.results.results import RESULTS_FILE, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun
from lincorr_lightning.terminal import write_out

_MAX_CONSOLE_ROWS = 5
_HELP = """Show finished runs of one study as a table: a row per run, columns are the settings in
which they differ and the study's main numbers. Runs that differ by a seed alone are one row, with
mean and standard deviation. Two other runs are shown side by side: their numbers with differences,
second minus first, and 95 % intervals over edits, labels or prompts, paired where both runs have
the same. Checkpoints of an LM in training are probed and shown over their steps. For example

  lincorr compare runs/linear_probe/version_* --output sweep.csv
  lincorr compare runs/linear_probe/version_0 runs/linear_probe/version_1 --output runs/compared
  lincorr compare training/checkpoint-* --pair "city->country" --output curve.png
"""


def compare(args: Sequence[str]) -> Results:
    """Compare runs as the command line behind ``lincorr compare`` says."""
    as_written: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="lincorr compare", description=_HELP, **as_written)
    runs = "folders of two or more finished runs, or that hold them; or checkpoints of one LM"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    output = "FILE.csv, FILE.html or FILE.png to write the table, a page or the figure to, or a "
    parser.add_argument("--output", help=f"{output}folder for all of them")
    pair = "pair that checkpoints of LMs are probed for (default: %(default)s)"
    parser.add_argument("--pair", default="city->country", help=pair)
    n_subjects = "subjects of each of these probes (default: %(default)s)"
    parser.add_argument("--n_subjects", type=int, default=1000, help=n_subjects)
    parser.add_argument("--lm", help="LM that checkpoints of Lightning (.ckpt) have weights of")
    prefix = "what their keys have before the LM's own names, such as model."
    parser.add_argument("--key_prefix", default="", help=prefix)
    options = parser.parse_args(args)
    folders = [folder for name in options.runs for folder in _folders_of_runs(Path(name))]
    if len(folders) < 2:
        parser.error(f"{options.runs[0]} is a single run: name two or more to compare")
    if options.output and (Path(options.output) / RESULTS_FILE).exists():
        raise ReportError(f"--output {options.output} is the folder of a run. Name another one.")
    if all(map(_is_lm, folders)):
        from lincorr_lightning.cli.lm_curve import curve  # here: it imports torch

        given = options.pair, options.n_subjects, options.lm, options.key_prefix
        results = curve(folders, *given)
    else:
        results = compare_runs(*map(SavedRun.read, folders))
    headlines = [table for table in results.tables if table.headline]
    tables = table_text(readable(table, _MAX_CONSOLE_ROWS) for table in headlines)
    write_out(sentences_text(results.verdict) + tables)
    if options.output:
        write_out(_write(results, Path(options.output), len(folders)))
    return results


def _folders_of_runs(path: Path) -> list[Path]:
    """Return the folder of a run, or those of the finished runs in a folder, by their numbers."""
    if path.name == RESULTS_FILE or (path / RESULTS_FILE).is_file() or not path.is_dir():
        return [path]
    found = [file.parent for file in path.rglob(RESULTS_FILE)]
    numbers = re.compile(r"(\d+)")
    found.sort(
        key=lambda folder: [int(x) if x.isdecimal() else x for x in numbers.split(str(folder))]
    )
    return found or [path]


def _is_lm(path: Path) -> bool:
    if path.suffix == ".ckpt":
        return True
    is_run = any((path / name).exists() for name in (RESULTS_FILE, CONFIG_FILE))
    return not is_run and any((path / f"{x}config.json").is_file() for x in ("", "adapter_"))


def _write(results: Results, output: Path, n_runs: int) -> str:
    """Write a table, the figure, a page or, to a folder, all; return what is said about it."""
    *_, main = (table for table in results.tables if table.headline)
    overview, *tables = map(readable, results.tables)
    note = " ".join(results.verdict)
    section = PageSection("Comparison", "comparison", tables, results.figures, note)
    page = overview.caption, [overview], [section], n_runs
    kind = {".csv": "Table:  ", ".png": "Figure: ", ".html": "Page:   "}.get(output.suffix)
    if kind is None:
        results.write_parts(output)
        return f"Page:   {write_page(output, *page)}\nTables: {output / 'tables'}\n"
    with atomic_write(output) as part:
        if output.suffix == ".csv":
            main.frame.to_csv(part, index=False, errors="backslashreplace")
        elif output.suffix == ".png":
            part.write_bytes(results.figures[0].png)
        else:
            part.write_text(page_text(*page), encoding="utf-8", newline="\n")
    return f"{kind}{output}\n"
