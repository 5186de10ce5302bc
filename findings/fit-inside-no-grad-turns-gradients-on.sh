#!/usr/bin/env bash
# `Trainer.fit` inside `torch.no_grad()` trains, and leaves gradients enabled for the rest of the block.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: fit fails there, since the loss needs a gradient; or it enables gradients for itself only.
# Seen:
#     hidden states before fit, inside no_grad: requires_grad=False
#     the probe was trained: True
#     gradients enabled after fit, still inside no_grad: True
#     hidden states after fit, inside no_grad: requires_grad=True
# Who meets it: whoever extracts hidden states in a function under `@torch.no_grad()` and fits a probe per layer in it:
# from the second layer on, each forward pass of the language model keeps its graph, and memory grows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 lightning==2.6.6
venv/bin/python - <<'PYTHON'
import warnings

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
lm = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))


class Probe(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]).squeeze(1) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(probe, hidden):
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(probe, DataLoader(TensorDataset(hidden, torch.ones(len(hidden))), batch_size=4))


with torch.no_grad():
    hidden = lm(torch.randn(16, 8))
    first = hidden.requires_grad
    probe = Probe()
    start = probe.layer.weight.clone()
    fit(probe, hidden)
    moved = not torch.equal(start, probe.layer.weight)
    enabled = torch.is_grad_enabled()
    second = lm(torch.randn(16, 8)).requires_grad
print(f"hidden states before fit, inside no_grad: requires_grad={first}")
print(f"the probe was trained: {moved}")
print(f"gradients enabled after fit, still inside no_grad: {enabled}")
print(f"hidden states after fit, inside no_grad: requires_grad={second}")
assert not first and moved, "fit inside no_grad no longer trains"
assert enabled and second, "fit restores the grad mode now"
PYTHON
