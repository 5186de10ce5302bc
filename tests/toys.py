"""Toy LMs: the one factory of small random LMs and word-level tokenizers for all tests."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers as hf
from scipy.stats import pearsonr
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lincorr_lightning.results import plots
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

WORDS = (
    """lives in the city of country speaks language favorite color ’s is was born One day saw a
Paris London Tokyo Berlin Madrid Rome Vienna Oslo Cairo Lima Beijing Moscow
France Japan Germany Spain Italy Austria Norway Egypt Peru China Russia
red blue green yellow black white"""
).split()
"""Words of the built-in prompts of city, country and color, and some of their answers."""

NAMES = [f"name{i}" for i in range(400)]
"""Subjects."""

_WHITE = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)
"""A PNG file of one white pixel."""

_TO_PNG = plots.to_png


def white_figures() -> Any:
    """Return a context in which runs write a white pixel for each figure."""
    return patch.object(plots, "to_png", lambda figure: _WHITE)


def drawn_figures() -> Any:
    """Return a context in which runs draw their figures."""
    return patch.object(plots, "to_png", _TO_PNG)


_GATED: dict[str, Any] = {"intermediate_size": 24, "num_key_value_heads": 1}

# What an architecture needs beside the sizes that all share: name -> (transformers' type, options).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _GATED | {"tie_word_embeddings": False}),
    "llama-tied": ("llama", _GATED | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", {}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False}),
    "gpt-neox": ("gpt_neox", {"intermediate_size": 24}),
    "gpt-neox-serial": ("gpt_neox", {"intermediate_size": 24, "use_parallel_residual": False}),
    "gptj": ("gptj", {"rotary_dim": 4, "tie_word_embeddings": False}),
    "opt": ("opt", {"ffn_dim": 24, "word_embed_proj_dim": 12}),
    "opt-350m": (
        "opt",
        {"ffn_dim": 24, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    ),
    "gemma2": ("gemma2", _GATED | {"head_dim": 8, "final_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", _GATED | {"head_dim": 8}),
    "qwen2": ("qwen2", _GATED),
    "mistral": ("mistral", _GATED),
    "mixtral": ("mixtral", _GATED),
    "phi": ("phi", {"intermediate_size": 24}),
    "cohere": ("cohere", _GATED | {"logit_scale": 0.25}),
    "granite": ("granite", _GATED | {"logits_scaling": 8.0}),
    "falcon": ("falcon", {}),
    "bloom": ("bloom", {}),
    "mamba": ("mamba", {"state_size": 4, "use_cache": False}),
    "bert-decoder": ("bert", {"intermediate_size": 24, "is_decoder": True}),
}


def toy_config(architecture: str = "llama", vocab_size: int = 50, **changes: Any) -> Any:
    """Return the configuration of a small LM: a key of `ARCHITECTURES`, or a model type."""
    model_type, options = ARCHITECTURES.get(architecture, (architecture, {}))
    defaults = {
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return hf.AutoConfig.for_model(model_type, **defaults | options | changes)


def toy_model(
    architecture: str = "llama",
    vocab_size: int = 50,
    seed: int = 0,
    std: float = 0.5,
    **changes: Any,
) -> Any:
    """Return an LM of a `toy_config` with large random weights everywhere, in eval mode."""
    return randomize(
        hf.AutoModelForCausalLM.from_config(toy_config(architecture, vocab_size, **changes)),
        seed,
        std,
    )


@torch.no_grad()
def randomize(model: Any, seed: int = 0, std: float = 0.5) -> Any:
    """Draw all weights of a model anew; return it in eval mode."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=std)
        elif "A_log" not in name:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def word_tokenizer(
    words: Sequence[str],
    special: Sequence[str] = ("<pad>", "<unk>"),
    template: str | None = None,
    **options: Any,
) -> hf.PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose ids are the positions in special tokens + words.

    `special` are among ``<pad> <unk> <s> </s>``; `template` puts them around a text: ``<s> $A``.
    """
    vocab = {word: i for i, word in enumerate([*special, *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex("’s|,"), behavior="isolated"),
        ]
    )
    if template is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(token, vocab[token]) for token in special[1:]]
        )
    named = {"<pad>": "pad_token", "<unk>": "unk_token", "<s>": "bos_token", "</s>": "eos_token"}
    tokens = {named[token]: token for token in special}
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **tokens | options)


def fast_tokenizer(
    model: Any, pre_tokenizer: Any = None, decoder: Any = None, **special: str
) -> hf.PreTrainedTokenizerFast:
    """Return a tokenizer of the parts of the package tokenizers."""
    backend = Tokenizer(model)
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        backend.decoder = decoder
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


@contextmanager
def replaced_output(
    model: Any, hook_point: HookPoint, change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Change a Llama's activations at a hook point by a hook of the tests' own."""
    layer = model.model.layers[hook_point.layer]
    parts = {"residual": layer, "mlp_out": layer.mlp, "attention_out": layer.self_attn}

    def hook(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = parts[hook_point.kind].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def toy_sae(hook_point: HookPoint, decoder: torch.Tensor, **changes: Any) -> SparseAutoencoder:
    """Return an SAE whose encoder is its decoder, ``(n_features, width)``, without biases."""
    n, width = decoder.shape
    defaults = {
        "encoder": decoder.clone(),
        "encoder_bias": torch.zeros(n),
        "decoder_bias": torch.zeros(width),
    }
    return SparseAutoencoder(hook_point=hook_point, decoder=decoder, **defaults | changes).eval()


def save_toy_lm(
    folder: Path,
    seed: int = 0,
    hidden_size: int = 16,
    architecture: str = "llama-tied",
    words: Sequence[str] = (*WORDS, ",", *NAMES),
    tokenizer: hf.PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> Path:
    """Save a random word-level LM that has words for some cities, countries and colors.

    Its logits mean nothing, but obey the same algebra as those of a trained LM.
    """
    tokenizer = tokenizer or word_tokenizer(words)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": hidden_size, "max_position_embeddings": 64, "initializer_range": 0.4}
    if architecture.startswith("llama"):
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2}
    config = toy_config(architecture, len(tokenizer), **sizes | changes)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def save_toy_gguf(
    path: Path,
    quantization: str = "F32",
    merges: Sequence[str] = ("c i",),
    tokenizer: bool = True,
    more: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Any:
    """Save a random Llama with a byte-level tokenizer as a GGUF file, as llama.cpp does.

    `quantization` is that of the matrices; `merges` are those beside the 256 bytes; `more` are
    further keys and, as arrays, tensors of the file. Returns the model whose weights are in the
    file, in float32 before any quantization.
    """
    letters = list(bytes_to_unicode().values())
    tokens = ["<|endoftext|>", *letters, *(merge.replace(" ", "") for merge in merges)]
    model = toy_model(
        "llama",
        len(tokens),
        std=0.2,
        **{"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32}
        | fields,
    )
    return write_gguf(path, model, quantization, (tokens, merges) if tokenizer else None, more)


def write_gguf(
    path: Path,
    model: Any,
    quantization: str = "F32",
    tokenizer: tuple[Sequence[str], Sequence[str]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> Any:
    """Write a Llama as a GGUF file, with tokens and merges of a byte-level tokenizer if any."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        tokens, merges = tokenizer
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types(
            [gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(tokens) - 1)
        )
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, parameter in model.named_parameters():  # a tied head once
        weight = parameter.detach()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        n_heads = next((n for part, n in heads.items() if part in name), None)
        if n_heads is not None:  # llama.cpp pairs neighboring numbers for RoPE, transformers halves
            weight = weight.reshape(n_heads, 2, -1, weight.shape[1]).transpose(1, 2).flatten(0, 2)
        array = weight.numpy()
        target = names.get_name(name, try_suffixes=(".weight",))
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, np.ascontiguousarray(array))
    add_to_gguf(writer, more or {})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def add_to_gguf(writer: Any, more: Mapping[str, Any]) -> None:
    """Add keys and, as arrays, tensors to a GGUF file."""
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    adders |= {str: writer.add_string, list: writer.add_array, np.ndarray: writer.add_tensor}
    for key, value in more.items():
        adders[type(value)](key, value)


NO_FILES: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
"""Options of a `quiet_trainer` that writes neither logs nor checkpoints."""


def quiet_trainer(folder: Path, **options: Any) -> Any:
    """Return a CPU Trainer of one epoch that shows nothing and writes below a folder."""
    import lightning as L

    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**defaults | options)


def recorded_passes(monkeypatch: Any) -> list[list[list[str]]]:
    """Return a list to which each joint read of an LM adds its prompts, by kind of knowledge."""
    from lincorr_lightning.lm.language_model import LanguageModel

    passes: list[list[list[str]]] = []
    read = LanguageModel.joint_logits

    def joint_logits(lm: LanguageModel, prompts: Any, *how: Any) -> torch.Tensor:
        passes.append([list(part) for part in prompts])
        return read(lm, prompts, *how)

    monkeypatch.setattr(LanguageModel, "joint_logits", joint_logits)
    return passes


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def by_reference(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The best constant answer and the means over references of rows of ``cases.csv``."""
    references = [set(row["reference"].split("|")) for row in rows]
    hits = [sum(label in one for one in references) for label in set().union(*references)]
    macro = {}
    for outcome in ("generalized", "hallucinated"):
        shares = []
        for one in {row["reference"] for row in rows}:
            own = [row["outcome"] == outcome for row in rows if row["reference"] == one]
            shares.append(sum(own) / len(own))
        macro[outcome] = sum(shares) / len(shares)
    return {"constant": max(hits) / len(rows), "macro": macro}


def mean_r(predicted: Any, true: Any) -> float:
    """Return the mean over columns of Pearson's r, by scipy."""
    columns = zip(np.asarray(predicted).T, np.asarray(true).T, strict=True)
    return float(np.mean([pearsonr(p, t)[0] for p, t in columns]))


def assert_same(one: Any, other: Any, tolerance: float = 0.0, where: str = "") -> None:
    """Assert that two values are equal at any depth, floats to a tolerance."""
    assert type(one) is type(other), (where, one, other)
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], tolerance, f"{where}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, tolerance, f"{where}/{i}")
    elif isinstance(one, float) and tolerance:
        np.testing.assert_allclose(one, other, tolerance, tolerance, err_msg=where)
    else:
        is_same = one == other
        assert is_same.all() if hasattr(one, "shape") else is_same, where


def assert_is_last(path: Path) -> None:
    """Assert that a run's results.json was written after all its other files."""
    others = [p for p in path.parent.rglob("*") if p.is_file() and "events.out" not in p.name]
    assert max(others, key=lambda p: p.stat().st_mtime_ns) == path
