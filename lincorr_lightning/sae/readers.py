"""Readers of SAELens', Gemma Scope's and Llama Scope's folders."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae.place import KINDS, Kind, Place
from lincorr_lightning.sae.reading import fail_to_read, read_json, read_tensors
from lincorr_lightning.sae.sparse_autoencoder import Activation, SparseAutoencoder

# Names of places as TransformerLens has them; the residual before a layer is that after the last.
_HOOK = re.compile(r"blocks\.(\d+)\.(.+)")
_HOOK_KINDS: dict[str, Kind] = {
    "hook_resid_post": "residual",
    "hook_resid_pre": "residual",
    "hook_mlp_out": "mlp_out",
    "hook_attn_out": "attention_out",
    "attn.hook_z": "attention_out",  # before its output projection, see `_at_output`
}
_GEMMA_KINDS: dict[str, Kind] = {"res": "residual", "mlp": "mlp_out", "att": "attention_out"}


@dataclass(frozen=True)
class Wishes:
    """What the caller of `load_sae` knows beside the folder.

    Attributes:
        place: Where the SAE belongs, for formats that do not say it.
        input_scale: By how much activations are multiplied, where the folder leaves it open.
        output_projection: From the attention's concatenated heads to its output,
            ``(width, n_heads * head_size)``.
    """

    place: Place | None = None
    input_scale: float | None = None
    output_projection: Tensor | None = None


# -- SAELens -----------------------------------------------------------------------------------


def read_saelens(folder: Path, wishes: Wishes) -> SparseAutoencoder:
    """``cfg.json`` and ``sae_weights.safetensors``, of versions before and after 6."""
    path = folder / "cfg.json"
    config = read_json(path)
    config = {**config, **config.get("metadata", {}), **config.get("meta", {})}
    tensors = read_tensors(folder / "sae_weights.safetensors")
    take = _Taker(folder / "sae_weights.safetensors", tensors)
    if config.get("hook_head_index") is not None:
        fail_to_read(path, "it is an SAE of a single attention head (hook_head_index)")
    activation, k = _saelens_activation(path, config)
    encoder, decoder, encoder_bias = take("W_enc").T, take("W_dec"), take("b_enc")
    threshold = None
    if activation == "jumprelu":
        training = "threshold" not in tensors and "log_threshold" in tensors
        threshold = take("log_threshold").exp() if training else take("threshold")
    elif activation == "batchtopk":
        threshold = take("topk_threshold").expand(len(decoder)).clone()
    if "scaling_factor" in tensors:  # a learned factor per feature, of before version 4
        decoder = decoder * take("scaling_factor")[:, None]
    if config.get("rescale_acts_by_decoder_norm") and activation in ("topk", "batchtopk"):
        norm = decoder.norm(dim=1)
        encoder, encoder_bias = encoder * norm[:, None], encoder_bias * norm
        decoder = decoder / torch.where(norm == 0, 1.0, norm)[:, None]
    hook = str(config.get("hook_name", config.get("hook_point", "")))
    sae = SparseAutoencoder(
        place=_place_of(path, hook, wishes),
        encoder=encoder.contiguous(),
        decoder=decoder,
        encoder_bias=encoder_bias,
        decoder_bias=take("b_dec"),
        activation=activation,
        threshold=threshold,
        k=k,
        input_scale=_saelens_scale(folder, config.get("normalize_activations"), wishes),
        subtract_decoder_bias=config.get("apply_b_dec_to_input", True),
        lm=config.get("model_name"),
    )
    return _at_output(sae, path, hook.endswith("hook_z"), wishes)


def _saelens_activation(path: Path, config: Mapping[str, Any]) -> tuple[Activation, int | None]:
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    architecture = config.get("architecture", "standard")
    if function == "topk" and architecture == "standard":
        architecture = "topk"
    known: dict[str, Activation] = {
        "standard": "relu", "jumprelu": "jumprelu", "topk": "topk", "batchtopk": "batchtopk",
    }  # fmt: skip
    if architecture not in known or function not in ("relu", "topk"):
        fail_to_read(
            path,
            f"its architecture is {architecture!r} with the activation {function!r}; this package "
            f"has {', '.join(known)} with relu",
        )
    return known[architecture], None if k is None else int(k)


def _saelens_scale(folder: Path, normalize: object, wishes: Wishes) -> float:
    if normalize in (None, False, "none"):
        return 1.0
    if normalize not in (True, "expected_average_only_in"):
        fail_to_read(
            folder / "cfg.json",
            f"it normalizes every token by itself (normalize_activations is {normalize!r}), "
            "so that no weights can hold the norm",
        )
    scale = wishes.input_scale
    path = folder / "activation_scaler.json"
    if scale is None and path.is_file():
        scale = read_json(path).get("scaling_factor")
    if scale is None:
        raise SparseAutoencoderError(
            f"{folder / 'cfg.json'} asks for activations of a fixed mean norm "
            "(expected_average_only_in), but the folder does not hold the factor "
            "(activation_scaler.json). Pass it as input_scale: sqrt(width) / mean norm."
        )
    return float(scale)


# -- Gemma Scope -------------------------------------------------------------------------------


def read_gemma_scope(folder: Path, wishes: Wishes) -> SparseAutoencoder:
    """``params.npz``; the place is in the path, as on the hub (Lieberum et al., 2024)."""
    path = folder / "params.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError, BadZipFile, TypeError) as error:
        fail_to_read(path, f"it is damaged or holds pickled objects, which are not read ({error})")
    take = _Taker(path, tensors)
    parts = folder.absolute().parts
    layers = [m[1] for part in parts if (m := re.fullmatch(r"layer_(\d+)", part))]
    kinds = [m[1] for part in parts if (m := re.search(r"gemma-scope.*-(res|mlp|att)\b", part))]
    place, heads = wishes.place, bool(kinds) and kinds[-1] == "att"
    if layers and kinds:
        place = Place(int(layers[-1]), _GEMMA_KINDS[kinds[-1]])
    if place is None:
        raise SparseAutoencoderError(
            f"neither {path} nor its path says where the SAE belongs. Keep the hub's folders "
            "(gemma-scope-2b-pt-res/layer_12/...), or pass the place."
        )
    sae = SparseAutoencoder(
        place=place,
        encoder=take("W_enc").T.contiguous(),
        decoder=take("W_dec"),
        encoder_bias=take("b_enc"),
        decoder_bias=take("b_dec"),
        activation="jumprelu",
        threshold=take("threshold"),
    )
    return _at_output(sae, path, heads, wishes)


# -- Llama Scope -------------------------------------------------------------------------------


def read_llama_scope(folder: Path, wishes: Wishes) -> SparseAutoencoder:
    """``hyperparams.json`` and ``checkpoints/final.safetensors`` (He et al., 2024).

    Activations are multiplied by ``sqrt(width) / mean norm``. The threshold, however, is in the
    units of the LM's own activations, and on features of unit decoder norm.
    """
    path = folder / "hyperparams.json"
    config = read_json(path)
    take = _Taker(
        folder / "checkpoints" / "final.safetensors",
        read_tensors(folder / "checkpoints" / "final.safetensors"),
    )
    hook, out = str(config.get("hook_point_in", "")), config.get("hook_point_out")
    if hook != out:
        fail_to_read(path, f"it is a transcoder from {hook} to {out}, not an SAE")
    if config.get("use_glu_encoder"):
        fail_to_read(path, "it has a gated encoder (use_glu_encoder)")
    encoder, decoder = take("encoder.weight"), take("decoder.weight").T.contiguous()
    scale = _llama_scale(path, config, decoder.shape[1])
    norm = decoder.norm(dim=1) if config.get("sparsity_include_decoder_norm") else None
    level = float(config.get("jump_relu_threshold") or 0.0)
    function = str(config.get("act_fn", "")).lower()
    activation: Activation = "relu"
    threshold = score_scale = None
    # The threshold of a release replaces the k of the training.
    if function == "jumprelu" or (function in ("topk", "batchtopk") and level > 0):
        activation = "jumprelu"
        threshold = torch.full((len(decoder),), level * scale)
        if norm is not None:  # a feature of zero norm adds nothing, whatever its threshold
            threshold = threshold / torch.where(norm == 0, 1.0, norm)
    elif function == "topk":
        activation, score_scale = "topk", norm
    elif function != "relu":
        fail_to_read(path, f"its activation is {function!r} without a jump_relu_threshold")
    return SparseAutoencoder(
        place=_place_of(path, hook, wishes),
        encoder=encoder,
        decoder=decoder,
        encoder_bias=take("encoder.bias"),
        decoder_bias=take("decoder.bias")
        if config.get("use_decoder_bias", True)
        else torch.zeros(decoder.shape[1]),
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
        fail_to_read(path, f"its norm_activation is {kind!r}, which no weights can hold")
    if not norms.get("in") or norms["in"] != norms.get("out"):
        fail_to_read(path, f"dataset_average_activation_norm is {norms}, not one norm above 0")
    return math.sqrt(width) / float(norms["in"])


# -- shared ------------------------------------------------------------------------------------


class _Taker:
    """Tensors of a file by name, in float32; a missing one is named with its file."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._path, self._tensors = path, tensors

    def __call__(self, name: str) -> Tensor:
        if name not in self._tensors:
            fail_to_read(self._path, f"it lacks {name} (it has {', '.join(self._tensors)})")
        return self._tensors[name].float()


def _place_of(path: Path, hook: str, wishes: Wishes) -> Place:
    found = _HOOK.fullmatch(hook)
    if found is None and wishes.place is not None:  # named as another library does
        return wishes.place
    name, layer = (found[2], int(found[1])) if found else (hook, 0)
    if name == "hook_resid_pre":
        layer -= 1
    if name not in _HOOK_KINDS or layer < 0:
        fail_to_read(
            path, f"it reads {hook or 'a place it does not name'}, none of {', '.join(KINDS)}"
        )
    return Place(layer, _HOOK_KINDS[name])


def _at_output(
    sae: SparseAutoencoder, path: Path, reads_heads: bool, wishes: Wishes
) -> SparseAutoencoder:
    """Move an SAE of the attention's concatenated heads to the attention's output.

    The output is ``W z``. With W of full column rank ``z = W⁺ W z``, so nothing is lost.
    """
    weight = wishes.output_projection
    if not reads_heads:
        return sae
    if weight is None:
        raise SparseAutoencoderError(
            f"the SAE of {path} reads the attention's concatenated heads, before its output "
            "projection. Pass that projection's weight as output_projection."
        )
    if weight.ndim != 2 or weight.shape[1] != sae.width:
        raise SparseAutoencoderError(
            f"output_projection has the shape {tuple(weight.shape)}; the SAE of {path} asks for "
            f"(width, {sae.width}). Pass the output projection of {sae.place} in this very LM."
        )
    weight = weight.detach().double().cpu()
    if torch.linalg.matrix_rank(weight) < sae.width:
        raise SparseAutoencoderError(
            f"the SAE of {path} reads {sae.width} numbers of the heads, which cannot be told from "
            f"the attention's output of width {len(weight)}. Take an SAE of the output itself."
        )
    back = torch.linalg.pinv(weight)
    # The decoder bias that the encoder subtracts moves along: W⁺ W b = b.
    return SparseAutoencoder(
        place=sae.place,
        encoder=(sae.encoder.detach().double() @ back).float(),
        decoder=(sae.decoder.detach().double() @ weight.T).float(),
        encoder_bias=sae.encoder_bias.detach(),
        decoder_bias=(weight @ sae.decoder_bias.detach().double()).float(),
        activation=sae.activation,
        threshold=sae.threshold,
        k=sae.k,
        score_scale=sae.score_scale,
        input_scale=sae.input_scale,
        subtract_decoder_bias=sae.subtract_decoder_bias,
        lm=sae.lm,
    )
