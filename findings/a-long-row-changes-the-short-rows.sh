#!/usr/bin/env bash
# With LongRoPE (Phi-3, Phi-4-mini), a prompt has other logits in a batch that also holds a row beyond the original
# context length than it has alone.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: with padding on the right and an attention mask, the logits of a row do not depend on the other rows,
# up to rounding.
# Seen:
#     prompt of 12 tokens beside a row of 64: logits move by up to 2.9e-06 (their deviation 1.6), same most
#       likely tokens: 100%
#     prompt of 12 tokens beside a row of 65: logits move by up to 5.5 (their deviation 1.6), same most likely
#       tokens: 33%
# One set of frequencies is chosen for the whole batch, by its largest position, padding included.
# Who meets it: whoever evaluates or extracts hidden states in batches of mixed lengths; sorting by length, the batch
# size and padding to a fixed length change the results.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import Phi3Config, Phi3ForCausalLM

original = 64
config = Phi3Config(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=256,
    original_max_position_embeddings=original,
    initializer_range=0.2,
    pad_token_id=0,
    rope_parameters={
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [1.0 + i for i in range(16)],
        "original_max_position_embeddings": original,
    },
)
torch.manual_seed(0)
lm = Phi3ForCausalLM(config).eval()
short = torch.randint(1, 128, (1, 12))


@torch.no_grad()
def logits(length):
    ids = torch.zeros(2, length, dtype=torch.long)
    ids[0, :12] = short
    ids[1] = torch.randint(1, 128, (length,))
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    return lm(ids, attention_mask=mask).logits[0, :12]


with torch.no_grad():
    alone = lm(short).logits[0]
gaps = {}
for length in (original, original + 1):
    other = logits(length)
    gaps[length] = (other - alone).abs().max().item()
    same = (other.argmax(-1) == alone.argmax(-1)).float().mean().item()
    print(
        f"prompt of 12 tokens beside a row of {length}: logits move by up to {gaps[length]:.2g}"
        f" (their deviation {alone.std():.2g}), same most likely tokens: {same:.0%}"
    )
assert gaps[original] < 1e-4, "the other row matters within the original length too"
assert gaps[original + 1] > 0.1, "the other row no longer matters"
PYTHON
