#!/usr/bin/env bash
# Python floats that pass through Lightning's `self.log` reach the logger in float32: Unix times move in steps of 128
# seconds, and a count of a billion tokens in steps of 64.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: a Python float reaches a CSV file as it is.
# Seen:
#     seconds between steps, written directly:   [30, 30, 30, 30, 30]
#     seconds between steps, through self.log:   [0, 0, 0, 0, 128]
#     tokens between steps (33), through self.log: [64, 0, 64, 0, 64]
# `self.logger.log_metrics` keeps them.
# Who meets it: whoever logs tokens seen or times of a long run, and computes throughput from the differences.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 lightning==2.6.6
venv/bin/python - <<'PYTHON'
import csv
import pathlib
import warnings

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        self.log_dict({"time": 1_795_000_000.0 + 30 * batch_idx, "tokens": 1_000_000_001.0 + 33 * batch_idx})
        self.logger.log_metrics({"exact_time": 1_795_000_000.0 + 30 * batch_idx}, step=batch_idx)
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    log_every_n_steps=1,
    logger=CSVLogger("logs"),
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(torch.ones(6, 1), batch_size=1))
rows = list(csv.DictReader(pathlib.Path("logs/lightning_logs/version_0/metrics.csv").open()))


def column(name):
    return [float(row[name]) for row in rows if row.get(name)]


def steps(values):
    return [round(b - a) for a, b in zip(values, values[1:])]


print("seconds between steps, written directly:  ", exact := steps(column("exact_time")))
print("seconds between steps, through self.log:  ", times := steps(column("time")))
print("tokens between steps (33), through self.log:", tokens := steps(column("tokens")))
assert exact == [30] * 5, "the logger rounds"
assert set(times) <= {0, 128} and 128 in times, "self.log no longer rounds times to float32"
assert set(tokens) <= {0, 64} and 64 in tokens, "self.log no longer rounds counts to float32"
PYTHON
