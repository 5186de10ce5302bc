"""What a GGUF file has for the computation and transformers' reader leaves out: set, or refused."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lincorr_lightning.errors import LanguageModelError, listed

# Keys, and their names in the configurations of transformers.
_SETTINGS = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "final_logit_softcapping": "final_logit_softcapping",
    "use_parallel_residual": "use_parallel_residual",
}
# Limits, and sizes that the shapes of weights fix.
_FREE = (
    "attention.key_length_swa",
    "attention.value_length",
    "attention.value_length_swa",
    "context_length",
    "nextn_predict_layers",
    "rope.dimension_count_swa",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "vocab_size",
)
_ROPE_FACTORS = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
_WIDE = 46, 62  # layers of the Gemmas of 27B: llama.cpp knows their attention scale by that
_NEWER = "qwen3_5", "qwen3_5_moe", "lfm2"  # types of which transformers reads all that there is
_ZERO_FREQUENCY = 1e9  # by which a frequency is divided to be none
_SCALES = re.compile(r"scal|causal|_factor$")  # where 1 changes nothing
_ABSENT = "ssm.dt_b_c_rms", False  # of Mamba; other keys that are false switch something off
_WAY_OUT = "Pass the Hugging Face checkpoint that the file was made from."


def complete_config(config: Any, path: Path) -> None:
    """Set in a configuration, in place, what the metadata has and transformers has not read.

    Raises:
        LanguageModelError: The configuration has no place for a key that changes the logits.
    """
    from gguf import GGUFReader
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    reader = GGUFReader(path)
    start = f"{reader.fields['general.architecture'].contents()}."
    of_lm = {k.removeprefix(start): f for k, f in reader.fields.items() if k.startswith(start)}
    values = {key: field.contents() for key, field in of_lm.items()}
    kind = config.model_type.removesuffix("_text")
    read: Any = {key: key for key in values if "rope.scaling" not in key}  # by its newer reader
    if kind not in _NEWER:
        # It takes the number of rotary dimensions for the size of a Llama's heads.
        known: Any = GGUF_CONFIG_MAPPING.get(kind, {})
        read = known | {"rope.dimension_count": None}
    left = {key: value for key, value in values.items() if not read.get(key) and key not in _FREE}
    is_rotary = isinstance(getattr(config, "rope_parameters", None), dict)
    for key, name in _SETTINGS.items():
        # Attention reads a head_dim that its configuration does not have by default.
        if key in left and (hasattr(config, name) or (name == "head_dim" and is_rotary)):
            setattr(config, name, left.pop(key))
    slides = left.get("attention.sliding_window_pattern")
    if isinstance(slides, list) and hasattr(config, "layer_types"):
        config.layer_types = ["sliding_attention" if s else "full_attention" for s in slides]
        del left["attention.sliding_window_pattern"]
    if hasattr(config, "n_positions"):  # of which transformers reads n_ctx, that nothing uses
        config.n_positions = values.get("context_length", config.n_positions)
    if getattr(config, "sliding_window", None) == 0:  # llama.cpp's word for none
        config.sliding_window = None
    if hasattr(config, "query_pre_attn_scalar"):
        width = config.hidden_size // config.num_attention_heads
        is_wide = config.num_hidden_layers in _WIDE
        config.query_pre_attn_scalar = width if is_wide else config.head_dim
    factors = {t.name: t.data.tolist() for t in reader.tensors if t.name in _ROPE_FACTORS}
    if is_rotary:
        _set_rope(config, left, factors)
    elif factors:
        left |= factors
    changing = [
        f"{start}{key} ({str(value)[:20]})"
        for key, value in left.items()
        if (value is False or (value and (value != 1 or not _SCALES.search(key))))
        and (key, value) != _ABSENT
    ]
    if changing:
        raise LanguageModelError(
            f"{path} has {listed(changing)}, which transformers' {type(config).__name__} has no "
            f"place for, so that the logits would be others. {_WAY_OUT}"
        )


def _set_rope(config: Any, left: dict[str, Any], factors: dict[str, list[float]]) -> None:
    """Set rotary positions; what `left` has of them is taken out, but for what does not fit."""
    rope = config.rope_parameters
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    rope["rope_theta"] = left.pop("rope.freq_base", rope["rope_theta"])
    if local:
        local["rope_theta"] = left.pop("rope.freq_base_swa", local["rope_theta"])
    size = left.pop("rope.dimension_count", 0)
    part = rope.get("partial_rotary_factor", 1)
    short, long = (factors.get(n, factors.get(_ROPE_FACTORS[0])) for n in _ROPE_FACTORS[1:])
    if rope["rope_type"] == "proportional":  # of Gemma 4, whose heads differ by layer
        n = int(len(short or ()) * part)
        if short and set(short[:n]) == {1.0} and min(short[n:]) > _ZERO_FREQUENCY:
            return
    elif size:
        width = config.hidden_size // config.num_attention_heads
        width = getattr(config, "head_dim", None) or width
        if "partial_rotary_factor" in rope:
            rope["partial_rotary_factor"] = size / width
        elif size != width:
            left["rope.dimension_count"] = size
    kind = left.pop("rope.scaling.type", "linear")
    factor = left.pop("rope.scaling.factor", left.pop("rope.scale_linear", 0)) or 1
    factor = 1 if kind == "none" else factor
    length = left.pop("rope.scaling.original_context_length", config.max_position_embeddings)
    if short and long and factor == 1:
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": length}
        rope["attention_factor"] = left.pop("rope.scaling.attn_factor", 1.0)
        rope |= {"short_factor": short, "long_factor": long}
        if hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = length
    elif factors:
        left |= factors
    elif factor != 1:
        rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn" and factor != 1:
        rope["original_max_position_embeddings"] = length
        for beta in ("beta_fast", "beta_slow"):
            rope[beta] = left.pop(f"rope.scaling.yarn_{beta}", None)
    elif kind not in ("none", "linear", "longrope", "yarn"):
        left["rope.scaling.type"] = kind


def check_tensors(model: Any, path: Path, unread: Collection[str]) -> None:
    """Refuse a GGUF file with tensors that transformers has not read, or reports as `unread`."""
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as hf

    if model.config.model_type.removesuffix("_text") not in _NEWER:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        kind: Any = hf.TENSOR_PROCESSORS.get(architecture, hf.TensorProcessor)
        names: Any = hf.get_gguf_hf_weights_map(model, kind({}))  # type: ignore[no-untyped-call]
        read = {name.removesuffix(".weight") for name in names}
        others = [t.name for t in reader.tensors if t.name not in _ROPE_FACTORS]
        unread = [name for name in others if name.removesuffix(".weight") not in read]
    if unread:
        raise LanguageModelError(
            f"{path} has {listed(sorted(unread))}, for which transformers' {type(model).__name__} "
            f"has no weight, so that the logits would be others. {_WAY_OUT}"
        )
