"""Peak memory and time of each study on the tiny world.

    python benchmarks/study_memory.py

runs `lincorr` on each config in a process of its own, as it ships; trainings of many minutes
(see `CUT`) are cut short, which does not change their peak. Most of the memory of a small study is
the libraries': the first row is a process that only imports them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
from jsonargparse import auto_cli

from lincorr_lightning.results.table import markdown_table

COMMANDS = {
    "linear_probe": "fit",
    "correlation_matrix": "fit",
    "resilience": "test",
    "source_finetune": "fit",
    "source_finetune_lora": "fit",
    "forecast": "predict",
    "vocabulary_ablation": "fit",
    "token_geometry": "test",
    "knowledge_geometry": "test",
    "pretraining": "fit",
    "formation": "fit",
    "sparse_autoencoders": "fit",
    "feature_flow": "test",
}
CUT = {
    "pretraining": ["--trainer.max_steps=100", "--trainer.limit_val_batches=2"],
    "formation": ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2"],
}


def peak_of(command: Sequence[str]) -> tuple[float, float]:
    """Return the peak resident memory in MiB, and seconds."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # wait4 gives the peak of this process, not that of the largest child so far.
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"`{' '.join(command)}` failed")
    return usage.ru_maxrss / 1024, time.perf_counter() - start


def main(studies: list[str] | None = None, options: list[str] = []) -> None:  # noqa: B006
    """Print the table.

    Args:
        studies: Names of configs; null takes all.
        options: Options added to each command, such as --trainer.max_steps=10.
    """
    print(
        f"{platform.machine()}, {os.environ.get('OMP_NUM_THREADS', 'all')} thread(s), "
        f"torch {torch.__version__}\n"
    )
    peak, seconds = peak_of([sys.executable, "-c", "import lincorr_lightning.lightning_cli"])
    rows = [["(libraries alone)", f"{peak:.0f} MiB", f"{seconds:.0f}"]]
    for study in COMMANDS if studies is None else studies:
        with tempfile.TemporaryDirectory() as folder:
            peak, seconds = peak_of(
                [sys.executable, "-m", "lincorr_lightning", COMMANDS[study], "--config",
                 f"{study}.yaml", "--trainer.default_root_dir", folder,
                 "--trainer.enable_progress_bar", "false",
                 *CUT.get(study, ()), *options]
            )  # fmt: skip
        name = f"{study} (cut short)" if study in CUT else study
        rows.append([name, f"{peak:.0f} MiB", f"{seconds:.0f}"])
    print(markdown_table(("study", "peak memory", "seconds"), rows))


if __name__ == "__main__":
    auto_cli(main)
