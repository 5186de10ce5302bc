"""What needs a GPU, in one call that runs unattended: speed, strategies, and studies.

    python -m benchmarks.speed.gpu --lm path/to/checkpoint

It covers each code path that differs by device (docs/many_gpus.md). The parts of ``gpu.yaml`` are
processes of their own; runs are compared with the same ones on the CPU. Rows go to
``benchmarks/results/speed/gpu.csv`` and into docs/benchmarks.md; what fails or does not end in time
is a row that says so.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import numpy as np
import torch
import yaml
from jsonargparse import auto_cli

from benchmarks import common
from lincorr_lightning.results.table import Table, column

PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


@dataclass(frozen=True)
class Part:
    """A process on a GPU, and how far its numbers are from those on the CPU."""

    part: str = column()
    strategy: str = column()
    lm: str = column("LM")
    device: str = column()
    seconds: float | None = column(format=",.0f")
    largest: float | None = column("largest difference from the CPU", ".0e")
    mean: float | None = column("mean difference", ".0e")
    error: str | None = column()


def run(words: Sequence[str], seconds: float) -> tuple[float, str | None]:
    """Run ``python -m`` with some words, and return its seconds, and its error if it fails."""
    start = time.perf_counter()
    # It ends the ranks that the process launched, too, and itself.
    limit = ["timeout", "--signal=KILL", f"{max(seconds, 0.01)}"]
    command = [*limit, sys.executable, "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
    error = None
    if done.returncode:
        error = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode == -SIGKILL:
        error = f"not finished after {seconds:.0f} s"
    return time.perf_counter() - start, error


def numbers_in(value: Any) -> Iterator[float]:
    """Yield the numbers with a fraction within lists and mappings, in their order."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(entry)


def difference(run: Path, reference: Path, keys: Sequence[str]) -> tuple[float, float]:
    """Return how far a run's numbers are from another's: at most, and in the mean."""
    files = [next(folder.rglob("results.json")) for folder in (run, reference)]
    results = [common.read_numbers(file) for file in files]
    own, other = (np.array([*numbers_in([found[key] for key in keys])]) for found in results)
    apart = np.abs(own - other)
    return apart.max(), apart.mean()


def parts(lm: str, seconds: float) -> Iterator[Part]:
    """Measure the parts, and yield their rows."""
    end = time.perf_counter() + seconds
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        values = {"lm": lm, "folder": folder}
        for name, text in PLAN["scripts"].items():
            words = [word.format(**values) for word in shlex.split(text)]
            took, error = run(words, end - time.perf_counter())
            yield Part(name, "one GPU", Path(lm).name, device, took, None, None, error)
        for name, study in PLAN["studies"].items():
            about = Path(lm).name if "{lm}" in study["command"] else "tiny-world"
            for strategy in study["strategies"]:
                text = f"{study['command']} {PLAN['strategies'][strategy]}"
                runs = Path(folder) / re.sub(r"\W+", "_", f"{name} {strategy}")
                words = [word.format(**values) for word in shlex.split(text)]
                words += [common.QUIET, f"--trainer.default_root_dir={runs}"]
                took, error = run(["lincorr_lightning", *words], end - time.perf_counter())
                if strategy == "CPU":
                    reference = None if error else runs
                    continue
                is_known = error is None and reference is not None
                apart = difference(runs, reference, study["numbers"]) if is_known else (None, None)
                yield Part(name, strategy, about, device, took, *apart, error)


def main(lm: str = "tiny-world", seconds: float = 470.0) -> None:
    """Measure all parts.

    Args:
        lm: The LM of the probe and of the edits.
        seconds: Time for all parts together.
    """
    table = Table.of("gpu", parts(lm, seconds), Part)
    table = common.add_rows(table, "part", "strategy", "lm")
    columns = "part strategy lm seconds largest mean"
    text = common.shown(table, columns, "strategy in ['one GPU', 'fsdp', 'states read']")
    common.place_tables({"gpu": text})


if __name__ == "__main__":
    auto_cli(main)
