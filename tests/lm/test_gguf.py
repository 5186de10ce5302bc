"""LMs in GGUF files: the same logits as the model that was written, and errors for bad files."""

import numpy as np
import pytest
import torch

from lincorr_lightning import LanguageModel
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm import LMConfig, loading
from tests.toys import add_to_gguf, save_toy_gguf, word_tokenizer

gguf = pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")

PROMPTS = ["The city of", "x"]
MERGES = ["c i", "t y", "ci ty"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "toy.gguf"
    return path, save_toy_gguf(path, merges=MERGES)


def test_logits_are_those_of_the_written_model(toy):
    path, model = toy
    lm = LanguageModel.from_pretrained(str(path))
    tokens = torch.arange(len(lm.tokenizer))
    for prompt in PROMPTS:
        ids = lm.tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model(ids).logits[0, -1]
        logits = lm.domain_logits([prompt], tokens)[0]
        torch.testing.assert_close(logits, expected.double(), atol=1e-4, rtol=0)


def test_tokenizer_of_the_file_merges_and_adds_no_bos(toy):
    lm = LanguageModel.from_pretrained(str(toy[0]))
    assert lm.tokenizer.convert_ids_to_tokens(lm.tokenizer("city")["input_ids"]) == ["city"]
    assert lm.prefix == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_are_plain_in_the_dtype_of_the_config(tmp_path, dtype):
    path = tmp_path / "toy.gguf"
    written = save_toy_gguf(path, "Q8_0").model.layers[0].mlp.down_proj.weight
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.dequantize(gguf.quantize(written.detach().numpy(), kind), kind)
    lm = LanguageModel.from_pretrained(str(path), dtype=dtype)
    weight = lm.model.model.layers[0].mlp.down_proj.weight
    assert type(weight) is torch.nn.Parameter and weight.dtype == getattr(torch, dtype)
    np.testing.assert_array_equal(
        weight.float().numpy(), torch.tensor(expected).to(weight.dtype).float().numpy()
    )
    assert np.abs(expected - written.detach().numpy()).max() > 0  # quantization changed them


def test_model_can_be_saved_as_a_folder_and_is_the_same_lm(toy, tmp_path):
    lm = LanguageModel.from_pretrained(str(toy[0]))
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    saved = LanguageModel.from_pretrained(str(tmp_path))
    assert saved.fingerprint == lm.fingerprint


def test_tokenizer_for_a_file_without_one(tmp_path):
    save_toy_gguf(tmp_path / "bare.gguf", tokenizer=False)
    words = ["The", "city", "of", *(f"w{i}" for i in range(250))]
    word_tokenizer(words).save_pretrained(tmp_path / "words")
    path = str(tmp_path / "bare.gguf")
    lm = LanguageModel.from_pretrained(path, tokenizer=str(tmp_path / "words"))
    assert lm.rows(["The city of"]) == [[2, 3, 4]]
    word_tokenizer(words[:100]).save_pretrained(tmp_path / "few")
    with pytest.raises(LanguageModelError, match=r"102 tokens with .* LM has 258"):
        LanguageModel.from_pretrained(path, tokenizer=str(tmp_path / "few"))


def test_tokenizer_of_another_lm_is_refused(toy, tmp_path):
    for n_words, message in ((500, "it has 502 tokens with ids up to 501"), (255, "only 0 of its")):
        word_tokenizer([f"w{i}" for i in range(n_words)]).save_pretrained(tmp_path)
        with pytest.raises(LanguageModelError, match=f"does not fit .*toy.gguf: {message}"):
            LanguageModel.from_pretrained(str(toy[0]), tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda path, toy: path.write_bytes(toy[:3]), {}, r"not a GGUF file.*again"),
        (lambda path, toy: path.write_bytes(toy[:-1_000]), {}, "again"),
        (lambda path, toy: None, {}, "does not exist"),
        (lambda path, toy: save_toy_gguf(path, tokenizer=False), {}, r"lm\.tokenizer"),
        (lambda path, toy: path.write_bytes(toy), {"revision": "main"}, "no revisions"),
        (lambda path, toy: path.write_bytes(toy), {"tokenizer": "no/bad.gguf"}, "does not exist"),
    ],
)
def test_bad_files_are_refused(toy, tmp_path, make, options, message):
    make(tmp_path / "bad.gguf", toy[0].read_bytes())
    with pytest.raises(LanguageModelError, match=message) as refusal:
        LanguageModel.from_pretrained(str(tmp_path / "bad.gguf"), **options)
    assert "bad.gguf" in str(refusal.value)


SCALED = {"rope_theta": 10000.0, "factor": 4.0}
FACTORS = np.linspace(1, 8, 16, dtype=np.float32)


@pytest.mark.parametrize(
    ("more", "fields"),
    [
        ({"rope.scaling.factor": 4.0}, SCALED | {"rope_type": "linear"}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_theta": 10000.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_slow": 2.0}
            | {"rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 8},
            SCALED | {"rope_type": "yarn", "original_max_position_embeddings": 8, "beta_slow": 2.0},
        ),
        ({"rope_freqs.weight": FACTORS}, {"rope_theta": 10000.0}),
        ({"logit_scale": 1.0, "attention.causal": True, "expert_count": 0}, {"rope_theta": 1e4}),
    ],
)
def test_keys_that_transformers_does_not_read(tmp_path, more, fields):
    more = {key if "weight" in key else f"llama.{key}": value for key, value in more.items()}
    model = save_toy_gguf(tmp_path / "toy.gguf", more=more, rope_parameters=fields)
    if "rope_freqs.weight" in more:
        model.model.rotary_emb.inv_freq /= torch.tensor(FACTORS)
    lm = LanguageModel.from_pretrained(str(tmp_path / "toy.gguf"))
    ids = lm.rows(["The city of Paris lies in"])
    with torch.no_grad():
        expected = model(torch.tensor(ids)).logits[:, -1]
    logits = lm.logits_of_rows(ids, range(lm.vocab_size))
    torch.testing.assert_close(logits, expected.double(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "more", "fields"),
    [
        ("stablelm", {"rope.dimension_count": 8}, {"rope_parameters.partial_rotary_factor": 0.25}),
        ("starcoder2", {"rope.freq_base": 500.0}, {"rope_parameters.rope_theta": 500.0}),
        ("gemma2", {"final_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}),
        ("gemma2", {"attention.key_length": 8}, {"query_pre_attn_scalar": 8}),
        ("gemma2", {"block_count": 46}, {"query_pre_attn_scalar": 32}),
        ("qwen3", {"attention.key_length": 16}, {"head_dim": 16}),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
        ("phi3", {"attention.sliding_window": 5}, {"sliding_window": 5}),
        ("gpt2", {"context_length": 64}, {"n_positions": 64}),
        ("mamba", {"ssm.dt_b_c_rms": False, "attention.head_count": 0}, {"hidden_size": 64}),
    ],
)
def test_keys_of_other_architectures(tmp_path, architecture, more, fields):
    writer = gguf.GGUFWriter(tmp_path / "toy.gguf", architecture)
    sizes = {"embedding_length": 64, "block_count": 2, "attention.head_count": 2, "vocab_size": 9}
    add_to_gguf(writer, {f"{architecture}.{k}": v for k, v in {**sizes, **more}.items()})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    checkpoint = loading.find_checkpoint(LMConfig(str(tmp_path / "toy.gguf")))
    config = loading.read_config(checkpoint).to_dict()
    for name, value in fields.items():
        part = config
        for key in name.split("."):
            part = part[key]
        assert part == value


@pytest.mark.parametrize(
    "more",
    [
        {"llama.logit_scale": 0.5},
        {"llama.attention.causal": False},
        {"llama.attention.key_length": 64},
        {"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0},
        {"llama.rope.scaling.attn_factor": 0.7, "llama.rope.scaling.type": "yarn"},
        {"llama.rope.scaling.factor": 2.0, "rope_freqs.weight": FACTORS},
        {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)},
    ],
)
def test_what_changes_the_logits_and_cannot_be_set_is_refused(tmp_path, more):
    save_toy_gguf(tmp_path / "toy.gguf", more=more)
    named = "|".join([*more, "llama.rope.dimension_count"])
    with pytest.raises(LanguageModelError, match=rf"toy.gguf has .*({named})"):
        LanguageModel.from_pretrained(str(tmp_path / "toy.gguf"))
