#!/usr/bin/env bash
# A torchmetrics metric holds the default of each state as a copy beside the state, moves it to the device too, and
# stores it in full if it was broadcast, so that a matrix of second moments takes twice its memory.
#
# Versions: torch 2.13.0, torchmetrics 1.9.0.
# One would guess: the default is one zero, or is made anew by `reset()`; the metric takes the memory of its state.
# Seen:
#     a 2048 x 2048 state in float32: 16 MiB; broadcast zero: 4 bytes
#     held by a metric: 32 MiB; with the broadcast zero as default: 32 MiB
#     held by ConfusionMatrix of 2048 classes (int64): 64 MiB, its state 32 MiB
#     device of the default after .to('meta'): meta
# Who meets it: whoever accumulates covariances, scatter matrices or confusion over a vocabulary in a metric: 16,384
# squared in float32 are 1 GiB on the device, and 1 GiB more.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 torchmetrics==1.9.0
venv/bin/python - <<'PYTHON'
import torch
from torchmetrics import ConfusionMatrix, Metric

k = 2048


class SecondMoments(Metric):
    def __init__(self, default):
        super().__init__()
        self.add_state("total", default, dist_reduce_fx="sum")

    def update(self, hidden):
        self.total += hidden.T @ hidden

    def compute(self):
        return self.total


def held(metric):
    tensors = [*metric._defaults.values(), *(getattr(metric, name) for name in metric._defaults)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()) / 2**20


one = torch.zeros(()).expand(k, k)
print(
    f"a {k} x {k} state in float32: {k * k * 4 / 2**20:.0f} MiB; broadcast zero: {one.untyped_storage().nbytes()} bytes"
)
full, broad = held(SecondMoments(torch.zeros(k, k))), held(SecondMoments(one))
print(f"held by a metric: {full:.0f} MiB; with the broadcast zero as default: {broad:.0f} MiB")
confusion = held(ConfusionMatrix(task="multiclass", num_classes=k))
print(f"held by ConfusionMatrix of {k} classes (int64): {confusion:.0f} MiB, its state {k * k * 8 / 2**20:.0f} MiB")
moved = SecondMoments(torch.zeros(k, k)).to("meta")
print(f"device of the default after .to('meta'): {moved._defaults['total'].device}")
assert full == broad == 2 * k * k * 4 / 2**20, "a metric no longer holds its state twice"
PYTHON
