"""Runs of `lincorr` in processes of their own, and checks of what they left in their folders."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.launching import CONTEXT

PATIENCE_S = 90
"""A run that takes longer hangs."""
PAYLOAD = "payload"
"""File that code in an input would make."""
_CONNECTED = "connected"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Work:
    """Folder of inputs; `reference` returns the folder of a study's uninterrupted run."""

    inputs: Path
    reference: Callable[[str], Path]

    def checkpoints(self, study: str) -> list[Path]:
        """Return the checkpoints of a study's uninterrupted run."""
        return sorted((self.reference(study).parents[1] / "kept").glob("*.ckpt"))


@dataclass(frozen=True)
class Case:
    """A command line with a fault, for `run_cases`."""

    command: list[str]
    what: str
    must_fail: bool = False
    """Whether no run can be right."""


@dataclass
class Run:
    """A run, and the file of its stderr."""

    process: Any
    output: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the process is still there."""
        if self.process.exitcode is None:
            os.kill(self.process.pid, number)

    def ends(self, patience: float = PATIENCE_S) -> int:
        """Return the exit status, as a shell shows it, of a run that must end in time."""
        self.process.join(patience)
        if self.process.exitcode is None:
            self.kill()
            raise AssertionError(f"still running after {patience} s: {self.text[-300:]}")
        code = int(self.process.exitcode)
        return 128 - code if code < 0 else code

    @property
    def text(self) -> str:
        """What it wrote to stderr."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def start(arguments: Sequence[str], output: Path) -> Run:
    """Start a run in a process of its own."""
    process = CONTEXT.Process(target=_program, args=(list(arguments), str(output)), daemon=True)
    process.start()
    return Run(process, output)


def _program(arguments: list[str], output: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run with `&`
    for stream, path in ((1, os.devnull), (2, output)):
        os.dup2(os.open(path, _NEW_FILE), stream)
    os.chdir(Path(output).parent)
    sys.argv = ["lincorr", *arguments]
    from lincorr_lightning.cli import console

    console()


# -- many runs in one process ---------------------------------------------------------------------


def run_cases(cases: Sequence[Case], folder: Path) -> list[str]:
    """Run cases one after another, each in a folder of its own; return what is not as it must be.

    One process runs them all. If it dies, or one takes too long, another one goes on with the next.
    """
    failures, first = [], 0
    while first < len(cases):
        rest = [(case, folder / str(i)) for i, case in enumerate(cases)][first:]
        process = CONTEXT.Process(target=_run_cases, args=(rest,), daemon=True)
        process.start()
        process.join()
        for case, case_folder in rest:
            first += 1
            status = case_folder / "status"
            if not status.exists():
                failures.append(f"{case.what}: the process ended by {process.exitcode}, or hung")
                break
            try:
                _check_case(case, int(status.read_text()), case_folder)
            except AssertionError as error:
                failures.append(f"{case.what}: {str(error)[-1500:]}")
            shutil.rmtree(case_folder)
    return failures


def _check_case(case: Case, status: int, folder: Path) -> None:
    """Check what a case left: one line, or a whole run; no code was run, nobody was called."""
    text = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    assert not (folder / PAYLOAD).exists(), "code of the input was executed"
    assert not (folder / _CONNECTED).exists(), (folder / _CONNECTED).read_text()
    check_files(folder / "runs")
    if status:
        check_line(text, status, {1, 2})
        return
    assert "Traceback" not in text, text
    assert not case.must_fail, f"accepted: {text[-300:]}"
    runs = list((folder / "runs").rglob("results.json"))
    assert runs or list((folder / "runs").rglob("linear_map.safetensors")), "no results"


def _run_cases(cases: list[tuple[Case, Path]]) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(_note_connections)
    kept = os.dup(2)
    for case, folder in cases:
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        for stream, path in ((1, os.devnull), (2, "stderr")):
            opened = os.open(path, _NEW_FILE)
            os.dup2(opened, stream)
            os.close(opened)
        signal.alarm(PATIENCE_S)
        status = _run_case(case)
        signal.alarm(0)
        for stream_of_python in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream_of_python.flush()
        os.dup2(kept, 2)
        Path("status").write_text(str(status))


def _run_case(case: Case) -> int:
    from lincorr_lightning.cli import console

    sys.argv = ["lincorr", *case.command, f"--trainer.default_root_dir={Path.cwd() / 'runs'}"]
    try:
        console()
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _note_connections(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        with open(_CONNECTED, "a") as file:  # noqa: PTH123 (no import in a hook)
            file.write(f"{event} {args[1:]}\n")


# -- what a run left ------------------------------------------------------------------------------


def check_line(text: str, status: int, statuses: Iterable[int]) -> None:
    """Check that a run failed with one of the statuses and one line at the end of its stderr."""
    assert "Traceback (most recent call last)" not in text, text[-2000:]
    lines = [line for line in text.splitlines() if line.startswith("lincorr: ")]
    assert status in statuses, lines
    assert len(lines) == 1, lines
    assert not text.split(lines[0], 1)[1].strip(), "text after the line"


def _read_png(path: Path) -> None:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and b"IEND" in content[-12:]


def _read_csv(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, strict=True))
    assert len({len(row) for row in rows}) == 1 and path.read_text().endswith("\n")


_READERS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".csv": _read_csv,
    ".png": _read_png,
    ".yaml": lambda path: yaml.compose(path.read_text(encoding="utf-8")),
    ".safetensors": load_file,
    ".ckpt": lambda path: torch.load(path, weights_only=True),
}


def check_files(root: Path) -> None:
    """Check that no file below a root is half-written, apart from those of a write in progress."""
    for path in sorted(root.rglob("*")):
        is_leftover = any(part.startswith(".part-") for part in path.relative_to(root).parts)
        if path.is_file() and path.suffix in _READERS and not is_leftover:
            try:
                _READERS[path.suffix](path)
            except Exception as error:
                raise AssertionError(f"{path} is half-written") from error
