"""Tries: one thing that goes wrong in one run, and the check that nothing is lost by it."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults import bad_inputs
from tests.faults.runs import (
    PATIENCE_S,
    Fault,
    Run,
    check_equal,
    check_files,
    check_text,
    checkpoints,
    files_of,
    finished,
    run_folders,
    start,
    start_two,
)
from tests.faults.studies import STUDIES

# A run that is ended by a signal may take so long.
_END_S = 5
# One that is so young has no handler of signals yet.
_START_S = 0.2
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Try:
    """A try, which its kind (key of `KINDS`), number and seed determine.

    `work` is the folder with ``inputs`` and ``references``, the uninterrupted runs.
    """

    kind: str
    number: int
    seed: int
    work: Path

    @property
    def row(self) -> str:
        """What is tried: a study, or a kind of input."""
        rows = KINDS[self.kind].rows
        return rows[self.number % len(rows)]

    @property
    def folder(self) -> Path:
        """Folder of the try's files."""
        return self.work / "tries" / f"{self.kind}-{self.number}"

    @property
    def root(self) -> Path:
        """Folder of the try's runs."""
        return self.folder / "runs"

    @property
    def draw(self) -> random.Random:
        """Random numbers of this try, the same at each call."""
        return random.Random(f"{self.seed} {self.kind} {self.number}")

    def reference(self, two: bool = False) -> Path:
        """Return the root of the study's uninterrupted run."""
        return self.work / "references" / f"{self.row}{'_two' * two}"

    def uninterrupted(self, two: bool = False) -> Path:
        """Return the folder of the study's uninterrupted run."""
        return finished(self.reference(two))

    def command(self, two: bool = False) -> list[str]:
        """Return the study's command line."""
        return STUDIES[self.row].command(self.work / "inputs", self.root, two)

    def checkpoint(self, two: bool = False) -> list[str]:
        """Return the option that goes on with the killed run; empty if it cannot be resumed."""
        end = [] if STUDIES[self.row].resumes_at_end else checkpoints(self.reference(two))[-1:]
        found = [path for path in checkpoints(self.root) if path.name not in {p.name for p in end}]
        return [f"--ckpt_path={path}" for path in found[-1:]]

    def start(self, name: str, *more: str) -> Run:
        """Start the study; `name` is that of the file with its stderr."""
        return start([*self.command(), *more], self.folder / f"{name}.stderr")


@dataclass(frozen=True)
class Outcome:
    """What came of a try: what was done to the run, and messages of what did not hold."""

    of: Try
    what: str
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of try.

    `run` makes the try; it yields what it does to the run as soon as this is known, and raises
    `Fault` if something does not hold. `weight` is the number of runs in a try; `two` is whether it
    needs uninterrupted runs on two processes.
    """

    run: Callable[[Try], Iterator[str]]
    rows: tuple[str, ...]
    count: int
    weight: int = 1
    two: bool = False


def make_try(one: Try) -> Outcome:
    """Make a try; its files are left for those that did not hold."""
    shutil.rmtree(one.folder, ignore_errors=True)
    one.folder.mkdir(parents=True)
    done: list[str] = []
    faults: list[str] = []
    try:
        for step in KINDS[one.kind].run(one):
            done.append(step)
    except Fault as fault:
        faults.append(str(fault))
    finally:
        _end_children()
    if not faults:
        shutil.rmtree(one.folder, ignore_errors=True)
    return Outcome(one, ", ".join(done), tuple(faults))


def make_reference(work: Path, row: str, two: bool) -> None:
    """Make a study's uninterrupted run, unless it is there."""
    one = Try("kill", list(STUDIES).index(row), 0, work)
    root, seconds = one.reference(two), one.reference(two).with_suffix(".seconds")
    if not seconds.exists():
        shutil.rmtree(root, ignore_errors=True)
        command = STUDIES[row].command(work / "inputs", root, two)
        output = root.with_suffix(".stderr")
        runs = start_two(command, output) if two else [start(command, output)]
        for run in runs:
            if not run.wait(4 * PATIENCE_S) or run.status:
                raise RuntimeError(f"the uninterrupted run of {row} fails: {run.text[-2000:]}")
        seconds.write_text(str(runs[0].seconds))


# -- killed ---------------------------------------------------------------------------------------


def _kill(one: Try) -> Iterator[str]:
    """Kill a run at a random time or file; resume it, or run it again."""
    number = _SIGNALS[one.number // len(STUDIES) % len(_SIGNALS)]
    run = one.start("killed")
    yield _wait_for_moment(one, [run]) + f", {signal.Signals(number).name}"
    run.signal(number)
    _check_end(run, number)
    whole = files_of(one.uninterrupted())
    check_files(one.root, whole)
    more = one.checkpoint()
    _check_next([one.start("again", *more)])
    check_files(one.root, whole)
    yield "resumed" if more else "run again"
    check_equal(finished(one.root), one.uninterrupted())


def _check_next(runs: list[Run]) -> None:
    """Check that the run after one that was killed ends well."""
    for run in runs:
        if not run.wait(2 * PATIENCE_S) or run.status:
            last = (run.text.strip().splitlines() or [""])[-1]
            raise Fault(f"the run after it ends with status {run.status}: {last[:300]}")


def _wait_for_moment(one: Try, runs: list[Run], two: bool = False) -> str:
    """Wait until a random time of a run, or until it has a random number of files."""
    draw = one.draw
    seconds = float(one.reference(two).with_suffix(".seconds").read_text())
    n_files = len(files_of(one.uninterrupted(two)))
    by_files = draw.random() < 0.5
    pause = draw.uniform(0, 0.05) if by_files else draw.uniform(0, seconds)
    n = draw.randint(1, n_files) if by_files else 0
    end = time.monotonic() + 4 * PATIENCE_S
    while sum(path.is_file() for path in one.root.rglob("*")) < n and time.monotonic() < end:
        if all(run.wait(0) for run in runs):
            break
        time.sleep(0.003)
    end = time.monotonic() + pause
    while time.monotonic() < end and not all(run.wait(0) for run in runs):
        time.sleep(0.003)
    return f"at file {n} of {n_files} + {pause:.3f} s" if by_files else f"after {pause:.2f} s"


def _check_end(run: Run, number: int) -> None:
    """Check how a run ends that got a signal."""
    _check_end_in_time(run, number)
    if run.status == 0:
        return  # it was finished already; its results are checked
    if number == signal.SIGKILL:
        if run.status != 128 + number:
            raise Fault(f"status {run.status}: {run.text[-300:]}")
    elif run.seconds > _START_S or run.text or run.status != 128 + number:
        check_text(run, {128 + number})


def _check_end_in_time(run: Run, number: int) -> None:
    if not run.wait(_END_S):
        run.end()
        raise Fault(f"still running {_END_S} s after {signal.Signals(number).name}")


def _kill_one_of_two(one: Try) -> Iterator[str]:
    """Kill one of two ranks; the other one must end, by itself or as torchrun ends it."""
    draw = random.Random(f"two {one.seed} {one.number}")
    if STUDIES[one.row].processes is None:
        yield "refused"
        for run in start_two(one.command(two=True), one.folder / "refused.stderr"):
            if not run.wait():
                raise Fault("hangs")
            if run.status == 0 or "Traceback" in run.text:
                raise Fault(f"status {run.status}: {run.text[-300:]}")
        return
    runs = start_two(one.command(two=True), one.folder / "killed.stderr")
    victim, agent = draw.randrange(2), draw.random() < 0.5
    when = _wait_for_moment(one, runs, two=True)
    yield f"rank {victim} {when}, the other {'ended by torchrun' if agent else 'left alone'}"
    runs[victim].signal(signal.SIGKILL)
    runs[victim].wait()
    other = runs[1 - victim]
    alone = not agent and other.wait(20)
    if not alone:
        other.signal(signal.SIGTERM)
        _check_end_in_time(other, signal.SIGTERM)
    # Of ranks that a signal ends, only the first has a line.
    if "Traceback" in other.text or other.status not in (0, 128 + signal.SIGTERM):
        check_text(other, {1})
    whole = files_of(one.uninterrupted(two=True))
    check_files(one.root, whole)
    more = one.checkpoint(two=True) if STUDIES[one.row].resumes_two else []
    _check_next(start_two([*one.command(two=True), *more], one.folder / "again.stderr"))
    yield "resumed" if more else "run again"
    check_equal(finished(one.root), one.uninterrupted(two=True))


# -- disk, starts ---------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[str]:
    """Limit what can be written to a folder; yield how."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    with suppress(OSError):
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            try:
                yield f"tmpfs of {size} bytes"
            finally:
                kept = folder.with_name("kept")
                shutil.copytree(folder, kept, dirs_exist_ok=True)
                subprocess.run(["umount", "-l", str(folder)], check=False)
            return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)  # no mount here: no file may be larger
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield f"RLIMIT_FSIZE of {size} bytes"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _full_disk(one: Try) -> Iterator[str]:
    """Run a study on a disk that is too small, or nearly."""
    pages = [
        -(-path.stat().st_size // 4096) for path in one.reference().rglob("*") if path.is_file()
    ]
    size = 4096 * one.draw.randint(1, sum(pages) + 2)
    with small_disk(one.root, size) as how:
        yield how
        run = one.start("full")
        if not run.wait(2 * PATIENCE_S):
            raise Fault("hangs")
        check_files(one.root, files_of(one.uninterrupted()))
        if run.status == 0:
            check_equal(finished(one.root), one.uninterrupted())
        elif "No space left" not in check_text(run, {1}) and "tmpfs" in how:
            raise Fault(f"the line does not name the cause: {run.text[-300:]}")


_AT_ONCE = 6


def _at_once(one: Try) -> Iterator[str]:
    """Start runs in one folder at the same moment."""
    yield f"{_AT_ONCE} starts"
    runs = [one.start(f"start_{i}") for i in range(_AT_ONCE)]
    for run in runs:
        if not run.wait(6 * PATIENCE_S) or run.status:
            raise Fault(f"status {run.status}: {run.text[-300:]}")
    folders = run_folders(one.root)
    if len(folders) != _AT_ONCE:
        raise Fault(f"{len(folders)} folders of {_AT_ONCE} runs")
    for folder in folders:
        if files_of(folder) != files_of(one.uninterrupted()):
            raise Fault(f"{folder.name} has other files than an uninterrupted run")
        check_equal(folder, one.uninterrupted())


# -- inputs ---------------------------------------------------------------------------------------


def _bad_input(one: Try) -> Iterator[str]:
    """Run a study with an input that is damaged, senseless or hostile."""
    case = bad_inputs.INPUTS[one.row](one.draw, one.work, one.folder)
    yield case.what
    run = start(
        [*case.command, f"--trainer.default_root_dir={one.root}"], one.folder / "bad.stderr"
    )
    if not run.wait():
        run.end()
        raise Fault(f"still running after {PATIENCE_S} s")
    if (one.folder / bad_inputs.PAYLOAD).exists():
        raise Fault("code of the input was executed")
    check_files(one.root)
    if run.status:
        check_text(run, {1, 2})
    elif case.must_fail:
        raise Fault("it was accepted")
    elif "fast_dev_run" not in case.what:
        finished(one.root)


_STUDIES = tuple(STUDIES)
KINDS = {
    "kill": Kind(_kill, _STUDIES, 180),
    "two": Kind(_kill_one_of_two, _STUDIES, 30, two=True),
    "disk": Kind(_full_disk, _STUDIES, 90),
    "starts": Kind(_at_once, _STUDIES, 15, weight=_AT_ONCE),
    "inputs": Kind(_bad_input, tuple(bad_inputs.INPUTS), 500),
}


def _end_children() -> None:
    """Kill the runs that a try left behind."""
    with suppress(ChildProcessError):
        while True:
            for child in (
                Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            ):
                os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
