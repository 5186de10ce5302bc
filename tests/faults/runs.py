"""Runs of `lincorr` in forked processes, and what they left in their folders."""

from __future__ import annotations

import csv
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from tqdm import tqdm

PATIENCE_S = 60
"""A run that takes longer hangs."""
# Keys of results.json that depend on how a run was made, or on its folder.
_NOT_COMPARED = {"seconds", "settings", "versions", "lm", "model"}
_ERROR = "lincorr: "


class Fault(Exception):
    """A try did not hold; the message says why."""


@dataclass
class Run:
    """A forked run: its process, and the file of its stderr, with one of stdout beside it.

    `status` is the exit status as a shell shows it, None until `wait` saw the end.
    """

    pid: int
    output: Path
    started: float
    status: int | None = None
    seconds: float = 0.0

    def wait(self, patience: float = PATIENCE_S) -> bool:
        """Wait for the end; return whether it came in time."""
        end = time.monotonic() + patience
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.status = code if code >= 0 else 128 - code
                self.seconds = time.monotonic() - self.started
            elif time.monotonic() > end:
                return False
            else:
                time.sleep(0.01)
        return True

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> None:
        """Kill what is still there."""
        self.signal(signal.SIGKILL)
        self.wait()

    @property
    def text(self) -> str:
        """What it wrote to stderr."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def start(arguments: Sequence[str], output: Path, environment: dict[str, str] | None = None) -> Run:
    """Fork a process that runs the program with everything imported already."""
    output.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Run(pid, output, time.monotonic())
    code = 1
    try:
        _become_program(arguments, output, environment or {})
        from lincorr_lightning.cli import console

        console()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_program(arguments: Sequence[str], output: Path, environment: dict[str, str]) -> None:
    """Make a forked process look like one that a shell started."""
    for stream, path in ((1, output.with_suffix(".stdout")), (2, output)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    # The lock that all processes share would stay locked by a run that is killed.
    tqdm.set_lock(threading.RLock())
    faulthandler.dump_traceback_later(PATIENCE_S - 5)  # of a run that hangs
    os.chdir(output.parent)
    os.environ.update(environment)
    sys.argv = ["lincorr", *arguments]


def start_two(arguments: Sequence[str], output: Path) -> list[Run]:
    """Fork the two ranks of a run, as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "faults",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    return [
        start(arguments, output.with_name(f"{output.stem}_{rank}.stderr"),
              common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]  # fmt: skip


# -- what a run wrote on its screen ---------------------------------------------------------------


def check_text(run: Run, statuses: Iterable[int]) -> str:
    """Check that a run failed with one of the statuses and one line; return the line."""
    if "Traceback (most recent call last)" in run.text:
        *_, last = [line for line in run.text.splitlines() if line.strip()]
        raise Fault(f"traceback, status {run.status}: {last[:300]}")
    lines = [line for line in run.text.splitlines() if line.startswith(_ERROR)]
    if run.status not in statuses:
        said = lines[-1] if lines else "no line"
        raise Fault(f"status {run.status} instead of {sorted(statuses)}: {said[:300]}")
    if len(lines) != 1:
        raise Fault(f"{len(lines)} lines instead of one: {lines[:3]}")
    after = run.text.split(lines[0], 1)[1].strip()
    if after:
        raise Fault(f"text after the line: {after[:300]!r}")
    return lines[0]


# -- what it left in its folder -------------------------------------------------------------------


def run_folders(root: Path) -> list[Path]:
    """Return the folders of runs below a root."""
    return sorted(path for path in root.glob("*/version_*") if path.is_dir())


def files_of(folder: Path) -> set[str]:
    """Return the names of a run's files: no leftovers, checkpoints and numbers of events."""
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    return {
        re.sub(r"tfevents.*", "tfevents", name)
        for name in names
        if not _is_leftover(Path(name)) and not name.endswith(".ckpt")
    }


def _is_leftover(path: Path) -> bool:
    return any(part.startswith((".part-", ".trial-")) for part in path.parts)


def _read_png(path: Path) -> None:
    content = path.read_bytes()
    if content[:8] != b"\x89PNG\r\n\x1a\n" or b"IEND" not in content[-12:]:
        raise ValueError("the PNG is cut short")


def _read_csv(path: Path) -> None:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, strict=True))
    if not rows or len({len(row) for row in rows}) != 1 or not path.read_text().endswith("\n"):
        raise ValueError("the table is cut short")


_READERS: dict[str, Callable[[Path], Any]] = {
    ".json": lambda path: json.loads(path.read_text(encoding="utf-8")),
    ".csv": _read_csv,
    ".png": _read_png,
    ".yaml": lambda path: yaml.compose(path.read_text(encoding="utf-8")),
    ".safetensors": load_file,
    ".ckpt": lambda path: torch.load(path, weights_only=True),
}


def check_files(root: Path, whole: set[str] | None = None) -> None:
    """Check that no file below a root is half-written.

    `whole` has the names of a finished run's files: a run with results.json must have them.
    """
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in _READERS and not _is_leftover(path.relative_to(root)):
            try:
                _READERS[path.suffix](path)
            except Exception as error:
                size = path.stat().st_size
                raise Fault(f"{path.name} ({size} bytes) is half-written: {error}") from error
    for folder in run_folders(root) if whole else []:
        missing = whole - files_of(folder)
        if (folder / "results.json").exists() and missing:
            raise Fault(f"results.json is there, but not {', '.join(sorted(missing)[:4])}")


def finished(root: Path) -> Path:
    """Return the last finished run below a root."""
    found = [folder for folder in run_folders(root) if (folder / "results.json").exists()]
    if not found:
        raise Fault("the run ended without an error and without results.json")
    return found[-1]


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints below a folder, that of the most steps at the end."""
    return sorted(root.rglob("step=*.ckpt"), key=lambda path: int(re.findall(r"\d+", path.stem)[0]))


def check_equal(ours: Path, theirs: Path) -> None:
    """Check that two finished runs have the same results, tables and weights, bit for bit.

    The last checkpoint of a resumed run may be in the folder of the run that it goes on with.
    """
    found = [json.loads((folder / "results.json").read_text()) for folder in (ours, theirs)]
    for key in sorted((found[0].keys() | found[1].keys()) - _NOT_COMPARED):
        if found[0].get(key) != found[1].get(key):
            first, second = (json.dumps(one.get(key))[:80] for one in found)
            raise Fault(f"{key} of results.json differs: {first} instead of {second}")
    for path in sorted(theirs.rglob("*")):
        other = ours / path.relative_to(theirs)
        if path.suffix == ".csv" and other.read_bytes() != path.read_bytes():
            raise Fault(f"{path.name} differs")
        if path.suffix == ".safetensors":
            _check_tensors(load_file(other), load_file(path), path.name)
    for last in checkpoints(theirs)[-1:]:
        paths = [path for path in checkpoints(ours.parent) if path.name == last.name]
        if not paths:
            raise Fault(f"there is no checkpoint {last.name}")
        states = [torch.load(path, weights_only=True)["state_dict"] for path in (paths[-1], last)]
        _check_tensors(states[0], states[1], last.name)


def _check_tensors(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> None:
    if ours.keys() != theirs.keys():
        raise Fault(f"{name} has other tensors")
    for key, value in theirs.items():
        if isinstance(value, torch.Tensor) and not torch.equal(ours[key], value):
            raise Fault(f"{key} of {name} differs")
