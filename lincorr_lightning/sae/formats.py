"""Load, convert and save SAEs of this package and of other libraries."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError, listed
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae import sparse_autoencoder as stored
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, find_projection, is_output_of, width_of
from lincorr_lightning.sae.sparse_autoencoder import Activation, SparseAutoencoder, fail_to_read

SAE_FOLDER = "sparse_autoencoders"  #: Folder of a run that holds a folder per SAE.
# Names of TransformerLens, whose stream before a layer is the one after the previous layer, and of
# modules, by their path below the layer. Heads are converted to the attention's output.
_HOOK_KINDS: dict[str, HookKind] = {
    "hook_resid_post": "residual",
    "hook_resid_pre": "residual",
    "": "residual",
    "hook_mlp_out": "mlp_out",
    "hook_attn_out": "attention_out",
    "attn.hook_z": "attention_out",
    "mlp": "mlp_out",
    "feed_forward": "mlp_out",
    "post_feedforward_layernorm": "mlp_out",
    "attn": "attention_out",
    "self_attn": "attention_out",
    "attention": "attention_out",
    "self_attention": "attention_out",
    "self_attn.o_proj.input": "attention_out",
}
_IN_LAYER = re.compile(r"(?:\w+\.)*(?:blocks|layers?|h)\.(\d+)\.?(.*)")
# Names in folders: Gemma Scope's, and such as resid_post_layer_8 or attn_out_all/layer_3_width_16k.
_SITES = (
    r"gemma-scope[^/]*-(res|mlp|att)\b.*/layer_(\d+)(?:/|$)",
    r"(?<![a-zA-Z])(res|mlp|att)(?:id|n)?_(?:post|out)(?:_all)?[/_]layer_?(\d+)",
)
_SITE_KINDS: dict[str, HookKind] = {"res": "residual", "mlp": "mlp_out", "att": "attention_out"}


@dataclass(frozen=True)
class SAESource:
    """A folder that holds the `files` of a format, and the arguments of `load_sae`.

    The last file holds tensors; the first holds settings, if there are two. A reader takes what it
    needs from `config`, `weights` and `find_hook_point`, and may `refuse` the SAE.
    """

    folder: Path
    files: Sequence[str]
    hook_point: HookPoint | None = None
    input_scale: float | None = None
    lm: LanguageModel | None = None

    @property
    def path(self) -> Path:
        """The first file."""
        return self.folder / self.files[0]

    @cached_property
    def config(self) -> dict[str, Any]:
        """The settings; empty if there is no file of them."""
        return stored.read_config(self.path) if len(self.files) > 1 else {}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in float32."""
        tensors = stored.read_tensors(self.folder / self.files[-1])
        return {name: tensor.float() for name, tensor in tensors.items()}

    def refuse(self, reason: str, way_out: str) -> NoReturn:
        """Raise the error of an SAE that is undamaged but cannot be used."""
        raise SparseAutoencoderError(f"cannot use the SAE of {self.path}: {reason}. {way_out}")

    def require(self, key: str, value: object, supported: Iterable[object]) -> None:
        """Refuse a setting whose value is not among the supported ones."""
        if value not in (supported := list(supported)):
            what = f"its {key} is {value!r}, which is not supported"
            what = f"its settings have no {key}" if value is None else what
            self.refuse(what, f"Take an SAE whose {key} is {' or '.join(map(str, supported))}.")

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that the file must have."""
        if name not in self.tensors:
            known = ", ".join(self.tensors)
            fail_to_read(self.folder / self.files[-1], f"it lacks {name} (it has {known})")
        return self.tensors[name]

    def weights(self, keys: Sequence[str], transposed: str = "") -> dict[str, Any]:
        """Return E, D, b_E and b_D, which the file calls `keys`.

        The `transposed` one of encoder and decoder has a column for each feature there.
        """
        names = ("encoder", "decoder", "encoder_bias", "decoder_bias")
        parts = dict(zip(names, map(self.tensor, keys), strict=True))
        return parts | {name: parts[name].T.contiguous() for name in names if name == transposed}

    def find_hook_point(self, hook: str = "") -> HookPoint:
        """Return the hook point that a library calls `hook`, or else that of the path or caller.

        It may be TransformerLens' name, a module (``model.layers.3.mlp``) or ``mlp_out_layer_3``.
        """
        if match := _IN_LAYER.fullmatch(hook.removesuffix(".output")):
            layer = int(match[1]) - (match[2] == "hook_resid_pre")
            if match[2] not in _HOOK_KINDS or layer < 0:
                self.refuse(
                    f"it reads {hook}, none of {', '.join(KINDS)}",
                    "Take an SAE of the residual stream after a layer, or of what its MLP or "
                    "attention adds to it; before layer 0 is the embedding, no layer's output.",
                )
            at = HookPoint(layer, _HOOK_KINDS[match[2]])
            is_output = match[2] and "hook" not in hook and not hook.endswith(".input")
            if self.lm and is_output and not is_output_of(self.lm.load().model, match[2], at):
                self.refuse(
                    f"it reads {hook}, but what {self.lm.config.name_or_path} adds to the stream "
                    f"as {at} is something else, such as that after a norm",
                    "Take an SAE of the layer's own output.",
                )
            return at
        path = self.folder.absolute()
        named = _site(hook) or HookPoint.named(path.name) or _site(str(path)) or self.hook_point
        if named is None:
            called = f"calls its hook point {hook!r}" if hook else "does not name its hook point"
            # Renaming the folder also helps those who pass it on the command line.
            self.refuse(
                f"it {called}, so that it is unknown which of {', '.join(KINDS)} it reads",
                "If it is one of these, name the folder by its hook point (residual.1, mlp_out.1, "
                "attention_out.1) or pass hook_point to load_sae; if not, leave it out.",
            )
        return named


def _site(text: str) -> HookPoint | None:
    """Return the hook point that a text such as ``resid_post_layer_8`` names, the last of some."""
    named = [found for pattern in _SITES for found in re.findall(pattern, text)]
    return HookPoint(int(named[-1][1]), _SITE_KINDS[named[-1][0]]) if named else None


class SAEFormat(NamedTuple):
    """A format: a folder that holds all `files`, relative paths, is read by `read`."""

    files: Sequence[str]
    read: Callable[[SAESource], SparseAutoencoder]

    def matches(self, folder: Path) -> bool:
        """Return whether a folder has this format."""
        return all((folder / name).is_file() for name in self.files)


def load_sae(
    folder: str | Path,
    *,
    hook_point: HookPoint | None = None,
    input_scale: float | None = None,
    lm: LanguageModel | None = None,
) -> SparseAutoencoder:
    """Load an SAE from a local folder of any known format; no code in its files is run.

    It is in float32 and in evaluation mode. The norms of the decoder stay as they are in the file;
    `SparseAutoencoder.folded` folds them. A `SparseAutoencoderError` if the SAE cannot be read or
    used, or its hook point is unknown.

    Args:
        folder: Folder with the files of one of the known formats.
        hook_point: Hook point of the SAE. Only needed where neither the files nor the path name it;
            where they do, it must be the same. Folders such as ``residual.12``, ``mlp_out.12``,
            ``attention_out.12`` and ``resid_post_layer_12`` name it as well.
        input_scale: Factor that multiplies activations before the SAE, for a SAELens checkpoint
            that leaves it open: ``sqrt(width) / mean norm`` of the activations. A file
            ``activation_scaler.json`` with ``{"scaling_factor": ...}`` in the folder holds it, too.
        lm: The LM; its weights are loaded if needed. SAEs of the attention's concatenated heads
            (Gemma Scope's of attention, SAELens at ``hook_z``) need it: its output projection is
            merged into them, so that they read and write what the attention adds to the stream. So
            do those of SAELens with ``center_writing_weights``, to read the uncentered LM. SAEs of
            a module such as ``layers.12.mlp`` are refused where the LM adds something else.
    """
    folder = Path(folder)
    if not folder.is_dir():
        missing = "there is no such folder; if it is a hub id, download it first, pass its folder"
        fail_to_read(folder, "it is a file; pass its folder" if folder.exists() else missing)
    name = next((name for name, one in reversed(FORMATS.items()) if one.matches(folder)), None)
    if name is None:
        inside = sorted(p.name + "/" * p.is_dir() for p in folder.iterdir())
        known = "; ".join(f"{name} ({', '.join(form.files)})" for name, form in FORMATS.items())
        raise SparseAutoencoderError(
            f"{folder} holds an SAE in no known format, or none: inside is "
            f"{listed(inside, most=8)}. Known are {known}. "
            "Pass the folder that holds one SAE's files itself, or register their format with "
            "lincorr_lightning.sae.register_format."
        )
    source = SAESource(folder, FORMATS[name].files, hook_point, input_scale, lm)
    try:
        sae = FORMATS[name].read(source)
    except torch.OutOfMemoryError:  # of the LM
        raise
    except KeyError as error:
        fail_to_read(folder, f"its files lack the key {error}, which {name} has")
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        fail_to_read(folder, f"a value in its files is none that {name} has ({error!r})")
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

    From a folder that holds a folder per SAE, the folder of one SAE, or a list of such folders.
    """
    folders: Sequence[str | Path] = [saes] if isinstance(saes, (str, Path)) else saes
    if isinstance(saes, (str, Path)) and (parent := Path(saes)).is_dir():
        inside = sorted(p for p in parent.iterdir() if p.is_dir() and not p.name.startswith("."))
        known = [any(form.matches(one) for form in FORMATS.values()) for one in (parent, *inside)]
        # Files beside folders without SAEs, such as checkpoints, are left to `load_sae` to refuse.
        is_one = not any(known[1:]) and any(path.is_file() for path in parent.iterdir())
        folders = folders if known[0] or is_one or not inside else inside
    loaded: dict[HookPoint, SparseAutoencoder] = {}
    for folder in folders:
        sae = load_sae(folder, lm=lm)
        if sae.hook_point in loaded:
            raise SparseAutoencoderError(
                f"{folder} holds a second SAE for {sae.hook_point}. Pass one for each hook point."
            )
        loaded[sae.hook_point] = sae
    return loaded


def check_fit(saes: Iterable[SparseAutoencoder], lm: LanguageModel) -> None:
    """Refuse SAEs of another width than the LM's, or of layers or outputs that it lacks."""
    name, width = lm.config.name_or_path, width_of(lm.model)
    for sae in saes:
        trained = f" (trained on {sae.lm})" if sae.lm else ""
        if sae.width != width:
            raise SparseAutoencoderError(
                f"the SAE at {sae.hook_point}{trained} is {sae.width} wide, but {name} is {width} "
                "wide. Take an SAE of this LM."
            )
        find_hook_points(lm.model, [sae.hook_point.kind], [sae.hook_point.layer])


def save_saes(saes: Mapping[HookPoint, SparseAutoencoder], folder: str | Path) -> None:
    """Save SAEs in a run's folder, as ``sparse_autoencoders/residual.0`` and so on."""
    for hook_point, sae in saes.items():
        sae.save(Path(folder) / SAE_FOLDER / hook_point.id)


_KEYS = ("W_enc", "W_dec", "b_enc", "b_dec")
# SAELens' architectures; nested losses (Matryoshka) only matter for training.
_ARCHITECTURES: dict[str, Activation] = {
    "standard": "relu",
    "jumprelu": "jumprelu",
    "gated": "jumprelu",
    "topk": "topk",
    "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "batchtopk",
}
_THRESHOLDS = {"jumprelu": "threshold", "batchtopk": "topk_threshold"}
_SCALED = "expected_average_only_in"


def _read_gemma_scope(source: SAESource) -> SparseAutoencoder:
    """Gemma Scope (Lieberum et al., 2024, arXiv 2408.05147), and Gemma Scope 2 for Gemma 3.

    Only the latter has settings; otherwise the path names the hook point, as on the hub. SAEs of
    attention read its concatenated heads.
    """
    hook = str(source.config.get("hf_hook_point_in") or "")
    expected = {"type": "sae", "hf_hook_point_out": hook, "architecture": "jump_relu"}
    for key, value in expected.items():
        source.require(key, source.config.get(key) or value, [value])
    skips = source.config.get("affine_connection") or "affine_skip_connection" in source.tensors
    source.require("affine_connection", bool(skips), [False])
    keys = _KEYS if "W_enc" in source.tensors else [key.lower() for key in _KEYS]
    sae = SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation="jumprelu",
        threshold=source.tensor("threshold"),
        lm=source.config.get("model_name"),
        **source.weights(keys, "encoder"),
    )
    return _from_heads(sae, source) if sae.hook_point.kind == "attention_out" else sae


def _gated(parts: dict[str, Any], r_mag: Tensor, gate_bias: Tensor) -> dict[str, Any]:
    """Return the parts of a gated SAE as one of jumprelu (Rajamanoharan et al., arXiv 2404.16014).

    A feature is ``max(p, 0)`` of ``p = exp(r_mag) e x + b_mag`` where ``e x + gate_bias > 0``, that
    is, where p is above ``b_mag - exp(r_mag) gate_bias``. `parts` have e and b_mag.
    """
    scale = r_mag.exp()
    threshold = parts["encoder_bias"] - scale * gate_bias
    return parts | {"encoder": parts["encoder"] * scale[:, None], "threshold": threshold}


def _read_sparsify(source: SAESource) -> SparseAutoencoder:
    """Top-k SAEs of EleutherAI, in folders named by a module: ``layers.12``, ``h.3.mlp``."""
    run = source.folder.absolute().parent / "config.json"  # transcoders of 2024 are only named here
    config = (stored.read_config(run) if run.is_file() else {}) | source.config
    for key in ("transcode", "skip_connection", "embed_skip", "gram_lookup", "signed"):
        is_on = config.get(key) or (key == "skip_connection" and "W_skip" in source.tensors)
        source.require(key, bool(is_on), [False])
    source.require("activation", config.get("activation") or "topk", ["topk"])
    parts = source.weights(("encoder.weight", "W_dec", "encoder.bias", "b_dec"))
    names = source.folder.absolute().parts[::-1]
    hook = next((name for name in names if _IN_LAYER.fullmatch(name)), names[0])
    return SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation="topk",
        k=int(config["k"]),
        subtract_decoder_bias=True,
        **parts,
    )


# dictionary_learning: tensors of a class, activation, and whether the encoder reads x - b_dec.
_LINEAR = ("encoder.weight", "decoder.weight", "encoder.bias", "b_dec")
_DICTIONARIES: dict[str, tuple[Sequence[str], Activation, bool]] = {
    "AutoEncoder": ((*_LINEAR[:3], "bias"), "relu", True),
    "AutoEncoderNew": ((*_LINEAR[:3], "decoder.bias"), "relu", False),
    "GatedAutoEncoder": ((*_LINEAR[:2], "mag_bias", "decoder_bias"), "jumprelu", True),
    "JumpReluAutoEncoder": (_KEYS, "jumprelu", False),
    "AutoEncoderTopK": (_LINEAR, "topk", True),
    "BatchTopKSAE": (_LINEAR, "batchtopk", True),
    "MatryoshkaBatchTopKSAE": (_KEYS, "batchtopk", True),
}


def _read_dictionary_learning(source: SAESource) -> SparseAutoencoder:
    """Biases and thresholds are already those of unscaled activations."""
    trainer, buffer = (source.config.get(key) or {} for key in ("trainer", "buffer"))
    source.require("buffer.io", buffer.get("io", "out"), ["out"])  # else an input, a transcoder
    name: Any = trainer.get("dict_class") or ("AutoEncoder" if "bias" in source.tensors else None)
    source.require("trainer.dict_class", name, _DICTIONARIES)
    keys, activation, subtract = _DICTIONARIES[name]
    parts = source.weights(keys, "encoder" if keys is _KEYS else "decoder")
    k = source.tensors.get("k", trainer.get("k"))
    if k is not None and trainer.get("k", int(k)) != int(k):
        reason = f"its trainer.k is {trainer['k']}, but the k of {source.files[-1]} is {int(k)}"
        source.refuse(reason, "Copy both files again, from one training.")
    if name == "GatedAutoEncoder":
        parts = _gated(parts, source.tensor("r_mag"), source.tensor("gate_bias"))
    elif activation in ("jumprelu", "batchtopk"):
        parts["threshold"] = source.tensor("threshold")
    return SparseAutoencoder(
        hook_point=source.find_hook_point(str(trainer.get("submodule_name") or "")),
        activation=activation,
        k=None if k is None else int(k),
        subtract_decoder_bias=subtract,
        lm=trainer.get("lm_name"),
        **parts,
    )


def _read_saelens(source: SAESource) -> SparseAutoencoder:
    """Versions before and after 6, which has the LM's part under ``metadata``."""
    config = source.config
    config = {**config, **(config.get("metadata") or {}), **(config.get("meta") or {})}
    source.require("hook_head_index", config.get("hook_head_index"), [None])  # one head alone
    function = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    architecture = config.get("architecture") or "standard"
    if function == "topk" and architecture == "standard":
        architecture = "topk"
    source.require("architecture", architecture, _ARCHITECTURES)
    source.require("activation_fn", function, ["relu", "topk"])
    activation = _ARCHITECTURES[architecture]
    k = config.get("k", (config.get("activation_fn_kwargs") or {}).get("k"))
    if "log_threshold" in source.tensors:  # in training
        source.tensors.setdefault("threshold", source.tensors["log_threshold"].exp())
    bias = "b_mag" if architecture == "gated" else "b_enc"
    parts = source.weights(("W_enc", "W_dec", bias, "b_dec"), "encoder")
    if architecture == "gated":
        parts = _gated(parts, source.tensor("r_mag"), source.tensor("b_gate"))
    elif activation in _THRESHOLDS:
        parts["threshold"] = source.tensor(_THRESHOLDS[activation])
    if "scaling_factor" in source.tensors:  # a learned factor per feature, before version 4
        parts["decoder"] = parts["decoder"] * source.tensors["scaling_factor"][:, None]
    if config.get("rescale_acts_by_decoder_norm") and activation in ("topk", "batchtopk"):
        norm = parts["decoder"].norm(dim=1)
        parts["encoder"] = parts["encoder"] * norm[:, None]
        parts["encoder_bias"] = parts["encoder_bias"] * norm
        parts["decoder"] = parts["decoder"] / torch.where(norm == 0, 1.0, norm)[:, None]
    hook = str(config.get("hook_name") or config.get("hook_point") or "")
    sae = SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation=activation,
        k=None if k is None else int(k),
        input_scale=_saelens_scale(source, config.get("normalize_activations"), hook),
        subtract_decoder_bias=config.get("apply_b_dec_to_input", True),
        lm=config.get("model_name"),
        **parts,
    )
    # Which processing steps of TransformerLens were chosen.
    chosen = config.get("model_from_pretrained_kwargs") or {}
    steps = {name for name, value in chosen.items() if value is True}
    if hook.endswith(("hook_z", "o_proj.input")):
        return _from_heads(sae, source, steps)
    return _uncentered(sae, source, steps)


def _saelens_scale(source: SAESource, normalize: object, hook: str) -> float:
    if normalize in (None, False, "none"):
        return 1.0
    source.require("normalize_activations", normalize, ["none", True, _SCALED])
    scale, path = source.input_scale, source.folder / "activation_scaler.json"
    if scale is None and path.is_file():
        scale = stored.read_config(path).get("scaling_factor")
    if scale is None:
        source.refuse(
            f"it expects activations of a fixed mean norm (normalize_activations is {_SCALED}), "
            f"but the folder does not hold the factor ({path.name})",
            f'Write {{"scaling_factor": s}} to {path}, or pass s to load_sae as input_scale: s = '
            f"sqrt(width) / mean norm of the LM's activations at {hook or 'its hook point'}, over "
            "texts like those of its training (lincorr_lightning.sae.captured reads activations).",
        )
    return float(scale)


def _read_llama_scope(source: SAESource) -> SparseAutoencoder:
    """The threshold is for unscaled activations and unit decoders (He et al., arXiv 2410.20526)."""
    config = source.config
    hook = str(config.get("hook_point_in", ""))
    source.require("hook_point_out", config.get("hook_point_out"), [hook])  # else a transcoder
    source.require("use_glu_encoder", bool(config.get("use_glu_encoder")), [False])
    kind = config.get("norm_activation")
    source.require("norm_activation", kind, ["dataset-wise", "inference", None])
    if not config.get("use_decoder_bias", True):
        source.tensors["decoder.bias"] = torch.zeros(len(source.tensor("decoder.weight")))
    keys = ("encoder.weight", "decoder.weight", "encoder.bias", "decoder.bias")
    parts = source.weights(keys, "decoder")
    scale, norm, threshold = 1.0, None, None
    if kind == "dataset-wise":
        norms = config.get("dataset_average_activation_norm") or {}
        if not norms.get("in") or norms["in"] != norms.get("out"):
            source.refuse(
                f"dataset_average_activation_norm is {norms}, not one norm above 0 for in and out",
                "Take the release's own hyperparams.json, or an SAE that keeps the scale.",
            )
        scale = math.sqrt(len(parts["decoder_bias"])) / float(norms["in"])
    if config.get("sparsity_include_decoder_norm"):
        norm = parts["decoder"].norm(dim=1)
    level = float(config.get("jump_relu_threshold") or 0.0)
    activation: Any = str(config.get("act_fn", "")).lower()
    # A released threshold replaces the k of training.
    if activation in ("topk", "batchtopk") and level > 0:
        activation = "jumprelu"
    source.require("act_fn without jump_relu_threshold", activation, ["relu", "topk", "jumprelu"])
    if activation == "jumprelu":
        threshold = torch.tensor(level * scale)
        if norm is not None:  # a feature of zero norm adds nothing, whatever its threshold
            threshold = threshold / torch.where(norm == 0, 1.0, norm)
    return SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation=activation,
        threshold=threshold,
        k=config.get("top_k") if activation == "topk" else None,
        score_scale=norm if activation == "topk" else None,
        input_scale=scale,
        subtract_decoder_bias=config.get("apply_decoder_bias_to_pre_encoder", False),
        **parts,
    )


# -- conversion ----------------------------------------------------------------------------------
#
# Of SAEs that read something else than a hook point of the LM: the attention's concatenated heads,
# or an LM whose weights TransformerLens processed, by the steps that SAELens keeps in
# ``model_from_pretrained_kwargs``. Folded norms and a centered head change no hook point.

# Below this ratio the smallest singular value is rounding error.
_MIN_SINGULAR_RATIO = 10 * torch.finfo(torch.float32).eps
# They shift or rotate the heads; what the heads add to the stream stays as it is.
_HEAD_STEPS = ("fold_value_biases", "refactor_factored_attn_matrices")


@torch.no_grad()
def _uncentered(
    sae: SparseAutoencoder, source: SAESource, steps: Collection[str]
) -> SparseAutoencoder:
    """Change an SAE of a centered LM, in place, to read the activations of the original LM.

    Where the weights that write to the stream are centered (``center_writing_weights``),
    everything written lacks its mean over the width, which a LayerNorm subtracts anyway; an LM
    without LayerNorm is never centered. Subtracting the mean is linear: the encoder does it.
    """
    if "center_writing_weights" not in steps:
        return sae
    if source.lm is None:
        source.refuse(
            "it was trained on an LM whose writing weights were centered, if a LayerNorm reads "
            "them (center_writing_weights in model_from_pretrained_kwargs)",
            "Pass lm to load_sae, which shows whether the LM has one.",
        )
    if any(isinstance(module, nn.LayerNorm) for module in source.lm.load().model.modules()):
        mean = sae.encoder.double().mean(1, keepdim=True)
        if sae.subtract_decoder_bias:  # the bias is subtracted without its mean
            sae.encoder_bias.sub_(mean[:, 0] * sae.decoder_bias.double().sum())
        sae.encoder.sub_(mean)
    return sae


def _from_heads(
    sae: SparseAutoencoder, source: SAESource, steps: Collection[str] = ()
) -> SparseAutoencoder:
    moved: SparseAutoencoder | None = None
    reason, changes = "", " and ".join(name for name in _HEAD_STEPS if name in steps)
    if changes:
        reason = f" of an LM that was changed ({changes} in model_from_pretrained_kwargs)"
    elif source.lm is None:
        source.refuse(
            "it reads the attention's concatenated heads, before their output projection",
            "Pass lm to load_sae; its output projection is then merged into the SAE.",
        )
    elif (projection := find_projection(source.lm.load().model, sae.hook_point)) is None:
        reason = (
            f", but what the LM's attention adds to the stream, {sae.hook_point}, is no linear map "
            "of these: something is in between, such as a norm of each token after the projection"
        )
    elif (moved := at_output(sae, *projection)) is None:
        sizes = "{} wide from {} numbers".format(*projection[0].shape)
        reason = f", {sae.width} numbers, which the LM's attention, {sizes}, does not determine"
    if moved is None:
        source.refuse(
            f"it reads the attention's concatenated heads{reason}",
            "Take an SAE of what the attention adds (hook_attn_out).",
        )
    return moved


@torch.no_grad()
def at_output(sae: SparseAutoencoder, weight: Tensor, bias: Tensor) -> SparseAutoencoder | None:
    """Move an SAE of the attention's concatenated heads z to the output ``y = W z + b``.

    With W of full column rank, ``z = W⁺ (y - b)``: the features are those of z, and the
    reconstruction is W and b applied to that of z. Rounding grows by up to W's condition number:
    an LM in float32 is better than one in bfloat16. None if W does not determine what it reads.
    """
    width, n_read = weight.shape
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    if n_read != sae.width or width < n_read or values[-1] <= _MIN_SINGULAR_RATIO * values[0]:
        return None
    encoder = sae.encoder.double() @ ((right.T / values) @ left.T)
    encoder_bias = sae.encoder_bias.double()
    decoder_bias = weight @ sae.decoder_bias.double() + sae.input_scale * bias
    if not sae.subtract_decoder_bias:  # otherwise the decoder bias, with b, is subtracted already
        encoder_bias = encoder_bias - sae.input_scale * (encoder @ bias)
    return sae.replaced(
        encoder=encoder.float(),
        decoder=(sae.decoder.double() @ weight.T).float(),
        encoder_bias=encoder_bias.float(),
        decoder_bias=decoder_bias.float(),
    )


FORMATS = {
    "lincorr": SAEFormat(
        [stored.CONFIG_FILE, stored.TENSORS_FILE],
        lambda source: SparseAutoencoder.from_pretrained(source.folder),
    ),
    "saelens": SAEFormat(["cfg.json", "sae_weights.safetensors"], _read_saelens),
    "gemma_scope": SAEFormat(["params.npz"], _read_gemma_scope),
    "gemma_scope_2, without settings": SAEFormat(["params.safetensors"], _read_gemma_scope),
    "gemma_scope_2": SAEFormat(["config.json", "params.safetensors"], _read_gemma_scope),
    "llama_scope": SAEFormat(
        ["hyperparams.json", "checkpoints/final.safetensors"], _read_llama_scope
    ),
    "sparsify": SAEFormat(["cfg.json", "sae.safetensors"], _read_sparsify),
    "dictionary_learning": SAEFormat(["config.json", "ae.pt"], _read_dictionary_learning),
}
"""Formats that `load_sae` reads, the last that fits; `register_format` adds others."""


def register_format(
    name: str, files: Sequence[str], read: Callable[[SAESource], SparseAutoencoder]
) -> None:
    """Add a format of SAEs, for `load_sae` and for all studies and callbacks that take SAEs.

    A `SparseAutoencoderError` if there is a format of this name, or no file.

    Args:
        name: Name of the format in messages.
        files: Relative paths of the files in a folder of the format. The last holds tensors (in
            ``.safetensors``, ``.npz`` or ``.pt``); the first, if it is another, settings in JSON.
        read: Function from a folder with all these files to its SAE; see `SAESource`.
    """
    if name in FORMATS or not files:
        raise SparseAutoencoderError(
            f"the format {name!r} cannot be registered: there is one of this name, or it has no "
            f"files. Pass a name other than {', '.join(FORMATS)}, and the files of a folder."
        )
    FORMATS[name] = SAEFormat(tuple(files), read)
