"""The vocabulary of a checkpoint, against what transformers reads of it."""

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from lincorr_lightning.ablation.token_embedding import TokenEmbedding, read_token_embedding
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.config import LMConfig
from tests.toys import save_toy_gguf

VOCAB = 33
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 8,
    "d_kv": 8,
    "d_ff": 8,
    "num_layers": 1,
    "num_heads": 1,
}

MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**_ENCODER)),
    "bert-bare": lambda: hf.BertModel(hf.BertConfig(**_ENCODER)),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**_ENCODER)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**_ENCODER, pad_token_id=0)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**_T5)),
    "t5-encoder": lambda: hf.T5EncoderModel(hf.T5Config(**_T5)),
    "llama-bare": lambda: hf.LlamaModel(hf.LlamaConfig(**_ENCODER)),
    "gpt2-bare": lambda: hf.GPT2Model(
        hf.GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    ),
}


def read(folder: Path | str, source: Any = "input", **options: Any) -> TokenEmbedding:
    return read_token_embedding(LMConfig(str(folder), **options), source)


def refusal(folder: Path | str, source: Any = "input", **options: Any) -> str:
    with pytest.raises(LanguageModelError) as caught:
        read(folder, source, **options)
    return str(caught.value)


def oracle(folder: Path, auto: Any = hf.AutoModel) -> torch.Tensor:
    weight: torch.Tensor = auto.from_pretrained(folder).get_input_embeddings().weight.detach()
    return weight


def save_bin(folder: Path, tensors: dict[str, torch.Tensor], **options: Any) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save(tensors, folder / "pytorch_model.bin", **options)


@pytest.fixture
def folder(lm_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of an untied Llama to break."""
    return Path(shutil.copytree(lm_folder("llama"), tmp_path / "llama"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory, small: SimpleNamespace) -> Callable[..., Path]:
    """Folder of one of MODELS."""
    made: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            MODELS[name]().save_pretrained(made[name])
            small.tokenizer().save_pretrained(made[name])
        return made[name]

    return save


# -- which matrix ----------------------------------------------------------------------------


def test_embedding_and_head_of_every_decoder(architecture, lm_folder):
    check_both(lm_folder(architecture))


def check_both(path: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(path)
    inputs, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    ours, ours_head = read(path), read(path, "output")
    assert torch.equal(ours.weight, inputs) and torch.equal(ours_head.weight, head)
    assert (ours.key == ours_head.key) == (head is inputs)


@pytest.mark.parametrize("name", MODELS)
def test_embedding_of_encoders_and_bare_models(name: str, saved: Callable[..., Path]) -> None:
    for source in ("input", "output"):  # their heads are tied, or there are none
        ours = read(saved(name), source)
        assert torch.equal(ours.weight, oracle(saved(name)))
        assert ours.weight.shape == (VOCAB, 8) and not ours.weight.requires_grad
        assert ours.info["name_or_path"] == str(saved(name))


def test_prefix_may_be_there_or_lack(folder: Path) -> None:
    # GPT-2's own checkpoint is one of an LM without the prefix `transformer.`.
    tensors, expected = load_file(folder / "model.safetensors"), oracle(folder)
    for new in ("", "outer.model."):
        renamed = {key.replace("model.", new, 1): value for key, value in tensors.items()}
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        ours = read(folder)
        assert ours.key == f"{new}embed_tokens.weight" and torch.equal(ours.weight, expected)


def test_two_matrices_are_tied_if_they_are_equal(
    saved: Callable[..., Path], tmp_path: Path
) -> None:
    # T5 v1.1 (Flan-T5): T5Config of transformers 5 always ties, whatever config.json says.
    path = Path(shutil.copytree(saved("t5"), tmp_path / "t5"))
    tensors = load_file(path / "model.safetensors")
    head = tensors["shared.weight"].clone()
    for key in ("shared.weight", "lm_head.weight"):
        save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors", {"format": "pt"})
        ours = read(path, "output")
        assert ours.key == key and torch.equal(ours.weight, head)
        head[-1, -1] += 1


def test_untied_head_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = ("model.embed_tokens.weight", "lm_head.weight")
    for source, key, other in (("input", *keys), ("output", *keys[::-1])):
        read(folder, source)
        message = caplog.records[-1].getMessage()
        assert f"{key} is used for both, and not {other}. Choose by model.emb" in message


# -- which file ------------------------------------------------------------------------------


def test_only_the_shard_of_the_matrix_is_opened(folder: Path, small: SimpleNamespace) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(folder)
    expected = model.get_input_embeddings().weight.detach().clone()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="3KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    shard = index["model.embed_tokens.weight"]
    assert len(set(index.values())) > 2
    for name in set(index.values()) - {shard}:
        (folder / name).unlink()
    assert torch.equal(read(folder).weight, expected)
    (folder / shard).unlink()
    message = refusal(folder)
    assert f"lacks the file {shard}" in message and "model.embed_tokens.weight" in message


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_pickled_weights(name, is_archive, lm_folder, tmp_path):
    path = Path(shutil.copytree(lm_folder(name), tmp_path / "pickled"))
    model = hf.AutoModelForCausalLM.from_pretrained(path)
    # A tied matrix is in it under both names, once; here as parameters, which require gradients.
    state = dict(model.named_parameters(remove_duplicate=False))
    assert "lm_head.weight" in state
    save_bin(path, state, _use_new_zipfile_serialization=is_archive)
    check_both(path)
    assert not read(path).weight.requires_grad


def test_no_code_of_a_pickle_is_run(folder: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (folder / "sprung",))

    save_bin(folder, {"model.embed_tokens.weight": Trap()})  # type: ignore[dict-item]
    assert "pytorch_model.bin of the folder" in refusal(folder)
    assert not (folder / "sprung").exists()


def test_hub_id_among_earlier_downloads(folder: Path, tmp_path: Path) -> None:
    # As the hub's client lays it out; only what is needed is there.
    repo, cache = tmp_path / "cache" / "models--some-org--some-lm", str(tmp_path / "cache")
    snapshot = repo / "snapshots" / ("0" * 40)
    shutil.copytree(folder, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    ours = read("some-org/some-lm", cache_dir=cache)
    assert torch.equal(ours.weight, oracle(folder))
    assert ours.info["name_or_path"] == "some-org/some-lm" and "base" not in ours.info
    (snapshot / "model.safetensors").unlink()
    assert "has no weights" in refusal("some-org/some-lm", cache_dir=cache)
    assert "is not a folder" in refusal("some-org/other", cache_dir=cache)


# -- what is wrong with it -------------------------------------------------------------------


def test_no_embedding_among_the_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder)
    assert f"{folder} has no token embedding" in message
    assert f"are {', '.join(sorted(tensors)[:12])}, ..." in message


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights(name: str, folder: Path) -> None:
    if name == "pytorch_model.bin":
        save_bin(folder, load_file(folder / "model.safetensors"))
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    message = refusal(folder)
    assert f"{name} of the folder {folder} cannot be read" in message
    assert "copy or download" in message.lower()
    (folder / name).unlink()
    assert f"the folder {folder} has no weights" in refusal(folder)
    (folder / f"{name}.index.json").write_text("{nope")
    assert f"{name}.index.json" in refusal(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w[:-2], f"has {VOCAB - 2} rows, but the tokenizer's largest id is {VOCAB - 1}"),
        (lambda w: (10 * w).to(torch.int8), "torch.int8, not a matrix of floating-point numbers"),
    ],
)
def test_tensor_that_is_no_vocabulary(change, reason, folder):
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors["model.embed_tokens.weight"]).clone()
    tensors["model.embed_tokens.weight"] = changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert re.search(f"model.embed_tokens.weight of the folder .*{reason}", refusal(folder))


# -- rows, means, fingerprint ----------------------------------------------------------------


def test_pooled_is_the_mean_over_a_texts_own_tokens(folder: Path, small: SimpleNamespace) -> None:
    hf.AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    ours = read(folder)
    assert ours.weight.dtype == torch.bfloat16  # as stored
    texts = [small.ids(text, bos=False) for text in small.prompts]
    naive = torch.stack([ours.weight[ids].float().mean(0) for ids in texts])
    torch.testing.assert_close(ours.pooled(texts), naive)
    assert torch.equal(torch.cat([ours.pooled([ids]) for ids in texts]), ours.pooled(texts))


def test_fingerprint_knows_every_bit_and_the_tokenizer(folder: Path) -> None:
    ours = read(folder)
    assert pickle.loads(pickle.dumps(ours)).fingerprint == ours.fingerprint
    assert read(folder, "output").fingerprint != ours.fingerprint
    changed = ours.weight.clone()
    changed.view(torch.int32)[7, 5] ^= 1
    other = replace(ours, weight=changed).fingerprint
    assert {part for part, own in ours.fingerprint.items() if other[part] != own} == {"weights"}
    ours.tokenizer.add_tokens("Zork")
    assert replace(ours).fingerprint != read(folder).fingerprint


# -- GGUF files ------------------------------------------------------------------------------


def test_embedding_and_head_of_gguf_files(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")
    path = tmp_path / "toy.gguf"
    model = save_toy_gguf(path)
    for source, key, matrix in (
        ("input", "token_embd.weight", model.model.embed_tokens),
        ("output", "output.weight", model.lm_head),
    ):
        ours = read(path, source)
        assert ours.key == key and torch.equal(ours.weight, matrix.weight)
    written = save_toy_gguf(path, "Q8_0").model.embed_tokens.weight.detach().numpy()
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(written, kind), kind))
    assert torch.equal(read(path).weight, expected)
    save_toy_gguf(path, tie_word_embeddings=True)  # and so without a head
    assert read(path, "output").key == "token_embd.weight"
    path.write_bytes(path.read_bytes()[:-1_000])
    assert re.search(r"toy\.gguf cannot be read.*complete", refusal(path))
