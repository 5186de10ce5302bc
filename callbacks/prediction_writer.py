"""Writes what `lincorr predict` finds."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.distributed import gather
from lincorr_lightning.io import atomic_write, write_csv
from lincorr_lightning.results.console import table_text
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.results.table import Table
from lincorr_lightning.terminal import write_out

_SHOWN = 10
_TOP = 3  #: Highest labels of each subject in the table.
_CAPTION = "The target labels with the highest predicted logits"


class PredictionWriter(BasePredictionWriter):
    """Writes the predicted logits of every pair: all of them, and the highest as a table.

    For any LightningModule whose ``predict_step`` returns a dict with ``subjects`` (list of str),
    ``first`` (position of the first of them in the data), ``logits`` (pair -> ``(n_subjects,
    n_labels)``) and ``labels`` (pair -> list of str). ``predictions.safetensors`` has a tensor per
    pair, with rows in the order of the data; ``tables/predictions.csv`` a row per subject and pair.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Choose the run's folder, which is a collective call."""
        super().setup(trainer, pl_module, stage)
        if not is_dry_run(trainer):
            run_folder(trainer)

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Any, *_: Any
    ) -> None:
        batches = [batch for part in gather(list(predictions)) for batch in part]
        # A study that writes its predictions itself returns empty ones.
        filled = (batch for batch in batches if batch and batch["subjects"])
        parts: list[dict[str, Any]] = sorted(filled, key=lambda batch: batch["first"])
        if not trainer.is_global_zero or not parts or is_dry_run(trainer):
            return
        folder = run_folder(trainer)
        pairs = list(parts[0]["logits"])
        logits = {pair: torch.cat([part["logits"][pair] for part in parts]) for pair in pairs}
        with atomic_write(folder / "predictions.safetensors") as path:
            save_file(logits, path)
        subjects = [subject for part in parts for subject in part["subjects"]]
        numbered = [f"{kind}_{n + 1}" for n in range(_TOP) for kind in ("label", "logit")]
        rows = [
            [subject, pair, *self._highest(logits[pair][i], parts[0]["labels"][pair])]
            for i, subject in enumerate(subjects)
            for pair in pairs
        ]
        columns = ["subject", "pair", *numbered]
        path = folder / "tables" / "predictions.csv"
        write_csv(path, columns, rows)
        formats = dict.fromkeys(numbered[1::2], ".2f")
        note = f"The first {min(_SHOWN, len(rows))} of {len(rows):,} rows."
        first = [row[:6] for row in rows[:_SHOWN]]  # two labels, with which it fits a console
        table = Table.of("predictions", first, columns[:6], _CAPTION, note, formats=formats)
        write_out(f"{table_text([table])}All rows:    {path}\n\n")

    def _highest(self, logits: Tensor, labels: list[str]) -> list[Any]:
        top = logits.topk(min(_TOP, len(labels)))
        cells = [c for v, i in zip(*map(Tensor.tolist, top), strict=True) for c in (labels[i], v)]
        return cells + [None] * (2 * _TOP - len(cells))
