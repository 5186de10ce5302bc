"""What the callbacks cost: time per training step of the tiny world.

    python -m benchmarks.speed.watching

A plain LightningModule trains the LM on eight edits per step, without callbacks and with each of
them at its defaults. What a callback does once, before the first step, is not counted. The fastest
of several runs is shown.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor

from benchmarks.common import markdown_table
from lincorr_lightning import LanguageModel
from lincorr_lightning.callbacks import Generalization, GradientCorrelation, Resilience
from lincorr_lightning.finetune import EditBatch, EditsDataModule
from lincorr_lightning.finetune.batches import answer_losses


class Plain(L.LightningModule):
    """A fine-tune without code for the callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LanguageModel.from_pretrained("tiny-world")
        self.model = self.lm.model
        self.model.requires_grad_(True)
        self.times: list[float] = []

    def training_step(self, batch: EditBatch, batch_idx: int) -> Tensor:
        """Return the mean cross-entropy of the answers."""
        del batch_idx
        self.times.append(time.perf_counter())
        return answer_losses(self.model, batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-5)


def seconds_per_step(callbacks: Sequence[L.Callback], steps: int) -> float:
    """Return the mean time from one step to the next, over the second half of the steps."""
    module = Plain()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, datamodule=EditsDataModule(module.lm, n_edits=64))
    later = module.times[steps // 2 :]
    return (later[-1] - later[0]) / (len(later) - 1)


def main(steps: int = 200, repeats: int = 3) -> None:
    """Print the table.

    Args:
        steps: Number of steps of each run.
        repeats: Number of runs per row.
    """
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    callbacks: dict[str, Any] = {
        "none": list,
        "GradientCorrelation": lambda: [GradientCorrelation()],
        "Generalization": lambda: [Generalization()],
        "Resilience (every 10 steps)": lambda: [Resilience()],
        "all three": lambda: [GradientCorrelation(), Generalization(), Resilience()],
        "all three, every_n_steps 10": lambda: [
            GradientCorrelation(every_n_steps=10),
            Generalization(every_n_steps=10),
            Resilience(every_n_steps=10),
        ],
    }
    rows, bare = [], 0.0
    for name, make in callbacks.items():
        seconds = min(seconds_per_step(make(), steps) for _ in range(repeats))
        bare = bare or seconds
        rows.append([name, f"{1000 * seconds:.1f} ms", f"{seconds / bare:.2f}x"])
    print(markdown_table(("callbacks", "step", "relative to none"), rows))


if __name__ == "__main__":
    auto_cli(main)
