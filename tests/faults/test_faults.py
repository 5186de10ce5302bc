"""Runs with wrong inputs, and runs that are killed: one line, or the right numbers.

In the nightly lane; LINCORR_FAULTS_SEED=N makes other tries, and ``-k options`` tries one kind.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.faults.inputs import INPUTS, Maker
from tests.faults.runs import Work, check_files, check_line, run_cases, start
from tests.small_runs import RESUMED, SMALL_RUNS, keeping, numbers

pytestmark = pytest.mark.nightly

N_TRIES = 60
_END_S = 10  # a run that is ended by a signal may take so long


def check(kind: str, make: Maker, work: Work, draw: random.Random, folder: Path) -> None:
    cases = []
    for i in range(N_TRIES):
        (folder / str(i)).mkdir()
        cases.append(make(draw, work, folder / str(i)))
    failures = run_cases(cases, folder)
    assert not failures, "\n".join(f"{kind}: {failure}" for failure in failures)


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs(kind: str, work: Work, draw: random.Random, tmp_path: Path) -> None:
    check(kind, INPUTS[kind], work, draw, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("study", SMALL_RUNS)
def test_interruptions(
    study: str, number: int, work: Work, draw: random.Random, tmp_path: Path
) -> None:
    """A run that ends at a random moment leaves no half-written file, and goes on from the last."""
    whole, root, small = work.reference(study), tmp_path / "runs", SMALL_RUNS[study]
    more = keeping(tmp_path / "kept") if study in RESUMED else []
    run = start(small.command(work.inputs, root, *more), tmp_path / "killed")
    time.sleep(draw.uniform(0.5, 4))
    run.kill(number)
    status = run.ends(_END_S)
    assert status in (0, 128 + number)  # it may have been finished already
    if status and number != signal.SIGKILL:
        check_line(run.text, status, {status})
    check_files(tmp_path)
    written = [*tmp_path.glob("kept/*.ckpt"), *root.rglob("interrupted.ckpt")]
    last = max(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    resumed = [f"--ckpt_path={last}"] if last and not list(root.rglob("results.json")) else []
    run = start(small.command(work.inputs, tmp_path / "again", *resumed), tmp_path / "again.stderr")
    assert run.ends() == 0, run.text[-2000:]
    (results,) = (tmp_path / "again").rglob("results.json")
    assert numbers(results.parent) == numbers(whole)
