#!/usr/bin/env bash
# Whether `hidden_states` of transformers show what a forward hook on a layer adds depends on whether the model was
# called with `output_hidden_states=True` before the hook was registered; the logits do not.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: `hidden_states[i + 1]` is what layer i hands on, so it contains what a hook on layer i adds.
# Seen:
#     hidden_states[1] moved by the hook on layer 1: fresh model 0.00, model that gave hidden states before 0.00
#     hidden_states[2] moved by the hook on layer 1: fresh model 10.00, model that gave hidden states before 0.00
#     hidden_states[3] moved by the hook on layer 1: fresh model 10.00, model that gave hidden states before 10.00
#     same logits: True
# The first such call registers permanent hooks that collect the states. Hooks run in order of registration, so a
# steering hook that comes later changes what the next layer gets and not what is collected.
# Who meets it: whoever takes hidden states without and then with steering, ablation or patching in one process.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
prompt = torch.arange(8)[None]


@torch.no_grad()
def run(look_first, steer):
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config).eval()
    if look_first:
        lm(prompt, output_hidden_states=True)
    if steer:
        lm.model.layers[1].register_forward_hook(lambda module, args, output: output + 10.0)
    return lm(prompt, output_hidden_states=True)


plain = run(look_first=False, steer=False)
fresh = run(look_first=False, steer=True)
used = run(look_first=True, steer=True)
for i in range(1, 4):
    print(
        f"hidden_states[{i}] moved by the hook on layer 1:"
        f" fresh model {(fresh.hidden_states[i] - plain.hidden_states[i]).abs().mean():.2f},"
        f" model that gave hidden states before {(used.hidden_states[i] - plain.hidden_states[i]).abs().mean():.2f}"
    )
print(f"same logits: {torch.equal(fresh.logits, used.logits)}")
assert torch.equal(fresh.logits, used.logits), "the hook acts differently on the logits"
assert torch.allclose(fresh.hidden_states[2] - plain.hidden_states[2], torch.tensor(10.0)), (
    "a fresh model misses the hook"
)
assert torch.equal(used.hidden_states[2], plain.hidden_states[2]), "hidden states now contain the hook of a used model"
PYTHON
