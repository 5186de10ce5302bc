"""Peak memory of a probe against the number of subjects: the statistics do not grow with it.

    python benchmarks/memory.py

runs `lincorr fit` once per number of subjects, each in a process of its own, and prints a table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jsonargparse import auto_cli


def peak_of(n_subjects: int, lm: str, knowledge: str) -> tuple[float, float, int]:
    """Return the peak resident memory in MiB, seconds, and the number of subjects used."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "lincorr_lightning", "fit", "--config", "linear_probe.yaml",
            "--model.lm.name_or_path", lm, "--model.knowledge", knowledge,
            "--model.require_reference", "[]", "--data.n_subjects", str(n_subjects),
            "--data.words_per_subject", "2", "--trainer.default_root_dir", folder,
            "--trainer.enable_progress_bar", "false",
        ]  # fmt: skip
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # wait4 gives the peak of this process, not that of the largest child so far.
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"`{' '.join(command)}` failed")
        (results,) = Path(folder).rglob("results.json")
        used = json.loads(results.read_text(encoding="utf-8"))
    return usage.ru_maxrss / 1024, seconds, used["n_fit"] + used["n_test"]


def main(
    n_subjects: tuple[int, ...] = (10_000, 100_000),
    lm: str = "tiny-world",
    knowledge: str = "[city, country]",
) -> None:
    """Measure.

    Args:
        n_subjects: Numbers of subjects.
        lm: The LM, a folder, hub id or tiny-world.
        knowledge: Kinds of knowledge that are probed.
    """
    print(f"{lm}, {knowledge}, subjects of two vocabulary strings\n")
    print("| subjects | peak memory | seconds |")
    print("|---:|---:|---:|")
    for n in n_subjects:
        peak, seconds, used = peak_of(n, lm, knowledge)
        print(f"| {used:,} | {peak:.0f} MiB | {seconds:.0f} |")


if __name__ == "__main__":
    auto_cli(main)
