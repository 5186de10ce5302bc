"""Writes what `lincorr predict` finds."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.distributed import gather
from lincorr_lightning.io import atomic_write, write_csv
from lincorr_lightning.results.run_folder import run_folder


class PredictionWriter(BasePredictionWriter):
    """Writes predicted logits of every pair: all of them, and the highest as a table.

    For any LightningModule whose ``predict_step`` returns a dict with ``inputs`` (list of str),
    ``first`` (position of the first input), ``logits`` (name to ``(n_subjects, n_labels)``) and
    ``labels`` (name to list of str). ``predictions.safetensors`` holds one tensor a name, its rows
    in the order of the inputs; ``tables/predictions.csv`` one row an input and name.

    Args:
        top: How many of the highest labels the table shows.
    """

    def __init__(self, top: int = 3) -> None:
        super().__init__(write_interval="epoch")
        self.top = top

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Agree on the run's folder: processes do so by a broadcast, so all of them must ask."""
        super().setup(trainer, pl_module, stage)
        run_folder(trainer)

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Any,
        batch_indices: Any,
    ) -> None:
        """Gather the predictions of all processes and write them on the first."""
        del pl_module, batch_indices
        own: list[dict[str, Any]] = list(predictions)
        everybodys = [part for parts in gather(own) for part in parts]
        # A study that writes its predictions itself returns none.
        told = (part for part in everybodys if part and part["inputs"])
        parts = sorted(told, key=lambda part: part["first"])
        if not trainer.is_global_zero or not parts:
            return
        folder = run_folder(trainer)
        names = list(parts[0]["logits"])
        logits = {name: torch.cat([part["logits"][name] for part in parts]) for name in names}
        with atomic_write(folder / "predictions.safetensors") as path:
            save_file(logits, path)
        inputs = [x for part in parts for x in part["inputs"]]
        columns = ["x", "pair"]
        for rank in range(1, self.top + 1):
            columns += [f"label_{rank}", f"logit_{rank}"]
        rows = [
            [x, name, *self._highest(logits[name][i], parts[0]["labels"][name])]
            for i, x in enumerate(inputs)
            for name in names
        ]
        write_csv(folder / "tables" / "predictions.csv", columns, rows)

    def _highest(self, logits: Tensor, labels: list[str]) -> list[Any]:
        top = logits.topk(min(self.top, len(labels)))
        cells = [c for v, i in zip(*map(Tensor.tolist, top), strict=True) for c in (labels[i], v)]
        return cells + [None] * (2 * self.top - len(cells))
