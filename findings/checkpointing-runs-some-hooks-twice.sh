#!/usr/bin/env bash
# With gradient checkpointing, a forward hook runs once on a decoder layer and on the last projection of its MLP, and
# twice on its other modules.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: twice on each module inside a layer, since the backward pass computes the layer again; or on the
# layer too.
# Seen:
#     input_layernorm: 1 without, 2 with checkpointing
#     self_attn.q_proj: 1 without, 2 with checkpointing
#     self_attn.k_proj: 1 without, 2 with checkpointing
#     self_attn.v_proj: 1 without, 2 with checkpointing
#     self_attn.o_proj: 1 without, 2 with checkpointing
#     self_attn: 1 without, 2 with checkpointing
#     post_attention_layernorm: 1 without, 2 with checkpointing
#     mlp.gate_proj: 1 without, 2 with checkpointing
#     mlp.act_fn: 1 without, 2 with checkpointing
#     mlp.up_proj: 1 without, 2 with checkpointing
#     mlp.down_proj: 1 without, 1 with checkpointing
#     mlp: 1 without, 1 with checkpointing
#     the layer: 1 without, 1 with checkpointing
# transformers 5 checkpoints a layer's `forward`, so that hooks on the layer stay outside, and torch stops the second
# computation as soon as it has the last tensor it needs, inside of the last projection.
# Who meets it: whoever collects activations by hooks in lists, counts, or adds noise in a hook, while training: lists
# of modules of one layer no longer match.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
from collections import Counter

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
runs = {}
for checkpointing in (False, True):
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config).train()
    if checkpointing:
        lm.gradient_checkpointing_enable()
    count = Counter()
    for name, module in lm.model.layers[0].named_modules():
        module.register_forward_hook(lambda module, args, output, name=name: count.update([name or "the layer"]))
    lm(prompt, labels=prompt).loss.backward()
    runs[checkpointing] = count
for name in runs[True]:
    print(f"{name}: {runs[False][name]} without, {runs[True][name]} with checkpointing")
once = sorted(name for name, n in runs[True].items() if n == 1)
assert set(runs[False].values()) == {1}, "hooks run more than once without checkpointing"
assert once == ["mlp", "mlp.down_proj", "the layer"], f"now these hooks run once: {once}"
PYTHON
