#!/usr/bin/env bash
# With dynamic rotary scaling, the logits of a prompt depend on the longest prompt that the model has seen since the
# last one shorter than the original context, also for a prompt of exactly the original length, which needs no scaling.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: the scaling follows the length of the prompt at hand, as the name says, and a model in eval mode has
# no memory.
# Seen:
#     prompt of 63 tokens (original context 64), after one of 256: logits move by up to 0 (their deviation 1.6)
#     prompt of 64 tokens (original context 64), after one of 256: logits move by up to 7.9 (their deviation 1.6)
#     prompt of 100 tokens (original context 64), after one of 256: logits move by up to 7.4 (their deviation 1.6)
#     prompt of 64 tokens, after one of 256 and one of 8: 0
# Who meets it: whoever evaluates prompts of mixed lengths near and above the original context: the order of the prompts
# changes the results.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

original = 64
config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=original,
    initializer_range=0.2,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
torch.manual_seed(0)
prompt = torch.randint(0, 128, (1, 256))


@torch.no_grad()
def logits(length, *before):
    torch.manual_seed(1)
    lm = LlamaForCausalLM(config).eval()
    for other in before:
        lm(prompt[:, :other])
    return lm(prompt[:, :length]).logits


gaps = {}
for length in (original - 1, original, 100):
    fresh = logits(length)
    gaps[length] = (logits(length, 256) - fresh).abs().max().item()
    print(
        f"prompt of {length} tokens (original context {original}), after one of 256: logits move by up to"
        f" {gaps[length]:.2g} (their deviation {fresh.std():.2g})"
    )
reset = (logits(original, 256, 8) - logits(original)).abs().max().item()
print(f"prompt of {original} tokens, after one of 256 and one of 8: {reset:.2g}")
assert gaps[original - 1] == 0 and reset == 0, "a prompt within the original context is scaled"
assert gaps[original] > 0.1 and gaps[100] > 0.1, "the longest prompt before no longer matters"
PYTHON
