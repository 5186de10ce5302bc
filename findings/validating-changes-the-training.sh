#!/usr/bin/env bash
# Validating changes the weights that training gives, though the validation draws no random number: each `iter()` of a
# DataLoader takes a number from torch's global generator, also without shuffling and without workers.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: a validation loop in eval mode over an unshuffled loader leaves the training as it is, so that runs
# with and without validation, or with another `val_check_interval`, give the same weights from the same seed.
# Seen:
#     iter() of an unshuffled loader moves the global generator: True
#     same weights, run again:                          True
#     same weights with and without the sanity check:   True
#     same weights with and without validation:         False
#     same with validation each epoch and each half:    False
#     same with and without validation, dropout of 0:   True
# The sanity check before the training is isolated from the generator; the validations are not.
# Who meets it: whoever compares runs of one seed that validate differently, with dropout, LoRA dropout or a shuffled
# training loader.
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
data = TensorDataset(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))

torch.manual_seed(0)
before = torch.get_rng_state()
iter(DataLoader(data, shuffle=False, num_workers=0))
print("iter() of an unshuffled loader moves the global generator:", not torch.equal(before, torch.get_rng_state()))


class Module(lightning.LightningModule):
    def __init__(self, dropout):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.layers(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def weights(dropout, **options):
    lightning.seed_everything(0, verbose=False)
    module = Module(dropout)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def same(dropout, a, b):
    return torch.equal(weights(dropout, **a), weights(dropout, **b))


without = {"limit_val_batches": 0}
print("same weights, run again:                         ", repeat := same(0.1, {}, {}))
print("same weights with and without the sanity check:  ", sanity := same(0.1, {}, {"num_sanity_val_steps": 0}))
print("same weights with and without validation:        ", validation := same(0.1, {}, without))
print("same with validation each epoch and each half:   ", often := same(0.1, {}, {"val_check_interval": 0.5}))
print("same with and without validation, dropout of 0:  ", plain := same(0.0, {}, without))
assert repeat and sanity and plain, "the runs differ for another reason"
assert not validation and not often, "validating no longer changes the training"
PYTHON
