#!/usr/bin/env bash
# A run that goes on from a checkpoint of the last step of an epoch calls neither `on_train_epoch_end` of that epoch nor
# `on_train_epoch_start` of the next one, though both were still to come when the checkpoint was written.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: whatever the step of the checkpoint, a resumed run calls the hooks that the uninterrupted one had
# left; what a module does at the start of each epoch, such as resetting a metric, happens at the start of each epoch.
# Seen (epochs of three steps):
#     whole run:   start 0, 0, 1, 2, end 0, start 1, 0, 1, 2, end 1
#     from step 1: 1, 2, end 0, start 1, 0, 1, 2, end 1
#     from step 2: 2, end 0, start 1, 0, 1, 2, end 1
#     from step 3: 0, 1, 2, end 1
#     from step 4: 1, 2, end 1
# Schedulers by epoch are stepped all the same.
# Who meets it: whoever keeps checkpoints by steps, and resets or reads sums of an epoch in these hooks: the first epoch
# after a resume then has the numbers of two.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 lightning==2.6.6
venv/bin/python - <<'PYTHON'
import logging
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def on_train_epoch_start(self):
        self.seen.append(f"start {self.current_epoch}")

    def training_step(self, batch, batch_idx):
        self.seen.append(str(batch_idx))
        return self.layer(batch).sum()

    def on_train_epoch_end(self):
        self.seen.append(f"end {self.current_epoch}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(path=None):
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint("kept", "{step}", every_n_train_steps=1, save_top_k=-1)],
    )
    trainer.fit(module, DataLoader(torch.ones(3, 1), batch_size=1), ckpt_path=path)
    return module.seen


whole = fit()
print("whole run:  ", ", ".join(whole))
rest = {}
for step in (1, 2, 3, 4):
    rest[step] = fit(f"kept/step={step}.ckpt")
    print(f"from step {step}:", ", ".join(rest[step]))
    left = whole[-len(rest[step]) :]
    assert rest[step] == left, "a resumed run calls something else"
assert {"end 0", "start 1"} <= {*rest[1]} & {*rest[2]}, "hooks are lost within an epoch too"
assert not {"end 0", "start 1"} & {*rest[3]}, "hooks around the end of an epoch are called now"
PYTHON
