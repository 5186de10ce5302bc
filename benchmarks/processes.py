"""A probe on one process and on more, each of one thread: how the time shrinks.

    python benchmarks/processes.py

runs `lincorr fit` on the CPU, once for each number of processes. Start-up, which every
process pays, is shown on its own: it is the time of a run on the fewest possible subjects. All
numbers must equal those of one process to 1e-6.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli

from lincorr_lightning.results.table import markdown_table

# Each half of these subjects has a batch for two processes.
_FEWEST = 80


def probed(
    n_processes: int, n_subjects: int, lm: str, knowledge: str
) -> tuple[float, float, list[Any]]:
    """Return the seconds of a run, the CPU seconds of its processes, and its pairs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "lincorr_lightning", "fit", "--config", "linear_probe.yaml",
            "--config", "trainer/ddp_cpu.yaml", f"--trainer.devices={n_processes}",
            f"--trainer.strategy={'ddp' if n_processes > 1 else 'auto'}",
            "--model.lm.name_or_path", lm, "--model.knowledge", knowledge,
            "--model.require_reference", "[]", "--data.n_subjects", str(n_subjects),
            "--data.words_per_subject", "2", "--data.batch_size",
            str(max(20, min(256, n_subjects // (2 * n_processes)))),
            "--trainer.default_root_dir", folder, "--trainer.enable_progress_bar", "false",
        ]  # fmt: skip
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        seconds = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if done.returncode:
            raise SystemExit(f"`{' '.join(command)}` failed:\n{done.stderr}")
        (results,) = Path(folder).rglob("results.json")
        return seconds, busy, json.loads(results.read_text(encoding="utf-8"))["pairs"]


def main(
    n_processes: tuple[int, ...] = (1, 2),
    n_subjects: int = 100_000,
    lm: str = "tiny-world",
    knowledge: str = "[city, country, continent, language]",
) -> None:
    """Print the table.

    Args:
        n_processes: Numbers of processes; 1 must be the first.
        n_subjects: Number of subjects.
        lm: The LM, a folder, hub id or tiny-world.
        knowledge: Kinds of knowledge that are probed.
    """
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, one thread per process, "
        f"torch {torch.__version__}; {lm}, {knowledge}, {n_subjects:,} subjects\n"
    )
    rows, alone, whole = [], 0.0, []
    for n in n_processes:
        idle, idle_processor, _ = probed(n, _FEWEST, lm, knowledge)
        seconds, processor, pairs = probed(n, n_subjects, lm, knowledge)
        busy = seconds - idle
        alone, whole = alone or busy, whole or pairs
        far = max(
            abs(ours["label_mean"] - theirs["label_mean"])
            for ours, theirs in zip(whole, pairs, strict=True)
        )
        rows.append(
            [str(n), f"{seconds:.1f} s", f"{idle:.1f} s", f"{busy:.1f} s",
             f"{processor - idle_processor:.1f} s", f"{alone / busy:.2f}x",
             f"{far:.0e}"]
        )  # fmt: skip
    names = (
        "processes",
        "run",
        "start-up and end",
        "work",
        "CPU time of the work",
        "faster",
        "r differs by",
    )
    print(markdown_table(names, rows))


if __name__ == "__main__":
    auto_cli(main)
