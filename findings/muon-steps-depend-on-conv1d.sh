#!/usr/bin/env bash
# torch's Muon takes other steps for a GPT-2 MLP, whose weights are Conv1D, than for the same layers as `nn.Linear`:
# half of them where the layer widens, twice where it narrows.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: the update, an orthogonalized momentum, only transposes with the weight, so it is the same model.
# Seen:
#     a layer that widens 64 to 256, SGD: Conv1D's step is 1.00 times that of nn.Linear, cosine 1.000
#     a layer that widens 64 to 256, Muon: Conv1D's step is 0.50 times that of nn.Linear, cosine 1.000
#     a layer that narrows 256 to 64, SGD: Conv1D's step is 1.00 times that of nn.Linear, cosine 1.000
#     a layer that narrows 256 to 64, Muon: Conv1D's step is 2.00 times that of nn.Linear, cosine 1.000
# The learning rate is multiplied by sqrt(max(1, rows / columns)), which takes the weight for that of an `nn.Linear`.
# Who meets it: whoever trains GPT-2 with Muon, or compares it with the same model in another code.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from transformers.pytorch_utils import Conv1D

torch.manual_seed(0)
ratios = {}
for name, (width_in, width_out) in {"widens 64 to 256": (64, 256), "narrows 256 to 64": (256, 64)}.items():
    x, target = torch.randn(512, width_in), torch.randn(512, width_out)
    conv = Conv1D(width_out, width_in)
    start = conv.weight.detach().clone()
    for optimizer, options in ((torch.optim.SGD, {}), (torch.optim.Muon, {"weight_decay": 0.0})):
        linear = torch.nn.Linear(width_in, width_out)
        with torch.no_grad():
            conv.weight.copy_(start)
            linear.weight.copy_(start.T)
            linear.bias.copy_(conv.bias)
        conv.zero_grad()
        for layer in (conv, linear):
            (layer(x) - target).square().mean().backward()
            optimizer([layer.weight], lr=0.02, **options).step()
        steps = [conv.weight.detach().T - start.T, linear.weight.detach() - start.T]
        cosine = torch.cosine_similarity(*(step.flatten() for step in steps), dim=0).item()
        ratio = ratios[name, optimizer.__name__] = (steps[0].norm() / steps[1].norm()).item()
        print(
            f"a layer that {name}, {optimizer.__name__}: Conv1D's step is {ratio:.2f} times that of nn.Linear,"
            f" cosine {cosine:.3f}"
        )
for (name, optimizer), ratio in ratios.items():
    expected = 1.0 if optimizer == "SGD" else 0.5 if name.startswith("widens") else 2.0
    assert abs(ratio - expected) < 0.02, f"the ratio of the steps is now {ratio:.2f} ({optimizer}, {name})"
PYTHON
