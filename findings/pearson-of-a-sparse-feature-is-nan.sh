#!/usr/bin/env bash
# torchmetrics' PearsonCorrCoef is NaN for a feature that fires on less than about 1 of 2,900 tokens, in float32
# (for one that is 0 or 1, by the formula below).
#
# Versions: torch 2.13.0, torchmetrics 1.9.0, scipy 1.17.1.
# One would guess: the correlation, as scipy has it; NaN is for a constant input.
# Seen:
#     feature that fires on 10 of 20000 tokens: variance 0.00048, torchmetrics 0.992, scipy 0.992
#     feature that fires on 5 of 20000 tokens: variance 0.00027, torchmetrics nan, scipy 0.996
#     hidden dimension: variance 1, torchmetrics 0.706, scipy 0.706
#     the same with one massive activation, 300: variance 5.5, torchmetrics nan, scipy 0.295
# The check for "variance close to zero" divides the variance by the square of the largest deviation, and compares with
# the root of float32's epsilon, 3.5e-4. A feature that is 0 or 1 and fires with probability p has p(1 - p) there; so
# does one dimension with a single massive activation, however large its variance.
# Who meets it: whoever correlates features of a sparse autoencoder, or hidden states with massive activations, with a
# label.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 torchmetrics==1.9.0 scipy==1.17.1
venv/bin/python - <<'PYTHON'
import warnings

import numpy as np
import torch
from scipy.stats import pearsonr
from torchmetrics import PearsonCorrCoef

warnings.filterwarnings("ignore")
rng = np.random.default_rng(0)
tokens = 20_000


def compare(name, x, y):
    metric = PearsonCorrCoef()
    for start in range(0, tokens, 1000):
        metric.update(torch.from_numpy(x[start : start + 1000]), torch.from_numpy(y[start : start + 1000]))
    ours, theirs = metric.compute().item(), pearsonr(x.astype(np.float64), y.astype(np.float64)).statistic
    print(f"{name}: variance {x.var():.2g}, torchmetrics {ours:.3f}, scipy {theirs:.3f}")
    return ours, theirs


results = {}
for fires in (10, 5):
    label = np.zeros(tokens, dtype=np.float32)
    label[rng.choice(tokens, fires, replace=False)] = 1
    feature = (label * rng.uniform(0.8, 1.2, tokens)).astype(np.float32)
    results[fires] = compare(f"feature that fires on {fires} of {tokens} tokens", feature, label)
hidden = rng.normal(size=tokens).astype(np.float32)
label = (hidden + rng.normal(size=tokens)).astype(np.float32)
plain = compare("hidden dimension", hidden, label)
hidden[1] = 300.0
massive = compare("the same with one massive activation, 300", hidden, label)

assert abs(results[10][0] - results[10][1]) < 1e-3, "torchmetrics and scipy differ on a denser feature"
assert abs(plain[0] - plain[1]) < 1e-3, "torchmetrics and scipy differ on a plain dimension"
assert np.isnan(results[5][0]) and results[5][1] > 0.9, "the sparse feature has a correlation now"
assert np.isnan(massive[0]) and np.isfinite(massive[1]), "the massive activation has a correlation now"
PYTHON
