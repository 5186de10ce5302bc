"""Folders of other libraries, written here by hand, against those libraries' formulas."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae.formats import load_sae, load_saes
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

N, WIDTH, K = 30, 8, 4
RNG = np.random.default_rng(0)
X = (RNG.normal(size=(50, WIDTH)) * 5).astype(np.float32)


def _draw(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def _weights() -> dict[str, np.ndarray]:
    decoder = _draw(N, WIDTH) * np.exp(_draw(N, 1))
    return {"W_enc": _draw(WIDTH, N), "W_dec": decoder, "b_enc": _draw(N), "b_dec": _draw(WIDTH)}


def _top_k(pre: np.ndarray) -> np.ndarray:
    """The k largest of each row, and of these the positive ones."""
    level = np.sort(pre, axis=1)[:, -K][:, None]
    return np.where(pre >= level, np.maximum(pre, 0), 0)


def _same(sae: SparseAutoencoder, reconstruction: np.ndarray) -> None:
    """As it is read, and folded."""
    x = torch.from_numpy(X)
    for one in (sae, sae.folded()):
        np.testing.assert_allclose(one(x).detach(), reconstruction, rtol=1e-3, atol=1e-3)


# -- SAELens -----------------------------------------------------------------------------------


def _saelens(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], new: bool = True
) -> Path:
    """New: version 6, with the LM's part under metadata; old: all in one."""
    about = {"model_name": "gemma-2-2b", "hook_name": "blocks.4.hook_resid_post"}
    about |= {"hook_head_index": None}
    own = {"d_in": WIDTH, "d_sae": N, "dtype": "float32", "normalize_activations": "none"}
    old = {"hook_layer": 4, "activation_fn_str": "relu", "activation_fn_kwargs": {}}
    for key in [key for key in config if key in about]:
        about[key] = config[key]
    rest = {key: value for key, value in config.items() if key not in about}
    content = {**own, "metadata": about, **rest} if new else {**own, **about, **old, **rest}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(content))
    save_file(
        {k: np.ascontiguousarray(v) for k, v in weights.items()}, folder / "sae_weights.safetensors"
    )
    return folder


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("subtract", [True, False])
def test_saelens_standard(new: bool, subtract: bool, tmp_path: Path) -> None:
    w = _weights()
    config = {"architecture": "standard", "apply_b_dec_to_input": subtract}
    sae = load_sae(_saelens(tmp_path / "sae", config, w, new))
    pre = (X - subtract * w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    _same(sae, np.maximum(pre, 0) @ w["W_dec"] + w["b_dec"])
    assert (sae.hook_point, sae.lm) == (HookPoint(4, "residual"), "gemma-2-2b")


_THRESHOLD = np.exp(_draw(N))


@pytest.mark.parametrize(
    ("architecture", "tensor", "threshold"),
    [
        ("jumprelu", {"threshold": _THRESHOLD}, _THRESHOLD),
        ("jumprelu", {"log_threshold": np.log(_THRESHOLD)}, _THRESHOLD),  # in training
        ("batchtopk", {"topk_threshold": np.array(1.5)}, 1.5),
        ("matryoshka_batchtopk", {"topk_threshold": np.array(1.5)}, 1.5),
    ],
)
def test_saelens_with_thresholds(
    architecture: str, tensor: dict[str, np.ndarray], threshold: Any, tmp_path: Path
) -> None:
    w = _weights()
    config = {"architecture": architecture, "k": 2.5, "apply_b_dec_to_input": True}
    sae = load_sae(_saelens(tmp_path / "sae", config, w | tensor))
    pre = (X - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    _same(sae, np.where(pre > threshold, pre, 0) @ w["W_dec"] + w["b_dec"])


@pytest.mark.parametrize("rescaled", [False, True])
@pytest.mark.parametrize("new", [True, False])
def test_saelens_topk(rescaled: bool, new: bool, tmp_path: Path) -> None:
    w = _weights()
    config: dict[str, Any] = {"architecture": "topk", "k": K}
    if not new:
        config = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}}
    config |= {"apply_b_dec_to_input": False, "rescale_acts_by_decoder_norm": rescaled}
    sae = load_sae(_saelens(tmp_path / "sae", config, w, new))
    norm = np.linalg.norm(w["W_dec"], axis=1) if rescaled else np.ones(N)
    features = _top_k((X @ w["W_enc"] + w["b_enc"]) * norm)
    _same(sae, (features / norm) @ w["W_dec"] + w["b_dec"])
    np.testing.assert_allclose(
        sae.encode(torch.from_numpy(X)).detach(), features, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("where", ["argument", "file"])
def test_saelens_average_norm(where: str, tmp_path: Path) -> None:
    w = _weights()
    config = {
        "architecture": "standard",
        "normalize_activations": "expected_average_only_in",
        "apply_b_dec_to_input": True,
    }
    folder = _saelens(tmp_path / "sae", config, w)
    with pytest.raises(
        SparseAutoencoderError,
        match=r'"scaling_factor": s\} to .*activation_scaler\.json, or .*input_scale.*blocks\.4',
    ):
        load_sae(folder)
    scale = 0.4
    if where == "file":
        (folder / "activation_scaler.json").write_text(json.dumps({"scaling_factor": scale}))
    sae = load_sae(folder, input_scale=scale if where == "argument" else None)
    assert sae.input_scale == scale
    pre = (scale * X - w["b_dec"]) @ w["W_enc"] + w["b_enc"]
    _same(sae, (np.maximum(pre, 0) @ w["W_dec"] + w["b_dec"]) / scale)


def test_saelens_finetuning_factor(tmp_path: Path) -> None:
    w, factor = _weights(), np.exp(_draw(N))
    config = {"architecture": "standard", "apply_b_dec_to_input": False}
    sae = load_sae(_saelens(tmp_path / "sae", config, w | {"scaling_factor": factor}, new=False))
    pre = X @ w["W_enc"] + w["b_enc"]
    _same(sae, (np.maximum(pre, 0) * factor) @ w["W_dec"] + w["b_dec"])


def test_hook_points_come_from_the_file_the_folder_or_the_caller(tmp_path: Path) -> None:
    def sae(folder: str, hook: str | None, given: HookPoint | None = None) -> SparseAutoencoder:
        config = {"architecture": "standard", "hook_name": hook}
        return load_sae(_saelens(tmp_path / folder, config, _weights()), hook_point=given)

    for hook, expected in (
        ("blocks.4.hook_mlp_out", HookPoint(4, "mlp_out")),
        ("blocks.12.hook_attn_out", HookPoint(12, "attention_out")),
        ("blocks.4.hook_resid_pre", HookPoint(3, "residual")),
    ):
        for folder, given in (("sae", None), ("sae", expected), ("mlp_out.3", None)):
            assert sae(folder, hook, given).hook_point == expected  # the file's own counts
        with pytest.raises(SparseAutoencoderError, match=r"belongs to .* not to mlp_out of layer"):
            sae("sae", hook, HookPoint(9, "mlp_out"))
    other = "trunk.3"  # of another library
    assert sae("sae", other, HookPoint(3, "residual")).hook_point == HookPoint(3, "residual")
    for named in ("mlp_out.3", "residual.0", "attention_out.12"):
        assert sae(named, other).hook_point.id == named
    for text in ("stream.3", "residual", "residual.x", "a.residual.3"):
        assert HookPoint.named(text) is None
    match = r"calls its hook point 'trunk\.3'.*name the folder by its hook point"
    with pytest.raises(SparseAutoencoderError, match=match):
        sae("sae", other)
    with pytest.raises(SparseAutoencoderError, match="it does not name its hook point"):
        sae("sae", None)


def test_saelens_metadata_that_is_null_or_no_object(tmp_path: Path) -> None:
    config = {"architecture": "standard", "hook_name": "blocks.4.hook_mlp_out"}
    folder = _saelens(tmp_path / "sae", config, _weights(), new=False)
    content = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(content | {"metadata": None, "meta": None}))
    assert load_sae(folder).hook_point == HookPoint(4, "mlp_out")
    for wrong in ({"metadata": 3}, {"hook_name": 3}, {"activation_fn_kwargs": 3}, {"k": "many"}):
        (folder / "cfg.json").write_text(json.dumps(content | wrong))
        with pytest.raises(SparseAutoencoderError, match="sae"):
            load_sae(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architecture": "temporal"},
            r"cfg\.json: its architecture is 'temporal'.*whose architecture is standard",
        ),
        ({"hook_head_index": 3}, "its hook_head_index is 3, .*whose hook_head_index is None"),
        ({"hook_name": "blocks.0.hook_resid_pre"}, "none of residual"),
        (
            {"hook_name": "blocks.0.hook_resid_mid"},
            r"reads blocks\.0\.hook_resid_mid, none of residual.*Take an SAE of the residual",
        ),
        ({"architecture": "jumprelu"}, r"safetensors: it lacks threshold \(it has"),
    ],
)
def test_saelens_kinds_that_are_refused(config: dict, message: str, tmp_path: Path) -> None:
    config = {"architecture": "standard"} | config
    with pytest.raises(SparseAutoencoderError, match=message) as error:
        load_sae(_saelens(tmp_path / "sae", config, _weights()))
    # To copy it again helps with a damaged one alone.
    assert ("Copy or download" in str(error.value)) == ("lacks" in message)


# -- Gemma Scope -------------------------------------------------------------------------------


def _gemma(folder: Path, **more: Any) -> tuple[Path, dict[str, np.ndarray]]:
    w = _weights() | {"threshold": np.exp(_draw(N))}
    folder.mkdir(parents=True)
    np.savez(folder / "params.npz", **(w | more))
    return folder, w


@pytest.mark.parametrize(("name", "kind"), [("res", "residual"), ("mlp-canonical", "mlp_out")])
def test_gemma_scope(name: str, kind: Any, tmp_path: Path) -> None:
    folder, w = _gemma(
        tmp_path / f"models--google--gemma-scope-2b-pt-{name}/snapshots/1f/layer_12/width_16k/l0_82"
    )
    sae = load_sae(folder)
    assert sae.hook_point == HookPoint(12, kind)
    pre = X @ w["W_enc"] + w["b_enc"]
    _same(sae, (pre > w["threshold"]) * np.maximum(pre, 0) @ w["W_dec"] + w["b_dec"])


def test_gemma_scope_out_of_its_folders_and_of_attention(tmp_path: Path) -> None:
    folder, _ = _gemma(tmp_path / "sae")
    with pytest.raises(SparseAutoencoderError, match=r"does not name its hook.* name the folder"):
        load_sae(folder)
    given = HookPoint(1, "mlp_out")
    assert load_sae(folder, hook_point=given).hook_point == given
    for where in ("gemma-scope-2b-pt-att/layer_3/l0", "attention_out.3"):
        folder, _ = _gemma(tmp_path / where)
        with pytest.raises(SparseAutoencoderError, match="concatenated heads"):
            load_sae(folder)


class Opened:
    """Unpickling it would leave a trace."""

    def __reduce__(self) -> tuple:
        return (Opened.leave_trace, ())

    @staticmethod
    def leave_trace() -> None:
        raise AssertionError("a pickle was loaded")


def _save_with_shape(path: Path, shape: tuple[int, ...], claimed: int | None) -> None:
    """Write an archive of one array whose header has another shape than its few numbers."""
    content = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(content, header)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("W_enc.npy", content.getvalue() + bytes(64))
        if claimed is not None:
            archive.infolist()[0].file_size = claimed


def test_nothing_is_unpickled_or_half_read(tmp_path: Path) -> None:
    array = np.empty(1, dtype=object)
    array[0] = Opened()
    folder, _ = _gemma(tmp_path / "gemma-scope-2b-pt-res" / "layer_3" / "l0", b_dec=array)
    with pytest.raises(SparseAutoencoderError, match=r"params\.npz: .*pickled objects"):
        load_sae(folder)
    content = (folder / "params.npz").read_bytes()
    (folder / "params.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(SparseAutoencoderError, match=r"params\.npz: it is damaged"):
        load_sae(folder)
    for claimed in (None, 4 * 10**12):  # in the archive's own directory too
        _save_with_shape(folder / "params.npz", (10**12,), claimed)
        with pytest.raises(SparseAutoencoderError, match=r"claims the shape \(1000000000000,\)"):
            load_sae(folder)
    np.savez(folder / "params.npz", W_enc=_draw(WIDTH, N))
    with pytest.raises(SparseAutoencoderError, match=r"it lacks threshold \(it has W_enc\)"):
        load_sae(folder)


# -- Llama Scope -------------------------------------------------------------------------------


def _llama(folder: Path, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    w = _weights()
    hook = "blocks.13.hook_attn_out"
    config: dict[str, Any] = {
        "hook_point_in": hook,
        "hook_point_out": hook,
        "use_decoder_bias": True,
        "apply_decoder_bias_to_pre_encoder": False,
        "d_model": WIDTH,
        "d_sae": N,
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.8,
        "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": {"in": 7.0, "out": 7.0},
        "use_glu_encoder": False,
        "sparsity_include_decoder_norm": True,
        "top_k": K,
    }
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "hyperparams.json").write_text(json.dumps(config | changes))
    tensors = {
        "encoder.weight": w["W_enc"].T,
        "encoder.bias": w["b_enc"],
        "decoder.weight": w["W_dec"].T,
        "decoder.bias": w["b_dec"],
    }
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()},
        folder / "checkpoints" / "final.safetensors",
    )
    return folder, w


SCALE = np.sqrt(WIDTH) / 7.0


@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("function", ["jumprelu", "topk"])
def test_llama_scope(with_norm: bool, function: str, tmp_path: Path) -> None:
    """As OpenMOSS's inference: the norm folded into the weights first, then the threshold."""
    folder, w = _llama(tmp_path / "sae", act_fn=function, sparsity_include_decoder_norm=with_norm)
    sae = load_sae(folder)
    assert sae.hook_point == HookPoint(13, "attention_out") and sae.activation == "jumprelu"
    norm = np.linalg.norm(w["W_dec"], axis=1) if with_norm else 1.0
    pre = X @ w["W_enc"] + w["b_enc"] / SCALE
    features = np.where(pre * norm > 0.8, pre, 0)
    assert 0.05 < (features > 0).mean() < 0.6
    _same(sae, features @ w["W_dec"] + w["b_dec"] / SCALE)


@pytest.mark.parametrize("with_norm", [True, False])
def test_llama_scope_top_k_without_a_threshold(with_norm: bool, tmp_path: Path) -> None:
    folder, w = _llama(
        tmp_path / "sae",
        act_fn="topk",
        jump_relu_threshold=0.0,
        sparsity_include_decoder_norm=with_norm,
        apply_decoder_bias_to_pre_encoder=True,
    )
    norm = np.linalg.norm(w["W_dec"], axis=1) if with_norm else np.ones(N)
    features = _top_k(((SCALE * X - w["b_dec"]) @ w["W_enc"] + w["b_enc"]) * norm) / norm
    _same(load_sae(folder), (features @ w["W_dec"] + w["b_dec"]) / SCALE)


def test_llama_scope_plain(tmp_path: Path) -> None:
    changes = {"act_fn": "relu", "norm_activation": "inference", "use_decoder_bias": False}
    folder, w = _llama(tmp_path / "sae", **changes)
    _same(load_sae(folder), np.maximum(X @ w["W_enc"] + w["b_enc"], 0) @ w["W_dec"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hook_point_out": "blocks.13.hook_mlp_out"}, r"json: its hook_point_out is 'blocks"),
        ({"use_glu_encoder": True}, "its use_glu_encoder is True"),
        ({"dataset_average_activation_norm": {"in": 7.0, "out": 6.0}}, "not one norm above 0"),
        (
            {"act_fn": "batchtopk", "jump_relu_threshold": 0},
            "without jump_relu_threshold is .*relu or topk",
        ),
    ],
)
def test_llama_scope_kinds_that_are_refused(changes: dict, message: str, tmp_path: Path) -> None:
    folder, _ = _llama(tmp_path / "sae", **changes)
    with pytest.raises(SparseAutoencoderError, match=message) as error:
        load_sae(folder)
    assert "Take " in str(error.value) and "Copy or download" not in str(error.value)


# -- all formats -------------------------------------------------------------------------------


def test_an_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(SparseAutoencoderError, match="inside is nothing"):
        load_sae(tmp_path)
    (tmp_path / "ae.pt").touch()
    match = r"inside is ae\.pt\. Known are lincorr.*saelens.*gemma_scope.*llama_scope"
    with pytest.raises(SparseAutoencoderError, match=match):
        load_sae(tmp_path)
    for load in (load_sae, load_saes):
        with pytest.raises(SparseAutoencoderError, match=r"no such folder; .*download it first"):
            load(tmp_path / "nowhere")
        with pytest.raises(SparseAutoencoderError, match=r"ae\.pt: it is a file; pass its folder"):
            load(tmp_path / "ae.pt")


def test_one_sae_per_hook_point(tmp_path: Path) -> None:
    folders = [
        _saelens(
            tmp_path / str(layer),
            {"architecture": "standard", "hook_name": f"blocks.{layer}.hook_mlp_out"},
            _weights(),
        )
        for layer in (0, 1)
    ]
    assert list(load_saes(folders)) == [HookPoint(0, "mlp_out"), HookPoint(1, "mlp_out")]
    with pytest.raises(SparseAutoencoderError, match="a second SAE for mlp_out of layer 0"):
        load_saes([*folders, folders[0]])
