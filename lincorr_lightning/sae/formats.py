"""Load, convert and save SAEs of this package and of other libraries."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError, listed
from lincorr_lightning.io import ReadKeys
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae import sparse_autoencoder as stored
from lincorr_lightning.sae.hook_points import KINDS, HookKind, HookPoint
from lincorr_lightning.sae.hooks import find_hook_points, find_projection, modules_giving, width_of
from lincorr_lightning.sae.sparse_autoencoder import Activation, SparseAutoencoder, fail_to_read

SAE_FOLDER = "sparse_autoencoders"  #: Folder of a run that holds a folder per SAE.
# Names of TransformerLens, whose stream before a layer is the one after the previous layer, and of
# modules, by their path below the layer. Heads are converted to the attention's output.
_HOOK_NAMES: dict[HookKind, str] = {
    "residual": r"|hook_resid_post|hook_resid_pre|hook_out|hook_in",
    "mlp_out": r"hook_mlp_out|mlp(\.hook_out)?|feed_forward|post_feedforward_layernorm",
    "attention_out": r"hook_attn_out|(self_)?att(n|ention)"
    r"(\.hook_(z|out)|\.o\.hook_in|\.o_proj\.input)?",
}
_IN_LAYER = re.compile(r"(?:\w+\.)*(?:blocks|layers?|h)\.(\d+)\.?(.*)")
# Names in folders: Gemma Scope's, and such as resid_post_layer_8 or attn_out_all/layer_3_width_16k.
_SITES = (
    r"gemma-scope[^/]*-(res|mlp|att)\b.*/layer_(\d+)(?:/|$)",
    r"(?<![a-zA-Z])(res|mlp|att)(?:id|n)?_(?:post|out)(?:_all)?[/_]layer_?(\d+)",
)
# Settings of training, its data, sizes or the LM's loading, by a word of theirs: they change no
# feature of the finished SAE, nor does noise, which was added in training alone.
_DESCRIBES = re.compile(
    r"(.*[._])?(adam|anneal|autocast|aux|band|batch(es|_size)|beta|bos|cache|checkpoint|coeff|"
    r"compil|context|ctx|cycles|d_(in|sae|model|sub)|data(set|_path|_type|$)|"
    r"dead|decay|device|dict_size|dtype|eval|exclu|expan|ghost|grad|"
    r"group_(frac|weights|sizes)|(re)?init|max_act|"
    r"model_kwargs|l[01]|latents|layer$|lp|logg?(er)?_|lr|mixing|mse|multi_topk|noise|"
    r"normalize_(sae_)?decoder$|optim|p_end|path|penal|pretrained|resume|run_|seed|seqpos|"
    r"sequence|spars|start|ste_|steps?|stream|strict|tanh_scale|[td]d?p_size|tokens|training|"
    r"verb|version|wandb|warm|width|window).*|hf_hook_name|neuronpedia_id|model_class_name|"
    r"(.*\.)?trainer_class"
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
    lm: LanguageModel | None = None

    @cached_property
    def config(self) -> ReadKeys:
        """The settings; empty if there is no file of them."""
        path = self.folder / self.files[0]
        return ReadKeys(stored.read_config(path) if len(self.files) > 1 else {})

    @cached_property
    def tensors(self) -> ReadKeys:
        """The tensors in float32, by their names without what torch's wrappers put before them."""
        tensors = stored.read_tensors(self.folder / self.files[-1])
        before = "".join(re.findall(r"^(?:(?:_orig_mod|module)\.)+", commonprefix(list(tensors))))
        return ReadKeys({name.removeprefix(before): x.float() for name, x in tensors.items()})

    def refuse_unread(self, sae: SparseAutoencoder) -> None:
        """Refuse tensors and settings that the reader, which read tensors here, left unread."""
        n_features, width = sae.decoder.shape
        layer = sae.hook_point.layer
        known = {"d_sae": n_features, "dict_size": n_features, "d_in": width}
        known |= {"activation_dim": width, "hook_layer": layer, "hook_point_layer": layer}
        rest = [f"tensor {name} is {tuple(x.shape)}" for name, x in self.tensors.unread()]
        for key, value in self.config.unread():
            size = known.get(key.rpartition(".")[2])
            is_known = value == size if size is not None else _DESCRIBES.fullmatch(key)
            if value and value != "none" and not is_known:
                rest.append(f"{key} is {value!r}")
        if rest:
            way_out = "Take an SAE without, or make a SparseAutoencoder of it yourself."
            self.refuse(f"its {listed(rest)}, which its format's reader does not know", way_out)

    def refuse(self, reason: str, way_out: str) -> NoReturn:
        """Raise the error of an SAE that is undamaged but cannot be used."""
        path = self.folder / self.files[0]
        raise SparseAutoencoderError(f"cannot use the SAE of {path}: {reason}. {way_out}")

    def require(self, key: str, value: object, supported: Iterable[object]) -> None:
        """Refuse a setting whose value is not among the supported ones."""
        if value not in (supported := list(supported)):
            way_out = f"Take an SAE whose {key} is {' or '.join(map(str, supported))}."
            self.refuse(f"its {key} is {value!r}, which is not supported", way_out)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that the file must have."""
        if name not in self.tensors:
            reason = f"it lacks {name} (it has {', '.join(self.tensors)})"
            fail_to_read(self.folder / self.files[-1], reason)
        return self.tensors[name]  # type: ignore[no-any-return]

    def weights(self, keys: Sequence[str], transposed: str = "") -> dict[str, Any]:
        """Return E, D, b_E and b_D, which the file calls `keys`.

        The `transposed` one of encoder and decoder has a column for each feature there.
        """
        names = ("encoder", "decoder", "encoder_bias", "decoder_bias")
        parts = dict(zip(names, map(self.tensor, keys), strict=True))
        if transposed:
            parts[transposed] = parts[transposed].T.contiguous()
        return parts

    def find_hook_point(self, hook: str = "") -> HookPoint:
        """Return the hook point that a library calls `hook`, or else that of the path.

        It may be TransformerLens' name, a module (``model.layers.3.mlp``) or ``mlp_out_layer_3``.
        """
        if match := _IN_LAYER.fullmatch(hook.removesuffix(".output")):
            return self._hook_point_in_layer(hook, int(match[1]), match[2])
        path = self.folder.absolute()
        named = _site(hook) or HookPoint.named(path.name) or _site(str(path))
        if named is None:
            self.refuse(
                f"it calls its hook point {hook!r}, so that it is unknown which of "
                f"{', '.join(KINDS)} it reads",
                "If it is one of these, name the folder by its hook point (residual.1, mlp_out.1, "
                "attention_out.1); if not, leave it out.",
            )
        return named

    def _hook_point_in_layer(self, hook: str, layer: int, name: str) -> HookPoint:
        layer -= name in ("hook_resid_pre", "hook_in")
        kind = next(
            (kind for kind, names in _HOOK_NAMES.items() if re.fullmatch(names, name)), None
        )
        if kind is None or layer < 0:
            self.refuse(
                f"it reads {hook}, none of {', '.join(KINDS)}",
                "Take an SAE of the residual stream after a layer, or of what its MLP or "
                "attention adds to it; before layer 0 is the embedding, no layer's output.",
            )
        at = HookPoint(layer, kind)
        is_bridged = name.endswith(".hook_out")  # of the module, whatever the LM calls it
        is_output = is_bridged or (name and "hook" not in hook and not hook.endswith(".input"))
        names = "mlp|feed_forward|(self_)?att(n|ention)" if is_bridged else re.escape(name)
        giving = modules_giving(self.lm.load().model, at) if self.lm and is_output else {}
        added = [path for path in giving if re.fullmatch(names, path)]
        if is_output and (self.lm or is_bridged) and not added:
            self.refuse(
                f"it reads {hook}, but what {self.lm.config.name_or_path if self.lm else 'an LM'} "
                f"adds to the stream as {at} may be something else, such as that after a norm",
                "Pass lm to load_sae, which shows it, or take an SAE of the layer's own output.",
            )
        return at


def _site(text: str) -> HookPoint | None:
    """Return the hook point that a text such as ``resid_post_layer_8`` names, the last of some."""
    sites = [site for pattern in _SITES for site in re.findall(pattern, text)]
    return HookPoint(int(sites[-1][1]), _SITE_KINDS[sites[-1][0]]) if sites else None


def _format_of(folder: Path) -> str | None:
    """Return the name of a folder's format, the last of those that fit."""
    for name, (files, _) in reversed(FORMATS.items()):
        if all((folder / file).is_file() for file in files):
            return name
    return None


def load_sae(folder: str | Path, lm: LanguageModel | None = None) -> SparseAutoencoder:
    """Load an SAE from a local folder of any known format; no code in its files is run.

    It is in float32 and in evaluation mode. The norms of the decoder stay as they are in the file;
    `SparseAutoencoder.folded` folds them. An SAE of SAELens that expects activations of a fixed
    mean norm needs the library's ``activation_scaler.json`` in its folder.

    Args:
        folder: Folder with the files of one of the known formats. Where neither they nor the path
            name the hook point, the folder's name does, as ``residual.12``.
        lm: The LM; its weights are loaded if needed. SAEs of the attention's concatenated heads
            (Gemma Scope's of attention, SAELens at ``hook_z``) need it: its output projection is
            merged into them, so that they read and write what the attention adds to the stream. So
            do those of SAELens with ``center_writing_weights``, to read the uncentered LM. SAEs of
            a module such as ``layers.12.mlp`` are refused where the LM adds something else.

    Raises:
        SparseAutoencoderError: The SAE cannot be read or used, or its hook point is unknown.
    """
    folder = Path(folder)
    if not folder.is_dir():
        fail_to_read(
            folder, "there is no such folder; download a hub id first, and pass its folder"
        )
    name = _format_of(folder)
    if name is None:
        known = "; ".join(f"{name} ({', '.join(files)})" for name, (files, _) in FORMATS.items())
        below = [str(path) for path in sorted(folder.rglob("*/")) if _format_of(path)]
        such_as = f", such as {listed(below)}," if below else ""
        raise SparseAutoencoderError(
            f"{folder} holds an SAE in no known format, or none. Known are {known}. Pass the "
            f"folder that holds one SAE's files itself{such_as} or save it as a "
            "lincorr_lightning.sae.SparseAutoencoder."
        )
    files, read = FORMATS[name]
    source = SAESource(folder, files, lm)
    try:
        sae = read(source)
        if "tensors" in vars(source):
            source.refuse_unread(sae)
    except torch.OutOfMemoryError:  # of the LM
        raise
    except SparseAutoencoderError as error:
        if str(folder) in str(error):
            raise
        raise SparseAutoencoderError(f"cannot use {folder}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = f"its files lack a value that {name} has, or it is wrong ({error!r})"
        shapes = [f"{key} {tuple(x.shape)}" for key, x in vars(source).get("tensors", {}).items()]
        fail_to_read(folder, f"{reason}; its tensors are {listed(shapes, most=12)}")
    return sae.float().eval()


def load_saes(
    saes: str | Path | Sequence[str | Path], lm: LanguageModel | None = None
) -> dict[HookPoint, SparseAutoencoder]:
    """Load one SAE per hook point, in the order of the folders.

    From a folder that holds a folder per SAE, the folder of one SAE, or a list of such folders.
    """
    folders: Sequence[str | Path] = [saes] if isinstance(saes, (str, Path)) else saes
    if isinstance(saes, (str, Path)) and Path(saes).is_dir() and _format_of(Path(saes)) is None:
        inside = sorted(path for path in Path(saes).iterdir() if path.is_dir())
        folders = [path for path in inside if not path.name.startswith(".")] or folders
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
    width = width_of(lm.model)
    for sae in saes:
        if sae.width != width:
            trained = f" (trained on {sae.lm})" if sae.lm else ""
            raise SparseAutoencoderError(
                f"the SAE at {sae.hook_point}{trained} is {sae.width} wide, but "
                f"{lm.config.name_or_path} is {width} wide. Take an SAE of this LM."
            )
        find_hook_points(lm.model, [sae.hook_point.kind], [sae.hook_point.layer])


def save_saes(saes: Mapping[HookPoint, SparseAutoencoder], folder: str | Path) -> None:
    """Save SAEs in a run's folder, as ``sparse_autoencoders/residual.0`` and so on."""
    for hook_point, sae in saes.items():
        sae.save(Path(folder) / SAE_FOLDER / hook_point.id)


# -- readers -------------------------------------------------------------------------------------

_KEYS = ("W_enc", "W_dec", "b_enc", "b_dec")
# SAELens' architectures: nested losses (Matryoshka) only matter for training.
_ARCHITECTURES: dict[str, Activation] = {
    "standard": "relu",
    "jumprelu": "jumprelu",
    "gated": "jumprelu",
    "topk": "topk",
    "batchtopk": "batchtopk",
    "matryoshka_batchtopk": "batchtopk",
}
_THRESHOLDS = {"jumprelu": "threshold", "batchtopk": "topk_threshold"}
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


def _gated(parts: dict[str, Any], r_mag: Tensor, gate_bias: Tensor) -> dict[str, Any]:
    """Return the parts of a gated SAE as one of jumprelu (Rajamanoharan et al., arXiv 2404.16014).

    A feature is ``max(p, 0)`` of ``p = exp(r_mag) e x + b_mag`` where ``e x + gate_bias > 0``, that
    is, where p is above ``b_mag - exp(r_mag) gate_bias``. `parts` have e and b_mag.
    """
    scale = r_mag.exp()
    threshold = parts["encoder_bias"] - scale * gate_bias
    return parts | {"encoder": parts["encoder"] * scale[:, None], "threshold": threshold}


def _read_gemma_scope(source: SAESource) -> SparseAutoencoder:
    """Gemma Scope (Lieberum et al., 2024, arXiv 2408.05147), and Gemma Scope 2 for Gemma 3.

    Only the latter has settings; otherwise the path names the hook point, as on the hub. SAEs of
    attention read its concatenated heads.
    """
    config = source.config
    hook = str(config.get("hf_hook_point_in") or "")
    for key, value in (("type", "sae"), ("hf_hook_point_out", hook), ("architecture", "jump_relu")):
        source.require(key, config.get(key) or value, [value])
    keys = _KEYS if "W_enc" in source.tensors else [key.lower() for key in _KEYS]
    sae = SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation="jumprelu",
        threshold=source.tensor("threshold"),
        lm=config.get("model_name"),
        **source.weights(keys, "encoder"),
    )
    return _from_heads(sae, source) if sae.hook_point.kind == "attention_out" else sae


def _read_sparsify(source: SAESource) -> SparseAutoencoder:
    """Top-k SAEs of EleutherAI, in folders named by a module: ``layers.12``, ``h.3.mlp``."""
    run = source.folder.absolute().parent / "config.json"  # transcoders of 2024 are only named here
    config = source.config
    of_run = stored.read_config(run) if run.is_file() else {}
    source.require("transcode", bool(config.get("transcode", of_run.get("transcode"))), [False])
    source.require("activation", config.get("activation") or "topk", ["topk"])
    names = source.folder.absolute().parts[::-1]
    return SparseAutoencoder(
        hook_point=source.find_hook_point(next(filter(_IN_LAYER.fullmatch, names), names[0])),
        activation="topk",
        k=int(config["k"]),
        subtract_decoder_bias=True,
        **source.weights(("encoder.weight", "W_dec", "encoder.bias", "b_dec")),
    )


def _read_dictionary_learning(source: SAESource) -> SparseAutoencoder:
    """Biases and thresholds are already those of unscaled activations."""
    trainer = source.config.get("trainer") or {}
    buffer = source.config.get("buffer") or {}
    source.require("buffer.io", buffer.get("io", "out"), ["out"])  # else an input, a transcoder
    name: Any = trainer.get("dict_class") or ("AutoEncoder" if "bias" in source.tensors else None)
    if name == "AutoEncoder" and "decoder.bias" in source.tensors:  # one trainer calls it so
        name = "AutoEncoderNew"
    source.require("trainer.dict_class", name, _DICTIONARIES)
    keys, activation, subtract = _DICTIONARIES[name]
    parts = source.weights(keys, "encoder" if keys is _KEYS else "decoder")
    if name == "GatedAutoEncoder":
        parts = _gated(parts, source.tensor("r_mag"), source.tensor("gate_bias"))
    elif activation in _THRESHOLDS:
        parts["threshold"] = source.tensor("threshold")
    elif activation == "topk":
        source.tensors.get("threshold")  # for another way to encode, which is not the default
    n = torch.tensor(len(parts["decoder"]))  # in groups that matter to losses of training alone
    source.require("sum of group_sizes", source.tensors.get("group_sizes", n).sum(), [n])
    k = source.tensors.get("k", trainer.get("k"))
    source.require("trainer.k", trainer.get("k") or k, [k])
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
    config |= (config.pop("metadata", None) or {}) | (config.pop("meta", None) or {})
    for key in ("hook_head_index", "hook_point_head_index"):
        source.require(key, config.get(key), [None])  # a single head
    functions = {key: config.get(key) for key in ("activation_fn", "activation_fn_str")}
    architecture = config.get("architecture") or "standard"
    if "topk" in functions.values() and architecture == "standard":
        architecture = "topk"
    source.require("architecture", architecture, _ARCHITECTURES)
    for key, function in functions.items():
        default = "topk" if architecture == "topk" else "relu"
        source.require(key, function or default, [default])
    activation = _ARCHITECTURES[architecture]
    if "log_threshold" in source.tensors and "threshold" not in source.tensors:  # in training
        source.tensors["threshold"] = source.tensors["log_threshold"].exp()
    if architecture == "gated":
        parts = source.weights(("W_enc", "W_dec", "b_mag", "b_dec"), "encoder")
        parts = _gated(parts, source.tensor("r_mag"), source.tensor("b_gate"))
    else:
        parts = source.weights(_KEYS, "encoder")
        if activation in _THRESHOLDS:
            parts["threshold"] = source.tensor(_THRESHOLDS[activation])
    factors = ("finetuning_scaling_factor", "scaling_factor")  # per feature, before version 6
    factor = next((source.tensors[key] for key in factors if key in source.tensors), None)
    is_other = factor is not None and bool((factor != 1).any())  # versions before 4 wrote ones
    is_finetuned = bool(config.get("finetuning_scaling_factor", is_other))
    source.require("finetuning_scaling_factor", is_finetuned, {is_other, factor is not None})
    if factor is not None:
        parts["decoder"] = parts["decoder"] * factor[:, None]
    if activation in ("topk", "batchtopk") and config.get("rescale_acts_by_decoder_norm"):
        norm = parts["decoder"].norm(dim=1)
        parts["encoder"] = parts["encoder"] * norm[:, None]
        parts["encoder_bias"] = parts["encoder_bias"] * norm
        parts["decoder"] = parts["decoder"] / stored.norms_of(parts["decoder"])[:, None]
    hook = str(config.get("hook_name") or config.get("hook_point") or "")
    source.require("hook_point", config.get("hook_point") or hook, [hook])
    arguments = config.get("activation_fn_kwargs") or {}
    k = config.get("k", arguments.get("k"))
    source.require("activation_fn_kwargs.k", arguments.get("k") or k, [k])
    sae = SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation=activation,
        k=k if k is None or activation == "topk" else int(k),
        input_scale=_saelens_scale(source, config.get("normalize_activations"), hook),
        subtract_decoder_bias=config.get("apply_b_dec_to_input", True),
        lm=config.get("model_name"),
        **parts,
    )
    steps = config.get("model_from_pretrained_kwargs") or {}  # of TransformerLens
    if hook.endswith(("hook_z", "o.hook_in", "o_proj.input")):
        config.get("reshape_activations")  # as these are read
        # Steps of TransformerLens that shift or rotate the heads.
        for step in ("fold_value_biases", "refactor_factored_attn_matrices"):
            key = f"model_from_pretrained_kwargs.{step}"
            source.require(key, bool(steps.get(step)), [False])
        return _from_heads(sae, source)
    return _uncentered(sae, source) if steps.get("center_writing_weights") is True else sae


def _saelens_scale(source: SAESource, normalize: object, hook: str) -> float:
    scaled = "expected_average_only_in"
    source.require("normalize_activations", normalize or "none", ["none", True, scaled])
    if normalize in (None, False, "none"):
        return 1.0
    path = source.folder / "activation_scaler.json"
    scale = stored.read_config(path).get("scaling_factor") if path.is_file() else None
    if scale is None:
        source.refuse(
            f"it expects activations of a fixed mean norm (normalize_activations is {scaled}), "
            f"but the folder does not hold the factor ({path.name})",
            f'Write {{"scaling_factor": s}} to {path}: s = sqrt(width) / mean norm of the LM\'s '
            f"activations at {hook or 'its hook point'}, over texts like those of its training "
            "(lincorr_lightning.sae.captured reads activations).",
        )
    return float(scale)


def _read_llama_scope(source: SAESource) -> SparseAutoencoder:
    """The threshold is for unscaled activations and unit decoders (He et al., arXiv 2410.20526)."""
    config = source.config
    hook = str(config.get("hook_point_in", ""))
    source.require("hook_point_out", config.get("hook_point_out"), [hook])  # else a transcoder
    kind = config.get("norm_activation")
    source.require("norm_activation", kind, ["dataset-wise", "inference", None])
    has_bias = "decoder.bias" in source.tensors
    source.require("use_decoder_bias", bool(config.get("use_decoder_bias", True)), [has_bias])
    if not has_bias:
        source.tensors["decoder.bias"] = torch.zeros(len(source.tensor("decoder.weight")))
    keys = ("encoder.weight", "decoder.weight", "encoder.bias", "decoder.bias")
    parts = source.weights(keys, "decoder")
    scale = 1.0
    if kind == "dataset-wise":
        norms = config["dataset_average_activation_norm"]
        source.require("dataset_average_activation_norm.out", norms["out"], [norms["in"]])
        scale = math.sqrt(len(parts["decoder_bias"])) / float(norms["in"])
    has_norm = config.get("sparsity_include_decoder_norm")
    level = float(config.get("jump_relu_threshold") or 0.0)
    activation: Any = str(config.get("act_fn", "")).lower()
    # A released threshold replaces the k of training.
    if activation in ("topk", "batchtopk") and level > 0:
        activation = "jumprelu"
    source.require("act_fn without jump_relu_threshold", activation, ["relu", "topk", "jumprelu"])
    if activation == "jumprelu":
        norms = stored.norms_of(parts["decoder"]) if has_norm else 1.0
        parts["threshold"] = torch.full((len(parts["decoder"]),), level * scale) / norms
    elif activation == "topk":
        parts["score_scale"] = parts["decoder"].norm(dim=1) if has_norm else None
    return SparseAutoencoder(
        hook_point=source.find_hook_point(hook),
        activation=activation,
        k=config.get("top_k"),
        input_scale=scale,
        subtract_decoder_bias=config.get("apply_decoder_bias_to_pre_encoder", False),
        **parts,
    )


@torch.no_grad()
def _uncentered(sae: SparseAutoencoder, source: SAESource) -> SparseAutoencoder:
    """Change an SAE of a centered LM, in place, to read the activations of the original LM.

    Where the weights that write to the stream are centered (``center_writing_weights``),
    everything written lacks its mean over the width, which a LayerNorm subtracts anyway; an LM
    without LayerNorm is never centered. Subtracting the mean is linear: the encoder does it.
    """
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


@torch.no_grad()
def _from_heads(sae: SparseAutoencoder, source: SAESource) -> SparseAutoencoder:
    """Move an SAE of the attention's concatenated heads z to its output ``y = W z + b``.

    With W of full column rank, ``z = W⁺ (y - b)``: the features are those of z, and the
    reconstruction is W and b applied to that of z. Rounding grows by up to W's condition number:
    an LM in float32 is better than one in bfloat16.
    """
    reason = "it reads the attention's concatenated heads"
    if source.lm is None:
        way_out = "Pass lm to load_sae; its output projection is then merged into the SAE."
        source.refuse(f"{reason}, before their output projection", way_out)
    way_out = "Take an SAE of what the attention adds (hook_attn_out)."
    projection = find_projection(source.lm.load().model, sae.hook_point)
    if projection is None:
        source.refuse(
            f"{reason}, but what the LM adds to the stream as {sae.hook_point} is no linear map "
            "of these: something is in between, such as a norm of each token",
            way_out,
        )
    weight, bias = projection
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    # Below this ratio the smallest singular value is rounding error.
    is_full = values[-1] > 10 * torch.finfo(torch.float32).eps * values[0]
    if weight.shape[1] != sae.width or len(weight) < sae.width or not is_full:
        sizes = "{} numbers from {}".format(*weight.shape)
        source.refuse(
            f"{reason}, {sae.width} numbers, but the LM's attention adds {sizes}", way_out
        )
    encoder = sae.encoder.double() @ ((right.T / values) @ left.T)
    encoder_bias = sae.encoder_bias.double()
    if not sae.subtract_decoder_bias:  # otherwise the decoder bias, with b, is subtracted already
        encoder_bias = encoder_bias - sae.input_scale * (encoder @ bias)
    decoder_bias = weight @ sae.decoder_bias.double() + sae.input_scale * bias
    return sae.replaced(
        encoder=encoder.float(),
        decoder=(sae.decoder.double() @ weight.T).float(),
        encoder_bias=encoder_bias.float(),
        decoder_bias=decoder_bias.float(),
    )


FORMATS: dict[str, tuple[Sequence[str], Callable[[SAESource], SparseAutoencoder]]] = {
    "lincorr": (
        [stored.CONFIG_FILE, stored.TENSORS_FILE],
        lambda source: SparseAutoencoder.from_pretrained(source.folder),
    ),
    "saelens": (["cfg.json", "sae_weights.safetensors"], _read_saelens),
    "gemma_scope": (["params.npz"], _read_gemma_scope),
    "gemma_scope_2, without settings": (["params.safetensors"], _read_gemma_scope),
    "gemma_scope_2": (["config.json", "params.safetensors"], _read_gemma_scope),
    "llama_scope": (["hyperparams.json", "checkpoints/final.safetensors"], _read_llama_scope),
    "sparsify": (["cfg.json", "sae.safetensors"], _read_sparsify),
    "dictionary_learning": (["config.json", "ae.pt"], _read_dictionary_learning),
}
"""Formats that `load_sae` reads, the last that fits: the files of a folder, and their reader."""
