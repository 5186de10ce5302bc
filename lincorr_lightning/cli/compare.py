"""The command ``lincorr compare``: finished runs of one study side by side."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lincorr_lightning.errors import CheckpointError, ConfigError, ReportError, one_line
from lincorr_lightning.io import atomic_write, regular_file
from lincorr_lightning.results.compare import compare_runs, readable, runs_table
from lincorr_lightning.results.console import sentences_text, table_text
from lincorr_lightning.results.report import Page, PageSection
from lincorr_lightning.results.results import RESULTS_FILE, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun
from lincorr_lightning.terminal import write_out

if TYPE_CHECKING:
    from lincorr_lightning.lm.language_model import LanguageModel

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
        given = options.pair, options.n_subjects, options.lm, options.key_prefix
        results = _curve(folders, *given)
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
    page = Page(overview.caption, [overview], [section], n_runs)
    kind = {".csv": "Table:  ", ".png": "Figure: ", ".html": "Page:   "}.get(output.suffix)
    if kind is None:
        results.write_parts(output)
        return f"Page:   {page.write(output)}\nTables: {output / 'tables'}\n"
    with atomic_write(output) as part:
        if output.suffix == ".csv":
            main.frame.to_csv(part, index=False, errors="backslashreplace")
        elif output.suffix == ".png":
            part.write_bytes(results.figures[0].png)
        else:
            part.write_text(page.html(), encoding="utf-8", newline="\n")
    return f"{kind}{output}\n"


def _curve(
    paths: Sequence[Path], pair: str, n_subjects: int, base: str | None, prefix: str
) -> Results:
    """Probe a pair in each LM, a folder or a Lightning checkpoint of the LM `base`.

    The step is the number in a path's name. Raises ConfigError where there is none, or twice the
    same, and CheckpointError if a checkpoint does not fit the LM.
    """
    from lincorr_lightning.api import correlate  # here: it imports torch

    steps: dict[int, Path] = {}
    for path in paths:
        found = re.search(r"step\D?(\d+)", path.name) or re.search(r"(\d+)\D*$", path.name)
        if found is None:
            raise ConfigError(f"{path} has no step in its name. Rename it as in checkpoint-500.")
        if other := steps.get(int(found[1])):
            raise ConfigError(f"{path} and {other} are of the same step. Leave out one of them.")
        steps[int(found[1])] = path
    runs = []
    for step, path in sorted(steps.items()):
        lm = str(path) if path.is_dir() else _load(path, base, prefix)
        probe = correlate(lm, pair, n_subjects=n_subjects)
        run = SavedRun(probe.study, probe.to_json(), tables=probe.tables, folder=path)
        runs.append(replace(run, settings={"step": step}))
    return runs_table(runs, f"{pair} by step")


def _load(path: Path, base: str | None, prefix: str) -> "LanguageModel":
    """Return the LM `base` with the weights of a Lightning checkpoint."""
    import torch

    from lincorr_lightning.lm.language_model import LanguageModel

    if base is None:
        raise ConfigError(f"{path} holds weights alone. Name its LM, as --lm path/to/base.")
    try:
        state = torch.load(regular_file(path), map_location="cpu", weights_only=True)["state_dict"]
    except Exception as error:  # of pickle and torch, of any kind
        raise CheckpointError(
            f"{path} is not read as a checkpoint of Lightning: {one_line(error)}. Pass one that "
            "torch.load reads with weights_only=True."
        ) from error
    lm = LanguageModel.from_pretrained(base)
    weights = {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}
    try:
        # What a checkpoint leaves out, such as frozen weights, is the LM's own.
        wrong = lm.model.load_state_dict(weights, strict=False).unexpected_keys
    except RuntimeError as error:
        raise CheckpointError(
            f"{path} is none of {base}: {one_line(error)}. Name its LM."
        ) from error
    if wrong or not weights:
        key = prefix + wrong[0] if wrong else next(iter(state), "of no name")
        raise CheckpointError(
            f"{path}: its key {key} is none of {base}, below the prefix {prefix!r}. Pass what its "
            "keys have before the LM's own names as --key_prefix, or name the LM that it is of."
        )
    return lm
