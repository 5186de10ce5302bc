"""Runs that end at a random moment: no half-written file, and the right numbers afterwards.

In the nightly lane; LINCORR_FAULTS_SEED=N makes other tries.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.launching import CONTEXT, run_program
from tests.small_runs import RESUMED, SMALL_RUNS, keeping, numbers

pytestmark = pytest.mark.nightly

_PATIENCE_S = 90  # a run that takes longer hangs
_END_S = 10  # a run that is ended by a signal may take so long


class Run(NamedTuple):
    """A run, and the file of its stderr."""

    process: Any
    output: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, if the process is still there."""
        if self.process.exitcode is None:
            os.kill(self.process.pid, number)

    def ends(self, patience: float = _PATIENCE_S) -> int:
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
    process = CONTEXT.Process(target=_program, args=(arguments, output), daemon=True)
    process.start()
    return Run(process, output)


def _program(arguments: Sequence[str], output: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(output.parent)
    run_program(arguments, output)


@pytest.fixture(scope="module")
def reference(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a study's uninterrupted run."""

    @cache
    def make(study: str) -> Path:
        if study == "feature flow":
            shutil.copytree(make("SAEs") / "sparse_autoencoders", inputs / "saes")
        root = tmp_path_factory.mktemp("run")
        run = start(SMALL_RUNS[study].command(inputs, root), root / "stderr")
        assert run.ends() == 0, run.text[-2000:]
        (results,) = root.rglob("results.json")
        return results.parent

    return make


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("study", SMALL_RUNS)
def test_interruptions(
    study: str, number: int, inputs: Path, reference: Callable[[str], Path], tmp_path: Path
) -> None:
    """A run that ends at a random moment leaves no half-written file, and goes on from the last."""
    draw = random.Random(f"{os.environ.get('LINCORR_FAULTS_SEED', '0')} {study} {number}")
    whole, root, small = reference(study), tmp_path / "runs", SMALL_RUNS[study]
    more = keeping(tmp_path / "kept") if study in RESUMED else []
    run = start(small.command(inputs, root, *more), tmp_path / "killed")
    time.sleep(draw.uniform(0.2, 2))
    run.kill(number)
    status = run.ends(_END_S)
    assert status in (0, 128 + number)  # it may have been finished already
    if status and number != signal.SIGKILL:
        assert "Traceback (most recent call last)" not in run.text, run.text[-2000:]
        lines = [line for line in run.text.splitlines() if line.startswith("lincorr: ")]
        assert len(lines) == 1 and not run.text.split(lines[0], 1)[1].strip(), run.text
    check_files(tmp_path)
    written = [*tmp_path.glob("kept/*.ckpt"), *root.rglob("interrupted.ckpt")]
    last = max(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    resumed = [f"--ckpt_path={last}"] if last and not list(root.rglob("results.json")) else []
    run = start(small.command(inputs, tmp_path / "again", *resumed), tmp_path / "again.stderr")
    assert run.ends() == 0, run.text[-2000:]
    (results,) = (tmp_path / "again").rglob("results.json")
    assert numbers(results.parent) == numbers(whole)


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
