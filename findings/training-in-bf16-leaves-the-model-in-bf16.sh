#!/usr/bin/env bash
# After training by transformers' Trainer with `bf16=True`, the model in memory keeps computing in bfloat16 when one
# calls it, though its weights are float32; the saved and reloaded model gives other logits.
#
# Versions: torch 2.13.0, transformers 5.24.0, accelerate 1.15.0.
# One would guess: mixed precision belongs to the Trainer's steps; afterwards the model computes in its weights'
# float32.
# Seen:
#     bf16=False: weights torch.float32, logits torch.float32, inside the model torch.float32; same weights
#       reloaded True, logits differ by 0.0e+00
#     bf16=True: weights torch.float32, logits torch.float32, inside the model torch.bfloat16; same weights
#       reloaded True, logits differ by 2.2e-02
# accelerate replaces the `forward` of the very object by one under autocast that casts its outputs back to float32.
# Who meets it: whoever evaluates, probes or edits the model after `trainer.train()` in one process, and compares with
# the saved one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'PYTHON'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

logging.set_verbosity_error()
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    initializer_range=0.1,
)
torch.manual_seed(0)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 16))]
prompt = rows[0]["input_ids"][None]
gaps = {}
for bf16 in (False, True):
    torch.manual_seed(0)
    lm = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        "out", max_steps=2, bf16=bf16, use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(lm, arguments, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    lm.eval()
    lm.save_pretrained("lm")
    reloaded = LlamaForCausalLM.from_pretrained("lm").eval()
    inside = []
    lm.model.layers[0].mlp.register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    with torch.no_grad():
        logits = lm(prompt).logits
        gaps[bf16] = (logits - reloaded(prompt).logits).abs().max().item()
    same = all(torch.equal(a, b) for a, b in zip(lm.parameters(), reloaded.parameters()))
    print(
        f"bf16={bf16}: weights {lm.dtype}, logits {logits.dtype}, inside the model {inside[0]};"
        f" same weights reloaded {same}, logits differ by {gaps[bf16]:.1e}"
    )
    assert same and lm.dtype == torch.float32, "the weights differ"
assert gaps[False] == 0, "training without mixed precision leaves something too"
assert gaps[True] > 1e-3 and inside[0] == torch.bfloat16, "the model computes in float32 after the training now"
PYTHON
