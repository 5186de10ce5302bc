#!/usr/bin/env bash
# Lightning's `precision="bf16-true"` rounds the rotary frequencies of a language model that transformers loaded in
# bfloat16, so that far positions get other angles, though all its weights have this dtype already.
#
# Versions: torch 2.13.0, transformers 5.24.0, lightning 2.6.6.
# One would guess: a model whose parameters are bfloat16 already passes through "bf16-true" as it is.
# Seen:
#     as loaded:   {'torch.bfloat16'} rotary frequencies torch.float32
#     "bf16-true": {'torch.bfloat16'} rotary frequencies torch.bfloat16
#     largest error of an angle at position 4000: 1.7 radians
#     same most likely token as in float32, positions 0 to 63: as loaded 97%, bf16-true 98%
#     same most likely token as in float32, positions 3072 to 4095: as loaded 93%, bf16-true 24%
# transformers keeps `inv_freq`, a buffer that is not saved, in float32; Lightning converts the whole module, buffers
# too.
# Who meets it: whoever trains or probes a language model in a LightningModule with long prompts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0 lightning==2.6.6
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import warnings

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

warnings.filterwarnings("ignore")
config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.3,
    tie_word_embeddings=False,
)
torch.manual_seed(0)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained("lm")
prompt = torch.randint(0, 256, (1, 4096))


class Module(lightning.LightningModule):
    def __init__(self, dtype):
        super().__init__()
        self.lm = LlamaForCausalLM.from_pretrained("lm", dtype=dtype)

    def predict_step(self, batch, batch_idx):
        return self.lm(batch).logits.float()


def predict(dtype, precision):
    trainer = lightning.Trainer(accelerator="cpu", precision=precision, logger=False, enable_progress_bar=False)
    module = Module(dtype)
    (logits,) = trainer.predict(module, DataLoader(prompt, batch_size=1))
    return logits[0], module.lm


exact, _ = predict(torch.float32, "32-true")
loaded, lm = predict(torch.bfloat16, "32-true")
print("as loaded:  ", {str(p.dtype) for p in lm.parameters()}, "rotary frequencies", lm.model.rotary_emb.inv_freq.dtype)
before = lm.model.rotary_emb.inv_freq.clone()
converted, lm = predict(torch.bfloat16, "bf16-true")
after = lm.model.rotary_emb.inv_freq
print('"bf16-true":', {str(p.dtype) for p in lm.parameters()}, "rotary frequencies", after.dtype)
angle = ((before - after.float()).abs() * 4000).max().item()
print(f"largest error of an angle at position 4000: {angle:.1f} radians")


def agreement(logits, rows):
    return (logits.argmax(-1) == exact.argmax(-1))[rows].float().mean().item()


for rows in (slice(0, 64), slice(3072, 4096)):
    print(
        f"same most likely token as in float32, positions {rows.start} to {rows.stop - 1}:"
        f" as loaded {agreement(loaded, rows):.0%}, bf16-true {agreement(converted, rows):.0%}"
    )
assert before.dtype == torch.float32, "transformers no longer keeps the frequencies in float32"
assert after.dtype == torch.bfloat16, "Lightning no longer converts the frequencies"
assert agreement(loaded, slice(3072, 4096)) > 1.5 * agreement(converted, slice(3072, 4096)), "far positions are right"
PYTHON
