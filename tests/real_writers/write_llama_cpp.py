"""GGUF files by llama.cpp's converter and quantization kernels, and transformers' logits.

Where weights are rounded, the logits are those of the LM with the weights of the file, which
llama.cpp's reader in Python dequantizes.
"""

import copy
import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from written_lms import PIECES, make_lm, save_logits, train_tokenizers

FOLDER = Path(sys.argv[1])
SOURCE = next((Path(sys.prefix) / "source").glob("*/vendor/llama.cpp"))
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]

import convert_hf_to_gguf as converter  # noqa: E402
import gguf  # noqa: E402
import xllamacpp  # noqa: E402
from conversion import TextModel  # noqa: E402

TEXTS = ["word1 word22 and  two", "Zürich 2024!", "the end ", "Don't"]
HEADS = {"head_dim": 16}
GEMMA = HEADS | {"query_pre_attn_scalar": 16}  # as llama.cpp takes it to be
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TYPES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gpt2": {"n_ctx": 64},
    "granite": {},
    "llama": {},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-heads": {"model_type": "llama", "head_dim": 32},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "mamba": {"use_cache": False, "intermediate_size": 128, "vocab_size": 304},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "phi3": {},
    "qwen2": {},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 32},
    "qwen3": HEADS,
    "qwen3_moe": MOE | HEADS | {"norm_topk_prob": True},  # as llama.cpp takes it to be
    "stablelm": {},
    "starcoder2": {},
}
# llama.cpp reads the length before scaling at the top of the configuration.
LENGTH = {"original_max_position_embeddings": 8}
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH},
    "yarn": {"factor": 4.0, **LENGTH},
}
WIDE = {"hidden_size": 256, "intermediate_size": 512}  # K-quants need rows of 256 numbers
CONVERTED = "f16", "bf16", "q8_0"
QUANTIZED = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
)
PIECED = "gemma2", "phi3"  # the converter takes no other tokenizer
PIECES_SIZES = {"vocab_size": 320}
KERNELS = ctypes.CDLL(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")))
KERNELS.ggml_quantize_chunk.restype = ctypes.c_size_t


def save_lm(name: str, model: Any, tokenizer: str = "bpe") -> Path:
    folder = FOLDER / "transformers" / name
    model.save_pretrained(folder)
    if tokenizer == "bpe":
        load_bpe().save_pretrained(folder)
    elif tokenizer == "sentencepiece":
        (folder / "tokenizer.model").write_bytes((FOLDER / PIECES).read_bytes())
    return folder


def convert(folder: Path, name: str, *options: str, outtype: str = "f32") -> Path:
    path = FOLDER / f"{name}.gguf"
    sys.argv = ["", str(folder), "--outfile", str(path), "--outtype", outtype, *options]
    converter.main()
    return path


def quantize(source: Path, name: str, kind: str) -> Path:
    """Copy a file with its matrices quantized by llama.cpp's kernels."""
    path = FOLDER / f"{name}.gguf"
    reader = gguf.GGUFReader(source)
    fields = dict(reader.fields)
    writer = gguf.GGUFWriter(path, fields.pop("general.architecture").contents())
    for key, field in fields.items():
        if not key.startswith("GGUF."):
            parts = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=parts)
    raw = gguf.GGMLQuantizationType[kind]
    block, n_bytes = gguf.GGML_QUANT_SIZES[raw]
    for tensor in reader.tensors:
        data = np.ascontiguousarray(tensor.data)
        if data.ndim == 1:
            writer.add_tensor(tensor.name, data)
            continue
        packed = np.empty((len(data), data.shape[1] // block * n_bytes), np.uint8)
        floats = data.ctypes.data_as(ctypes.c_void_p), packed.ctypes.data_as(ctypes.c_void_p)
        sizes = [ctypes.c_int64(size) for size in (0, *data.shape)]
        assert KERNELS.ggml_quantize_chunk(raw.value, *floats, *sizes, None) == packed.nbytes
        writer.add_tensor(tensor.name, packed, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@torch.no_grad()
def with_weights_of(path: Path, model: Any) -> Any:
    """Return a copy of a Llama or Qwen 2 with a file's weights, as gguf-py dequantizes them."""
    model = copy.deepcopy(model)
    config = model.config
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    tensors.pop("rope_freqs.weight", None)
    kind = gguf.MODEL_ARCH[config.model_type.upper()]
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    n_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        tensor = tensors.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        weight = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
        part = name.split(".")[-2]
        if config.model_type == "llama" and part in n_heads:  # pairs of numbers, and not halves
            weight = weight.view(n_heads[part], -1, 2, *weight.shape[1:]).transpose(1, 2)
        parameter.copy_(weight.reshape(parameter.shape))
    assert not tensors, list(tensors)
    return model


def save(path: Path, model: Any) -> None:
    save_logits(path.with_suffix(".npz"), model)


def load_bpe() -> Any:
    import transformers as hf

    file = str(FOLDER / "bpe.json")
    return hf.PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", eos_token="</s>")


def write_tokenizers() -> None:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(FOLDER / PIECES))
    bpe = load_bpe()
    ids = {
        "sentencepiece": (pieces.vocab_size(), [[1, *pieces.encode(text)] for text in TEXTS]),
        "bpe": (len(bpe), [bpe(text)["input_ids"] for text in TEXTS]),
    }
    for name, (size, rows) in ids.items():
        model = make_lm(vocab_size=size)
        path = convert(save_lm(f"tokenizer-{name}", model, name), f"tokenizer-{name}")
        path.with_suffix(".json").write_text(json.dumps([TEXTS, rows]))


def main() -> None:
    # Which split of texts a vocabulary has, the converter knows by a hash of its own list.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    train_tokenizers(FOLDER, "<|endoftext|>").save(str(FOLDER / "bpe.json"))
    sizes = {"vocab_size": len(load_bpe()), "bos_token_id": 0, "eos_token_id": 1}
    for name, options in TYPES.items():
        tokenizer = "sentencepiece" if name in PIECED else "bpe"
        vocabulary = PIECES_SIZES if name in PIECED else sizes
        model = make_lm(**{"model_type": name} | vocabulary | options)
        save(convert(save_lm(name, model, tokenizer), name), model)
    for kind, fields in ROPES.items():
        rope = {"rope_type": kind, "rope_theta": 500.0, **fields}
        # The converter leaves Llama 3's positions of other types out.
        for model_type in ("llama",) if kind == "llama3" else ("llama", "qwen2"):
            name = f"rope-{kind}-{model_type}"
            model = make_lm(model_type, rope_parameters=rope, **sizes, **LENGTH)
            save(convert(save_lm(name, model), name), model)

    for name in "llama", "qwen2":
        model = make_lm(name, **sizes, **WIDE, tie_word_embeddings=name == "qwen2")
        folder = save_lm(f"{name}-wide", model)
        whole = convert(folder, f"{name}-f32")
        save(whole, model)
        for kind in CONVERTED:
            path = convert(folder, f"{name}-{kind}", outtype=kind)
            save(path, with_weights_of(path, model))
        for kind in QUANTIZED:
            path = quantize(whole, f"{name}-{kind}", kind)
            save(path, with_weights_of(path, model))
    convert(FOLDER / "transformers" / "llama", "split", "--split-max-tensors", "8")
    write_tokenizers()


if __name__ == "__main__":
    main()
