#!/usr/bin/env bash
# An in-place edit of a layer that `device_map` put on the disk runs without an error and changes nothing.
#
# Versions: torch 2.13.0, transformers 5.24.0, accelerate 1.15.0.
# One would guess: the edit acts, since accelerate moves weights both ways; or an error says that the weight is
# elsewhere.
# Seen:
#     layer 1, disk (its weight is on meta): the edit moves the logits by 0.000
#     layer 0, cpu (its weight is on cpu): the edit moves the logits by 0.883
# The weight is a meta tensor between calls, and operations on meta tensors have shapes only; the next forward pass
# reads the file again.
# Who meets it: whoever edits or ablates weights of a model that `device_map="auto"` did not fit into the memory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
torch.manual_seed(0)
LlamaForCausalLM(config).save_pretrained("lm")
prompt = torch.randint(0, 64, (1, 8))
device_map = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}
lm = LlamaForCausalLM.from_pretrained("lm", device_map=device_map, offload_folder="offload").eval()
moved = {}
for layer in (1, 0):
    weight, place = lm.model.layers[layer].mlp.down_proj.weight, device_map[f"model.layers.{layer}"]
    with torch.no_grad():
        before = lm(prompt).logits
        weight += torch.outer(torch.ones(64), torch.ones(128))
        weight.mul_(3)
        moved[layer] = (lm(prompt).logits - before).abs().max().item()
    print(f"layer {layer}, {place} (its weight is on {weight.device}): the edit moves the logits by {moved[layer]:.3f}")
assert moved[0] > 0.01, "the edit does nothing in memory either"
assert moved[1] == 0, "the edit of the offloaded layer acts now"
PYTHON
