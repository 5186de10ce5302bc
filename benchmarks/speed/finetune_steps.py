"""What the callbacks of a full fine-tune add to its steps.

    python -m benchmarks.speed.finetune_steps --lm FOLDER
    python -m benchmarks.speed.finetune_steps --lm FOLDER --device cuda

runs ``configs/source_finetune.yaml`` with its callbacks and without any, in turns: each edit is
trained from the base weights, all weights at once, and measured after some of its ten steps. The
least of the repeats counts. Rows go to ``benchmarks/results/speed/finetune_steps.csv`` and into
docs/benchmarks.md.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli

from benchmarks import common
from benchmarks.speed.reading import device_name
from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.results.table import Table, column

TIMER = "benchmarks.speed.finetune_steps.StepTimer"


@dataclass(frozen=True)
class StepCost:
    """Seconds of an optimizer step, with what callbacks measure and without."""

    lm: str = column("LM")
    device: str = column()
    edits: int = column(format="d")
    alone: float = column("step alone, s", ".3f")
    measured: float = column("with callbacks, s", ".3f")
    ratio: float = column(format=".2f")


class StepTimer(L.Callback):
    """Takes the time at the end of each step, as the last of the callbacks."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.synchronize()
        self.moments.append(time.perf_counter())

    def seconds(self, n_first: int) -> float:
        """Return the mean seconds of a step after some first ones."""
        return (self.moments[-1] - self.moments[n_first - 1]) / (len(self.moments) - n_first)


def step_seconds(callbacks: str, lm: str, n_edits: int, device: str) -> float:
    """Return the seconds of a step of the config with an option of its callbacks."""
    with tempfile.TemporaryDirectory() as folder:
        command = f"fit --config configs/source_finetune.yaml {callbacks} {common.QUIET}".split()
        command += [f"--model.lm.name_or_path={lm}", f"--data.n_edits={n_edits}"]
        command += [f"--trainer.accelerator={device}", f"--trainer.default_root_dir={folder}"]
        cli = lincorr(command)
    # By its name: as the program, this module is another one than that of the callback.
    timer = next(each for each in cli.trainer.callbacks if type(each).__name__ == "StepTimer")
    return float(timer.seconds(cli.model.hparams["steps_per_edit"]))


def main(lm: str = "tiny-world", n_edits: int = 6, repeats: int = 3, device: str = "cpu") -> None:
    """Measure.

    Args:
        lm: The LM: a folder, hub id or tiny-world.
        n_edits: Number of edits, of which the first warms up: two at least.
        repeats: Number of runs of each.
        device: cpu or cuda.
    """
    ways = f"--trainer.callbacks=[{TIMER}]", f"--trainer.callbacks+={TIMER}"
    turns = [[step_seconds(way, lm, n_edits, device) for way in ways] for _ in range(repeats)]
    alone, measured = map(min, zip(*turns, strict=True))
    row = StepCost(Path(lm).name, device_name(device), n_edits, alone, measured, measured / alone)
    table = common.add_rows(Table.of("finetune_steps", [row]), "lm", "device")
    common.place_tables({"fine-tune steps": common.shown(table)})


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
