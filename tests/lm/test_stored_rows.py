"""The head of a checkpoint, read alone, against that of the loaded LM."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.stored_rows import StoredRows, stored_head
from tests.lm.small_lms import VOCAB, Folder
from tests.lm.test_adapter import EMBEDDING, KINDS, lora, train
from tests.toys import save_toy_gguf

pytestmark = pytest.mark.filterwarnings("ignore:.*(tie|gradient_checkpointing|vera)")


@pytest.fixture
def only_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "read_model", None)


def head_in(folder: Path | str) -> StoredRows:
    lm = LanguageModel(LMConfig(str(folder)))
    assert lm.checkpoint is not None
    return stored_head(lm.checkpoint, lm.tokenizer)


def head_of_loaded(folder: Path | str, **options: Any) -> torch.Tensor:
    model: Any = LanguageModel.from_pretrained(str(folder), **options).model
    weight: torch.Tensor = model.get_output_embeddings().weight
    return weight.detach()


def assert_is(stored: StoredRows, expected: torch.Tensor) -> None:
    assert torch.equal(torch.cat(list(stored.blocks())), expected)
    assert torch.equal(stored.rows([7, 0, 7]), expected[[7, 0, 7]].double())
    assert stored.shape == expected.shape and stored.dtype == expected.dtype


def test_head_of_every_decoder(architecture: str, lm_folder: Folder, only_files: None) -> None:
    """Tied to the embedding, or not."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(lm_folder(architecture))
    assert_is(head_in(lm_folder(architecture)), model.get_output_embeddings().weight.detach())


def test_only_the_file_of_the_head_is_opened(folder: Path, only_files: None) -> None:
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="3KB")
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(files.values()) - {files["lm_head.weight"]}
    assert len(others) > 2
    for name in others:
        (folder / name).unlink()
    assert_is(head_in(folder), model.lm_head.weight.detach())
    (folder / files["lm_head.weight"]).unlink()
    with pytest.raises(LanguageModelError, match=f"lacks the file {files['lm_head.weight']}"):
        head_in(folder)


def test_a_tied_lm_that_has_a_head_of_its_own(lm_folder: Folder, tmp_path: Path) -> None:
    """As transformers reads it."""
    path = shutil.copytree(lm_folder("llama-tied"), tmp_path / "lm")
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["model.embed_tokens.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert_is(head_in(path), head_of_loaded(path))


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("quantization", ["F32", "Q8_0"])
def test_gguf_files(
    quantization: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf", reason="install lincorr-lightning[gguf]")
    save_toy_gguf(tmp_path / "toy.gguf", quantization, tie_word_embeddings=is_tied)
    expected = head_of_loaded(tmp_path / "toy.gguf")
    monkeypatch.setattr(loading, "read_model", None)
    stored = head_in(tmp_path / "toy.gguf")
    assert_is(stored, expected)
    assert stored.key == ("token_embd.weight" if is_tied else "output.weight")


ADAPTERS = {
    **{name: kind() for name, kind in KINDS.items()},
    "both saved": lora(["q_proj"], modules_to_save=EMBEDDING),
}
# Those whose head depends on how peft merges them.
MERGED = {("llama", "head")} | {
    ("llama-tied", kind) for kind in ("head", "embedding", "embedding saved", "tokens")
}


@pytest.mark.parametrize("base", ["llama", "llama-tied"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(
    kind: str, base: str, lm_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(lm_folder(base), tmp_path / "adapter", ADAPTERS[kind])
    expected = head_of_loaded(tmp_path / "adapter")
    if (base, kind) not in MERGED:
        monkeypatch.setattr(loading, "read_model", None)
    stored = head_in(tmp_path / "adapter")
    assert_is(stored, expected)
    assert stored.info["adapter"] == str(tmp_path / "adapter")


@pytest.mark.parametrize("base", ["llama", "llama-tied"])
def test_an_adapter_with_more_tokens(
    base: str, lm_folder: Folder, tmp_path: Path, only_files: None
) -> None:
    adapted = train(lm_folder(base), tmp_path / "adapter", lora(["q_proj"]), VOCAB + 4)
    head = adapted.get_base_model().get_output_embeddings().weight.detach()
    assert_is(head_in(tmp_path / "adapter"), head)


def test_pickled_weights(folder: Path) -> None:
    expected = head_of_loaded(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert_is(head_in(folder), expected)


def test_the_fingerprint_is_of_every_bit_and_the_dtype(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")

    def fingerprint(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, str]:
        changed = tensors | {name: change(tensors[name].clone())}
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        return head_in(folder).fingerprint

    def turn(weight: torch.Tensor) -> torch.Tensor:
        weight[3, 2] *= -1
        return weight

    same = fingerprint("model.embed_tokens.weight", turn)
    assert fingerprint("lm_head.weight", torch.clone) == same
    assert fingerprint("lm_head.weight", turn)["weights"] != same["weights"]
    half = fingerprint("lm_head.weight", lambda weight: weight.bfloat16())
    assert (half["dtype"], same["dtype"]) == ("bfloat16", "float32")
    assert half["tokenizer"] == same["tokenizer"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w[:-2], f"{VOCAB - 2} rows, but the tokenizer's largest id"),
        (lambda w: (10 * w).to(torch.int8), "quantized, pass the checkpoint"),
        (lambda w: w.to(torch.float8_e4m3fn), "quantized, pass the checkpoint"),
        (lambda w: None, r"has no head: its tensors are model\.embed_tokens\.weight"),
    ],
)
def test_heads_that_cannot_be_used(change: Any, reason: str, folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop("lm_head.weight"))
    if changed is not None:
        tensors["lm_head.weight"] = changed.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LanguageModelError, match=reason) as refusal:
        head_in(folder)
    assert str(folder) in str(refusal.value)
