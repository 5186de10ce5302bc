"""SAEs of attention heads, and of a changed LM, against what they give there."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor, nn

from lincorr_lightning.cli import main
from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.formats import at_output, load_sae, load_saes
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited, find_projection
from tests.toys import toy_model, toy_sae

N = 64
IDS = torch.arange(3, 20)[None]
HOOK_POINT = HookPoint(1, "attention_out")
HOOK = "blocks.1.attn.hook_z"
CENTRED = {"center_writing_weights": True, "fold_ln": True, "device": "cpu"}
_PROJECTIONS = {
    "gpt2": "transformer.h.1.attn.c_proj",
    "gpt-neox": "gpt_neox.layers.1.attention.dense",
    "opt": "model.decoder.layers.1.self_attn.out_proj",
    "phi": "model.layers.1.self_attn.dense",
} | dict.fromkeys(("llama", "mixtral", "gemma2", "gemma3"), "model.layers.1.self_attn.o_proj")


@pytest.fixture(scope="module")
def tokenizer(small_lm: str) -> Any:
    return hf.AutoTokenizer.from_pretrained(small_lm)


def _model(name: str, n_words: int) -> tuple[Any, nn.Module]:
    """An LM whose heads have 32 numbers in all, and its second layer's output projection."""
    # In the Llama family, the heads are narrower than the stream.
    sizes: dict[str, Any] = (
        {"hidden_size": 32}
        if name == "gpt2"
        else {"hidden_size": 40, "head_dim": 8, "intermediate_size": 64, "num_key_value_heads": 2}
    )
    model = toy_model(name, n_words, std=0.2, num_attention_heads=4, **sizes)
    return model, model.get_submodule(_PROJECTIONS[name])


def _weights(width: int = 32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {"W_enc": (width, N), "W_dec": (N, width), "b_enc": (N,), "b_dec": (width,)}
    weights = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return weights | {"b_enc": weights["b_enc"] - 3}


def _saelens(folder: Path, width: int = 32, scale: float = 1.0, **changes: Any) -> Path:
    config = {
        "architecture": "standard",
        "hook_name": HOOK,
        "hook_head_index": None,
        "normalize_activations": "none" if scale == 1 else "expected_average_only_in",
    }
    folder.mkdir(parents=True)
    (folder / "cfg.json").write_text(json.dumps(config | changes))
    save_file(_weights(width), folder / "sae_weights.safetensors")
    return folder


def _on(x: Tensor, subtract: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Features and reconstruction, by SAELens' formula."""
    w = _weights(x.shape[-1])
    features = ((scale * x - subtract * w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
    return features, (features @ w["W_dec"] + w["b_dec"]) / scale


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# -- heads ---------------------------------------------------------------------------------------


def _heads(model: Any, projection: nn.Module, ids: Tensor = IDS) -> Tensor:
    seen: list[Tensor] = []
    hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids)
    hook.remove()
    return seen[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("subtract", "scale"), [(True, 1.0), (False, 0.4), (True, 0.4)])
def test_features_and_reconstruction_are_those_of_the_heads(
    name: str, subtract: bool, scale: float, tokenizer: Any, tmp_path: Path
) -> None:
    model, projection = _model(name, len(tokenizer))
    lm = LanguageModel.from_module(model, tokenizer)
    folder = _saelens(tmp_path / "sae", scale=scale, apply_b_dec_to_input=subtract)
    sae = load_sae(folder, input_scale=scale, lm=lm)
    assert (sae.hook_point, sae.width) == (HOOK_POINT, model.config.hidden_size)
    assert sae.input_scale == scale

    z = _heads(model, projection)
    features, rebuilt = _on(z, subtract, scale)
    assert 0.05 < (features > 0).float().mean() < 0.7
    with captured(model, [HOOK_POINT]) as read:
        model(IDS)
    found = sae.encode(read[HOOK_POINT])
    assert float((found - features).norm() / features.norm()) < 1e-3
    for one in (sae, sae.folded()):
        _close(one(read[HOOK_POINT]), projection(rebuilt))

    # The LM goes on alike with the reconstruction put where either of the two stands.
    with edited(model, {HOOK_POINT: sae}):
        after_output = model(IDS).logits
    hook = projection.register_forward_pre_hook(lambda _, args: rebuilt)
    after_heads = model(IDS).logits
    hook.remove()
    _close(after_output, after_heads)
    assert not torch.allclose(after_heads, model(IDS).logits, atol=0.1)


@torch.no_grad()
def test_in_bfloat16_the_projection_is_found_too(tokenizer: Any, tmp_path: Path) -> None:
    model, projection = _model("gpt2", len(tokenizer))
    lm = LanguageModel.from_module(model.bfloat16(), tokenizer)
    sae = load_sae(_saelens(tmp_path / "sae"), lm=lm)
    expected = _weights()["W_dec"] @ projection.weight.float()
    torch.testing.assert_close(sae.decoder.detach(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_norm_between_projection_and_stream_is_refused(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model, projection = _model(name, len(tokenizer))
    lm = LanguageModel.from_module(model, tokenizer)
    match = r"no linear map of these: .* such as a norm.*hook_attn_out"
    scope = tmp_path / "gemma-scope-2b-pt-att" / "layer_1" / "l0"
    scope.mkdir(parents=True)
    tensors = _weights() | {"threshold": torch.zeros(N)}
    np.savez(scope / "params.npz", **{key: value.numpy() for key, value in tensors.items()})
    for folder in (_saelens(tmp_path / "sae"), scope):
        with pytest.raises(SparseAutoencoderError, match=match):
            load_saes(str(folder), lm)
    # The norm is why: without it they are the heads' own.
    model.model.layers[1].post_attention_layernorm = nn.Identity()
    # A copy, because a model keeps where its hook points are.
    sae = load_sae(scope, lm=LanguageModel.from_module(copy.deepcopy(model), tokenizer))
    with captured(model, [HOOK_POINT]) as read:
        z = _heads(model, projection)
    _close(sae.encode(read[HOOK_POINT]), _on(z, False, 1.0)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt-neox", "opt", "phi", "mixtral"])
def test_the_projection_of_other_lms(name: str) -> None:
    """Found by what goes through it, wherever it lies."""
    model = toy_model(name, std=0.3)
    projection = model.get_submodule(_PROJECTIONS[name])
    weight, bias = find_projection(model, HOOK_POINT)
    torch.testing.assert_close(weight, projection.weight.double())
    expected = torch.zeros(16) if projection.bias is None else projection.bias
    torch.testing.assert_close(bias, expected.double())
    with captured(model, [HOOK_POINT]) as read:
        z = _heads(model, projection)
    output = read[HOOK_POINT].double().flatten(0, -2)
    _close(output, (z.double() @ weight.T + bias).flatten(0, -2))


def test_what_cannot_be_moved(tokenizer: Any, tmp_path: Path) -> None:
    lm = LanguageModel.from_module(_model("gpt2", len(tokenizer))[0], tokenizer)
    for options, changes, match in (
        ({}, {}, r"heads, before.*Pass lm to load_sae"),
        ({"lm": lm}, {"width": 24}, r"heads, 24 numbers.*from 32 numbers"),
        ({"lm": lm}, {"hook_name": "blocks.7.attn.hook_z"}, r"no attention_out of layer 7"),
    ):
        folder = _saelens(tmp_path / str(len(list(tmp_path.iterdir()))), **changes)
        with pytest.raises(SparseAutoencoderError, match=match):
            load_sae(folder, **options)  # type: ignore[arg-type]
    sae = toy_sae(HOOK_POINT, torch.randn(N, 8))
    wide, one = torch.randn(7, 8).double(), torch.randn(12, 7) @ torch.randn(7, 8)
    for weight in (wide, one.double()):
        bias = torch.zeros(len(weight)).double()
        assert at_output(sae, weight, bias) is None


def test_studies_find_the_projection_and_folder_names_give_the_hook_point(
    tokenizer: Any, tmp_path: Path
) -> None:
    """A folder of folders, from the command line."""
    model, projection = _model("gpt2", len(tokenizer))
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    _saelens(tmp_path / "saes" / "hub", apply_b_dec_to_input=True)
    _saelens(tmp_path / "saes" / "residual.0", hook_name="model.layers.0")
    lines = [f"name{i} lives in the city of {c}" for i in range(40) for c in ("Paris", "Rome")]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    config = Path(__file__).resolve().parents[2] / "configs" / "sparse_autoencoders.yaml"
    cli = main(
        [
            "validate",
            "--config",
            str(config),
            f"--model.saes={tmp_path / 'saes'}",
            f"--model.lm.name_or_path={tmp_path / 'lm'}",
            "--trainer.enable_progress_bar=false",
            f"--data.texts=[{tmp_path / 'texts.txt'}]",
            f"--trainer.default_root_dir={tmp_path}",
        ]
    )
    results = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    scores = {each["hook_point"]: each for each in results["hook_points"]}
    assert set(scores) == {"attention_out.1", "residual.0"}
    with torch.no_grad():
        z = [
            _heads(model, projection, tokenizer(line, return_tensors="pt").input_ids)[0]
            for line in lines
        ]
        features, rebuilt = _on(torch.cat(z), True, 1.0)
        y, y_hat = projection(torch.cat(z)), projection(rebuilt)
    explained = 1 - (y - y_hat).square().sum() / (y - y.mean(0)).square().sum()
    assert results["n_held_out_tokens"] == len(y) == 7 * 80
    score = scores["attention_out.1"]
    assert score["explained_variance"] == pytest.approx(float(explained), rel=1e-3)
    assert score["l0"] == pytest.approx(float((features > 0).sum() / len(y)), rel=1e-3)


# -- an LM that TransformerLens changed ----------------------------------------------------------


@torch.no_grad()
def _lm(name: str, tokenizer: Any) -> LanguageModel:
    """An LM whose weights have a mean, biases too."""
    model = toy_model(name, len(tokenizer), hidden_size=32)
    for parameter in model.parameters():
        parameter.normal_(mean=0.1, std=0.3)
    return LanguageModel.from_module(model, tokenizer)


@torch.no_grad()
def _with_centred_weights(model: Any) -> Any:
    """A copy of a GPT-2 that writes nothing along the ones."""
    twin = copy.deepcopy(model)
    twin.lm_head.weight = torch.nn.Parameter(twin.lm_head.weight.clone())  # it reads
    body = twin.transformer
    written = [body.wte.weight, body.wpe.weight]
    for layer in body.h:
        for projection in (layer.attn.c_proj, layer.mlp.c_proj):
            written += [projection.weight, projection.bias]
    for weight in written:
        weight -= weight.mean(-1, keepdim=True)
    return twin


def _processed(folder: Path, steps: object, new: bool = True, **changes: Any) -> Path:
    about = {"model_from_pretrained_kwargs": steps}
    options = {"hook_name": "blocks.0.hook_resid_post"} | changes
    return _saelens(folder, **options, **({"metadata": about} if new else about))  # type: ignore[arg-type]


@torch.no_grad()
@pytest.mark.parametrize(
    ("hook", "subtract", "scale", "new"),
    [
        ("hook_resid_post", True, 1.0, True),
        ("hook_mlp_out", False, 0.4, False),
        ("hook_attn_out", True, 0.4, True),
    ],
)
def test_features_are_those_of_the_centred_lm(
    hook: str, scale: float, subtract: bool, new: bool, tokenizer: Any, tmp_path: Path
) -> None:
    lm = _lm("gpt2", tokenizer)
    model, twin = lm.model, _with_centred_weights(lm.model)
    _close(twin(IDS).logits, model(IDS).logits)
    folder = _processed(
        tmp_path / "sae",
        CENTRED,
        new,
        hook_name=f"blocks.1.{hook}",
        scale=scale,
        apply_b_dec_to_input=subtract,
    )
    sae = load_sae(folder, input_scale=scale, lm=lm)
    with captured(model, [sae.hook_point]) as own, captured(twin, [sae.hook_point]) as other:
        model(IDS)
        twin(IDS)
    x = other[sae.hook_point]
    assert float((own[sae.hook_point] - x).abs().max()) > 0.1
    features, rebuilt = _on(x, subtract, scale)
    for one in (sae, sae.folded()):
        _close(one(own[sae.hook_point]), rebuilt)
    _close(sae.encode(own[sae.hook_point]), features)
    # What lacks a mean, the LM does not miss.
    with edited(model, {sae.hook_point: sae}):
        logits = model(IDS).logits
    with edited(twin, {sae.hook_point: lambda x: rebuilt}):
        _close(logits, twin(IDS).logits)


def test_an_lm_that_was_not_changed_or_has_no_layer_norm(tokenizer: Any, tmp_path: Path) -> None:
    for i, steps in enumerate((None, {}, {"center_writing_weights": False})):
        sae = load_sae(_processed(tmp_path / str(i), steps))
        assert torch.equal(sae.encoder, _weights()["W_enc"].T)
    sae = load_sae(_processed(tmp_path / "llama", CENTRED), lm=_lm("llama", tokenizer))
    assert torch.equal(sae.encoder, _weights()["W_enc"].T)
    with pytest.raises(SparseAutoencoderError, match=r"writing weights.*Pass lm to load_sae"):
        load_sae(_processed(tmp_path / "sae", CENTRED))


@torch.no_grad()
def test_heads_of_a_changed_lm(tokenizer: Any, tmp_path: Path) -> None:
    lm = _lm("gpt2", tokenizer)
    plain = load_sae(_processed(tmp_path / "plain", None, hook_name=HOOK), lm=lm)
    # They are read before they are written to the stream.
    same = load_sae(_processed(tmp_path / "centred", CENTRED, hook_name=HOOK), lm=lm)
    assert same.hook_point == HOOK_POINT
    assert torch.equal(same.encoder, plain.encoder) and torch.equal(same.decoder, plain.decoder)
    changed = CENTRED | {"fold_value_biases": True}
    with pytest.raises(SparseAutoencoderError, match=r"changed \(fold_value_biases in model_from"):
        load_sae(_processed(tmp_path / "changed", changed, hook_name=HOOK), lm=lm)
