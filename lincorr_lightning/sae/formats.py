"""Load and save SAEs: folders of this package, SAELens, Gemma Scope and Llama Scope."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.conversion import check_heads, from_heads, uncentered
from lincorr_lightning.sae.files import fail_to_read, raise_unsupported, read_config, read_tensors
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import (
    CONFIG_FILE,
    TENSORS_FILE,
    Activation,
    SparseAutoencoder,
)

SAE_FOLDER = "sparse_autoencoders"
"""Folder of a run that holds a folder per SAE."""


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


Reader = Callable[[Path, LoadOptions], SparseAutoencoder]


@dataclass(frozen=True)
class SAEFormat:
    """A format of an SAE's folder.

    Attributes:
        name: Name of the format, as ``gemma_scope``.
        files: Relative paths; a folder that holds all of them has this format.
        read: Function that reads such a folder.
    """

    name: str
    files: tuple[str, ...]
    read: Reader

    def matches(self, folder: Path) -> bool:
        """Return whether a folder has this format."""
        return all((folder / name).is_file() for name in self.files)


FORMATS: dict[str, SAEFormat] = {}


def register_format(name: str, files: Iterable[str], read: Reader) -> None:
    """Add a format that `load_sae` reads.

    Args:
        name: New name; a ValueError if it is taken.
        files: Relative paths that identify a folder of this format.
        read: Function from the folder and the caller's `LoadOptions` to an SAE.
    """
    if name in FORMATS:
        raise ValueError(f"the SAE format {name!r} is registered already")
    FORMATS[name] = SAEFormat(name, tuple(files), read)


def load_sae(
    folder: str | Path,
    *,
    hook_point: HookPoint | None = None,
    input_scale: float | None = None,
    lm: LanguageModel | None = None,
) -> SparseAutoencoder:
    """Load an SAE from a local folder of any known format; nothing is unpickled.

    The norms of the decoder stay as they are in the file; `SparseAutoencoder.folded` folds them.

    Args:
        folder: Folder of this package, SAELens, Gemma Scope or Llama Scope.
        hook_point: Hook point of the SAE. Only needed where neither the files nor the path name it;
            where they do, it must be the same. A folder called ``residual.12``, ``mlp_out.12`` or
            ``attention_out.12`` names it as well.
        input_scale: Factor that multiplies activations before the SAE, for a SAELens checkpoint
            that leaves it open: ``sqrt(width) / mean norm`` of the activations. A file
            ``activation_scaler.json`` with ``{"scaling_factor": ...}`` in the folder holds it, too.
        lm: The LM; its weights are loaded if needed. Two kinds of SAEs need it. SAEs of the
            attention's concatenated heads (Gemma Scope's attention SAEs, SAELens at ``hook_z``)
            have the output projection merged into them, so that they read and write what the
            attention adds to the stream. SAEs of SAELens with ``center_writing_weights`` are
            changed to read the activations of the uncentered LM.

    Returns:
        The SAE in float32, in evaluation mode.

    Raises:
        SparseAutoencoderError: The format or the kind of SAE is unknown, a file is missing or
            damaged, the hook point is unknown or differs from `hook_point`, or the SAE reads the
            heads of an attention whose output projection a norm follows (Gemma 2 and 3).
    """
    folder = Path(folder)
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    form = next((form for form in FORMATS.values() if form.matches(folder)), None)
    if form is None:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        known = "; ".join(f"{form.name} ({', '.join(form.files)})" for form in FORMATS.values())
        raise SparseAutoencoderError(
            f"{folder} is in no known format of SAEs: it holds {inside}. Known are {known}. "
            "Pass the folder that holds one SAE's files itself."
        )
    named = HookPoint.named(folder.absolute().name)
    try:
        sae = form.read(folder, LoadOptions(hook_point or named, input_scale, lm))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        fail_to_read(folder, f"a value in its files is none that {form.name} has ({error!r})")
    if hook_point is not None and sae.hook_point != hook_point:
        raise SparseAutoencoderError(
            f"the SAE in {folder} belongs to {sae.hook_point}, not to {hook_point}. "
            "Pass the folder of that hook point's SAE."
        )
    return sae.float().eval()


def load_saes(
    saes: str | Path | Sequence[str | Path], lm: LanguageModel | None = None
) -> dict[HookPoint, SparseAutoencoder]:
    """Load one SAE per hook point, in the order of the folders.

    Args:
        saes: A folder that holds a folder per SAE, the folder of one SAE, or a list of such
            folders.
        lm: The LM, see `load_sae`.

    Raises:
        SparseAutoencoderError: A folder cannot be read, or two SAEs belong to one hook point.
    """
    folders = _sae_folders(Path(saes)) if isinstance(saes, (str, Path)) else saes
    loaded: dict[HookPoint, SparseAutoencoder] = {}
    for folder in folders:
        sae = load_sae(folder, lm=lm)
        if sae.hook_point in loaded:
            raise SparseAutoencoderError(
                f"{folder} holds a second SAE for {sae.hook_point}. Pass one for each hook point."
            )
        loaded[sae.hook_point] = sae
    return loaded


def _sae_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    inside = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    # A folder without folders is left to `load_sae`, whose refusal lists the known formats.
    if not inside or any(form.matches(folder) for form in FORMATS.values()):
        return [folder]
    return inside


def save_saes(saes: Mapping[HookPoint, SparseAutoencoder], folder: str | Path) -> None:
    """Save SAEs in a run's folder, as ``sparse_autoencoders/residual.0`` and so on."""
    for hook_point, sae in saes.items():
        sae.save(Path(folder) / SAE_FOLDER / hook_point.id)


# -- formats of other libraries ------------------------------------------------------------------


_FILES = {
    "saelens": ("cfg.json", "sae_weights.safetensors"),
    "gemma_scope": ("params.npz",),
    "llama_scope": ("hyperparams.json", "checkpoints/final.safetensors"),
}
"""The file of settings, if there is one, and that of tensors."""

_PARTS = ("encoder", "decoder", "encoder_bias", "decoder_bias")
_KEYS = ("W_enc", "W_dec", "b_enc", "b_dec")
_LLAMA_KEYS = ("encoder.weight", "decoder.weight", "encoder.bias", "decoder.bias")
# TransformerLens' names; the residual stream before a layer is the one after the previous layer.
_HOOK_KINDS: dict[str, HookKind] = {
    "hook_resid_post": "residual", "hook_resid_pre": "residual", "hook_mlp_out": "mlp_out",
    "hook_attn_out": "attention_out", "attn.hook_z": "attention_out",
}  # fmt: skip
_GEMMA_KINDS: dict[str, HookKind] = {"res": "residual", "mlp": "mlp_out", "att": "attention_out"}
# Renaming the folder also helps those who pass it on the command line.
_NAME_IT = (
    "name the folder by its hook point, such as residual.12, mlp_out.12 or attention_out.12, or "
    "pass hook_point to load_sae."
)
_ONE_HOOK_POINT = "Take an SAE, which reads and writes the same hook point."


class _Source(dict[str, Tensor]):
    """The tensors of a folder by name, in float32, beside its config and the caller's options."""

    def __init__(self, form: str, folder: Path, options: LoadOptions) -> None:
        files = [folder / name for name in _FILES[form]]
        self.folder, self.options, self.path = folder, options, files[0]
        self.config = read_config(files[0]) if len(files) > 1 else {}
        self._tensors = files[-1]
        super().__init__({name: t.float() for name, t in read_tensors(files[-1]).items()})

    def __missing__(self, name: str) -> Tensor:
        fail_to_read(self._tensors, f"it lacks {name} (it has {', '.join(self)})")

    def refuse(self, reason: str, way_out: str) -> NoReturn:
        raise_unsupported(self.path, reason, way_out)

    def weights(self, keys: Sequence[str], transposed: str) -> dict[str, Any]:
        """Return E, D and their biases; one matrix has a column per feature in the file."""
        parts = {name: self[key] for name, key in zip(_PARTS, keys, strict=True)}
        return parts | {transposed: parts[transposed].T.contiguous()}

    def hook_point(self, hook: str) -> HookPoint:
        """Return the hook point that TransformerLens calls `hook`."""
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)
        if match is None:  # the name of another library, or none
            if self.options.hook_point is None:
                named = f"calls its hook point {hook!r}" if hook else "does not name its hook point"
                self.refuse(
                    f"it {named}, so that it is unknown which of {', '.join(KINDS)} it reads",
                    f"If it is one of these, {_NAME_IT}",
                )
            return self.options.hook_point
        layer = int(match[1]) - (match[2] == "hook_resid_pre")
        if match[2] not in _HOOK_KINDS or layer < 0:
            self.refuse(
                f"it reads {hook}, none of {', '.join(KINDS)}",
                f"Take an SAE of {', '.join(_HOOK_KINDS)}; the stream before layer 0 is the "
                "embedding, which is no layer's output.",
            )
        return HookPoint(layer, _HOOK_KINDS[match[2]])


def _read_gemma_scope(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    """The path names the hook point, as on the hub; SAEs of attention read concatenated heads.

    (Lieberum et al., 2024, arXiv 2408.05147.)
    """
    source = _Source("gemma_scope", folder, options)
    parts = folder.absolute().parts
    layers = [m[1] for part in parts if (m := re.fullmatch(r"layer_(\d+)", part))]
    kinds = [m[1] for part in parts if (m := re.search(r"gemma-scope.*-(res|mlp|att)\b", part))]
    hook_point = options.hook_point
    if layers and kinds:
        hook_point = HookPoint(int(layers[-1]), _GEMMA_KINDS[kinds[-1]])
    if hook_point is None:
        source.refuse(
            "neither the file nor its path names its hook point",
            f"Keep the hub's folders (gemma-scope-2b-pt-res/layer_12/...), {_NAME_IT}",
        )
    sae = SparseAutoencoder(
        hook_point=hook_point, activation="jumprelu",
        **source.weights(_KEYS, transposed="encoder"), threshold=source["threshold"],
    )  # fmt: skip
    if hook_point.kind == "attention_out":
        return from_heads(sae, options.lm, source.path)
    return sae


# -- SAELens -------------------------------------------------------------------------------------

_ARCHITECTURES: dict[str, Activation] = {
    "standard": "relu", "jumprelu": "jumprelu", "topk": "topk", "batchtopk": "batchtopk",
    # The nested losses only matter for training.
    "matryoshka_batchtopk": "batchtopk",
}  # fmt: skip
_NORMS = {
    "layer_norm": "it normalizes every token by itself",
    "constant_norm_rescale": "it normalizes every token by itself",
    "covariance_whitening": "it whitens activations by their covariance",
    "constant_scalar_rescale": "it multiplies activations by its own constant",
}


def _read_saelens(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    """Versions before and after 6, which has the LM's part under ``metadata``."""
    source = _Source("saelens", folder, options)
    config = source.config
    config = {**config, **(config.get("metadata") or {}), **(config.get("meta") or {})}
    if config.get("hook_head_index") is not None:
        source.refuse(
            "it is an SAE of a single attention head (hook_head_index is "
            f"{config['hook_head_index']})",
            "Take one of all heads together (attn.hook_z) or of what they add (hook_attn_out).",
        )
    activation, k = _saelens_activation(source, config)
    parts = source.weights(_KEYS, transposed="encoder")
    threshold = None
    if activation == "jumprelu":
        training = "threshold" not in source and "log_threshold" in source
        threshold = source["log_threshold"].exp() if training else source["threshold"]
    elif activation == "batchtopk":
        threshold = source["topk_threshold"].expand(len(parts["decoder"])).clone()
    if "scaling_factor" in source:  # a learned factor per feature, before version 4
        parts["decoder"] = parts["decoder"] * source["scaling_factor"][:, None]
    if config.get("rescale_acts_by_decoder_norm") and activation in ("topk", "batchtopk"):
        norm = parts["decoder"].norm(dim=1)
        parts["encoder"] = parts["encoder"] * norm[:, None]
        parts["encoder_bias"] = parts["encoder_bias"] * norm
        parts["decoder"] = parts["decoder"] / torch.where(norm == 0, 1.0, norm)[:, None]
    hook = str(config.get("hook_name") or config.get("hook_point") or "")
    sae = SparseAutoencoder(
        hook_point=source.hook_point(hook), activation=activation, threshold=threshold, k=k,
        input_scale=_saelens_scale(source, config.get("normalize_activations"), hook),
        subtract_decoder_bias=config.get("apply_b_dec_to_input", True),
        lm=config.get("model_name"), **parts,
    )  # fmt: skip
    # Which processing steps of TransformerLens were chosen.
    chosen = config.get("model_from_pretrained_kwargs") or {}
    steps = {name for name, value in chosen.items() if value is True}
    if hook.endswith("hook_z"):
        check_heads(steps, source.path)
        return from_heads(sae, options.lm, source.path)
    return uncentered(sae, options.lm, source.path) if "center_writing_weights" in steps else sae


def _saelens_activation(
    source: _Source, config: Mapping[str, Any]
) -> tuple[Activation, int | None]:
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    architecture = config.get("architecture") or "standard"
    if function == "topk" and architecture == "standard":
        architecture = "topk"
    if "transcoder" in str(architecture):
        source.refuse(
            f"it is a transcoder ({architecture}), which reads one hook point and writes another",
            _ONE_HOOK_POINT,
        )
    if architecture not in _ARCHITECTURES or function not in ("relu", "topk"):
        source.refuse(
            f"its architecture is {architecture!r} with the activation {function!r}, which is not "
            "supported",
            f"Take one whose architecture is {', '.join(_ARCHITECTURES)}, with relu.",
        )
    return _ARCHITECTURES[architecture], None if k is None else int(k)


def _saelens_scale(source: _Source, normalize: object, hook: str) -> float:
    if normalize in (None, False, "none"):
        return 1.0
    if normalize not in (True, "expected_average_only_in"):
        how = _NORMS.get(str(normalize), "it changes activations in an unknown way")
        source.refuse(
            f"{how} (normalize_activations is {normalize!r}), which is not supported",
            "Take one that has none or expected_average_only_in there.",
        )
    scale = source.options.input_scale
    path = source.folder / "activation_scaler.json"
    if scale is None and path.is_file():
        scale = read_config(path).get("scaling_factor")
    if scale is None:
        source.refuse(
            "it expects activations of a fixed mean norm (normalize_activations is "
            f"expected_average_only_in), but the folder does not hold the factor ({path.name})",
            f'Write {{"scaling_factor": s}} to {path}, or pass s to load_sae as input_scale: '
            "s = sqrt(width) / mean norm of the LM's activations at "
            f"{hook or 'its hook point'}, over texts like those it was trained on "
            "(lincorr_lightning.sae.captured reads activations).",
        )
    return float(scale)


# -- Llama Scope ---------------------------------------------------------------------------------


def _read_llama_scope(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    """Activations are multiplied by ``sqrt(width) / mean norm``, but the threshold is not.

    It is in the units of the LM's own activations, and applies to features of unit decoder norm
    (He et al., 2024, arXiv 2410.20526).
    """
    source = _Source("llama_scope", folder, options)
    config = source.config
    hook, out = str(config.get("hook_point_in", "")), config.get("hook_point_out")
    if hook != out:
        source.refuse(f"it is a transcoder from {hook} to {out}", _ONE_HOOK_POINT)
    if config.get("use_glu_encoder"):
        source.refuse(
            "it has a gated encoder (use_glu_encoder), which is not supported", "Take one without."
        )
    if not config.get("use_decoder_bias", True):
        source["decoder.bias"] = torch.zeros(len(source["decoder.weight"]))
    parts = source.weights(_LLAMA_KEYS, transposed="decoder")
    n_features, width = parts["decoder"].shape
    scale = _llama_scale(source, width)
    norm = None
    if config.get("sparsity_include_decoder_norm"):
        norm = parts["decoder"].norm(dim=1)
    level = float(config.get("jump_relu_threshold") or 0.0)
    function = str(config.get("act_fn", "")).lower()
    activation: Activation = "relu"
    threshold = None
    # A released threshold replaces the k of training.
    if function == "jumprelu" or (function in ("topk", "batchtopk") and level > 0):
        activation = "jumprelu"
        threshold = torch.full((n_features,), level * scale)
        if norm is not None:  # a feature of zero norm adds nothing, whatever its threshold
            threshold = threshold / torch.where(norm == 0, 1.0, norm)
    elif function == "topk":
        activation = "topk"
    elif function != "relu":
        source.refuse(
            f"its activation is {function!r} without a jump_relu_threshold, which is not supported",
            "Take one with relu, topk or jumprelu, or with such a threshold.",
        )
    return SparseAutoencoder(
        hook_point=source.hook_point(hook), activation=activation, threshold=threshold,
        k=config.get("top_k") if activation == "topk" else None,
        score_scale=norm if activation == "topk" else None, input_scale=scale,
        subtract_decoder_bias=config.get("apply_decoder_bias_to_pre_encoder", False), **parts,
    )  # fmt: skip


def _llama_scale(source: _Source, width: int) -> float:
    kind = source.config.get("norm_activation")
    if kind in (None, "inference"):
        return 1.0
    norms = source.config.get("dataset_average_activation_norm") or {}
    if kind != "dataset-wise":
        source.refuse(
            f"its norm_activation is {kind!r}, which cannot be merged into weights",
            "Take one with dataset-wise or inference.",
        )
    if not norms.get("in") or norms["in"] != norms.get("out"):
        source.refuse(
            f"dataset_average_activation_norm is {norms}, not one norm above 0 for in and out",
            "Take the release's own hyperparams.json, or an SAE that reads and writes one scale.",
        )
    return math.sqrt(width) / float(norms["in"])


def _read_own(folder: Path, options: LoadOptions) -> SparseAutoencoder:
    del options  # the folder holds everything
    return SparseAutoencoder.from_pretrained(folder)


register_format("lincorr", (CONFIG_FILE, TENSORS_FILE), _read_own)
register_format("saelens", _FILES["saelens"], _read_saelens)
register_format("gemma_scope", _FILES["gemma_scope"], _read_gemma_scope)
register_format("llama_scope", _FILES["llama_scope"], _read_llama_scope)
