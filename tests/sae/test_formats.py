"""Folders of other libraries, written here by hand, against those libraries' formulas."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae import SparseAutoencoder, load_sae, load_saes
from lincorr_lightning.sae.formats import FORMATS, SAESource
from lincorr_lightning.sae.hook_points import HookPoint
from tests.toys import toy_model

N, WIDTH, K = 40, 12, 5
STREAM = HookPoint(1, "residual")
Encode = Callable[[Tensor], Tensor]


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


X = _draw(200, WIDTH, seed=7)
# In the papers' notation: a feature is a column of the encoder and a row of the decoder.
W_ENC, B_ENC = _draw(WIDTH, N, seed=1) / WIDTH**0.5, _draw(N, seed=2) / 4
W_DEC, B_DEC = _draw(N, WIDTH, seed=3) * _draw(N, 1, seed=4).exp() / N, _draw(WIDTH, seed=5) / 4
NORM = W_DEC.norm(dim=1)
THRESHOLD = _draw(N, seed=6).exp() / 3
FACTOR = _draw(N, seed=11).exp()
R_MAG, B_GATE, B_MAG = _draw(N, seed=8) / 2, _draw(N, seed=9) / 2, _draw(N, seed=10) / 2
PARAMETERS = {"W_enc": W_ENC, "b_enc": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}
LINEAR = {"encoder.weight": W_ENC.T, "encoder.bias": B_ENC, "decoder.weight": W_DEC.T}


def write_folder(folder: Path, settings: str, config: object, tensors: str, parts: dict) -> Path:
    """Write a folder: a file of tensors, and a file of settings if it has a name."""
    (folder / tensors).parent.mkdir(parents=True, exist_ok=True)
    if settings:
        (folder / settings).write_text(json.dumps(config))
    parts = {name: part.contiguous() for name, part in parts.items()}
    if tensors.endswith(".pt"):
        torch.save(parts, folder / tensors)
    elif tensors.endswith(".npz"):
        np.savez(folder / tensors, **{name: part.numpy() for name, part in parts.items()})
    else:
        save_file(parts, folder / tensors)
    return folder


def _check(
    sae: SparseAutoencoder,
    encode: Encode,
    w_dec: Tensor = W_DEC,
    b_dec: Tensor = B_DEC,
    scale: float = 1.0,
) -> None:
    """To 1e-5: features and reconstruction, and those of the folded SAE."""
    expected = encode(scale * X)
    assert 0.02 < (expected > 0).double().mean() < 0.9
    rebuilt = (expected @ w_dec + b_dec) / scale
    lengths = expected * w_dec.norm(dim=1) / scale
    for read, features in ((sae, expected), (sae.folded(), lengths)):
        torch.testing.assert_close(read.encode(X).detach(), features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(read(X).detach(), rebuilt, rtol=1e-5, atol=1e-5)


def _pre(x: Tensor) -> Tensor:
    return x @ W_ENC + B_ENC


def _relu(x: Tensor) -> Tensor:
    return _pre(x).relu()


def _jump(x: Tensor, threshold: Tensor | float = THRESHOLD) -> Tensor:
    return torch.where(_pre(x) > threshold, _relu(x), 0)


def _largest(pre: Tensor, k: int = K) -> Tensor:
    """The k largest of each row, and of these the positive ones."""
    level = pre.sort(dim=1, descending=True).values[:, k - 1 : k]
    return torch.where(pre >= level, pre.clamp(min=0), 0)


def _top_k(x: Tensor) -> Tensor:
    return _largest(_pre(x))


def _gated(x: Tensor) -> Tensor:
    """Equations 6 and 7 of Rajamanoharan et al., 2024 (arXiv 2404.16014), tied by r_mag."""
    return (x @ W_ENC + B_GATE > 0) * (x @ (W_ENC * R_MAG.exp()) + B_MAG).relu()


# -- SAELens: settings, further tensors, and the features of x, or of x - b_dec --------------------

_SAELENS: dict[str, tuple[dict[str, Any], dict[str, Tensor], Encode, Tensor]] = {
    "standard": ({}, {}, _relu, W_DEC),
    "finetuned": ({}, {"scaling_factor": FACTOR}, _relu, W_DEC * FACTOR[:, None]),
    "jumprelu": ({"architecture": "jumprelu"}, {"threshold": THRESHOLD}, _jump, W_DEC),
    "jumprelu in training": (
        {"architecture": "jumprelu"},
        {"log_threshold": THRESHOLD.log()},
        _jump,
        W_DEC,
    ),
    "gated": (
        {"architecture": "gated"},
        {"r_mag": R_MAG, "b_gate": B_GATE, "b_mag": B_MAG},
        _gated,
        W_DEC,
    ),
    "matryoshka_batchtopk": (
        {"architecture": "matryoshka_batchtopk", "k": 2.5},
        {"topk_threshold": torch.tensor(0.4)},
        lambda x: _jump(x, 0.4),
        W_DEC,
    ),
    "topk": ({"architecture": "topk", "k": K}, {}, _top_k, W_DEC),
    "topk of version 3": (
        {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}},
        {},
        _top_k,
        W_DEC,
    ),
    "topk, rescaled": (
        {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True},
        {},
        lambda x: _largest(_pre(x) * NORM),
        W_DEC / NORM[:, None],
    ),
}


def _saelens(
    folder: Path, name: str = "standard", new: bool = True, more: dict | None = None, **changes: Any
) -> Path:
    """New: version 6, with the LM's part under metadata; old: all in one."""
    about = {
        "model_name": "gemma-2-2b",
        "hook_name": changes.pop("hook_name", "blocks.4.hook_mlp_out"),
        "hook_head_index": changes.pop("hook_head_index", None),
    }
    config = {"d_in": WIDTH, "normalize_activations": "none", **_SAELENS[name][0], **changes}
    content = {**config, "metadata": about} if new else {**config, **about, "hook_layer": 4}
    parts = PARAMETERS | _SAELENS[name][1] | (more or {})
    if name == "gated":
        parts.pop("b_enc")
    return write_folder(folder, "cfg.json", content, "sae_weights.safetensors", parts)


@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("name", _SAELENS)
def test_saelens(name: str, subtract: bool, tmp_path: Path) -> None:
    new = name not in ("finetuned", "topk of version 3")
    sae = load_sae(_saelens(tmp_path, name, new, apply_b_dec_to_input=subtract))
    assert (sae.hook_point, sae.lm) == (HookPoint(4, "mlp_out"), "gemma-2-2b")
    _, _, encode, w_dec = _SAELENS[name]
    _check(sae, lambda x: encode(x - subtract * B_DEC), w_dec)


def test_saelens_of_activations_of_a_fixed_norm(tmp_path: Path) -> None:
    _saelens(tmp_path, normalize_activations="expected_average_only_in", apply_b_dec_to_input=True)
    match = r'"scaling_factor": s\} to .*activation_scaler\.json.*blocks\.4'
    with pytest.raises(SparseAutoencoderError, match=match):
        load_sae(tmp_path)
    (tmp_path / "activation_scaler.json").write_text(json.dumps({"scaling_factor": 0.4}))
    _check(load_sae(tmp_path), lambda x: _relu(x - B_DEC), scale=0.4)


def test_saelens_settings_of_training_and_of_the_lms_loading(tmp_path: Path) -> None:
    """As the library's runner writes them; none changes what a finished SAE computes."""
    names = (
        "dataset_path lr_scheduler_name b_dec_init_method mse_loss_normalization lr l1_coefficient "
        "noise adam_beta1 dead_feature_window n_checkpoints jumprelu_tanh_scale resume autocast_lm "
        "train_batch_size_tokens decoder_heuristic_init_norm log_to_wandb normalize_sae_decoder "
        "num_dead_features"
    )
    config: dict[str, Any] = dict.fromkeys(names.split(), True)
    config["model_from_pretrained_kwargs"] = {"fold_ln": True}
    _check(load_sae(_saelens(tmp_path, **config)), lambda x: _relu(x - B_DEC))


# -- Gemma Scope ----------------------------------------------------------------------------------

_HUB = "models--google--gemma-scope-2b-pt-{}/snapshots/1f/layer_12/width_16k/l0_82"
_HUB_2 = "models--google--gemma-scope-2-1b-pt/snapshots/1f/{}/layer_10_width_16k_l0_small"
_LOWER = {name.lower(): part for name, part in PARAMETERS.items()} | {"threshold": THRESHOLD}


def _gemma_scope(folder: Path, **more: Tensor) -> Path:
    parts = PARAMETERS | {"threshold": THRESHOLD} | more
    return write_folder(folder, "", None, "params.npz", parts)


def _gemma_scope_2(
    folder: Path, hook: str = "output", more: dict[str, Tensor] | None = None, **changes: Any
) -> Path:
    """As google/gemma-scope-2-4b-pt has them."""
    config = {
        "hf_hook_point_in": f"model.layers.17.{hook}",
        "hf_hook_point_out": f"model.layers.17.{hook}",
        "type": "sae",
        "model_name": "google/gemma-3-4b-pt",
        "architecture": "jump_relu",
        "affine_connection": False,
    }
    parts = _LOWER | (more or {})
    return write_folder(folder, "config.json", config | changes, "params.safetensors", parts)


@pytest.mark.parametrize(
    ("path", "hook_point"),
    [
        (_HUB.format("mlp-canonical"), HookPoint(12, "mlp_out")),
        (_HUB_2.format("resid_post_all"), HookPoint(10, "residual")),
        ("mlp_out.3", HookPoint(3, "mlp_out")),
    ],
)
def test_gemma_scope_whose_path_names_the_hook_point(
    path: str, hook_point: HookPoint, tmp_path: Path
) -> None:
    if "scope-2-" in path:
        write_folder(tmp_path / path, "", None, "params.safetensors", _LOWER)
    else:
        _gemma_scope(tmp_path / path)
    sae = load_sae(tmp_path / path)
    assert sae.hook_point == hook_point
    _check(sae, _jump)


@pytest.mark.parametrize(
    ("module", "kind"), [("output", "residual"), ("post_feedforward_layernorm.output", "mlp_out")]
)
def test_gemma_scope_2(module: str, kind: Any, tmp_path: Path) -> None:
    sae = load_sae(_gemma_scope_2(tmp_path, module))
    assert (sae.hook_point, sae.lm) == (HookPoint(17, kind), "google/gemma-3-4b-pt")
    _check(sae, _jump)


# -- Llama Scope ----------------------------------------------------------------------------------

_SCALE = math.sqrt(WIDTH) / 7.0


def _llama_scope(folder: Path, **changes: Any) -> Path:
    hook = "blocks.13.hook_attn_out"
    config = {
        "hook_point_in": hook,
        "hook_point_out": hook,
        "use_decoder_bias": True,
        "apply_decoder_bias_to_pre_encoder": False,
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.05,
        "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": {"in": 7.0, "out": 7.0},
        "use_glu_encoder": False,
        "sparsity_include_decoder_norm": True,
        "top_k": K,
    }
    tensors = "checkpoints/final.safetensors"
    parts = LINEAR | {"decoder.bias": B_DEC}
    if not (config | changes)["use_decoder_bias"]:
        parts.pop("decoder.bias")
    return write_folder(folder, "hyperparams.json", config | changes, tensors, parts)


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("function", ["jumprelu", "topk"])
def test_llama_scope(with_norm: bool, function: str, tmp_path: Path) -> None:
    """As OpenMOSS's inference: the norm folded into the weights first, then the threshold."""
    changes = {"act_fn": function, "sparsity_include_decoder_norm": with_norm}
    sae = load_sae(_llama_scope(tmp_path, **changes))
    assert sae.hook_point == HookPoint(13, "attention_out") and sae.activation == "jumprelu"
    norm = NORM if with_norm else 1.0

    def encode(x: Tensor) -> Tensor:
        pre = x / _SCALE @ W_ENC + B_ENC / _SCALE
        return torch.where(pre * norm > 0.05, pre.relu(), 0) * _SCALE

    _check(sae, encode, scale=_SCALE)


@pytest.mark.parametrize("with_norm", [True, False])
def test_llama_scope_top_k_without_a_threshold(with_norm: bool, tmp_path: Path) -> None:
    changes = {
        "act_fn": "topk",
        "jump_relu_threshold": 0.0,
        "sparsity_include_decoder_norm": with_norm,
        "apply_decoder_bias_to_pre_encoder": True,
    }
    norm = NORM if with_norm else 1.0
    sae = load_sae(_llama_scope(tmp_path, **changes))
    _check(sae, lambda x: _largest(_pre(x - B_DEC) * norm) / norm, scale=_SCALE)


def test_llama_scope_plain(tmp_path: Path) -> None:
    changes = {"act_fn": "relu", "norm_activation": "inference", "use_decoder_bias": False}
    _check(load_sae(_llama_scope(tmp_path, **changes)), _relu, b_dec=torch.zeros(WIDTH))


# -- sparsify -------------------------------------------------------------------------------------

_SPARSIFY = {"encoder.weight": W_ENC.T, "encoder.bias": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}


def _sparsify(folder: Path, more: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    config = {"expansion_factor": 4, "num_latents": 0, "k": K, "multi_topk": False}
    parts = _SPARSIFY | (more or {})
    return write_folder(folder, "cfg.json", config | changes, "sae.safetensors", parts)


@pytest.mark.parametrize(
    ("name", "hook_point"),
    [
        ("layers.12", HookPoint(12, "residual")),
        ("layers.12.mlp", HookPoint(12, "mlp_out")),
        ("layers.3.self_attn/seed1", HookPoint(3, "attention_out")),
        ("h.5", HookPoint(5, "residual")),
        ("residual.2", HookPoint(2, "residual")),  # renamed
    ],
)
@pytest.mark.parametrize("k", [K, 30])
def test_sparsify(name: str, hook_point: HookPoint, k: int, tmp_path: Path) -> None:
    sae = load_sae(_sparsify(tmp_path / name, k=k, activation="topk", transcode=False))
    assert (sae.hook_point, sae.k) == (hook_point, k)
    _check(sae, lambda x: _largest(_pre(x - B_DEC), k))  # at 30, some of the k are not positive


def test_sparsify_in_bfloat16_and_all_layers(tmp_path: Path) -> None:
    halves = {name: part.bfloat16() for name, part in _SPARSIFY.items()}
    for layer in range(3):
        _sparsify(tmp_path / f"layers.{layer}", halves)
    for name in ("config.json", "optimizer_0.pt"):  # of its runs
        (tmp_path / name).write_text("{}")
    saes = load_saes(tmp_path)
    assert list(saes) == [HookPoint(layer, "residual") for layer in range(3)]
    w_enc, b_enc, w_dec, b_dec = (part.float() for part in halves.values())
    _check(saes[STREAM], lambda x: _largest((x - b_dec) @ w_enc.T + b_enc), w_dec, b_dec)
    with pytest.raises(SparseAutoencoderError, match="a second SAE for residual of layer 1"):
        load_saes([tmp_path / "layers.1", _sparsify(tmp_path / "layers.1" / "seed2")])


def test_sparsify_transcoder_that_only_its_run_names(tmp_path: Path) -> None:
    folder = _sparsify(tmp_path / "layers.1.mlp")
    (tmp_path / "config.json").write_text(json.dumps({"transcode": True, "sae": {"k": K}}))
    with pytest.raises(SparseAutoencoderError, match="its transcode is True"):
        load_sae(folder)


# -- dictionary_learning --------------------------------------------------------------------------

_B_DEC = {"b_dec": B_DEC}
_K = {"k": torch.tensor(K, dtype=torch.int), "threshold": torch.tensor(0.4)}
_GATES = {"decoder_bias": B_DEC, "r_mag": R_MAG, "gate_bias": B_GATE, "mag_bias": B_MAG}
_CLASSES: dict[str, tuple[dict[str, Tensor], Encode]] = {
    "AutoEncoder": (LINEAR | {"bias": B_DEC}, lambda x: _relu(x - B_DEC)),
    "AutoEncoderNew": (LINEAR | {"decoder.bias": B_DEC}, _relu),
    "GatedAutoEncoder": (
        {key: part for key, part in (LINEAR | _GATES).items() if key != "encoder.bias"},
        lambda x: _gated(x - B_DEC),
    ),
    "JumpReluAutoEncoder": (PARAMETERS | {"threshold": THRESHOLD}, _jump),
    "AutoEncoderTopK": (LINEAR | _B_DEC | _K, lambda x: _top_k(x - B_DEC)),
    "BatchTopKSAE": (LINEAR | _B_DEC | _K, lambda x: _jump(x - B_DEC, 0.4)),
    "MatryoshkaBatchTopKSAE": (
        PARAMETERS | _K | {"group_sizes": torch.tensor([8, 32])},
        lambda x: _jump(x - B_DEC, 0.4),
    ),
}


def _dictionary(
    folder: Path,
    name: str = "AutoEncoder",
    more: dict[str, Tensor] | None = None,
    io: str = "out",
    **changes: Any,
) -> Path:
    trainer = {
        "dict_class": name,
        "layer": 8,
        "lm_name": "EleutherAI/pythia-160m",
        "submodule_name": "resid_post_layer_8",
    }
    config = {"trainer": trainer | changes, "buffer": {"io": io, "ctx_len": 128}}
    return write_folder(folder, "config.json", config, "ae.pt", _CLASSES[name][0] | (more or {}))


@pytest.mark.parametrize("name", _CLASSES)
def test_dictionary_learning(name: str, tmp_path: Path) -> None:
    sae = load_sae(_dictionary(tmp_path, name))
    assert (sae.hook_point, sae.lm) == (HookPoint(8, "residual"), "EleutherAI/pythia-160m")
    assert sae.k == (K if "TopK" in name else None)
    _check(sae, _CLASSES[name][1])


def test_dictionary_learning_early_files(tmp_path: Path) -> None:
    """No buffers for k and threshold, no submodule or class: the folder has the hook point."""
    parts, encode = _CLASSES["AutoEncoderTopK"]
    parts = {name: part for name, part in parts.items() if name not in _K}
    config = {"trainer": {"dict_class": "AutoEncoderTopK", "k": K, "submodule_name": None}}
    folder = tmp_path / "mlp_out_layer1" / "5_32768"
    sae = load_sae(write_folder(folder, "config.json", config, "ae.pt", parts))
    assert sae.hook_point == HookPoint(1, "mlp_out")
    _check(sae, encode)
    folder = tmp_path / "resid_out_layer2" / "0_8192"  # when there was one class
    parts, encode = _CLASSES["AutoEncoder"]
    sae = load_sae(write_folder(folder, "config.json", {}, "ae.pt", parts))
    assert sae.hook_point == HookPoint(2, "residual")
    _check(sae, encode)


@pytest.mark.parametrize("before", ["_orig_mod.", "module.", "module._orig_mod."])
def test_tensors_of_a_wrapped_module(before: str, tmp_path: Path) -> None:
    parts, encode = _CLASSES["AutoEncoder"]
    parts = {before + name: part for name, part in parts.items()}
    config = {"trainer": {"submodule_name": "resid_post_layer_8"}}
    _check(load_sae(write_folder(tmp_path, "config.json", config, "ae.pt", parts)), encode)


def test_dictionary_learning_trainer_that_names_another_class(tmp_path: Path) -> None:
    """StandardTrainerAprilUpdate trains AutoEncoderNew, and writes AutoEncoder."""
    _check(load_sae(_dictionary(tmp_path, "AutoEncoderNew", dict_class="AutoEncoder")), _relu)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "changes", "match"),
    [
        (_saelens, {"architecture": "temporal"}, "architecture is 'temporal'.* is standard"),
        (_saelens, {"hook_head_index": 3}, "hook_head_index is 3"),
        *((_saelens, {key: 99}, f"{key} is 99") for key in ("d_sae", "d_in", "hook_layer")),
        (_saelens, {"class": "Transcoder"}, "class is 'Transcoder'"),
        *(
            (write, {key: True}, f"{key} is True")
            for write, keys in (
                (_saelens, "use_error_term hook_name_out layer_norm batch_norm output_scale"),
                (_saelens, "reshape_activations finetuning_scaling_factor"),
                (_gemma_scope_2, "affine_connection"),
                (_llama_scope, "use_glu_encoder circuit_scale"),
                (_sparsify, "transcode skip_connection embed_skip gram_lookup signed"),
            )
            for key in keys.split()
        ),
        (_saelens, {"activation_fn_kwargs": {"signed": True}}, "kwargs.signed is True"),
        (_saelens, {"hook_point": "blocks.5.hook_mlp_out"}, "hook_point is 'blocks.5"),
        (_saelens, {"activation_fn": "topk", "activation_fn_str": "relu"}, "fn_str is 'relu'"),
        (
            _saelens,
            {"name": "topk", "activation_fn_kwargs": {"k": 6}},
            "activation_fn_kwargs.k is 6",
        ),
        (_saelens, {"name": "topk", "k": 5.5}, "k from 1 to its 40 features, not 5.5"),
        (_saelens, {"more": {"norm_factor": X[0]}}, r"norm_factor is \(12,\)"),
        (_saelens, {"name": "jumprelu", "more": {"log_threshold": B_MAG}}, "tensor log_threshold"),
        (
            _saelens,
            {"name": "finetuned", "finetuning_scaling_factor": False},
            "finetuning_scaling_factor is False",
        ),
        (_saelens, {"more": {"W_dec": W_DEC[:0]}}, r"sae: .*decoder has the shape \(0, 12\)"),
        (
            _saelens,
            {"name": "gated", "more": {"r_mag": R_MAG[1:]}},
            r"r_mag \(39,\).*W_enc|W_enc.*39",
        ),
        (_saelens, {"hook_name": "blocks.0.hook_resid_pre"}, "none of residual"),
        (_saelens, {"hook_name": "blocks.0.hook_resid_mid"}, "none of residual"),
        (_saelens, {"hook_name": "trunk.3"}, "hook point 'trunk.3'.*name the folder"),
        (_saelens, {"architecture": "jumprelu"}, r"lacks threshold \(it has"),
        (_gemma_scope_2, {"type": "transcoder"}, "type is 'transcoder'"),
        (_gemma_scope_2, {"hf_hook_point_out": "model.layers.17.mlp"}, "hf_hook_point_out"),
        (_gemma_scope_2, {"architecture": "topk"}, "architecture is 'topk'"),
        (_gemma_scope_2, {"hook": "pre_feedforward_layernorm.output"}, "none of residual"),
        (_gemma_scope_2, {"hook": "self_attn.o_proj.input"}, "concatenated heads.*Pass lm"),
        (_llama_scope, {"hook_point_out": "blocks.13.hook_mlp_out"}, "hook_point_out"),
        (
            _llama_scope,
            {"dataset_average_activation_norm": {"in": 7.0, "out": 6.0}},
            "dataset_average_activation_norm",
        ),
        (_llama_scope, {"act_fn": "batchtopk", "jump_relu_threshold": 0}, "act_fn without"),
        (_sparsify, {"activation": "groupmax"}, "activation is 'groupmax'"),
        (_sparsify, {"more": {"W_skip": R_MAG}}, r"tensor W_skip is \(40,\)"),
        (_dictionary, {"dict_class": "CrossCoder"}, "dict_class is 'CrossCoder', .*AutoEncoder"),
        (_dictionary, {"dict_class": None, "name": "BatchTopKSAE"}, "dict_class is None"),
        (_dictionary, {"io": "in"}, "buffer.io is 'in'"),
        (_dictionary, {"name": "AutoEncoderTopK", "k": 6}, "trainer.k is 6"),
        (
            _dictionary,
            {"name": "MatryoshkaBatchTopKSAE", "more": {"group_sizes": torch.tensor([8, 8])}},
            "sum of group_sizes",
        ),
    ],
)
def test_what_is_refused(write: Any, changes: dict, match: str, tmp_path: Path) -> None:
    folder = tmp_path / ("layers.1" if write is _sparsify else "sae")
    with pytest.raises(SparseAutoencoderError, match=match) as error:
        load_sae(write(folder, **changes))
    assert "\n" not in str(error.value)


class Opened:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> tuple:
        return (Opened.leave_trace, ())

    @staticmethod
    def leave_trace() -> None:
        raise AssertionError("a pickle was loaded")


@pytest.mark.parametrize("write", [_gemma_scope, _dictionary, _sparsify])
def test_no_code_of_a_file_is_run_and_none_is_half_read(write: Any, tmp_path: Path) -> None:
    folder = write(tmp_path / "residual.1")
    (file,) = (path for path in folder.iterdir() if path.suffix != ".json")
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], b"", b"no tensors"):
        file.write_bytes(damaged)
        with pytest.raises(SparseAutoencoderError, match=f"{file.name}: it is damaged"):
            load_sae(folder)
    if file.suffix == ".npz":
        np.savez(file, W_enc=np.array([Opened()], dtype=object))
    elif file.suffix == ".pt":
        torch.save({"encoder.weight": W_ENC, "more": Opened()}, file)
    with pytest.raises(SparseAutoencoderError, match=f"{file.name}: it is damaged") as error:
        load_sae(folder)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)


def test_a_pointer_in_place_of_a_file(tmp_path: Path) -> None:
    folder = _sparsify(tmp_path / "layers.1")
    (folder / "sae.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(SparseAutoencoderError, match=r"sae\.safetensors: it is LFS"):
        load_sae(folder)


def test_a_folder_above_names_those_below(tmp_path: Path) -> None:
    for name in ("average_l0_9", "average_l0_82"):
        _gemma_scope(tmp_path / "layer_1" / "width_16k" / name)
    for load in (load_sae, load_saes):
        with pytest.raises(SparseAutoencoderError, match=r"such as \S*width_16k/average_l0_82, "):
            load(tmp_path / "layer_1")


def test_folders_without_an_sae(tmp_path: Path) -> None:
    (tmp_path / "ae.pt").touch()
    for load in (load_sae, load_saes):
        with pytest.raises(SparseAutoencoderError, match=r"or none\. Known are lincorr"):
            load(tmp_path)
        for path in (tmp_path / "nowhere", tmp_path / "ae.pt"):
            with pytest.raises(SparseAutoencoderError, match="no such folder; download"):
                load(path)
    (tmp_path / "residual.1").mkdir()
    with pytest.raises(SparseAutoencoderError, match=r"residual\.1 holds an SAE in no"):
        load_saes(tmp_path)


# -- hook points ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "hook_point"),
    [
        ("model.layers.3", HookPoint(3, "residual")),
        ("model.language_model.layers.3.output", HookPoint(3, "residual")),
        ("transformer.h.3.mlp", HookPoint(3, "mlp_out")),
        ("gpt_neox.layers.3.attention", HookPoint(3, "attention_out")),
        ("blocks.12.hook_attn_out", HookPoint(12, "attention_out")),
        ("blocks.3.hook_out", HookPoint(3, "residual")),
        ("blocks.3.hook_in", HookPoint(2, "residual")),
        ("topk_mlp_out_layer_3", HookPoint(3, "mlp_out")),
        ("resid_post_layer_12", HookPoint(12, "residual")),
        ("trunk.3", HookPoint(9, "mlp_out")),  # of the folder
        ("mlp_in_layer_3", HookPoint(9, "mlp_out")),
        ("notmlp_out_layer_3", HookPoint(9, "mlp_out")),
    ],
)
def test_names_of_hook_points(hook: str, hook_point: HookPoint, tmp_path: Path) -> None:
    assert SAESource(tmp_path / "mlp_out.9", ["x"]).find_hook_point(hook) == hook_point


@pytest.mark.parametrize(
    ("name", "module", "is_added"),
    [
        ("llama", "mlp", True),
        ("llama", "self_attn", True),
        ("gpt-neox", "mlp", True),  # followed by a dropout, which is the hook point
        ("gpt2", "self_attn", False),  # it has none
        ("gemma3", "mlp", False),  # a norm follows
        ("gemma3", "post_feedforward_layernorm", True),
    ],
)
def test_the_lm_shows_whether_a_module_is_added_to_the_stream(
    name: str, module: str, is_added: bool, small_lm: str, tmp_path: Path
) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(small_lm)
    lm = LanguageModel.from_module(toy_model(name, len(tokenizer)), tokenizer)
    folder = _sparsify(tmp_path / f"layers.1.{module}")
    load_sae(folder)
    hook = f"blocks.1.{'mlp' if module == 'mlp' else 'attn'}.hook_out"  # TransformerLens 4
    bridged = _saelens(tmp_path / "bridged", hook_name=hook)
    with pytest.raises(SparseAutoencoderError, match="Pass lm to load_sae"):
        load_sae(bridged)
    for path, is_read in ((folder, is_added), (bridged, name != "gemma3")):
        if is_read:
            load_sae(path, lm=lm)
            continue
        with pytest.raises(SparseAutoencoderError, match=rf"{path}.*the layer's own output"):
            load_sae(path, lm=lm)


def test_the_page_lists_the_files_of_all_formats() -> None:
    page = (Path(__file__).parents[2] / "docs/sparse_autoencoders.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.count(" | ") == 3]
    listed = {tuple(re.findall(r"`([^`]+)`", row[1])) for row in rows}
    without_settings = {("params.safetensors",)}  # of Gemma Scope 2
    assert {tuple(files) for files, _ in FORMATS.values()} - without_settings == listed - {()}
