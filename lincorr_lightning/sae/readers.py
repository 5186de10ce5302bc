"""Read the folders of SAELens, Gemma Scope and Llama Scope."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.attention_heads import at_output, find_projection
from lincorr_lightning.sae.files import (
    TensorReader,
    raise_unsupported,
    read_config,
    read_npz,
    read_tensors,
)
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.processed_lm import check_heads, processing_steps, uncentered
from lincorr_lightning.sae.sparse_autoencoder import Activation, SparseAutoencoder

# TransformerLens' names; the residual stream before a layer is the one after the previous layer.
_HOOK = re.compile(r"blocks\.(\d+)\.(.+)")
_HOOK_KINDS: dict[str, HookKind] = {
    "hook_resid_post": "residual",
    "hook_resid_pre": "residual",
    "hook_mlp_out": "mlp_out",
    "hook_attn_out": "attention_out",
    "attn.hook_z": "attention_out",  # before the output projection, see `at_output`
}
_HOOKS = "hook_resid_post, hook_resid_pre, hook_mlp_out, hook_attn_out and attn.hook_z"
_GEMMA_KINDS: dict[str, HookKind] = {"res": "residual", "mlp": "mlp_out", "att": "attention_out"}


# Renaming the folder also helps those who pass it on the command line.
_NAME_IT = (
    "name the folder by its hook point, such as residual.12, mlp_out.12 or attention_out.12, or "
    "pass hook_point to load_sae."
)


@dataclass(frozen=True)
class LoadOptions:
    """What the caller of `load_sae` knows besides the folder.

    Attributes:
        hook_point: Hook point of the SAE, for formats that do not name it.
        input_scale: Factor that multiplies activations, where the folder leaves it open.
        lm: The LM, for SAEs of the attention's concatenated heads and of a centered LM.
    """

    hook_point: HookPoint | None = None
    input_scale: float | None = None
    lm: LanguageModel | None = None


# -- SAELens -----------------------------------------------------------------------------------


def read_saelens(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    """Read ``cfg.json`` and ``sae_weights.safetensors``, of versions before and after 6.

    Raises:
        SparseAutoencoderError: A file cannot be read, or the SAE is not supported.
    """
    path = folder / "cfg.json"
    config = read_config(path)
    config = {**config, **(config.get("metadata") or {}), **(config.get("meta") or {})}
    tensors = folder / "sae_weights.safetensors"
    take = TensorReader(tensors, read_tensors(tensors))
    if config.get("hook_head_index") is not None:
        raise_unsupported(
            path,
            f"it is an SAE of a single attention head (hook_head_index is "
            f"{config['hook_head_index']})",
            "Take one of all heads together (attn.hook_z) or of what they add (hook_attn_out).",
        )
    activation, k = _saelens_activation(path, config)
    encoder, decoder, encoder_bias = take("W_enc").T, take("W_dec"), take("b_enc")
    threshold = None
    if activation == "jumprelu":
        training = "threshold" not in take and "log_threshold" in take
        threshold = take("log_threshold").exp() if training else take("threshold")
    elif activation == "batchtopk":
        threshold = take("topk_threshold").expand(len(decoder)).clone()
    if "scaling_factor" in take:  # a learned factor per feature, before version 4
        decoder = decoder * take("scaling_factor")[:, None]
    if config.get("rescale_acts_by_decoder_norm") and activation in ("topk", "batchtopk"):
        norm = decoder.norm(dim=1)
        encoder, encoder_bias = encoder * norm[:, None], encoder_bias * norm
        decoder = decoder / torch.where(norm == 0, 1.0, norm)[:, None]
    hook = str(config.get("hook_name") or config.get("hook_point") or "")
    sae = SparseAutoencoder(
        hook_point=_hook_point_of(path, hook, options),
        encoder=encoder.contiguous(),
        decoder=decoder,
        encoder_bias=encoder_bias,
        decoder_bias=take("b_dec"),
        activation=activation,
        threshold=threshold,
        k=k,
        input_scale=_saelens_scale(folder, config.get("normalize_activations"), hook, options),
        subtract_decoder_bias=config.get("apply_b_dec_to_input", True),
        lm=config.get("model_name"),
    )
    steps = processing_steps(config)
    if hook.endswith("hook_z"):
        check_heads(steps, path)
        return _from_heads(sae, path, options)
    return uncentered(sae, options.lm, path) if "center_writing_weights" in steps else sae


def _saelens_activation(path: Path, config: Mapping[str, Any]) -> tuple[Activation, int | None]:
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    architecture = config.get("architecture") or "standard"
    if function == "topk" and architecture == "standard":
        architecture = "topk"
    known: dict[str, Activation] = {
        "standard": "relu", "jumprelu": "jumprelu", "topk": "topk", "batchtopk": "batchtopk",
        # The nested losses only matter for training.
        "matryoshka_batchtopk": "batchtopk",
    }  # fmt: skip
    if "transcoder" in str(architecture):
        raise_unsupported(
            path,
            f"it is a transcoder ({architecture}), which reads one hook point and writes another",
            "Take an SAE, which reads and writes the same hook point.",
        )
    if architecture not in known or function not in ("relu", "topk"):
        raise_unsupported(
            path,
            f"its architecture is {architecture!r} with the activation {function!r}, which is not "
            "supported",
            f"Take one whose architecture is {', '.join(known)}, with relu.",
        )
    return known[architecture], None if k is None else int(k)


_NORMS = {
    "layer_norm": "it normalizes every token by itself",
    "constant_norm_rescale": "it normalizes every token by itself",
    "covariance_whitening": "it whitens activations by their covariance",
    "constant_scalar_rescale": "it multiplies activations by its own constant",
}


def _saelens_scale(folder: Path, normalize: object, hook: str, options: LoadOptions) -> float:
    if normalize in (None, False, "none"):
        return 1.0
    if normalize not in (True, "expected_average_only_in"):
        how = _NORMS.get(str(normalize), "it changes activations in an unknown way")
        raise_unsupported(
            folder / "cfg.json",
            f"{how} (normalize_activations is {normalize!r}), which is not supported",
            "Take one that has none or expected_average_only_in there.",
        )
    scale = options.input_scale
    path = folder / "activation_scaler.json"
    if scale is None and path.is_file():
        scale = read_config(path).get("scaling_factor")
    if scale is None:
        raise_unsupported(
            folder / "cfg.json",
            "it expects activations of a fixed mean norm (normalize_activations is "
            "expected_average_only_in), but the folder does not hold the factor "
            "(activation_scaler.json)",
            f'Write {{"scaling_factor": s}} to {path}, or pass s to load_sae as input_scale: '
            "s = sqrt(width) / mean norm of the LM's activations at "
            f"{hook or 'its hook point'}, over texts like those it was trained on "
            "(lincorr_lightning.sae.captured reads activations).",
        )
    return float(scale)


# -- Gemma Scope -------------------------------------------------------------------------------


def read_gemma_scope(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    """Read ``params.npz``; the path names the hook point, as on the hub.

    SAEs of attention read its concatenated heads (Lieberum et al., 2024, arXiv 2408.05147).

    Raises:
        SparseAutoencoderError: The file cannot be read, or the hook point is unknown.
    """
    path = folder / "params.npz"
    take = TensorReader(path, read_npz(path))
    parts = folder.absolute().parts
    layers = [m[1] for part in parts if (m := re.fullmatch(r"layer_(\d+)", part))]
    kinds = [m[1] for part in parts if (m := re.search(r"gemma-scope.*-(res|mlp|att)\b", part))]
    hook_point = options.hook_point
    if layers and kinds:
        hook_point = HookPoint(int(layers[-1]), _GEMMA_KINDS[kinds[-1]])
    if hook_point is None:
        raise_unsupported(
            path,
            "neither the file nor its path names its hook point",
            f"Keep the hub's folders (gemma-scope-2b-pt-res/layer_12/...), {_NAME_IT}",
        )
    sae = SparseAutoencoder(
        hook_point=hook_point,
        encoder=take("W_enc").T.contiguous(),
        decoder=take("W_dec"),
        encoder_bias=take("b_enc"),
        decoder_bias=take("b_dec"),
        activation="jumprelu",
        threshold=take("threshold"),
    )
    return _from_heads(sae, path, options) if hook_point.kind == "attention_out" else sae


# -- Llama Scope -------------------------------------------------------------------------------


def read_llama_scope(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    """Read ``hyperparams.json`` and ``checkpoints/final.safetensors``.

    Activations are multiplied by ``sqrt(width) / mean norm``. The threshold, however, is in the
    units of the LM's own activations and applies to features of unit decoder norm (He et al., 2024,
    arXiv 2410.20526).

    Raises:
        SparseAutoencoderError: A file cannot be read, or the SAE is not supported.
    """
    path = folder / "hyperparams.json"
    config = read_config(path)
    tensors = folder / "checkpoints" / "final.safetensors"
    take = TensorReader(tensors, read_tensors(tensors))
    hook, out = str(config.get("hook_point_in", "")), config.get("hook_point_out")
    if hook != out:
        raise_unsupported(
            path,
            f"it is a transcoder from {hook} to {out}",
            "Take an SAE, which reads and writes the same hook point.",
        )
    if config.get("use_glu_encoder"):
        raise_unsupported(
            path,
            "it has a gated encoder (use_glu_encoder), which is not supported",
            "Take one without.",
        )
    encoder, decoder = take("encoder.weight"), take("decoder.weight").T.contiguous()
    scale = _llama_scale(path, config, decoder.shape[1])
    norm = decoder.norm(dim=1) if config.get("sparsity_include_decoder_norm") else None
    level = float(config.get("jump_relu_threshold") or 0.0)
    function = str(config.get("act_fn", "")).lower()
    activation: Activation = "relu"
    threshold = score_scale = None
    # A released threshold replaces the k of training.
    if function == "jumprelu" or (function in ("topk", "batchtopk") and level > 0):
        activation = "jumprelu"
        threshold = torch.full((len(decoder),), level * scale)
        if norm is not None:  # a feature of zero norm adds nothing, whatever its threshold
            threshold = threshold / torch.where(norm == 0, 1.0, norm)
    elif function == "topk":
        activation, score_scale = "topk", norm
    elif function != "relu":
        raise_unsupported(
            path,
            f"its activation is {function!r} without a jump_relu_threshold, which is not supported",
            "Take one with relu, topk or jumprelu, or with such a threshold.",
        )
    has_bias = config.get("use_decoder_bias", True)
    return SparseAutoencoder(
        hook_point=_hook_point_of(path, hook, options),
        encoder=encoder,
        decoder=decoder,
        encoder_bias=take("encoder.bias"),
        decoder_bias=take("decoder.bias") if has_bias else torch.zeros(decoder.shape[1]),
        activation=activation,
        threshold=threshold,
        k=config.get("top_k") if activation == "topk" else None,
        score_scale=score_scale,
        input_scale=scale,
        subtract_decoder_bias=config.get("apply_decoder_bias_to_pre_encoder", False),
    )


def _llama_scale(path: Path, config: Mapping[str, Any], width: int) -> float:
    kind = config.get("norm_activation")
    if kind in (None, "inference"):
        return 1.0
    norms = config.get("dataset_average_activation_norm") or {}
    if kind != "dataset-wise":
        raise_unsupported(
            path,
            f"its norm_activation is {kind!r}, which cannot be merged into weights",
            "Take one with dataset-wise or inference.",
        )
    if not norms.get("in") or norms["in"] != norms.get("out"):
        raise_unsupported(
            path,
            f"dataset_average_activation_norm is {norms}, not one norm above 0 for in and out",
            "Take the release's own hyperparams.json, or an SAE that reads and writes one scale.",
        )
    return math.sqrt(width) / float(norms["in"])


# -- shared ------------------------------------------------------------------------------------


def _hook_point_of(path: Path, hook: str, options: LoadOptions) -> HookPoint:
    found = _HOOK.fullmatch(hook)
    if found is None:  # the name of another library, or none
        if options.hook_point is None:
            named = f"calls its hook point {hook!r}" if hook else "does not name its hook point"
            raise_unsupported(
                path,
                f"it {named}, so that it is unknown which of {', '.join(KINDS)} it reads",
                f"If it is one of these, {_NAME_IT}",
            )
        return options.hook_point
    layer = int(found[1]) - (found[2] == "hook_resid_pre")
    if found[2] not in _HOOK_KINDS or layer < 0:
        raise_unsupported(
            path,
            f"it reads {hook}, none of {', '.join(KINDS)}",
            f"Take an SAE of {_HOOKS}; the stream before layer 0 is the embedding, which is no "
            "layer's output.",
        )
    return HookPoint(layer, _HOOK_KINDS[found[2]])


def _from_heads(sae: SparseAutoencoder, path: Path, options: LoadOptions) -> SparseAutoencoder:
    if options.lm is None:
        raise_unsupported(
            path,
            "it reads the attention's concatenated heads, before their output projection",
            "Pass lm to load_sae; its output projection is then merged into the SAE.",
        )
    return at_output(sae, find_projection(options.lm.load().model, sae.hook_point, path), path)
