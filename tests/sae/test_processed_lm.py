"""SAEs of an LM whose weights TransformerLens changed, against what they give on that LM."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import save_file
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.formats import load_sae
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from tests.toys import toy_model

N, WIDTH = 48, 16
IDS = torch.arange(3, 20)[None]
CENTRED = {"center_writing_weights": True, "fold_ln": True, "device": "cpu"}


@pytest.fixture(scope="module")
def tokenizer(small_lm: str) -> Any:
    return hf.AutoTokenizer.from_pretrained(small_lm)


def _lm(name: str, n_words: int) -> Any:
    """An LM whose weights have a mean, biases too."""
    model = toy_model(name, n_words, hidden_size=WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=0.1, std=0.3)
    return model


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


def _weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {"W_enc": (WIDTH, N), "W_dec": (N, WIDTH), "b_enc": (N,), "b_dec": (WIDTH,)}
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


def _saelens(folder: Path, steps: object, new: bool = True, **changes: Any) -> Path:
    config: dict[str, Any] = {
        "architecture": "standard", "hook_name": "blocks.0.hook_resid_post",
        "normalize_activations": "none", **changes,
    }  # fmt: skip
    about = {"model_from_pretrained_kwargs": steps}
    folder.mkdir(parents=True)
    content = {**config, "metadata": about} if new else {**config, **about}
    (folder / "cfg.json").write_text(json.dumps(content))
    save_file(_weights(), folder / "sae_weights.safetensors")
    return folder


@torch.no_grad()
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("subtract", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.4])
@pytest.mark.parametrize("hook", ["hook_resid_post", "hook_mlp_out", "hook_attn_out"])
def test_features_are_those_of_the_centred_lm(
    hook: str, scale: float, subtract: bool, new: bool, tokenizer: Any, tmp_path: Path
) -> None:
    model = _lm("gpt2", len(tokenizer))
    twin = _with_centred_weights(model)
    torch.testing.assert_close(twin(IDS).logits, model(IDS).logits, rtol=1e-3, atol=1e-3)
    folder = _saelens(
        tmp_path / "sae", CENTRED, new, hook_name=f"blocks.1.{hook}", apply_b_dec_to_input=subtract,
        normalize_activations="none" if scale == 1 else "expected_average_only_in",
    )  # fmt: skip
    lm = LanguageModel.from_module(model, tokenizer)
    sae = load_sae(folder, input_scale=scale, lm=lm)
    with captured(model, [sae.hook_point]) as own, captured(twin, [sae.hook_point]) as theirs:
        model(IDS)
        twin(IDS)
    x = theirs[sae.hook_point]
    assert float((own[sae.hook_point] - x).abs().max()) > 0.1

    w = _weights()
    features = ((scale * x - subtract * w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
    rebuilt = (features @ w["W_dec"] + w["b_dec"]) / scale
    for one in (sae, sae.folded()):
        torch.testing.assert_close(one(own[sae.hook_point]), rebuilt, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(sae.encode(own[sae.hook_point]), features, rtol=1e-3, atol=1e-3)

    # What lacks a mean, the LM does not miss.
    with edited(model, {sae.hook_point: sae}):
        ours = model(IDS).logits
    with edited(twin, {sae.hook_point: lambda x: rebuilt}):
        torch.testing.assert_close(ours, twin(IDS).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("steps", [None, {}, {"center_writing_weights": False}])
def test_an_lm_that_was_not_changed(steps: object, tmp_path: Path) -> None:
    sae = load_sae(_saelens(tmp_path / "sae", steps))
    assert torch.equal(sae.encoder, _weights()["W_enc"].T)


@torch.no_grad()
def test_an_lm_without_layer_norm_is_never_centred(tokenizer: Any, tmp_path: Path) -> None:
    lm = LanguageModel.from_module(_lm("llama", len(tokenizer)), tokenizer)
    sae = load_sae(_saelens(tmp_path / "sae", CENTRED), lm=lm)
    assert torch.equal(sae.encoder, _weights()["W_enc"].T)


def test_the_lm_is_needed(tmp_path: Path) -> None:
    with pytest.raises(SparseAutoencoderError, match=r"writing weights.*Pass lm to load_sae"):
        load_sae(_saelens(tmp_path / "sae", CENTRED))


@torch.no_grad()
def test_heads(tokenizer: Any, tmp_path: Path) -> None:
    lm = LanguageModel.from_module(_lm("gpt2", len(tokenizer)), tokenizer)
    hook = "blocks.1.attn.hook_z"
    plain = load_sae(_saelens(tmp_path / "plain", None, hook_name=hook), lm=lm)
    # They are read before they are written to the stream.
    same = load_sae(_saelens(tmp_path / "centred", CENTRED, hook_name=hook), lm=lm)
    assert same.hook_point == HookPoint(1, "attention_out")
    assert torch.equal(same.encoder, plain.encoder) and torch.equal(same.decoder, plain.decoder)
    changed = CENTRED | {"fold_value_biases": True}
    with pytest.raises(SparseAutoencoderError, match=r"changed \(fold_value_biases in model_from"):
        load_sae(_saelens(tmp_path / "changed", changed, hook_name=hook), lm=lm)
