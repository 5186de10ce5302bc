#!/usr/bin/env bash
# Lightning's epoch mean of a value logged per prompt is weighted by the prompts' lengths if a batch is one prompt of
# one-dimensional tensors, without a warning.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: with `batch_size=None`, each batch counts once, so that the logged epoch mean is the mean of the
# values.
# Seen:
#     right answers: [1.0, 1.0, 1.0, 0.0], mean 0.75
#     logged accuracy: 0.090; warnings about the batch size: 0
# The weight is the first dimension of the first tensor in the batch: here the number of tokens.
# Who meets it: whoever evaluates prompts of various lengths one by one, without padding.
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
from torch.utils.data import DataLoader

prompts = [
    {"input_ids": torch.zeros(length, dtype=torch.long), "attention_mask": torch.ones(length, dtype=torch.long)}
    for length in (2, 3, 4, 91)
]
correct = [1.0, 1.0, 1.0, 0.0]


class Module(lightning.LightningModule):
    def validation_step(self, batch, batch_idx):
        self.log("accuracy", correct[batch_idx])


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (result,) = trainer.validate(Module(), DataLoader(prompts, batch_size=None), verbose=False)
about = [str(w.message) for w in caught if "batch_size" in str(w.message)]
mean = sum(correct) / len(correct)
print(f"right answers: {correct}, mean {mean}")
print(f"logged accuracy: {result['accuracy']:.3f}; warnings about the batch size: {len(about)}")
assert not about, "there is a warning now"
assert abs(result["accuracy"] - 9 / 100) < 1e-6, "the prompts' lengths are no longer the weights"
PYTHON
