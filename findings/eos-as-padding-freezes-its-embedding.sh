#!/usr/bin/env bash
# `config.pad_token_id = eos_token_id`, saved and loaded, stops the gradient of the end-of-text token's embedding: the
# model trains it before the reload and not after it, also where the token separates documents.
#
# Versions: torch 2.13.0, transformers 5.24.0.
# One would guess: the padding token matters for masks and generation; attention mask and labels decide what is trained.
# Seen:
#     before the reload: loss 4.1411, gradient of the embedding of end of text 0.9553, of a word 0.6651
#     after the reload: loss 4.1411, gradient of the embedding of end of text 0.0000, of a word 0.6651
# Llama passes `pad_token_id` to `nn.Embedding(padding_idx=...)` when it is built.
# Who meets it: whoever sets the end-of-text token as padding, saves the model, and trains on, attributes by gradients
# of embeddings, or compares a run with one that was resumed.
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
    eos_token_id=2,
    tie_word_embeddings=False,
)
torch.manual_seed(0)
lm = LlamaForCausalLM(config)
two_documents = torch.tensor([[5, 6, 7, 2, 8, 9, 10, 2]])


def gradients(lm):
    lm.zero_grad()
    loss = lm(two_documents, labels=two_documents).loss
    loss.backward()
    norms = lm.get_input_embeddings().weight.grad.norm(dim=1)
    return loss.item(), norms[2].item(), norms[7].item()


lm.config.pad_token_id = lm.config.eos_token_id
before = gradients(lm)
lm.save_pretrained("lm")
after = gradients(LlamaForCausalLM.from_pretrained("lm"))
for name, (loss, eos, word) in {"before": before, "after": after}.items():
    print(
        f"{name} the reload: loss {loss:.4f}, gradient of the embedding of end of text {eos:.4f}, of a word {word:.4f}"
    )
assert before[0] == after[0] and before[2] == after[2], "the reloaded model is another one"
assert before[1] > 0 and after[1] == 0, "the end-of-text token has a gradient after the reload now"
PYTHON
