"""Load, convert and save SAEs of this package, SAELens, Gemma Scope and Llama Scope."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import captured, find_hook_points, layer_of, run_probe, width_of
from lincorr_lightning.sae.sparse_autoencoder import (
    CONFIG_FILE,
    TENSORS_FILE,
    Activation,
    SparseAutoencoder,
    fail_to_read,
    read_config,
    read_tensors,
)

SAE_FOLDER = "sparse_autoencoders"
"""Folder of a run that holds a folder per SAE."""
# TransformerLens' names; the residual stream before a layer is the one after the previous layer.
_HOOK_KINDS: dict[str, HookKind] = {
    "hook_resid_post": "residual", "hook_resid_pre": "residual", "hook_mlp_out": "mlp_out",
    "hook_attn_out": "attention_out", "attn.hook_z": "attention_out",
}  # fmt: skip


@dataclass(frozen=True)
class SAESource:
    """A folder that holds the `files` of a format, and the arguments of `load_sae`.

    The last file holds tensors; the first holds settings, if there are two.
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
        return read_config(self.path) if len(self.files) > 1 else {}

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in float32."""
        tensors = read_tensors(self.folder / self.files[-1])
        return {name: tensor.float() for name, tensor in tensors.items()}

    def refuse(self, reason: str, way_out: str) -> NoReturn:
        """Raise the error of an SAE that is undamaged but cannot be used."""
        raise SparseAutoencoderError(f"cannot use the SAE of {self.path}: {reason}. {way_out}")

    def require(self, key: str, value: object, supported: Iterable[object]) -> None:
        """Refuse a setting whose value is not among the supported ones."""
        if value not in (supported := list(supported)):
            known = " or ".join(map(str, supported))
            self.refuse(
                f"its {key} is {value!r}, which is not supported",
                f"Take an SAE whose {key} is {known}.",
            )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that the file must have."""
        if name not in self.tensors:
            known = ", ".join(self.tensors)
            fail_to_read(self.folder / self.files[-1], f"it lacks {name} (it has {known})")
        return self.tensors[name]

    def weights(self, keys: Sequence[str], transposed: str) -> dict[str, Any]:
        """Return E, D, b_E and b_D, which the file calls `keys`.

        The `transposed` one of encoder and decoder has a column for each feature there.
        """
        names = ("encoder", "decoder", "encoder_bias", "decoder_bias")
        parts = dict(zip(names, map(self.tensor, keys), strict=True))
        return parts | {transposed: parts[transposed].T.contiguous()}

    def find_hook_point(self, hook: str = "") -> HookPoint:
        """Return the hook point that TransformerLens calls `hook`, or else the caller's."""
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", hook)
        if match is None:  # the name of another library, or none
            if self.hook_point is None:
                named = f"calls its hook point {hook!r}" if hook else "does not name its hook point"
                # Renaming the folder also helps those who pass it on the command line.
                self.refuse(
                    f"it {named}, so that it is unknown which of {', '.join(KINDS)} it reads",
                    "If it is one of these, name the folder by its hook point, such as "
                    "residual.12, mlp_out.12 or attention_out.12, or pass hook_point to load_sae.",
                )
            return self.hook_point
        layer = int(match[1]) - (match[2] == "hook_resid_pre")
        if match[2] not in _HOOK_KINDS or layer < 0:
            self.refuse(
                f"it reads {hook}, none of {', '.join(KINDS)}",
                f"Take an SAE of {', '.join(_HOOK_KINDS)}; the stream before layer 0 is the "
                "embedding, which is no layer's output.",
            )
        return HookPoint(layer, _HOOK_KINDS[match[2]])


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
    """Load an SAE from a local folder of any known format; nothing is unpickled.

    It is in float32 and in evaluation mode. The norms of the decoder stay as they are in the file;
    `SparseAutoencoder.folded` folds them. A `SparseAutoencoderError` if the SAE cannot be read or
    used, or its hook point is unknown.

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
    """
    folder = Path(folder)
    if not folder.is_dir():
        fail_to_read(folder, "there is no such folder")
    name = next((name for name, form in FORMATS.items() if form.matches(folder)), None)
    if name is None:
        inside = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
        known = "; ".join(f"{name} ({', '.join(form.files)})" for name, form in FORMATS.items())
        raise SparseAutoencoderError(
            f"{folder} is in no known format of SAEs: it holds {inside}. Known are {known}. "
            "Pass the folder that holds one SAE's files itself."
        )
    named = HookPoint.named(folder.absolute().name)
    source = SAESource(folder, FORMATS[name].files, hook_point or named, input_scale, lm)
    try:
        sae = FORMATS[name].read(source)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
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


# -- formats of other libraries ------------------------------------------------------------------


_KEYS = ("W_enc", "W_dec", "b_enc", "b_dec")
_GEMMA_KINDS: dict[str, HookKind] = {"res": "residual", "mlp": "mlp_out", "att": "attention_out"}
# SAELens' architectures; nested losses (Matryoshka) only matter for training.
_ARCHITECTURES: dict[str, Activation] = {
    "standard": "relu", "jumprelu": "jumprelu", "topk": "topk", "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "batchtopk",
}  # fmt: skip
_SCALED = "expected_average_only_in"


def _read_gemma_scope(source: SAESource) -> SparseAutoencoder:
    """The path names the hook point, as on the hub; SAEs of attention read concatenated heads.

    (Lieberum et al., 2024, arXiv 2408.05147.)
    """
    parts = source.folder.absolute().parts
    layers = [m[1] for part in parts if (m := re.fullmatch(r"layer_(\d+)", part))]
    kinds = [m[1] for part in parts if (m := re.search(r"gemma-scope.*-(res|mlp|att)\b", part))]
    if layers and kinds:
        hook_point = HookPoint(int(layers[-1]), _GEMMA_KINDS[kinds[-1]])
    else:
        hook_point = source.find_hook_point()
    sae = SparseAutoencoder(
        hook_point=hook_point, activation="jumprelu", threshold=source.tensor("threshold"),
        **source.weights(_KEYS, "encoder"),
    )  # fmt: skip
    if hook_point.kind == "attention_out":
        return _from_heads(sae, source)
    return sae


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
    parts = source.weights(_KEYS, "encoder")
    threshold = None
    if activation == "jumprelu":
        training = "threshold" not in source.tensors and "log_threshold" in source.tensors
        threshold = source.tensor("log_threshold").exp() if training else source.tensor("threshold")
    elif activation == "batchtopk":
        threshold = source.tensor("topk_threshold").expand(len(parts["decoder"])).clone()
    if "scaling_factor" in source.tensors:  # a learned factor per feature, before version 4
        parts["decoder"] = parts["decoder"] * source.tensors["scaling_factor"][:, None]
    if config.get("rescale_acts_by_decoder_norm") and activation in ("topk", "batchtopk"):
        norm = parts["decoder"].norm(dim=1)
        parts["encoder"] = parts["encoder"] * norm[:, None]
        parts["encoder_bias"] = parts["encoder_bias"] * norm
        parts["decoder"] = parts["decoder"] / torch.where(norm == 0, 1.0, norm)[:, None]
    hook = str(config.get("hook_name") or config.get("hook_point") or "")
    sae = SparseAutoencoder(
        hook_point=source.find_hook_point(hook), activation=activation, threshold=threshold,
        k=None if k is None else int(k),
        input_scale=_saelens_scale(source, config.get("normalize_activations"), hook),
        subtract_decoder_bias=config.get("apply_b_dec_to_input", True),
        lm=config.get("model_name"), **parts,
    )  # fmt: skip
    # Which processing steps of TransformerLens were chosen.
    chosen = config.get("model_from_pretrained_kwargs") or {}
    steps = {name for name, value in chosen.items() if value is True}
    if hook.endswith("hook_z"):
        return _from_heads(sae, source, steps)
    return _uncentered(sae, source, steps)


def _saelens_scale(source: SAESource, normalize: object, hook: str) -> float:
    if normalize in (None, False, "none"):
        return 1.0
    source.require("normalize_activations", normalize, ["none", True, _SCALED])
    scale = source.input_scale
    path = source.folder / "activation_scaler.json"
    if scale is None and path.is_file():
        scale = read_config(path).get("scaling_factor")
    if scale is None:
        source.refuse(
            f"it expects activations of a fixed mean norm (normalize_activations is {_SCALED}), "
            f"but the folder does not hold the factor ({path.name})",
            f'Write {{"scaling_factor": s}} to {path}, or pass s to load_sae as input_scale: '
            "s = sqrt(width) / mean norm of the LM's activations at "
            f"{hook or 'its hook point'}, over texts like those it was trained on "
            "(lincorr_lightning.sae.captured reads activations).",
        )
    return float(scale)


def _read_llama_scope(source: SAESource) -> SparseAutoencoder:
    """Activations are multiplied by ``sqrt(width) / mean norm``, but the threshold is not.

    It is in the units of the LM's own activations, and applies to features of unit decoder norm
    (He et al., 2024, arXiv 2410.20526).
    """
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
    n_features, width = parts["decoder"].shape
    scale, norm, threshold = 1.0, None, None
    if kind == "dataset-wise":
        norms = config.get("dataset_average_activation_norm") or {}
        if not norms.get("in") or norms["in"] != norms.get("out"):
            source.refuse(
                f"dataset_average_activation_norm is {norms}, not one norm above 0 for in and out",
                "Take the release's own hyperparams.json, or an SAE that reads and writes one "
                "scale.",
            )
        scale = math.sqrt(width) / float(norms["in"])
    if config.get("sparsity_include_decoder_norm"):
        norm = parts["decoder"].norm(dim=1)
    level = float(config.get("jump_relu_threshold") or 0.0)
    activation: Any = str(config.get("act_fn", "")).lower()
    # A released threshold replaces the k of training.
    if activation in ("topk", "batchtopk") and level > 0:
        activation = "jumprelu"
    source.require("act_fn without jump_relu_threshold", activation, ["relu", "topk", "jumprelu"])
    if activation == "jumprelu":
        threshold = torch.full((n_features,), level * scale)
        if norm is not None:  # a feature of zero norm adds nothing, whatever its threshold
            threshold = threshold / torch.where(norm == 0, 1.0, norm)
    return SparseAutoencoder(
        hook_point=source.find_hook_point(hook), activation=activation, threshold=threshold,
        k=config.get("top_k") if activation == "topk" else None,
        score_scale=norm if activation == "topk" else None, input_scale=scale,
        subtract_decoder_bias=config.get("apply_decoder_bias_to_pre_encoder", False), **parts,
    )  # fmt: skip


# -- conversion ----------------------------------------------------------------------------------
#
# Of SAEs that read something else than a hook point of the LM: the attention's concatenated heads,
# or an LM whose weights TransformerLens processed, by the steps that SAELens keeps in
# ``model_from_pretrained_kwargs``. Folded norms and a centered head leave all hook points as they
# are.

# Relative error of the projection's output, at any precision, and in units of its rounding.
_TOLERANCE = 1e-4
_ROUNDINGS = 4.0
# Below this ratio the smallest singular value is rounding error.
_MIN_SINGULAR_RATIO = 10 * torch.finfo(torch.float32).eps
# They shift or rotate the heads; what the heads add to the stream stays as it is.
_HEAD_STEPS = ("fold_value_biases", "refactor_factored_attn_matrices")
_TAKE_OUTPUT = "Take an SAE of what the attention adds (hook_attn_out)."


@torch.no_grad()
def _uncentered(
    sae: SparseAutoencoder, source: SAESource, steps: Collection[str]
) -> SparseAutoencoder:
    """Change an SAE of a centered LM, in place, to read the activations of the original LM.

    Where the weights that write to the stream are centered (``center_writing_weights``),
    everything written lacks its mean over the width. A LayerNorm subtracts that mean anyway, so
    the logits are the same; an LM without LayerNorm is never centered. Subtracting the mean is
    linear and is merged into the encoder.
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
    """Move an SAE of the attention's concatenated heads to the attention's output."""
    changes = [name for name in _HEAD_STEPS if name in steps]
    if changes:
        source.refuse(
            f"it reads the attention's heads of an LM that was changed ({' and '.join(changes)} in "
            "model_from_pretrained_kwargs)",
            _TAKE_OUTPUT,
        )
    if source.lm is None:
        source.refuse(
            "it reads the attention's concatenated heads, before their output projection",
            "Pass lm to load_sae; its output projection is then merged into the SAE.",
        )
    model = source.lm.load().model
    projection = find_projection(model, sae.hook_point)
    if projection is None:
        source.refuse(
            "it reads the attention's concatenated heads, but what the attention adds to the "
            f"stream of {type(model).__name__}, {sae.hook_point}, is no linear map of these: there "
            "is something in between, such as a norm of each token after the projection",
            _TAKE_OUTPUT,
        )
    moved = at_output(sae, *projection)
    if moved is None:
        width, n_read = projection[0].shape
        source.refuse(
            f"it reads {sae.width} numbers of the attention's heads, which the LM's attention, "
            f"{width} wide from {n_read} numbers, does not determine",
            _TAKE_OUTPUT,
        )
    return moved


@torch.no_grad()
def find_projection(model: nn.Module, hook_point: HookPoint) -> tuple[Tensor, Tensor] | None:
    """Find the map ``y = W z + b`` from the heads z of a layer's attention to its output y.

    It works for any architecture: each matrix of the layer is tried on its own input.

    Returns:
        W, ``(width, n_heads * head_size)``, and b, ``(width,)``, float64; None if y is no such map.
    """
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(module: Any, args: Any, output: Any) -> None:
        del output
        if args and isinstance(args[0], Tensor):
            bias = getattr(module, "bias", None)
            bias = module.weight.new_zeros(()) if bias is None else bias
            # Copied during the forward pass, when a sharded LM has gathered them.
            calls.append((args[0], module.weight.detach().clone(), bias.detach().clone()))

    with ExitStack() as stack:
        for module in layer_of(model, hook_point).modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and weight.dim() == 2:
                stack.enter_context(module.register_forward_hook(record))
        at = stack.enter_context(captured(model, [hook_point]))
        run_probe(model)
    added = at[hook_point]
    output = added.double().cpu().flatten(0, -2)
    tolerance = max(_TOLERANCE, _ROUNDINGS * torch.finfo(added.dtype).eps)
    for read, weight, bias in calls:
        for matrix in (weight, weight.T):  # GPT-2 stores its matrices transposed
            if matrix.shape != (output.shape[1], read.shape[-1]):
                continue
            w, b = matrix.double().cpu(), bias.double().cpu().expand(len(matrix))
            error = read.double().cpu().flatten(0, -2) @ w.T + b - output
            if error.norm() <= tolerance * output.norm():
                return w, b
    return None


@torch.no_grad()
def at_output(sae: SparseAutoencoder, weight: Tensor, bias: Tensor) -> SparseAutoencoder | None:
    """Move an SAE of the attention's concatenated heads z to the output ``y = W z + b``.

    With W of full column rank, ``z = W⁺ (y - b)``: the features are those of z, and the
    reconstruction is W and b applied to that of z. The map is exact up to rounding, which grows by
    up to W's condition number from y to z: an LM in float32 is better than one in bfloat16. Returns
    None if W does not determine what the SAE reads.
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
        [CONFIG_FILE, TENSORS_FILE], lambda source: SparseAutoencoder.from_pretrained(source.folder)
    ),
    "saelens": SAEFormat(["cfg.json", "sae_weights.safetensors"], _read_saelens),
    "gemma_scope": SAEFormat(["params.npz"], _read_gemma_scope),
    "llama_scope": SAEFormat(
        ["hyperparams.json", "checkpoints/final.safetensors"], _read_llama_scope
    ),
}
"""Formats that `load_sae` reads, the first that fits; others can be added."""
