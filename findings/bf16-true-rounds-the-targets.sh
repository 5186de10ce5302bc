#!/usr/bin/env bash
# Lightning's `precision="bf16-true"` rounds all floating-point tensors of a batch, also those that no layer gets: a
# regression on years trains on, and is scored against, years rounded to multiples of 8.
#
# Versions: torch 2.13.0, lightning 2.6.6.
# One would guess: the precision is that of the weights and of what the layers compute; targets, sample weights and
# statistics in the batch arrive as the data loader made them.
# Seen:
#     years in the data:       [1789, 1815, 1914, 1969, 1987, 2026]
#     years, bf16-mixed:       [1789, 1815, 1914, 1969, 1987, 2026]
#     years, bf16-true:        [1792, 1816, 1912, 1968, 1984, 2024]
#     root mean square error of a probe that knows each year, as measured in bf16-true: 2.2 years
# Who meets it: whoever fits a probe, a value head or sample weights beside a language model in bfloat16 on real numbers
# (years, coordinates, populations, log-probabilities of a teacher).
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

warnings.filterwarnings("ignore")
years = torch.tensor([1789.0, 1815.0, 1914.0, 1969.0, 1987.0, 2026.0])
data = [{"hidden": torch.randn(8), "year": year, "row": i} for i, year in enumerate(years)]


class Probe(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.seen.update(zip(batch["row"].tolist(), batch["year"].tolist()))
        return (self.layer(batch["hidden"].to(self.dtype)).squeeze(1) - batch["year"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


seen = {}
for precision in ("bf16-mixed", "bf16-true"):
    probe = Probe()
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision=precision,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(probe, DataLoader(data, batch_size=3))
    seen[precision] = torch.tensor([probe.seen[i] for i in range(len(years))])
print("years in the data:      ", years.int().tolist())
for precision, values in seen.items():
    print(f"years, {precision}:".ljust(24), values.int().tolist())
error = (seen["bf16-true"] - years).square().mean().sqrt().item()
print(f"root mean square error of a probe that knows each year, as measured in bf16-true: {error:.1f} years")
assert torch.equal(seen["bf16-mixed"], years), "bf16-mixed changes the targets"
assert error > 1, "bf16-true no longer rounds the targets"
PYTHON
