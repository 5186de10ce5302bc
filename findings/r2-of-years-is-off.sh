#!/usr/bin/env bash
# torchmetrics' R2Score of targets far from zero (years, Unix times) is wrong in float32, as it subtracts sums of
# squares.
#
# Versions: torch 2.13.0, torchmetrics 1.9.0, scikit-learn 1.9.1.
# One would guess: torchmetrics has its means and variances updated stably (as PearsonCorrCoef does), so R2Score agrees
# with scikit-learn to five digits or so.
# Seen:
#     years 0 to 9: torchmetrics 0.8787, scikit-learn 0.8787
#     years 2010 to 2019: torchmetrics 0.7456, scikit-learn 0.8785
#     years 1000 to 2020: torchmetrics 0.8845, scikit-learn 0.8845
#     days since 1970, of one month: torchmetrics 0.9907, scikit-learn 0.8800
# Who meets it: whoever scores a probe that predicts years or times.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 torchmetrics==1.9.0 scikit-learn==1.9.1
venv/bin/python - <<'PYTHON'
import torch
from sklearn.metrics import r2_score
from torchmetrics import R2Score

torch.manual_seed(0)
n = 100_000


def compare(name, target, noise):
    preds = target + noise * torch.randn(n)
    metric = R2Score()
    for p, t in zip(preds.split(64), target.split(64)):
        metric.update(p, t)
    ours, theirs = metric.compute().item(), r2_score(target.double().numpy(), preds.double().numpy())
    print(f"{name}: torchmetrics {ours:.4f}, scikit-learn {theirs:.4f}")
    return ours, theirs


centred = torch.randint(0, 10, (n,)).float()
small = compare("years 0 to 9", centred, 1.0)
years = compare("years 2010 to 2019", centred + 2010, 1.0)
long = compare("years 1000 to 2020", torch.randint(1000, 2021, (n,)).float(), 100.0)
days = compare("days since 1970, of one month", torch.randint(20_000, 20_030, (n,)).float(), 3.0)
assert abs(small[0] - small[1]) < 1e-4, "R2Score is off for small targets too"
assert abs(long[0] - long[1]) < 1e-3, "R2Score is off where years vary by centuries too"
assert abs(years[0] - years[1]) > 1e-2, "R2Score of years is right now"
assert abs(days[0] - days[1]) > 1e-2, "R2Score of days is right now"
PYTHON
