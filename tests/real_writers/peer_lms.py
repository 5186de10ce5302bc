"""Small random LMs for packages that read LMs; each saves its own copy by its transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

WORDS = [f"w{i}" for i in range(40)]
PROMPTS = ("w1 w2 w3 w4 w5 w6 w7", "w8 w9", "w10 w11 w12 w13", "w39 w1 w20 w3 w5")
"""Of different lengths, so that batches of them are padded."""

_GATED = {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 8}
# Type and options of the architectures, and whether their tokenizers put BOS before a text.
LMS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt2": ("gpt2", {}, False),
    "llama": ("llama", _GATED | {"tie_word_embeddings": False}, True),
    "qwen2": ("qwen2", _GATED, False),
    # Windows shorter than the prompts.
    "gemma2": ("gemma2", _GATED | {"final_logit_softcapping": 4.0, "sliding_window": 4}, True),
    "gemma3": ("gemma3_text", _GATED | {"sliding_window": 4}, True),
}


def save(name: str, folder: Path) -> None:
    """Save an LM of `LMS` with large random weights, and a tokenizer of words, or of bytes."""
    from written_lms import save_tokenizer  # the writer's side alone saves

    kind, options, puts_bos = LMS[name]
    save_tokenizer(folder, WORDS, puts_bos)
    if name == "qwen2":  # AutoTokenizer makes a byte-level tokenizer of whatever a Qwen2 has
        special = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>"}
        tokens = [*special.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
        backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    n_tokens = len(hf.PreTrainedTokenizerFast.from_pretrained(folder))
    more = {"vocab_size": n_tokens, "max_position_embeddings": 32} | sizes | ids
    torch.manual_seed(0)
    lm = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(kind, **more | options))
    with torch.no_grad():
        for parameter in lm.parameters():
            # Gains and biases differ from 1 and 0, too.
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.2))
    lm.save_pretrained(folder)
