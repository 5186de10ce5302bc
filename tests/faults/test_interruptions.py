"""Runs that are killed, lose a rank, fill the disk or start at the same moment lose nothing.

Each study several times, at random moments, in the nightly lane; LINCORR_FAULTS_SEED=N chooses
others.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults.runs import (
    PATIENCE_S,
    Run,
    check_equal,
    check_files,
    check_line,
    checkpoints,
    files_of,
    finished,
    run_folders,
    start_two,
)
from tests.faults.studies import STUDIES, Work

pytestmark = pytest.mark.nightly

# A run that is ended by a signal may take so long.
_END_S = 5
_AT_ONCE = 6
Start = Callable[..., Run]


def wait_for_moment(
    draw: random.Random, runs: Sequence[Run], root: Path, whole: set[str], seconds: float
) -> None:
    """Wait until a random time of a run, or until it has a random number of files."""
    n_files = draw.choice([0, draw.randint(1, len(whole))])
    pause = draw.uniform(0, 0.05) if n_files else draw.uniform(0.5, seconds)
    end = time.monotonic() + PATIENCE_S
    while sum(path.is_file() for path in root.rglob("*")) < n_files and time.monotonic() < end:
        if all(run.wait(0) for run in runs):
            return
        time.sleep(0.003)
    runs[0].wait(pause)


def own_checkpoint(root: Path) -> list[str]:
    """Return the option that goes on with a killed run; empty if it cannot be resumed."""
    return [f"--ckpt_path={path}" for path in checkpoints(root)][-1:]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("again", range(3))
@pytest.mark.parametrize("study", STUDIES)
def test_a_killed_run_goes_on(
    study: str,
    again: int,
    number: int,
    work: Work,
    draw: random.Random,
    run_study: Start,
    tmp_path: Path,
) -> None:
    del again
    root, (whole, seconds) = tmp_path / "runs", work.reference(study)
    run = run_study(study, "killed")
    wait_for_moment(draw, [run], root, files_of(whole), seconds)
    run.kill(number)
    status = run.ends(_END_S)
    assert status in (0, 128 + number)  # it may have been finished already
    if status and number != signal.SIGKILL:
        check_line(run, {status})
    check_files(root, files_of(whole))
    more = own_checkpoint(root)
    assert (last := run_study(study, "again", *more)).ends() == 0, last.text[-2000:]
    check_files(root, files_of(whole))
    check_equal(finished(root), whole)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("study", STUDIES)
def test_the_other_rank_ends(
    study: str, victim: int, work: Work, draw: random.Random, tmp_path: Path
) -> None:
    """By itself, or by the signal of torchrun."""
    root, made = tmp_path / "runs", STUDIES[study]
    command = made.command(work.inputs, root, two=True)
    if made.processes is None:
        for run in start_two(command, tmp_path / "refused.stderr"):
            assert run.ends() and "Traceback" not in run.text
        return
    whole, seconds = work.reference(study, True)
    runs = start_two(command, tmp_path / "killed.stderr")
    wait_for_moment(draw, runs, root, files_of(whole), seconds)
    runs[victim].kill()
    other = runs[1 - victim]
    if not other.wait(20):
        other.kill(signal.SIGTERM)
    # Of ranks that a signal ends, only the first has a line.
    if other.ends(_END_S) not in (0, 128 + signal.SIGTERM):
        check_line(other, {1})
    check_files(root, files_of(whole))
    more = own_checkpoint(root) if made.resumes_two else []
    for run in start_two([*command, *more], tmp_path / "again.stderr"):
        assert run.ends(2 * PATIENCE_S) == 0, run.text[-2000:]
    check_equal(finished(root), whole)


@pytest.mark.parametrize("again", range(4))
@pytest.mark.parametrize("study", STUDIES)
def test_a_full_disk(
    study: str, again: int, work: Work, draw: random.Random, run_study: Start, tmp_path: Path
) -> None:
    """A small tmpfs; a limit of the files' size where none can be mounted."""
    del again
    root, (whole, _) = tmp_path / "runs", work.reference(study)
    root.mkdir()
    files = [path for path in whole.parents[1].rglob("*") if path.is_file()]
    size = 4096 * draw.randint(1, sum(-(-path.stat().st_size // 4096) for path in files) + 2)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(root)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        run = run_study(study, "full", max_bytes=None if is_mounted else size)
        status = run.ends(2 * PATIENCE_S)
        check_files(root, files_of(whole))
        if status == 0:
            check_equal(finished(root), whole)
        else:
            assert "No space left" in check_line(run, {1}) or not is_mounted, run.text
    finally:
        if is_mounted:
            shutil.copytree(root, tmp_path / "kept", dirs_exist_ok=True)
            subprocess.run(["umount", "-l", str(root)], check=False)


@pytest.mark.parametrize("study", STUDIES)
def test_runs_that_start_at_once(study: str, work: Work, run_study: Start, tmp_path: Path) -> None:
    whole, _ = work.reference(study)
    for run in [run_study(study, f"start_{i}") for i in range(_AT_ONCE)]:
        assert run.ends(6 * PATIENCE_S) == 0, run.text[-2000:]
    folders = run_folders(tmp_path / "runs")
    assert len(folders) == _AT_ONCE
    for folder in folders:
        assert files_of(folder) == files_of(whole)
        check_equal(folder, whole)
