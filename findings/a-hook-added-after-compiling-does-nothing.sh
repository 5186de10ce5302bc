#!/usr/bin/env bash
# A forward hook that is registered on a layer after the first call of a `torch.compile`d language model does not run,
# without a word; one that was there at the first call runs, and its removal is noticed.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: the change of the module fails a guard and leads to another compilation; or compiled code ignores
# later changes of hooks both ways, as the comment on `skip_nnmodule_hook_guards` says.
# Seen:
#     first the compiled call: the hook moves the logits by 0.50, those of the compiled model by 0.00; after its
#       removal 0.00
#     first the hook: the hook moves the logits by 0.50, those of the compiled model by 0.50; after its removal 0.00
# Who meets it: whoever compiles a model for speed, takes a baseline, and then steers, ablates or collects with hooks:
# the results are those of the baseline.
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
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
prompt = torch.arange(8)[None]
moved = {}
for first in ("compiled call", "hook"):
    torch._dynamo.reset()
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        plain = lm(prompt).logits
        compiled = torch.compile(lm, backend="eager")
        if first == "compiled call":
            compiled(prompt)
        handle = lm.model.layers[1].register_forward_hook(lambda module, args, output: output + 10.0)
        moved[first] = [(model(prompt).logits - plain).abs().max().item() for model in (lm, compiled)]
        handle.remove()
        moved[first].append((compiled(prompt).logits - plain).abs().max().item())
    print(
        f"first the {first}: the hook moves the logits by {moved[first][0]:.2f}, those of the compiled model by"
        f" {moved[first][1]:.2f}; after its removal {moved[first][2]:.2f}"
    )
assert moved["hook"][1] == moved["hook"][0] > 0.1, "a hook that was there at the first call does not run"
assert moved["hook"][2] == 0, "a removed hook still runs"
assert moved["compiled call"][0] > 0.1 and moved["compiled call"][1] == 0, "a later hook runs now"
PYTHON
