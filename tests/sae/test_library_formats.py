"""Folders of Gemma Scope 2, sparsify, dictionary_learning and gated SAEs, against own formulas."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae import FORMATS, SparseAutoencoder, load_sae, load_saes, register_format
from lincorr_lightning.sae.formats import SAESource
from lincorr_lightning.sae.hook_points import HookPoint
from tests.sae.test_formats import Opened
from tests.toys import toy_model

N, WIDTH, K = 40, 12, 5
HERE = HookPoint(1, "residual")
Oracle = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


X = _draw(200, WIDTH, seed=7)
# In the papers' notation: a feature is a column of the encoder and a row of the decoder.
W_ENC, B_ENC = _draw(WIDTH, N, seed=1) / WIDTH**0.5, _draw(N, seed=2) / 4
W_DEC, B_DEC = _draw(N, WIDTH, seed=3) * _draw(N, 1, seed=4).exp() / N, _draw(WIDTH, seed=5) / 4
THRESHOLD = _draw(N, seed=6).exp() / 3
R_MAG, B_GATE, B_MAG = _draw(N, seed=8) / 2, _draw(N, seed=9) / 2, _draw(N, seed=10) / 2


def _write(folder: Path, tensors: str, config: dict[str, Any] | None, **parts: Tensor) -> Path:
    """Write a folder: a file of tensors, and a file of settings if there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        name = "cfg.json" if tensors.startswith("sae") else "config.json"
        (folder / name).write_text(json.dumps(config))
    parts = {name.replace("__", "."): part.contiguous() for name, part in parts.items()}
    if tensors.endswith(".pt"):
        torch.save(parts, folder / tensors)
    else:
        save_file(parts, folder / tensors)
    return folder


def _check(
    sae: SparseAutoencoder,
    encode: Callable[[Tensor], Tensor],
    w_dec: Tensor = W_DEC,
    b_dec: Tensor = B_DEC,
) -> None:
    """To 1e-5: features, reconstruction, those of the folded SAE, and of the SAE saved and read."""
    expected = encode(X)
    assert 0.02 < (expected > 0).double().mean() < 0.9
    rebuilt = expected @ w_dec + b_dec
    norms = w_dec.norm(dim=1)
    for one, features in ((sae, expected), (sae.folded(), expected * norms)):
        torch.testing.assert_close(one.encode(X).detach(), features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one(X).detach(), rebuilt, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sae.decode(expected).detach(), rebuilt, rtol=1e-5, atol=1e-5)


def _top_k(pre: Tensor, k: int = K) -> Tensor:
    """The k largest of each row, and of these the positive ones."""
    level = pre.sort(dim=1, descending=True).values[:, k - 1 : k]
    return torch.where(pre >= level, pre.clamp(min=0), 0)


def _gated(x: Tensor) -> Tensor:
    """Equations 6 and 7 of Rajamanoharan et al., 2024 (arXiv 2404.16014), tied by r_mag."""
    is_open = (x - B_DEC) @ W_ENC + B_GATE > 0
    magnitude = (x - B_DEC) @ (W_ENC * R_MAG.exp()) + B_MAG
    return is_open * magnitude.clamp(min=0)


def _jump(x: Tensor) -> Tensor:
    pre = x @ W_ENC + B_ENC
    return torch.where(pre > THRESHOLD, pre.clamp(min=0), 0)


# -- Gemma Scope 2 -----------------------------------------------------------------------------

_GEMMA = {"w_enc": W_ENC, "b_enc": B_ENC, "w_dec": W_DEC, "b_dec": B_DEC, "threshold": THRESHOLD}


def _gemma(folder: Path, module: str = "output", **changes: Any) -> Path:
    """As google/gemma-scope-2-4b-pt has them."""
    hook = f"model.layers.17.{module}"
    config = {
        "hf_hook_point_in": hook,
        "hf_hook_point_out": hook,
        "width": N,
        "l0": 60,
        "type": "sae",
        "model_name": "google/gemma-3-4b-pt",
        "architecture": "jump_relu",
        "affine_connection": False,
    }
    return _write(folder, "params.safetensors", config | changes, **_GEMMA)


@pytest.mark.parametrize(
    ("module", "kind"), [("output", "residual"), ("post_feedforward_layernorm.output", "mlp_out")]
)
def test_gemma_scope_2(module: str, kind: Any, tmp_path: Path) -> None:
    sae = load_sae(_gemma(tmp_path / "sae", module))
    assert (sae.hook_point, sae.lm) == (HookPoint(17, kind), "google/gemma-3-4b-pt")
    _check(sae, _jump)


def test_gemma_scope_2_without_settings(tmp_path: Path) -> None:
    """Some folders of the hub have none; their path has the hook point, but a copy has not."""
    path = "models--google--gemma-scope-2-1b-pt/snapshots/1f/{}/layer_10_width_16k_l0_small"
    for site, kind in (("resid_post_all", "residual"), ("mlp_out", "mlp_out")):
        folder = _write(tmp_path / path.format(site), "params.safetensors", None, **_GEMMA)
        sae = load_sae(folder)
        assert sae.hook_point == HookPoint(10, kind)  # type: ignore[arg-type]
        _check(sae, _jump)
        with pytest.raises(SparseAutoencoderError, match="of layer 10, not to residual of layer 1"):
            load_sae(folder, hook_point=HERE)
    folder = _write(tmp_path / "sae", "params.safetensors", None, **_GEMMA)
    with pytest.raises(SparseAutoencoderError, match="does not name its hook point"):
        load_sae(folder)
    assert load_sae(folder, hook_point=HERE).hook_point == HERE
    folder = _write(tmp_path / path.format("attn_out"), "params.safetensors", None, **_GEMMA)
    with pytest.raises(SparseAutoencoderError, match=r"concatenated heads.*Pass lm"):
        load_sae(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "transcoder"}, "its type is 'transcoder', .*whose type is sae"),
        ({"type": "crosscoder"}, "its type is 'crosscoder'"),
        (
            {"hf_hook_point_out": "model.layers.17.post_feedforward_layernorm.output"},
            "its hf_hook_point_out is 'model.layers.17.post",
        ),
        ({"architecture": "topk"}, "its architecture is 'topk', .* is jump_relu"),
        ({"affine_connection": True}, "its affine_connection is True"),
        (
            {
                "hf_hook_point_in": "model.layers.17.pre_feedforward_layernorm.output",
                "hf_hook_point_out": "model.layers.17.pre_feedforward_layernorm.output",
            },
            "reads model.layers.17.pre_feedforward_layernorm.output, none of residual",
        ),
    ],
)
def test_gemma_scope_2_that_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SparseAutoencoderError, match=message) as error:
        load_sae(_gemma(tmp_path, **changes))
    assert "\n" not in str(error.value) and "Copy or download" not in str(error.value)


def test_gemma_scope_2_with_tensors_of_a_skip_connection(tmp_path: Path) -> None:
    _gemma(tmp_path)
    skip = {"affine_skip_connection": torch.eye(WIDTH)}
    save_file(_GEMMA | skip, tmp_path / "params.safetensors")
    with pytest.raises(SparseAutoencoderError, match="affine_connection is True"):
        load_sae(tmp_path)


# -- sparsify ----------------------------------------------------------------------------------

_SPARSIFY = {"encoder__weight": W_ENC.T, "encoder__bias": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}


def _sparsify(folder: Path, more: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    config = {
        "expansion_factor": 4,
        "normalize_decoder": True,
        "num_latents": 0,
        "k": K,
        "multi_topk": False,
        "d_in": WIDTH,
    }
    return _write(folder, "sae.safetensors", config | changes, **_SPARSIFY, **(more or {}))


def _sparsify_encode(x: Tensor, k: int = K) -> Tensor:
    return _top_k((x - B_DEC) @ W_ENC + B_ENC, k)


@pytest.mark.parametrize(
    ("name", "hook_point"),
    [
        ("layers.12", HookPoint(12, "residual")),
        ("layers.12.mlp", HookPoint(12, "mlp_out")),
        ("layers.3.self_attn/seed1", HookPoint(3, "attention_out")),
        ("h.5", HookPoint(5, "residual")),
        ("h.5.attn", HookPoint(5, "attention_out")),
        ("residual.2", HookPoint(2, "residual")),  # renamed
    ],
)
@pytest.mark.parametrize("k", [K, 30])
def test_sparsify(name: str, hook_point: HookPoint, k: int, tmp_path: Path) -> None:
    sae = load_sae(_sparsify(tmp_path / name, k=k, activation="topk", transcode=False))
    assert (sae.hook_point, sae.k) == (hook_point, k)
    _check(sae, lambda x: _sparsify_encode(x, k))  # at 30, some of the k are not positive


def test_sparsify_in_bfloat16_and_all_layers(tmp_path: Path) -> None:
    for layer in range(3):
        _sparsify(tmp_path / f"layers.{layer}")
    _sparsify(tmp_path / "layers.1.mlp")
    for beside in ("config.json", "optimizer_0.pt", "lr_scheduler.pt"):  # of its runs
        (tmp_path / beside).write_text("{}")
    points = [HookPoint(0, "residual"), HERE, HookPoint(1, "mlp_out"), HookPoint(2, "residual")]
    assert list(load_saes(tmp_path)) == points
    folder = tmp_path / "layers.0"
    halves = {name.replace("__", "."): part.bfloat16() for name, part in _SPARSIFY.items()}
    save_file({k: v.contiguous() for k, v in halves.items()}, folder / "sae.safetensors")
    w_enc, b_enc, w_dec, b_dec = (
        halves[name].float() for name in ("encoder.weight", "encoder.bias", "W_dec", "b_dec")
    )
    _check(load_sae(folder), lambda x: _top_k((x - b_dec) @ w_enc.T + b_enc), w_dec, b_dec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transcode": True}, "its transcode is True, .*whose transcode is False"),
        ({"skip_connection": True}, "its skip_connection is True"),
        ({"embed_skip": True}, "its embed_skip is True"),
        ({"gram_lookup": True}, "its gram_lookup is True"),
        ({"signed": True}, "its signed is True"),
        ({"activation": "groupmax"}, "its activation is 'groupmax', .*is topk"),
        ({"more": {"W_skip": torch.eye(WIDTH)}}, "its skip_connection is True"),
        ({"k": None}, "a value in its files"),
        ({"k": N + 1}, "topk needs a k from 1 to its 40 features"),
    ],
)
def test_sparsify_that_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SparseAutoencoderError, match=message) as error:
        load_sae(_sparsify(tmp_path / "layers.1", **changes))
    assert "\n" not in str(error.value)


def test_sparsify_without_k(tmp_path: Path) -> None:
    folder = _sparsify(tmp_path / "layers.1")
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps({key: config[key] for key in config if key != "k"}))
    with pytest.raises(SparseAutoencoderError, match="its files lack the key 'k', which sparsify"):
        load_sae(folder)


def test_sparsify_transcoder_that_only_its_run_names(tmp_path: Path) -> None:
    folder = _sparsify(tmp_path / "layers.1.mlp")
    (tmp_path / "config.json").write_text(json.dumps({"transcode": True, "sae": {"k": K}}))
    with pytest.raises(SparseAutoencoderError, match="its transcode is True"):
        load_sae(folder)
    (tmp_path / "config.json").write_text(json.dumps({"transcode": False}))
    load_sae(folder)


def test_sparsify_of_modules_that_are_no_hook_points(tmp_path: Path) -> None:
    for name, message in (
        ("h.3.mlp.act", r"it reads h\.3\.mlp\.act, none of residual"),
        ("layers.3.input_layernorm", r"it reads layers\.3\.input_layernorm, none of"),
        ("embed_tokens", r"calls its hook point 'embed_tokens', .*name the folder"),
    ):
        with pytest.raises(SparseAutoencoderError, match=message):
            load_sae(_sparsify(tmp_path / name))


# -- dictionary_learning -----------------------------------------------------------------------

_LINEAR = {"encoder__weight": W_ENC.T, "encoder__bias": B_ENC, "decoder__weight": W_DEC.T}
_PARAMETERS = {"W_enc": W_ENC, "b_enc": B_ENC, "W_dec": W_DEC, "b_dec": B_DEC}
_INT = torch.tensor(K, dtype=torch.int)


def _centered(x: Tensor) -> Tensor:
    return (x - B_DEC) @ W_ENC + B_ENC


_CLASSES: dict[str, tuple[dict[str, Tensor], Callable[[Tensor], Tensor]]] = {
    "AutoEncoder": (_LINEAR | {"bias": B_DEC}, lambda x: _centered(x).relu()),
    "AutoEncoderNew": (_LINEAR | {"decoder__bias": B_DEC}, lambda x: (x @ W_ENC + B_ENC).relu()),
    "GatedAutoEncoder": (
        {
            "encoder__weight": W_ENC.T,
            "decoder__weight": W_DEC.T,
            "decoder_bias": B_DEC,
            "r_mag": R_MAG,
            "gate_bias": B_GATE,
            "mag_bias": B_MAG,
        },
        _gated,
    ),
    "JumpReluAutoEncoder": (_PARAMETERS | {"threshold": THRESHOLD}, _jump),
    "AutoEncoderTopK": (
        _LINEAR | {"b_dec": B_DEC, "k": _INT, "threshold": torch.tensor(0.4)},
        lambda x: _top_k(_centered(x)),
    ),
    "BatchTopKSAE": (
        _LINEAR | {"b_dec": B_DEC, "k": _INT, "threshold": torch.tensor(0.4)},
        lambda x: _centered(x).relu() * (_centered(x).relu() > 0.4),
    ),
    "MatryoshkaBatchTopKSAE": (
        _PARAMETERS | {"k": _INT, "threshold": torch.tensor(0.4), "group_sizes": _INT},
        lambda x: _centered(x).relu() * (_centered(x).relu() > 0.4),
    ),
}


def _dictionary(
    folder: Path,
    name: str = "AutoEncoder",
    more: dict[str, Tensor] | None = None,
    buffer: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    trainer = {
        "trainer_class": "Trainer",
        "dict_class": name,
        "activation_dim": WIDTH,
        "dict_size": N,
        "layer": 8,
        "lm_name": "EleutherAI/pythia-160m",
        "submodule_name": "resid_post_layer_8",
    }
    if "TopK" in name:
        trainer["k"] = K
    config = {"trainer": trainer | changes, "buffer": buffer or {"io": "out", "ctx_len": 128}}
    return _write(folder, "ae.pt", config, **(_CLASSES[name][0] | (more or {})))


@pytest.mark.parametrize("name", _CLASSES)
def test_dictionary_learning(name: str, tmp_path: Path) -> None:
    sae = load_sae(_dictionary(tmp_path / "sae", name))
    assert (sae.hook_point, sae.lm) == (HookPoint(8, "residual"), "EleutherAI/pythia-160m")
    assert sae.k == (K if "TopK" in name else None)
    _check(sae, _CLASSES[name][1])
    sae.save(tmp_path / "saved")
    saved = load_sae(tmp_path / "saved")
    assert torch.equal(saved.encode(X), sae.encode(X))


def test_dictionary_learning_early_files(tmp_path: Path) -> None:
    """No buffers for k and threshold, no submodule: the folder has the hook point."""
    old = {
        name: part
        for name, part in _CLASSES["AutoEncoderTopK"][0].items()
        if name not in ("k", "threshold")
    }
    trainer = {"dict_class": "AutoEncoderTopK", "k": K, "layer": 1, "submodule_name": None}
    folder = tmp_path / "mlp_out_layer1" / "5_32768"
    sae = load_sae(_write(folder, "ae.pt", {"trainer": trainer}, **old))
    assert sae.hook_point == HookPoint(1, "mlp_out")
    first = tmp_path / "resid_out_layer2" / "0_8192"  # when there was one class
    parts, encode = _CLASSES["AutoEncoder"]
    assert load_sae(_write(first, "ae.pt", {}, **parts)).hook_point == HookPoint(2, "residual")
    _check(load_sae(first), encode)
    _check(sae, _CLASSES["AutoEncoderTopK"][1])
    with pytest.raises(SparseAutoencoderError, match="does not name its hook point"):
        load_sae(_write(tmp_path / "sae", "ae.pt", {"trainer": trainer}, **old))


def test_dictionary_learning_threshold_that_was_never_learned(tmp_path: Path) -> None:
    """It is -1 until then, and all positive pre-activations are above it."""
    more = {"threshold": torch.tensor(-1.0)}
    _check(load_sae(_dictionary(tmp_path, "BatchTopKSAE", more)), lambda x: _centered(x).relu())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dict_class": "IdentityDict"}, "trainer.dict_class is 'IdentityDict', .*AutoEncoder or"),
        ({"dict_class": "CrossCoder"}, "trainer.dict_class is 'CrossCoder'"),
        ({"dict_class": None, "name": "BatchTopKSAE"}, "settings have no trainer.dict_class"),
        ({"buffer": {"io": "in"}}, "buffer.io is 'in', .*whose buffer.io is out"),
        ({"buffer": {"io": "in_and_out"}}, "buffer.io is 'in_and_out'"),
        ({"name": "AutoEncoderTopK", "k": K + 1}, r"trainer.k is 6, but the k of ae\.pt is 5"),
        ({"dict_class": "BatchTopKSAE"}, r"ae\.pt: it lacks b_dec \(it has encoder\.weight"),
        ({"submodule_name": "embed"}, "calls its hook point 'embed'"),
        ({"name": "GatedAutoEncoder", "more": {"r_mag": torch.zeros(N - 1)}}, "in its files"),
        (
            {"name": "BatchTopKSAE", "more": {"threshold": torch.zeros(N - 1)}},
            r"threshold has the shape \(39,\)",
        ),
    ],
)
def test_dictionary_learning_that_is_refused(changes: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(SparseAutoencoderError, match=message) as error:
        load_sae(_dictionary(tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_dictionary_learning_runs_no_code_of_a_file(tmp_path: Path) -> None:
    folder = _dictionary(tmp_path)
    whole = (folder / "ae.pt").read_bytes()
    torch.save({"encoder.weight": W_ENC, "more": Opened()}, folder / "ae.pt")
    with pytest.raises(SparseAutoencoderError, match=r"ae\.pt: .*pickled objects") as error:
        load_sae(folder)
    assert "\n" not in str(error.value) and "weights_only" not in str(error.value)
    for content in (whole[: len(whole) // 2], b"", b"no tensors"):
        (folder / "ae.pt").write_bytes(content)
        with pytest.raises(SparseAutoencoderError, match=r"ae\.pt: it is damaged") as error:
            load_sae(folder)
        assert "\n" not in str(error.value)
    for wrong in (W_ENC, {"encoder.weight": [1]}):
        torch.save(wrong, folder / "ae.pt")
        with pytest.raises(SparseAutoencoderError, match="cannot read"):
            load_sae(folder)


# -- gated SAEs of SAELens ---------------------------------------------------------------------


@pytest.mark.parametrize("subtract", [True, False])
def test_saelens_gated(subtract: bool, tmp_path: Path) -> None:
    config = {
        "architecture": "gated",
        "d_in": WIDTH,
        "d_sae": N,
        "apply_b_dec_to_input": subtract,
        "normalize_activations": "none",
        "metadata": {"model_name": "gpt2", "hook_name": "blocks.1.hook_resid_post"},
    }
    parts = {
        "W_enc": W_ENC,
        "W_dec": W_DEC,
        "b_dec": B_DEC,
        "r_mag": R_MAG,
        "b_gate": B_GATE,
        "b_mag": B_MAG,
    }
    sae = load_sae(_write(tmp_path, "sae_weights.safetensors", config, **parts))
    assert sae.hook_point == HERE
    _check(sae, lambda x: _gated(x if subtract else x + B_DEC))
    save_file(
        {k: v for k, v in parts.items() if k != "b_gate"}, tmp_path / "sae_weights.safetensors"
    )
    with pytest.raises(SparseAutoencoderError, match="it lacks b_gate"):
        load_sae(tmp_path)


# -- hook points -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "hook_point"),
    [
        ("model.layers.3", HookPoint(3, "residual")),
        ("model.language_model.layers.3.output", HookPoint(3, "residual")),
        ("transformer.h.3.mlp", HookPoint(3, "mlp_out")),
        ("gpt_neox.layers.3.attention", HookPoint(3, "attention_out")),
        ("blocks.3.hook_resid_pre", HookPoint(2, "residual")),
        ("attn_out_layer_3", HookPoint(3, "attention_out")),
        ("mlp_out_layer3", HookPoint(3, "mlp_out")),
        ("topk_mlp_out_layer_3", HookPoint(3, "mlp_out")),
        ("resid_post_layer_12", HookPoint(12, "residual")),
        ("trunk.3", None),
        ("mlp_in_layer_3", None),
        ("notmlp_out_layer_3", None),
    ],
)
def test_names_of_hook_points(hook: str, hook_point: HookPoint | None, tmp_path: Path) -> None:
    source = SAESource(tmp_path, ["x"], hook_point=HookPoint(9, "mlp_out"))
    assert source.find_hook_point(hook) == (hook_point or source.hook_point)


@pytest.mark.parametrize(
    ("name", "module", "is_added"),
    [
        ("llama", "mlp", True),
        ("llama", "self_attn", True),
        ("gpt-neox", "mlp", True),  # followed by a dropout, which is the hook point
        ("gpt2", "self_attn", False),  # it has none
        ("gemma3", "mlp", False),  # a norm follows
        ("gemma3", "self_attn", False),
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
    if is_added:
        load_sae(folder, lm=lm)
        return
    message = rf"reads layers\.1\.{module}, .*Take an SAE of the layer's own output"
    with pytest.raises(SparseAutoencoderError, match=message):
        load_sae(folder, lm=lm)


def test_gemma_scope_2_of_attention_has_a_norm_after_it(small_lm: str, tmp_path: Path) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(small_lm)
    lm = LanguageModel.from_module(toy_model("gemma3", len(tokenizer)), tokenizer)
    hook = "model.layers.1.self_attn.o_proj.input"
    folder = _gemma(tmp_path, hf_hook_point_in=hook, hf_hook_point_out=hook)
    with pytest.raises(SparseAutoencoderError, match="a norm of each token after the projection"):
        load_sae(folder, lm=lm)


# -- formats of one's own ----------------------------------------------------------------------


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats as they are, whatever a test registers."""
    for name in list(FORMATS):
        monkeypatch.setitem(FORMATS, name, FORMATS[name])
    before = dict(FORMATS)
    yield  # type: ignore[misc]
    FORMATS.clear()
    FORMATS.update(before)


def _read_own(source: SAESource) -> SparseAutoencoder:
    source.require("kind", source.config.get("kind"), ["plain"])
    keys = ("enc", "dec", "enc_bias", "dec_bias")
    hook_point = source.find_hook_point(source.config["module"])
    return SparseAutoencoder(hook_point=hook_point, **source.weights(keys, "encoder"))


def _own(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    settings = {"module": "layers.1", "kind": "plain"} | changes
    (folder / "settings.json").write_text(json.dumps(settings))
    parts = {"enc": W_ENC, "dec": W_DEC, "enc_bias": B_ENC, "dec_bias": B_DEC}
    save_file(parts, folder / "own.safetensors")
    return folder


@pytest.mark.usefixtures("formats")
def test_a_format_of_ones_own(tmp_path: Path) -> None:
    folder = _own(tmp_path / "sae")
    (folder / "checkpoints").mkdir()
    message = (
        r"sae holds an SAE in no known format, or none: inside is checkpoints/, own\.safetensors, "
        r"settings\.json\. Known are .*sparsify \(cfg\.json, sae\.safetensors\).*register_format"
    )
    for load in (load_sae, load_saes):
        with pytest.raises(SparseAutoencoderError, match=message):
            load(folder)
    register_format("own", ["settings.json", "own.safetensors"], _read_own)
    (sae,) = load_saes(folder).values()
    assert sae.hook_point == HERE
    _check(sae, lambda x: (x @ W_ENC + B_ENC).relu())
    with pytest.raises(SparseAutoencoderError, match=r"settings\.json: its kind is 'odd'"):
        load_sae(_own(tmp_path / "odd", kind="odd"))
    with pytest.raises(SparseAutoencoderError, match="a value in its files is none that own has"):
        load_sae(_own(tmp_path / "wrong", module=3))


@pytest.mark.usefixtures("formats")
def test_a_registered_format_is_tried_before_others(tmp_path: Path) -> None:
    folder = _gemma(tmp_path / "sae")
    (folder / "own.txt").touch()
    register_format("own", ["own.txt", "params.safetensors"], lambda source: own)
    own = load_sae(_sparsify(tmp_path / "layers.1"))
    assert load_sae(folder) is own
    with pytest.raises(SparseAutoencoderError, match="there is one of this name, or"):
        register_format("own", ["own.txt"], _read_own)
    with pytest.raises(SparseAutoencoderError, match="it has no files"):
        register_format("more", [], _read_own)


def test_a_folder_of_folders_names_the_one_that_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "residual.1").mkdir()
    (tmp_path / "residual.1" / "weights.bin").touch()
    with pytest.raises(SparseAutoencoderError, match=r"residual\.1 holds .*inside is weights\.bin"):
        load_saes(tmp_path)


def test_the_page_lists_the_files_of_all_formats_and_its_own_reader_works(
    formats: None, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs/sparse_autoencoders.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.count(" | ") == 3]
    listed = {tuple(re.findall(r"`([^`]+)`", row[1])) for row in rows}
    alone = {("params.safetensors",)}  # Gemma Scope 2 without its settings
    assert {tuple(form.files) for form in FORMATS.values()} - alone == listed - {()}
    code = next(one for one in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def" in one)
    exec(compile(code, "sparse_autoencoders.md", "exec"), {})
    parts = {"enc.weight": W_ENC.T, "dec.weight": W_DEC.T, "enc.bias": B_ENC, "dec.bias": B_DEC}
    save_file({k: v.contiguous() for k, v in parts.items()}, tmp_path / "weights.safetensors")
    settings = {"module": "model.layers.1.mlp", "kind": "plain"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    sae = load_sae(tmp_path)
    assert sae.hook_point == HookPoint(1, "mlp_out")
    _check(sae, lambda x: (x @ W_ENC + B_ENC).relu())
