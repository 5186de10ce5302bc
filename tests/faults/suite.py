"""The fault suite: many tries at once, in processes that have imported everything."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shutil
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

from torch import multiprocessing
from tqdm import tqdm

from tests.faults.runs import finished
from tests.faults.studies import STUDIES, make_inputs
from tests.faults.tries import KINDS, Outcome, Try, make_reference, make_try

_MAX_KEPT = 3
"""Tries of a row whose files are kept."""


def _warm() -> None:
    """Import and cache what every run needs, so that a forked one begins at once."""
    import matplotlib.pyplot  # noqa: F401
    import torch
    import torch.utils.tensorboard
    from docstring_parser.attrdoc import AttributeDocstrings

    from lincorr_lightning.cli import main
    from lincorr_lightning.knowledge import Catalogue

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # and end the try's runs
    torch.set_num_threads(1)
    read = AttributeDocstrings.get_attr_docs
    read_once = functools.cache(lambda component: read(AttributeDocstrings(), component))
    AttributeDocstrings.get_attr_docs = lambda self, component: read_once(component)
    Catalogue.load()
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.suppress(SystemExit):
        main(["fit", "--config", "linear_probe.yaml", "--print_config"])


class Suite:
    """Makes tries in worker processes.

    Args:
        seed: Seed of all tries.
        jobs: Number of tries at a time.
        work: Folder of inputs and uninterrupted runs, reused if present; None for a temporary one.
        failures: Folder to which failed tries are moved.
    """

    def __init__(self, seed: int, jobs: int, work: Path | None, failures: Path) -> None:
        self._seed = seed
        self._jobs = jobs
        self._temporary = work is None
        memory = Path("/dev/shm")
        self._work = work.resolve() if work else Path(
            tempfile.mkdtemp(prefix="faults-", dir=memory if memory.is_dir() else None)
        )  # fmt: skip
        self._failures = failures.resolve()

    def __enter__(self) -> Suite:
        os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lincorr_lightning.lightning_cli", "tests.faults.tries"])
        inputs = self._work / "inputs"
        if not (inputs / "edits.jsonl").exists():
            inputs.mkdir(parents=True)
            make_inputs(inputs)
        (self._work / "references").mkdir(exist_ok=True)
        self._pool = context.Pool(self._jobs, initializer=_warm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._pool.terminate()
        self._pool.join()
        if self._temporary:
            shutil.rmtree(self._work, ignore_errors=True)

    def run(self, numbers: Mapping[str, Iterable[int]], progress: bool = False) -> list[Outcome]:
        """Make the tries of these numbers by kind.

        Args:
            numbers: Numbers of the tries of each kind.
            progress: Whether to show progress, and each try that does not hold, on stderr. Ctrl-C
                then ends the tries, and returns what there is.
        """
        tries = [
            Try(kind, number, self._seed, self._work)
            for kind, some in numbers.items() for number in some
        ]  # fmt: skip
        self._make_references(tries)
        outcomes: list[Outcome] = []
        bar = tqdm(total=len(tries), unit="try", disable=not progress)
        with contextlib.suppress(*[KeyboardInterrupt] if progress else ()):
            for outcome in self._pool.imap_unordered(make_try, tries):
                outcomes.append(outcome)
                bar.update()
                if outcome.faults:
                    self._keep(outcome, outcomes)
                    what = f"{outcome.kind} {outcome.number}, {outcome.row}: {outcome.what}"
                    bar.write(f"{what}: {outcome.faults[0]}", file=sys.stderr)
        bar.close()
        return sorted(outcomes, key=lambda one: (list(KINDS).index(one.kind), one.number))

    def _make_references(self, tries: Iterable[Try]) -> None:
        """Make the uninterrupted runs that tries need; SAEs first, which the feature flow reads."""
        needed = {(one.row, KINDS[one.kind].two) for one in tries if one.row in STUDIES}
        if any(one.row not in STUDIES for one in tries):  # damaged inputs of any study
            needed |= {(row, False) for row in STUDIES}
        self._pool.apply(make_reference, (self._work, "sparse_autoencoders", False))
        saes = self._work / "inputs" / "saes"
        if not saes.exists():
            run = finished(self._work / "references" / "sparse_autoencoders")
            shutil.copytree(run / "sparse_autoencoders", saes)
        jobs = [
            (self._work, row, two)
            for row, two in sorted(needed)
            if not two or STUDIES[row].processes is not None
        ]
        self._pool.starmap(make_reference, jobs, chunksize=1)

    def _keep(self, outcome: Outcome, outcomes: list[Outcome]) -> None:
        """Keep a try that did not hold, with the way to repeat it."""
        name = f"{outcome.kind}-{outcome.number}"
        before = [
            o for o in outcomes if o.faults and (o.kind, o.row) == (outcome.kind, outcome.row)
        ]
        source, kept = self._work / "tries" / name, self._failures / name
        shutil.rmtree(kept, ignore_errors=True)
        if len(before) <= _MAX_KEPT and source.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, kept, symlinks=True, ignore=_no_pipes)
            repeat = (
                f"python -m tests.faults --seed {self._seed} --only {outcome.kind} "
                f"--number {outcome.number}"
            )
            (kept / "fault.txt").write_text(
                "\n".join([repeat, outcome.row, outcome.what, *outcome.faults]) + "\n"
            )
        shutil.rmtree(source, ignore_errors=True)


def _no_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_fifo()]


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table of what was tried and what held."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.kind, outcome.row].append(outcome)
    lines = ["| try | of | tried | held | not held | first |", "|---|---|---:|---:|---:|---|"]
    totals = [0, 0]
    for (kind, row), some in rows.items():
        tried = sum(one.weight for one in some)
        failed = [one for one in some if one.faults]
        lost = sum(one.weight for one in failed)
        totals = [totals[0] + tried, totals[1] + lost]
        example = f"{failed[0].number}: {failed[0].faults[0]}" if failed else ""
        example = " ".join(example.split()).replace("|", "\\|")[:110]
        lines.append(f"| {kind} | {row} | {tried} | {tried - lost} | {lost} | {example} |")
    tried, lost = totals
    lines.append(f"| all | | {tried} | {tried - lost} | {lost} | |")
    return "\n".join(lines) + "\n"
