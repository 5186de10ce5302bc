"""Runs of `lincorr` in processes of their own, and checks of what they left in their folders."""

from __future__ import annotations

import csv
import json
import os
import re
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from tests.launching import CONTEXT, join_run, serve_store

PATIENCE_S = 90
"""A run that takes longer hangs."""
PAYLOAD = "payload"
"""File that code in an input would make."""
_CONNECTED = "connected"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
# Keys of results.json that depend on how a run was made, or on its folder.
_NOT_COMPARED = {"seconds", "settings", "versions", "lm", "model"}


@dataclass(frozen=True)
class Case:
    """A command line with a fault, for `run_cases`.

    It may be prepared by a function, and have another standard output: ``"full"``, ``"closed"``, or
    ``"unread"``.
    """

    command: list[str]
    what: str
    must_fail: bool = False
    """Whether no run can be right."""
    must_end: bool = False
    """Whether the run is right all the same."""
    is_dry: bool = False
    """Whether a run has no results."""
    prepare: Callable[[], AbstractContextManager[object]] = nullcontext
    stdout: str = ""


@dataclass(frozen=True)
class Ended:
    """A run of `run_cases` that has ended."""

    status: int
    text: str

    def ends(self) -> int:
        """Return the exit status."""
        return self.status


@dataclass
class Run:
    """A run, and the file of its stderr."""

    process: Any
    output: Path

    def wait(self, patience: float = PATIENCE_S) -> bool:
        """Wait for the end; return whether it came in time."""
        self.process.join(patience)
        return self.process.exitcode is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the process is still there."""
        if self.process.exitcode is None:
            os.kill(self.process.pid, number)

    def ends(self, patience: float = PATIENCE_S) -> int:
        """Return the exit status, as a shell shows it, of a run that must end in time."""
        if not self.wait(patience):
            self.kill()
            raise AssertionError(f"still running after {patience} s: {self.text[-300:]}")
        code = int(self.process.exitcode)
        return 128 - code if code < 0 else code

    @property
    def text(self) -> str:
        """What it wrote to stderr."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def start(arguments: Sequence[str], output: Path, max_bytes: int | None = None) -> Run:
    """Start a run; no file that it writes may be larger than `max_bytes`."""
    return _start(output, list(arguments), str(output), max_bytes)


def start_two(arguments: Sequence[str], output: Path) -> list[Run]:
    """Start the two ranks of a run, as torchrun starts them."""
    store, files = serve_store(), [output.with_suffix(f".{rank}") for rank in range(2)]
    runs = [
        _start(file, list(arguments), str(file), None, rank, store.port)
        for rank, file in enumerate(files)
    ]
    runs[0].process.store = store  # as long as the run
    return runs


def _start(output: Path, *args: Any) -> Run:
    process = CONTEXT.Process(target=_program, args=args, daemon=True)
    process.start()
    return Run(process, output)


def _program(
    arguments: list[str], output: str, max_bytes: int | None, rank: int | None = None, port: int = 0
) -> None:
    if rank is not None:
        join_run(rank, 2, port)
    torch.set_num_threads(1)
    for stream, path in ((1, os.devnull), (2, output)):
        os.dup2(os.open(path, _NEW_FILE), stream)
    os.chdir(Path(output).parent)
    if max_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, resource.RLIM_INFINITY))
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
        for case, own in rest:
            first += 1
            ended = own / "status"
            if not ended.exists():
                failures.append(f"{case.what}: the process ended by {process.exitcode}, or hung")
                break
            try:
                check_case(case, int(ended.read_text()), own)
            except AssertionError as error:
                failures.append(f"{case.what}: {str(error)[-1500:]}")
            shutil.rmtree(own)
    return failures


def check_case(case: Case, status: int, folder: Path) -> None:
    """Check what a case left: one line, or a whole run; no code was run, nobody was called."""
    text = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    assert not (folder / PAYLOAD).exists(), "code of the input was executed"
    assert not (folder / _CONNECTED).exists(), (folder / _CONNECTED).read_text()
    check_files(folder / "runs")
    if status:
        line = check_line(Ended(status, text), {1, 2})
        assert not case.must_end, line
        return
    assert "Traceback" not in text, text
    assert not case.must_fail, f"accepted: {text[-300:]}"
    if "nothing was scored" in text:  # a probe without validation says so, and has its maps
        assert list(folder.rglob("linear_map.safetensors"))
    elif not case.is_dry:
        check_whole(finished(folder / "runs"))


def check_whole(run: Path) -> None:
    """Check that a run has the tables and figures that its results list."""
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    for kind, suffix in (("tables", ".csv"), ("figures", ".png")):
        listed = {f"{one['name']}{suffix}" for one in results[kind]}
        assert listed <= {path.name for path in (run / kind).glob("*")}, kind
        assert kind == "tables" or len(listed) == len(list((run / kind).glob("*.png")))


def _run_cases(cases: list[tuple[Case, Path]]) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(_note_connections)
    kept = os.dup(2)
    for case, folder in cases:
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        for stream, opened in ((1, _stdout_of(case)), (2, os.open("stderr", _NEW_FILE))):
            os.dup2(opened, stream)
            os.close(opened)
        if case.stdout == "closed":
            os.close(1)
        signal.alarm(PATIENCE_S)
        status = _run_case(case)
        signal.alarm(0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os.dup2(kept, 2)
        Path("status").write_text(str(status))


def _run_case(case: Case) -> int:
    from lincorr_lightning.cli import console

    sys.argv = ["lincorr", *case.command]
    named = ("reproduce", "--trainer.default_root_dir")
    if not any(word.startswith(named) for word in sys.argv):
        sys.argv.append(f"--trainer.default_root_dir={Path.cwd() / 'runs'}")
    try:
        with case.prepare():
            console()
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _stdout_of(case: Case) -> int:
    if case.stdout == "unread":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return os.open("/dev/full" if case.stdout == "full" else os.devnull, os.O_WRONLY)


def _note_connections(event: str, args: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        with open(_CONNECTED, "a") as file:  # noqa: PTH123 (no import in a hook)
            file.write(f"{event} {args[1:]}\n")


# -- what a run left ------------------------------------------------------------------------------


def check_line(run: Run | Ended, statuses: Iterable[int]) -> str:
    """Check that a run failed with one of the statuses and one line at the end; return the line."""
    assert "Traceback (most recent call last)" not in run.text, run.text[-2000:]
    lines = [line for line in run.text.splitlines() if line.startswith("lincorr: ")]
    assert run.ends() in statuses, lines
    assert len(lines) == 1, lines
    assert not run.text.split(lines[0], 1)[1].strip(), "text after the line"
    return lines[0]


def run_folders(root: Path) -> list[Path]:
    """Return the folders of runs below a root."""
    return sorted(path for path in root.glob("*/version_*") if path.is_dir())


def finished(root: Path) -> Path:
    """Return the last finished run below a root."""
    found = [folder for folder in run_folders(root) if (folder / "results.json").exists()]
    assert found, "the run ended without an error and without results.json"
    return found[-1]


def checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints below a folder, that of the most steps at the end."""
    return sorted(root.rglob("step=*.ckpt"), key=lambda path: int(re.findall(r"\d+", path.stem)[0]))


def files_of(folder: Path) -> set[str]:
    """Return the names of a run's files: no leftovers, checkpoints and numbers of events."""
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    return {
        re.sub(r"tfevents.*", "tfevents", name)
        for name in names
        if not _is_leftover(Path(name)) and not name.endswith(".ckpt")
    }


def _is_leftover(path: Path) -> bool:
    return any(part.startswith(".part-") for part in path.parts)


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


def check_files(root: Path, whole: set[str] | None = None) -> None:
    """Check that no file below a root is half-written.

    `whole` has the names of a finished run's files: a run with results.json must have them.
    """
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in _READERS and not _is_leftover(path.relative_to(root)):
            try:
                _READERS[path.suffix](path)
            except Exception as error:
                raise AssertionError(f"{path} is half-written") from error
    for folder in run_folders(root) if whole else []:
        assert not (folder / "results.json").exists() or whole <= files_of(folder)


def check_equal(ours: Path, theirs: Path) -> None:
    """Check that two finished runs have the same results, tables and weights, bit for bit.

    The last checkpoint of a resumed run may be in the folder of the run that it goes on with.
    """
    found = [json.loads((folder / "results.json").read_text()) for folder in (ours, theirs)]
    for one in found:
        for key in _NOT_COMPARED & one.keys():
            del one[key]
    assert found[0] == found[1]
    for path in sorted(theirs.rglob("*")):
        other = ours / path.relative_to(theirs)
        if path.suffix == ".csv":
            assert other.read_bytes() == path.read_bytes(), path.name
        if path.suffix == ".safetensors":
            _check_tensors(load_file(other), load_file(path))
    for last in checkpoints(theirs)[-1:]:
        (*_, own) = (path for path in checkpoints(ours.parent) if path.name == last.name)
        _check_tensors(*(torch.load(p, weights_only=True)["state_dict"] for p in (own, last)))


def _check_tensors(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert not isinstance(value, torch.Tensor) or torch.equal(ours[key], value), key
