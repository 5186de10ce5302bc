#!/usr/bin/env bash
# A Gemma 2 model of the shape of the 27B, read by transformers from a GGUF file of its own weights, gets another
# attention scale: files of Gemma 2 hold no `query_pre_attn_scalar`, and transformers takes the default of the smaller
# models.
#
# Versions: torch 2.13.0, transformers 5.24.0, accelerate 1.15.0, gguf 0.19.0.
# One would guess: unquantized weights in GGUF give the same model; what a file cannot say follows from the sizes.
# Seen:
#     query_pre_attn_scalar: written from 144, read as 256
#     logits off by up to 0.582; with the scale set by hand, by 0.0e+00
# llama.cpp (by its source, not run here) computes the scale of the 27B from its sizes, so the file needs no key.
# Who meets it: whoever analyses the same GGUF file in transformers that others run in llama.cpp.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check \
    torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import pathlib

import gguf
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

# hidden size / heads = 144 and head_dim = 128, as in Gemma 2 27B
config = Gemma2Config(
    vocab_size=64,
    hidden_size=288,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=128,
    query_pre_attn_scalar=144,
    initializer_range=0.1,
)
torch.manual_seed(0)
lm = Gemma2ForCausalLM(config).eval()
prompt = torch.randint(3, 64, (1, 16))

pathlib.Path("lm").mkdir()
writer = gguf.GGUFWriter("lm/model.gguf", "gemma2")
writer.add_name("gemma2")
writer.add_context_length(config.max_position_embeddings)
writer.add_embedding_length(config.hidden_size)
writer.add_block_count(config.num_hidden_layers)
writer.add_feed_forward_length(config.intermediate_size)
writer.add_head_count(config.num_attention_heads)
writer.add_head_count_kv(config.num_key_value_heads)
writer.add_layer_norm_rms_eps(config.rms_norm_eps)
writer.add_key_length(config.head_dim)
writer.add_value_length(config.head_dim)
writer.add_sliding_window(config.sliding_window)
writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
writer.add_final_logit_softcapping(config.final_logit_softcapping)
writer.add_vocab_size(config.vocab_size)
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA2, config.num_hidden_layers)
for name, tensor in lm.state_dict().items():
    if name == "lm_head.weight":
        continue
    value = tensor + 1 if "norm" in name else tensor
    writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), value.float().numpy())
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

read = Gemma2ForCausalLM.from_pretrained("lm", gguf_file="model.gguf", dtype=torch.float32).eval()


@torch.no_grad()
def gap(model):
    return (model(prompt).logits - lm(prompt).logits).abs().max().item()


default = read.config.query_pre_attn_scalar
off = gap(read)
for layer in read.model.layers:
    layer.self_attn.scaling = config.query_pre_attn_scalar**-0.5
mended = gap(read)
print(f"query_pre_attn_scalar: written from {config.query_pre_attn_scalar}, read as {default}")
print(f"logits off by up to {off:.3f}; with the scale set by hand, by {mended:.1e}")
assert mended < 1e-3, "the file differs in something else"
assert default == 256 and off > 0.01, "the scale is right now"
PYTHON
