"""SAEs of the attention's concatenated heads, against what they give on the heads themselves."""

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
from lincorr_lightning.sae.conversion import at_output, find_projection
from lincorr_lightning.sae.formats import load_sae, load_saes
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder
from tests.toys import toy_model

N = 64
IDS = torch.arange(3, 20)[None]
HOOK_POINT = HookPoint(1, "attention_out")
HOOK = "blocks.1.attn.hook_z"
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
    sizes: dict[str, Any] = {"hidden_size": 32} if name == "gpt2" else {
        "hidden_size": 40, "head_dim": 8, "intermediate_size": 64, "num_key_value_heads": 2
    }  # fmt: skip
    model = toy_model(name, n_words, std=0.2, num_attention_heads=4, **sizes)
    return model, model.get_submodule(_PROJECTIONS[name])


def _weights(width: int = 32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {"W_enc": (width, N), "W_dec": (N, width), "b_enc": (N,), "b_dec": (width,)}
    weights = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return weights | {"b_enc": weights["b_enc"] - 3}


def _saelens(folder: Path, width: int = 32, **changes: Any) -> Path:
    config = {"architecture": "standard", "hook_name": HOOK, "hook_head_index": None}
    folder.mkdir(parents=True)
    (folder / "cfg.json").write_text(json.dumps(config | changes))
    save_file(_weights(width), folder / "sae_weights.safetensors")
    return folder


def _on_heads(z: Tensor, subtract: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Features and reconstruction, by SAELens' formula."""
    w = _weights()
    features = ((scale * z - subtract * w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
    return features, (features @ w["W_dec"] + w["b_dec"]) / scale


def _heads(model: Any, projection: nn.Module) -> Tensor:
    seen: list[Tensor] = []
    hook = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(IDS)
    hook.remove()
    return seen[0]


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.4])
def test_features_and_reconstruction_are_those_of_the_heads(
    name: str, subtract: bool, scale: float, tokenizer: Any, tmp_path: Path
) -> None:
    model, projection = _model(name, len(tokenizer))
    lm = LanguageModel.from_module(model, tokenizer)
    folder = _saelens(
        tmp_path / "sae", apply_b_dec_to_input=subtract,
        normalize_activations="none" if scale == 1 else "expected_average_only_in",
    )  # fmt: skip
    sae = load_sae(folder, input_scale=scale, lm=lm)
    assert (sae.hook_point, sae.width, sae.input_scale) == (
        HOOK_POINT,
        model.config.hidden_size,
        scale,
    )

    z = _heads(model, projection)
    features, rebuilt = _on_heads(z, subtract, scale)
    assert 0.05 < (features > 0).float().mean() < 0.7
    with captured(model, [HOOK_POINT]) as read:
        model(IDS)
    got = sae.encode(read[HOOK_POINT])
    assert float((got - features).norm() / features.norm()) < 1e-3
    torch.testing.assert_close(sae(read[HOOK_POINT]), projection(rebuilt), rtol=1e-3, atol=1e-3)
    folded = sae.folded()
    torch.testing.assert_close(folded(read[HOOK_POINT]), projection(rebuilt), rtol=1e-3, atol=1e-3)

    # The LM goes on alike with the reconstruction put where either of the two stands.
    with edited(model, {HOOK_POINT: sae}):
        after_output = model(IDS).logits
    hook = projection.register_forward_pre_hook(lambda _, args: rebuilt)
    after_heads = model(IDS).logits
    hook.remove()
    torch.testing.assert_close(after_output, after_heads, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(after_heads, model(IDS).logits, atol=0.1)


@torch.no_grad()
def test_in_bfloat16_the_projection_is_found_too(tokenizer: Any, tmp_path: Path) -> None:
    model, projection = _model("gpt2", len(tokenizer))
    lm = LanguageModel.from_module(model.bfloat16(), tokenizer)
    w = _weights()
    sae = load_sae(_saelens(tmp_path / "sae"), lm=lm)
    expected = w["W_dec"] @ projection.weight.float()
    torch.testing.assert_close(sae.decoder.detach(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_norm_between_projection_and_stream_is_refused(
    name: str, tokenizer: Any, tmp_path: Path
) -> None:
    model, projection = _model(name, len(tokenizer))
    lm = LanguageModel.from_module(model, tokenizer)
    match = r"no linear map of these: it is the output of Gemma\dRMSNorm.*hook_attn_out"
    with pytest.raises(SparseAutoencoderError, match=match):
        load_sae(_saelens(tmp_path / "sae"), lm=lm)
    scope = tmp_path / "gemma-scope-2b-pt-att" / "layer_1" / "l0"
    scope.mkdir(parents=True)
    tensors = _weights() | {"threshold": torch.zeros(N)}
    np.savez(scope / "params.npz", **{key: value.numpy() for key, value in tensors.items()})
    with pytest.raises(SparseAutoencoderError, match=match):
        load_saes(str(scope), lm)
    # The norm is why: without it they are the heads' own.
    layer = model.model.layers[1]
    layer.post_attention_layernorm = nn.Identity()
    # A copy, because the modules of a model's hook points are cached.
    sae = load_sae(scope, lm=LanguageModel.from_module(copy.deepcopy(model), tokenizer))
    with torch.no_grad(), captured(model, [HOOK_POINT]) as read:
        z = _heads(model, projection)
        w = _weights()
        expected = (z @ w["W_enc"] + w["b_enc"]).relu()
        torch.testing.assert_close(sae.encode(read[HOOK_POINT]), expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt-neox", "opt", "phi", "mixtral"])
def test_the_projection_of_other_lms(name: str) -> None:
    """Found by what goes through it, wherever it lies."""
    model = toy_model(name, std=0.3)
    projection = model.get_submodule(_PROJECTIONS[name])
    weight, bias = find_projection(model, HOOK_POINT, Path("sae"))
    torch.testing.assert_close(weight, projection.weight.double())
    expected = torch.zeros(16) if projection.bias is None else projection.bias
    torch.testing.assert_close(bias, expected.double())
    with captured(model, [HOOK_POINT]) as read:
        z = _heads(model, projection)
    torch.testing.assert_close(
        read[HOOK_POINT].double().flatten(0, -2),
        (z.double() @ weight.T + bias).flatten(0, -2), rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_what_cannot_be_moved(tokenizer: Any, tmp_path: Path) -> None:
    lm = LanguageModel.from_module(_model("gpt2", len(tokenizer))[0], tokenizer)
    with pytest.raises(SparseAutoencoderError, match=r"heads, before.*Pass lm to load_sae"):
        load_sae(_saelens(tmp_path / "one"))
    with pytest.raises(SparseAutoencoderError, match=r"it reads 24 numbers.*of the LM has 32"):
        load_sae(_saelens(tmp_path / "two", width=24), lm=lm)
    with pytest.raises(SparseAutoencoderError, match=r"no attention_out of layer 7"):
        load_sae(_saelens(tmp_path / "three", hook_name="blocks.7.attn.hook_z"), lm=lm)

    w = _weights(8)
    sae = SparseAutoencoder(
        hook_point=HOOK_POINT, encoder=w["W_enc"].T, decoder=w["W_dec"], encoder_bias=w["b_enc"],
        decoder_bias=w["b_dec"],
    )  # fmt: skip
    wide, one = torch.randn(7, 8).double(), torch.randn(12, 7) @ torch.randn(7, 8)
    for weight in (wide, one.double()):
        bias = torch.zeros(len(weight)).double()
        with pytest.raises(SparseAutoencoderError, match=r"does not determine.*Take an SAE of"):
            at_output(sae, weight, bias, tmp_path)


def test_studies_find_the_projection_and_folder_names_give_the_hook_point(
    tokenizer: Any, tmp_path: Path
) -> None:
    """A folder of folders, from the command line; n_texts exceeds the number of texts."""
    model, projection = _model("gpt2", len(tokenizer))
    model.save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    _saelens(tmp_path / "saes" / "hub", apply_b_dec_to_input=True)
    for layer in (0, 1):
        _saelens(tmp_path / "saes" / f"residual.{layer}", hook_name=f"model.layers.{layer}")
    lines = [f"name{i} lives in the city of {c}" for i in range(40) for c in ("Paris", "Rome")]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    configs = Path(__file__).resolve().parents[2] / "configs"
    common = [
        f"--model.saes={tmp_path / 'saes'}", f"--model.lm.name_or_path={tmp_path / 'lm'}",
        f"--data.texts=[{tmp_path / 'texts.txt'}]", "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={tmp_path / 'runs'}", "--data.knowledge=null",
    ]  # fmt: skip
    cli = main(["validate", "--config", str(configs / "sparse_autoencoders.yaml"), *common])
    results = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    scores = {f"{each['kind']}.{each['layer']}": each for each in results["hook_points"]}
    assert set(scores) == {"attention_out.1", "residual.0", "residual.1"}
    x, rebuilt, n_active = [], [], 0
    with torch.no_grad():
        for line in dict.fromkeys(lines):
            seen: list[Tensor] = []
            hook = projection.register_forward_pre_hook(
                lambda _, args, seen=seen: seen.append(args[0])
            )
            model(tokenizer(line, return_tensors="pt").input_ids)
            hook.remove()
            features, z = _on_heads(seen[0][0], True, 1.0)
            n_active += int((features > 0).sum())
            x.append(projection(seen[0][0]))
            rebuilt.append(projection(z))
    y, y_hat = torch.cat(x), torch.cat(rebuilt)
    explained = 1 - (y - y_hat).square().sum() / (y - y.mean(0)).square().sum()
    assert results["n_held_out_tokens"] == len(y) == 7 * 80
    found = scores["attention_out.1"]
    assert found["explained_variance"] == pytest.approx(float(explained), rel=1e-3)
    assert found["l0"] == pytest.approx(n_active / len(y), rel=1e-3)

    cli = main(
        ["test", "--config", str(configs / "feature_flow.yaml"), *common, "--model.relation=null",
         "--model.deactivation.n_cases=20"]
    )  # fmt: skip
    results = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    assert set(results["saes"]) == set(scores)
    assert results["n_texts"] == 80
