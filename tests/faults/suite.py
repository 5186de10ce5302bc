"""The fault suite: many tries at once, in processes that have imported everything."""

from __future__ import annotations

import contextlib
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

    from lincorr_lightning.cli import main
    from lincorr_lightning.knowledge import Catalogue

    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # and end the try's runs
    torch.set_num_threads(1)
    Catalogue.load()
    silent = io.StringIO()
    with contextlib.redirect_stdout(silent), contextlib.suppress(SystemExit):
        main(["fit", "--config", "linear_probe.yaml", "--print_config"])


class Suite:
    """Makes tries in worker processes, `jobs` at a time.

    Inputs and uninterrupted runs are in `work`, reused if present; None is a temporary folder.
    Tries that do not hold are moved to `failures`.
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

        With `progress`, each try that does not hold is shown on stderr, and Ctrl-C ends the tries.
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
                    of = outcome.of
                    what = f"{of.kind} {of.number}, {of.row}: {outcome.what}"
                    bar.write(f"{what}: {outcome.faults[0]}", file=sys.stderr)
        bar.close()
        return sorted(outcomes, key=lambda one: (list(KINDS).index(one.of.kind), one.of.number))

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
        of = outcome.of
        same = [o for o in outcomes if o.faults and (o.of.kind, o.of.row) == (of.kind, of.row)]
        kept = self._failures / of.folder.name
        shutil.rmtree(kept, ignore_errors=True)
        if len(same) <= _MAX_KEPT and of.folder.exists():
            for pipe in [path for path in of.folder.rglob("*") if path.is_fifo()]:
                pipe.unlink()
            shutil.copytree(of.folder, kept, symlinks=True)
            repeat = (
                f"python -m tests.faults --seed {of.seed} --only {of.kind} --number {of.number}"
            )
            text = "\n".join([repeat, of.row, outcome.what, *outcome.faults])
            (kept / "fault.txt").write_text(f"{text}\n")
        shutil.rmtree(of.folder, ignore_errors=True)


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table of what was tried and what held."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.of.kind, outcome.of.row].append(outcome)
    lines = ["| try | of | tried | held | not held | first |", "|---|---|---:|---:|---:|---|"]
    totals = [0, 0]
    for (kind, row), some in rows.items():
        failed = [one for one in some if one.faults]
        tried, lost = (KINDS[kind].weight * len(ones) for ones in (some, failed))
        totals = [totals[0] + tried, totals[1] + lost]
        example = f"{failed[0].of.number}: {failed[0].faults[0]}" if failed else ""
        example = " ".join(example.split()).replace("|", "\\|")[:110]
        lines.append(f"| {kind} | {row} | {tried} | {tried - lost} | {lost} | {example} |")
    tried, lost = totals
    lines.append(f"| all | | {tried} | {tried - lost} | {lost} | |")
    return "\n".join(lines) + "\n"
