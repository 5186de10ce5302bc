#!/usr/bin/env bash
# `load_state_dict(load_file("model.safetensors"), strict=False)` of a mixture of experts leaves all experts at random:
# since transformers 5, the tensors in the file have other names and shapes than those of the model that wrote it.
#
# Versions: torch 2.13.0, transformers 5.24.0, safetensors 0.8.0.
# One would guess: `save_pretrained` writes the model's state dict, without the tied head; so loading the file with
# `strict=False` fills everything that is not tied.
# Seen:
#     LlamaForCausalLM: same logits after from_pretrained True, after load_state_dict True; weights left at random 0%
#     Qwen3MoeForCausalLM: same logits after from_pretrained True, after load_state_dict False; weights left at
#       random 59%
#     in the model: model.layers.0.mlp.experts.gate_up_proj, (4, 32, 32)
#     in the file: model.layers.0.mlp.experts.0.gate_proj.weight, (16, 32)
# Who meets it: whoever loads weights outside `from_pretrained` (into a Lightning module, on a meta-initialized model),
# or looks up tensors of a file by the names of the model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0 safetensors==0.8.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

sizes = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
prompt = torch.arange(8)[None]
right = {}
for cls, config in (
    (LlamaForCausalLM, LlamaConfig(**sizes)),
    (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**sizes, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    ),
):
    torch.manual_seed(0)
    lm = cls(config).eval()
    lm.save_pretrained("lm")
    tensors = load_file("lm/model.safetensors")
    torch.manual_seed(1)
    other = cls(config).eval()
    keys = other.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        right[cls] = torch.equal(lm(prompt).logits, other(prompt).logits)
        loaded = torch.equal(lm(prompt).logits, cls.from_pretrained("lm").eval()(prompt).logits)
    left = sum(other.get_parameter(name).numel() for name in keys.missing_keys if name != "lm_head.weight")
    share = left / sum(p.numel() for p in other.parameters())
    print(
        f"{cls.__name__}: same logits after from_pretrained {loaded}, after load_state_dict {right[cls]};"
        f" weights left at random {share:.0%}"
    )
    assert loaded, "from_pretrained gives another model"
for place, names in {"model": lm.state_dict(), "file": tensors}.items():
    name = next(name for name in names if ".experts." in name and "gate" in name)
    print(f"in the {place}: {name}, {tuple(names[name].shape)}")
assert right[LlamaForCausalLM], "load_state_dict does not fill a dense model"
assert not right[Qwen3MoeForCausalLM], "load_state_dict fills the experts now"
experts = {name for name in lm.state_dict() if ".experts." in name}
assert experts and experts <= {*keys.missing_keys}, "load_state_dict fills some of the experts now"
PYTHON
