"""LMs and tokenizers that transformers saves, and the logits and token ids of them in memory."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from written_lms import (
    PIECES,
    SIZES,
    WORDS,
    make_lm,
    perturb,
    save_logits,
    save_tokenizer,
    train_tokenizers,
)

FOLDER = Path(sys.argv[1])
IS_OLD = int(hf.__version__.split(".")[0]) < 5
HEADS = {"head_dim": 16}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Types of LM by the names that both versions know them by.
TYPES: dict[str, dict[str, Any]] = {
    "bloom": {},
    "cohere": {},
    "falcon": {},
    "gemma2": HEADS | {"attn_implementation": "eager"},  # sdpa leaves out the soft cap in 4.51
    "gemma3_text": HEADS,
    "glm": HEADS,
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "llama": {},
    "mamba": {"use_cache": False},
    "olmo2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "qwen2": {},
    "qwen3": HEADS,
    "stablelm": {},
    "starcoder2": {},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "granitemoe": {"num_local_experts": 4},
    "jamba": {
        "num_experts": 4,
        "use_mamba_kernels": False,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
    },
    "jetmoe": {"num_local_experts": 4, "kv_channels": 16, "num_key_value_heads": 2},
    "mixtral": {"num_local_experts": 4},
    "olmoe": MOE,
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE | HEADS,
}
ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8,
    },
    "longrope": {
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [2.0 + i for i in range(8)],
    },
    # The 4.x versions take the factor to be the quotient of both lengths.
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 8},
}


def rope(kind: str) -> dict[str, Any]:
    """Return options of scaled rotary positions, in the words of this version."""
    fields = {"rope_type": kind, **ROPES[kind]}
    if IS_OLD:  # Phi-3 with the key's earlier name, and no other
        fields = {"type": kind, **ROPES[kind]} if kind == "longrope" else fields
        return {"rope_scaling": fields, "rope_theta": 500.0}
    return {"rope_parameters": fields | {"rope_theta": 500.0}}


def save(name: str, model: Any, **options: Any) -> None:
    model.save_pretrained(FOLDER / name, **options)
    save_tokenizer(FOLDER / name)
    if model.dtype != torch.float32:  # `Module.float` would leave rotary frequencies rounded
        model = hf.AutoModelForCausalLM.from_pretrained(FOLDER / name, torch_dtype=torch.float32)
    save_logits(FOLDER / f"{name}.npz", model)


def write_ways() -> None:
    """One LM, in the ways that it can be saved."""
    save("bfloat16", make_lm().to(torch.bfloat16))
    save("float16", make_lm().half())
    save("sharded", make_lm(), max_shard_size="60KB")
    save(
        "sharded-mixture",
        make_lm(model_type="mixtral", num_local_experts=4),
        max_shard_size="60KB",
    )
    save("variant", make_lm(), variant="fp16")
    if IS_OLD:
        write_adapters()
        save("bin", make_lm(), safe_serialization=False)
        save("bin-sharded", make_lm(), safe_serialization=False, max_shard_size="60KB")
        save("bin-tied", make_lm(tie_word_embeddings=True), safe_serialization=False)
    else:
        for name in ("mixtral", "qwen2_moe", "granitemoe"):
            model = make_lm(name, **TYPES[name])
            save(f"{name}-fused", model, save_original_format=False)
    for kind in ROPES:
        model_type = "phi3" if kind == "longrope" else "llama"
        save(f"rope-{kind}", make_lm(model_type, **rope(kind)))

    model = make_lm()
    model.generation_config = hf.GenerationConfig(
        do_sample=True,
        temperature=0.1,
        repetition_penalty=9.0,
        suppress_tokens=[4, 5],
        max_length=3,
    )
    save("generation", model)

    # The backbone alone: with a tied head nothing is missing.
    for name, is_tied in ("backbone", False), ("backbone-tied", True):
        model = make_lm(tie_word_embeddings=is_tied)
        save_logits(FOLDER / f"{name}.npz", model)
        model.model.save_pretrained(FOLDER / name)
        save_tokenizer(FOLDER / name)


def write_adapters() -> None:
    """Adapters that an LM of transformers holds without peft's wrapper."""
    import peft

    make_lm().save_pretrained(FOLDER / "base")
    save_tokenizer(FOLDER / "base")
    for name, is_peft_format in ("adapter", True), ("adapter-bare", False):
        model = hf.AutoModelForCausalLM.from_pretrained(FOLDER / "base")
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        save(name, perturb(model.eval(), 0.1, seed=1), save_peft_format=is_peft_format)


def write_resized() -> None:
    for head, is_tied in ("untied", False), ("tied", True):
        for size, n_tokens, multiple in ("more", 47, None), ("fewer", 36, None), ("padded", 47, 32):
            model = make_lm(tie_word_embeddings=is_tied)
            model.resize_token_embeddings(n_tokens, multiple)
            save(f"resized-{size}-{head}", perturb(model, 0.1, seed=1))


TEXTS = ["word1 word22 and  two\nlines", " Zürich 2024!", "<s> the end</s>", "Don't", ""]


def write_tokenizers() -> None:
    """Tokenizers of the classes of Llama and GPT-2, trained here, with BOS and without."""
    bpe = train_tokenizers(FOLDER, "<unk>")
    bpe.save_model(str(FOLDER))
    files = {"vocab_file": str(FOLDER / "vocab.json"), "merges_file": str(FOLDER / "merges.txt")}
    pieces = {"vocab_file": str(FOLDER / PIECES)}
    made: dict[str, Any] = {}
    if IS_OLD:
        made["gpt2-slow"] = hf.GPT2Tokenizer(**files, bos_token="<s>", add_bos_token=True)
        made["gpt2-fast"] = hf.GPT2TokenizerFast(**files, bos_token="<s>")
        made["llama-slow"] = hf.LlamaTokenizer(**pieces, legacy=False)
        made["llama-legacy"] = hf.LlamaTokenizer(**pieces, legacy=True, add_bos_token=False)
        made["llama-fast"] = hf.LlamaTokenizerFast(**pieces, legacy=False)
    else:
        made["gpt2"] = hf.GPT2Tokenizer(**load_bpe(files), bos_token="<s>")
        generic = hf.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>")
        made["generic"] = generic
    for name, tokenizer in made.items():
        tokenizer.add_tokens(["Zürich"])
        folder = FOLDER / f"tokenizer-{name}"
        model = make_lm(name.split("-")[0].replace("generic", "llama"), vocab_size=len(tokenizer))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        ids = [tokenizer(text)["input_ids"] for text in TEXTS]
        (FOLDER / f"tokenizer-{name}.json").write_text(json.dumps([TEXTS, ids]))


def load_bpe(files: dict[str, str]) -> dict[str, Any]:
    """Return vocabulary and merges as this version's tokenizers take them."""
    merges = Path(files["merges_file"]).read_text("utf-8").splitlines()[1:]
    return {
        "vocab": json.loads(Path(files["vocab_file"]).read_text("utf-8")),
        "merges": [tuple(merge.split(" ")) for merge in merges],
    }


def main() -> None:
    assert SIZES["vocab_size"] == len(WORDS) + 4
    for name, options in TYPES.items():
        save(name, make_lm(name, **options))
    write_ways()
    write_resized()
    write_tokenizers()


if __name__ == "__main__":
    main()
