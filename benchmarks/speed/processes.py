"""A probe on one process and on more, each of one thread: how the time shrinks.

    python -m benchmarks.speed.processes

runs `lincorr fit` on the CPU, once for each number of processes. Start-up, which every
process pays, is shown on its own: it is the time of a run on the fewest possible subjects. All
numbers must equal those of one process to 1e-6.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse import auto_cli

from benchmarks.common import QUIET, Cost, cost_of, markdown_table, read_numbers

# Each half of these subjects has a batch for two processes.
_FEWEST = 80


def probed(n_processes: int, n_subjects: int, lm: str, knowledge: str) -> tuple[Cost, list[Any]]:
    """Return what a run costs, with all of its processes, and its pairs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "lincorr_lightning", "fit", "--config", "linear_probe.yaml",
            "--config", "trainer/ddp_cpu.yaml", f"--trainer.devices={n_processes}",
            f"--trainer.strategy={'ddp' if n_processes > 1 else 'auto'}",
            "--model.lm.name_or_path", lm, "--model.knowledge", knowledge,
            "--model.require_reference", "[]", "--data.n_subjects", str(n_subjects),
            "--data.words_per_subject", "2", "--data.batch_size",
            str(max(20, min(256, n_subjects // (2 * n_processes)))),
            "--trainer.default_root_dir", folder, QUIET,
        ]  # fmt: skip
        cost = cost_of(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        (results,) = Path(folder).rglob("results.json")
        return cost, read_numbers(results)["pairs"]


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
        idle, _ = probed(n, _FEWEST, lm, knowledge)
        whole_run, pairs = probed(n, n_subjects, lm, knowledge)
        busy = whole_run.wall - idle.wall
        alone, whole = alone or busy, whole or pairs
        far = max(
            abs(ours["label_mean"] - theirs["label_mean"])
            for ours, theirs in zip(whole, pairs, strict=True)
        )
        rows.append(
            [str(n), f"{whole_run.wall:.1f} s", f"{idle.wall:.1f} s", f"{busy:.1f} s",
             f"{whole_run.processor - idle.processor:.1f} s", f"{alone / busy:.2f}x", f"{far:.0e}"]
        )  # fmt: skip
    columns = ("processes", "run", "start-up and end", "work", "CPU time of the work", "faster",
               "r differs by")  # fmt: skip
    print(markdown_table(columns, rows))


if __name__ == "__main__":
    auto_cli(main)
