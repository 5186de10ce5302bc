#!/usr/bin/env bash
# A Trainer on a single device logs nothing if the environment has a RANK, LOCAL_RANK or SLURM_PROCID above 0, though it
# says that it is rank 0 of 1 and saves checkpoints.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: RANK counts only for a strategy with several processes, or the run is a rank 1 throughout, that saves
# nothing either.
# Seen:
#     RANK=0: the trainer's rank, processes and is_global_zero: 0 1 True; files: ['.ckpt', '.csv']
#     RANK=1: the trainer's rank, processes and is_global_zero: 0 1 True; files: ['.ckpt']
#     LOCAL_RANK=1: the trainer's rank, processes and is_global_zero: 0 1 True; files: ['.ckpt']
#     SLURM_PROCID=1: the trainer's rank, processes and is_global_zero: 0 1 True; files: ['.ckpt']
# Importing lightning reads RANK, LOCAL_RANK and SLURM_PROCID for what runs on rank 0 only; the strategies with several
# processes set it again, the one for a single device does not.
# Who meets it: whoever starts one probe per worker inside a job of torchrun, Slurm or a cluster that sets RANK.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 lightning==2.6.6
venv/bin/python - <<'PYTHON'
import os
import pathlib
import subprocess
import sys

program = """
import sys, warnings
warnings.filterwarnings("ignore")
import lightning, torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, default_root_dir=sys.argv[1],
    logger=CSVLogger(sys.argv[1]), enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(torch.ones(4, 1), batch_size=1))
print(trainer.global_rank, trainer.world_size, trainer.is_global_zero)
"""


def run(name, rank):
    """Return the rank, processes and is_global_zero that the trainer says, and the kinds of files that it leaves."""
    folder = f"{name}{rank}"
    command = [sys.executable, "-c", program, folder]
    done = subprocess.run(command, env=os.environ | {name: rank}, capture_output=True, text=True, check=True)
    files = sorted(path.suffix for path in pathlib.Path(folder).rglob("*") if path.is_file())
    print(f"{name}={rank}: the trainer's rank, processes and is_global_zero: {done.stdout.strip()}; files: {files}")
    return done.stdout.split(), files


said, files = run("RANK", "0")
assert said == ["0", "1", "True"] and {".ckpt", ".csv"} <= {*files}, "nothing is logged or saved at all"
for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"):
    said, files = run(name, "1")
    assert said == ["0", "1", "True"], "the trainer has another rank"
    assert ".ckpt" in files, "nothing is saved"
    assert ".csv" not in files, f"a left-over {name} logs now"
PYTHON
