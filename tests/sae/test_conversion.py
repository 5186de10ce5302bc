"""SAEs of attention heads, and of a changed LM, against what they give there."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.formats import load_sae, load_saes
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.hooks import captured, edited, find_projection
from tests.sae.test_formats import write_folder
from tests.toys import toy_model

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
    wide = {"hidden_size": 40, "head_dim": 8, "intermediate_size": 64, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"hidden_size": 32} if name == "gpt2" else wide
    model = toy_model(name, n_words, std=0.2, num_attention_heads=4, **sizes)
    return model, model.get_submodule(_PROJECTIONS[name])


def _weights(width: int = 32) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    shapes = {"W_enc": (width, N), "W_dec": (N, width), "b_enc": (N,), "b_dec": (width,)}
    weights = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return weights | {"b_enc": weights["b_enc"] - 3}


def _saelens(
    folder: Path,
    hook: str = HOOK,
    steps: object = None,
    width: int = 32,
    scale: float = 1.0,
    subtract: bool = True,
) -> Path:
    config = {
        "architecture": "standard",
        "hook_name": hook,
        "normalize_activations": "none" if scale == 1 else "expected_average_only_in",
        "apply_b_dec_to_input": subtract,
        "metadata": {"model_from_pretrained_kwargs": steps},
    }
    write_folder(folder, "cfg.json", config, "sae_weights.safetensors", _weights(width))
    (folder / "activation_scaler.json").write_text(json.dumps({"scaling_factor": scale}))
    return folder


def _on(x: Tensor, subtract: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Features and reconstruction, by SAELens' formula."""
    w = _weights(x.shape[-1])
    features = ((scale * x - subtract * w["b_dec"]) @ w["W_enc"] + w["b_enc"]).relu()
    return features, (features @ w["W_dec"] + w["b_dec"]) / scale


def _close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# -- heads ---------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("subtract", "scale"), [(True, 1.0), (False, 0.4), (True, 0.4)])
def test_features_and_reconstruction_are_those_of_the_heads(
    name: str, subtract: bool, scale: float, tokenizer: Any, tmp_path: Path
) -> None:
    model, projection = _model(name, len(tokenizer))
    lm = LanguageModel.from_module(model, tokenizer)
    (sae,) = load_saes([_saelens(tmp_path, scale=scale, subtract=subtract)], lm).values()
    assert (sae.hook_point, sae.width) == (HOOK_POINT, model.config.hidden_size)

    heads: list[Tensor] = []
    keep = projection.register_forward_pre_hook(lambda _, args: heads.append(args[0]))
    with keep, captured(model, [HOOK_POINT]) as read:
        model(IDS)
    features, rebuilt = _on(heads[0], subtract, scale)
    assert 0.05 < (features > 0).float().mean() < 0.7
    encoded = sae.encode(read[HOOK_POINT])
    assert float((encoded - features).norm() / features.norm()) < 1e-3
    for each in (sae, sae.folded()):
        _close(each(read[HOOK_POINT]), projection(rebuilt))

    # The LM goes on alike with the reconstruction put where either of the two stands.
    with edited(model, {HOOK_POINT: sae}):
        after_output = model(IDS).logits
    with projection.register_forward_pre_hook(lambda _, args: rebuilt):
        after_heads = model(IDS).logits
    _close(after_output, after_heads)
    assert not torch.allclose(after_heads, model(IDS).logits, atol=0.1)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt-neox", "opt", "phi", "mixtral"])
def test_the_projection_of_other_lms(name: str) -> None:
    """Found by what it gives, wherever it lies."""
    model = toy_model(name, std=0.3)
    projection = model.get_submodule(_PROJECTIONS[name])
    weight, bias = find_projection(model, HOOK_POINT)
    torch.testing.assert_close(weight, projection.weight.double())
    expected = torch.zeros(16) if projection.bias is None else projection.bias
    torch.testing.assert_close(bias, expected.double())


@torch.no_grad()
def test_in_bfloat16_the_projection_is_found_but_not_below_an_adapter(tokenizer: Any) -> None:
    model, projection = _model("gpt2", len(tokenizer))
    weight, _ = find_projection(model.bfloat16(), HOOK_POINT)
    torch.testing.assert_close(weight, projection.weight.T.double())
    model, _ = _model("llama", len(tokenizer))
    tuned = get_peft_model(model, LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    assert find_projection(tuned, HOOK_POINT) is None


def test_what_cannot_be_moved(tokenizer: Any, tmp_path: Path) -> None:
    lm = LanguageModel.from_module(_model("gpt2", len(tokenizer))[0], tokenizer)
    gemma = LanguageModel.from_module(_model("gemma2", len(tokenizer))[0], tokenizer)
    for number, (options, changes, match) in enumerate(
        (
            ({}, {}, r"heads, before.*Pass lm to load_sae"),
            ({"lm": gemma}, {}, r"no linear map of these: .* such as a norm.*hook_attn_out"),
            ({"lm": lm}, {"width": 24}, r"heads, 24 numbers.*adds 32 numbers from 32"),
            ({"lm": lm}, {"hook": "blocks.7.attn.hook_z"}, r"no attention_out of layer 7"),
            ({"lm": lm}, {"steps": CENTRED | {"fold_value_biases": True}}, "fold_value_biases"),
        )
    ):
        with pytest.raises(SparseAutoencoderError, match=match):
            load_sae(_saelens(tmp_path / str(number), **changes), **options)  # type: ignore[arg-type]
    # The output does not say which of several states of the heads it is of.
    projection = lm.model.get_submodule(_PROJECTIONS["gpt2"])
    nn.init.ones_(projection.weight)
    with pytest.raises(SparseAutoencoderError, match="adds 32 numbers from 32"):
        load_sae(_saelens(tmp_path / "ones"), lm=lm)


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


@torch.no_grad()
@pytest.mark.parametrize(
    ("hook", "subtract", "scale"),
    [("hook_resid_post", True, 1.0), ("hook_mlp_out", False, 0.4), ("hook_attn_out", True, 0.4)],
)
def test_features_are_those_of_the_centred_lm(
    hook: str, scale: float, subtract: bool, tokenizer: Any, tmp_path: Path
) -> None:
    lm = _lm("gpt2", tokenizer)
    model, twin = lm.model, _with_centred_weights(lm.model)
    _close(twin(IDS).logits, model(IDS).logits)
    sae = load_sae(_saelens(tmp_path, f"blocks.1.{hook}", CENTRED, 32, scale, subtract), lm=lm)
    with captured(model, [sae.hook_point]) as read, captured(twin, [sae.hook_point]) as centred:
        model(IDS)
        twin(IDS)
    x = read[sae.hook_point]
    assert float((x - centred[sae.hook_point]).abs().max()) > 0.1
    features, rebuilt = _on(centred[sae.hook_point], subtract, scale)
    for each in (sae, sae.folded()):
        _close(each(x), rebuilt)
    _close(sae.encode(x), features)
    # What lacks a mean, the LM does not miss.
    with edited(model, {sae.hook_point: sae}):
        logits = model(IDS).logits
    with edited(twin, {sae.hook_point: lambda x: rebuilt}):
        _close(logits, twin(IDS).logits)


def test_an_lm_that_was_not_changed_or_has_no_layer_norm(tokenizer: Any, tmp_path: Path) -> None:
    hook = "blocks.0.hook_resid_post"
    for i, steps in enumerate((None, {}, {"center_writing_weights": False})):
        sae = load_sae(_saelens(tmp_path / str(i), hook, steps))
        assert torch.equal(sae.encoder, _weights()["W_enc"].T)
    folder = _saelens(tmp_path / "centred", hook, CENTRED)
    sae = load_sae(folder, lm=_lm("llama", tokenizer))
    assert torch.equal(sae.encoder, _weights()["W_enc"].T)
    with pytest.raises(SparseAutoencoderError, match=r"writing weights.*Pass lm to load_sae"):
        load_sae(folder)
    # Heads are read before they are written to the stream.
    lm = _lm("gpt2", tokenizer)
    plain, same = (
        load_sae(_saelens(tmp_path / name, HOOK, steps), lm=lm)
        for name, steps in (("plain", None), ("heads", CENTRED))
    )
    assert torch.equal(same.encoder, plain.encoder) and torch.equal(same.decoder, plain.decoder)
