"""Loading an LM: what is read, and errors about its name, folder and files."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from tests.lm.small_lms import Folder, config_of, random_model, small_tokenizer
from tests.toys import toy_config, toy_model


def refusal(name: str | Path, **options: Any) -> str:
    with pytest.raises(LanguageModelError) as caught:
        LanguageModel.from_pretrained(str(name), **options)
    return str(caught.value)


@pytest.fixture
def folder(lm_folder: Folder, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(lm_folder("llama"), tmp_path / "llama"))


def test_making_reads_no_weights_and_loading_freezes_them(folder: Path) -> None:
    weights = (folder / "model.safetensors").rename(folder / "away")
    lm = LanguageModel(LMConfig(name_or_path=str(folder)))
    assert lm.tokenizer.get_vocab()["Paris"] == 4
    assert not lm.is_loaded and not hasattr(lm, "model") and not list(lm.parameters())
    weights.rename(folder / "model.safetensors")
    assert lm.load() is lm
    model = lm.model
    assert lm.load().model is model
    assert not any(part.training for part in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_config_from_a_mapping_and_from_pretrained_agree(folder: Path) -> None:
    options = {"name_or_path": str(folder), "add_bos": False, "tokens_per_forward": 64}
    options["attn_implementation"] = "eager"
    lm = LanguageModel.from_pretrained(**options)
    assert lm.config == LMConfig(**options) == LanguageModel(options).config
    assert lm.model.config._attn_implementation == "eager"


def test_float32_by_default_whatever_the_checkpoint_has(tmp_path: Path) -> None:
    random_model(config_of("llama")).to(torch.bfloat16).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    path = str(tmp_path)
    assert LanguageModel.from_pretrained(path).model.dtype == torch.float32
    assert LanguageModel.from_pretrained(path, dtype="auto").model.dtype == torch.bfloat16
    assert LanguageModel.from_pretrained(path, dtype="float16").model.dtype == torch.float16


@pytest.mark.parametrize(
    "name", ["./none", "/none/such", "~/none_such_lm", "a/b/c", "none/", "..", "a b"]
)
def test_missing_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    message = refusal(name if name != ".." else "../none")
    assert "does not exist" in message and "config.json" in message


def test_folder_with_the_name_of_a_hub_id_is_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "org").mkdir()
    shutil.copytree(folder, folder / "org" / "name", ignore=shutil.ignore_patterns("org"))
    monkeypatch.chdir(folder)
    assert LanguageModel.from_pretrained("org/name").is_loaded
    assert "lm.revision is 'v2'" in refusal(folder, revision="v2")


def test_folder_without_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    assert "model.safetensors is not a folder" in refusal(folder / "model.safetensors")
    (tmp_path / "empty").mkdir()
    message = refusal(tmp_path / "empty")
    assert f"the LM's folder {tmp_path / 'empty'} has no config.json (it holds nothing)" in message
    assert "Did you mean llama in it?" in refusal(tmp_path)
    (folder / "config.json").unlink()
    message = refusal(folder)
    assert "has no config.json (it holds " in message and "model.safetensors" in message
    (folder / "adapter_config.json").write_text("{}")
    assert "merge it into its LM" in refusal(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [("{nope", "not a valid JSON"), ('{"a": 1}', "model_type"), ('{"model_type": "zork"}', "zork")],
)
def test_corrupt_config(folder: Path, content: str, reason: str) -> None:
    (folder / "config.json").write_text(content)
    message = refusal(folder)
    assert f"config.json of the folder {folder} cannot be read" in message and reason in message


def test_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    message = refusal(folder)
    assert f"the folder {folder}" in message and "Copy the tokenizer files" in message
    # transformers silently makes an empty tokenizer of such a folder.
    for name in ("LlamaTokenizer", "GPT2Tokenizer"):
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        assert "has no vocabulary of a tokenizer. Copy the tokenizer files" in refusal(folder)


def test_slow_tokenizer_without_padding_token(tmp_path: Path) -> None:
    toy_model("gpt2", 384).save_pretrained(tmp_path)
    hf.ByT5Tokenizer().save_pretrained(tmp_path)
    lm = LanguageModel.from_pretrained(str(tmp_path))
    assert not lm.tokenizer.is_fast
    lm.tokenizer.pad_token = None
    lm = LanguageModel.from_module(lm.model, lm.tokenizer)
    ours = lm.domain_logits(["ab", "c"], [100, 101])
    for row, ids in zip(ours, ([100, 101], [102]), strict=True):
        naive = lm.model(input_ids=torch.tensor([ids])).logits[0, -1, [100, 101]]
        torch.testing.assert_close(row, naive.double(), atol=1e-4, rtol=0)


def test_truncated_and_missing_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert f"the weights of the folder {folder} cannot be read" in refusal(folder)
    weights.unlink()
    message = refusal(folder)
    assert "no file named model.safetensors" in message and "complete" in message


def test_weights_that_would_be_random(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    fewer = {name: value for name, value in weights.items() if "mlp" not in name}
    save_file(fewer, folder / "model.safetensors", metadata={"format": "pt"})
    message = refusal(folder)
    assert "lack model.layers.0.mlp.down_proj.weight" in message
    assert "and 1 more, which would be initialized at random" in message
    fewer = {name: value for name, value in weights.items() if name != "lm_head.weight"}
    save_file(fewer, folder / "model.safetensors", metadata={"format": "pt"})
    assert "lack lm_head.weight, which" in refusal(folder)
    weights["lm_head.weight"] = weights["lm_head.weight"][:5].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"the weights of the folder {folder} cannot be read" in refusal(folder)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("n_layers", "message"),
    [(1, "have model.layers.1.input_layernorm.weight, but its config.json has 1 layers"),
     (10**9, "has num_hidden_layers 1000000000; it must be between 0 and 10,000")],
)  # fmt: skip
def test_a_config_with_another_number_of_layers(n_layers: int, message: str, folder: Path) -> None:
    change_config(folder, num_hidden_layers=n_layers)
    assert message in refusal(folder)


def test_layers_of_other_parts_are_left_out(folder: Path) -> None:
    """Vision towers, and layers that predict more tokens."""
    path = folder / "model.safetensors"
    names = "vision_tower.model.layers.5.weight", "mtp.layers.3.weight", "model.layers.2.eh.weight"
    save_file(load_file(path) | {name: torch.zeros(3) for name in names}, path, {"format": "pt"})
    assert "have model.layers.2.eh.weight" in refusal(folder)
    change_config(folder, num_nextn_predict_layers=1)
    assert LanguageModel.from_pretrained(str(folder)).is_loaded


def test_a_fifo_in_the_folder(folder: Path) -> None:
    os.mkfifo(folder / "x")
    assert f"{folder / 'x'} is a FIFO, a device or a socket, not a file" in refusal(folder)


def test_tied_head_is_not_missed(lm_folder: Folder) -> None:
    stored = load_file(lm_folder("llama-tied") / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert LanguageModel.from_pretrained(str(lm_folder("llama-tied"))).is_loaded


@pytest.mark.parametrize(
    ("auto", "model_type", "kind"),
    [
        (hf.AutoModelForMaskedLM, "bert", "an encoder (BertForMaskedLM)"),
        (hf.AutoModelForSeq2SeqLM, "t5", "an encoder-decoder (T5ForConditionalGeneration)"),
        (hf.AutoModel, "vit", "a model without a language-modeling head (ViTModel)"),
    ],
)
def test_not_a_causal_lm(auto: Any, model_type: str, kind: str, tmp_path: Path) -> None:
    auto.from_config(toy_config(model_type)).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    assert f"the folder {tmp_path} holds {kind}, not a causal LM" in refusal(tmp_path)


def test_hub_id_in_offline_mode_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(time, "sleep", calls.append)  # what waits before it tries again
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *more, **options: calls.append(host))
    message = refusal("some-org/some-lm")
    assert not calls
    assert "some-org/some-lm is not a folder" in message
    assert "not among earlier downloads" in message
    assert "Pass the folder" in message and "hf download some-org/some-lm" in message


def test_hub_id_without_network_fails_after_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def model_info(self: object, name: str, **options: Any) -> None:
        calls.append((name, options["revision"]))
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(time, "sleep", calls.append)
    message = refusal("some-org/some-lm", revision="v2")
    assert calls == [("some-org/some-lm", "v2")]
    assert "no network, or offline mode" in message
    assert "no network, or offline mode" in refusal("some-org/some-lm", local_files_only=True)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name_or_path": ""}, "name_or_path is empty"),
        ({"dtype": "int8"}, "must be one of auto, float32, bfloat16, float16"),
        ({"tokens_per_forward": 0}, "lm.tokens_per_forward is 0; it must be at least 1"),
    ],
)
def test_settings_without_meaning(options: dict[str, Any], message: str) -> None:
    with pytest.raises((LanguageModelError, ConfigError), match=message):
        LMConfig(**options)


# -- weights that several studies read once -------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Folders whose weights were read."""
    found: list[str] = []
    read = loading.read_model

    def count(checkpoint, config):
        found.append(str(checkpoint.location))
        return read(checkpoint, config)

    monkeypatch.setattr(loading, "read_model", count)
    return found


def lm_of(folder: str | Path, **options: str) -> LanguageModel:
    return LanguageModel(LMConfig(str(folder), **options)).load()


def test_weights_are_read_once(small_lm: str, reads: list[str]) -> None:
    with weights_read_once():
        one, other = lm_of(small_lm), lm_of(small_lm)
    assert one.model is other.model
    assert len(reads) == 1
    assert lm_of(small_lm).model is not one.model  # outside of the context
    assert len(reads) == 2


def test_an_lm_that_was_changed_is_read_again(small_lm: str, reads: list[str]) -> None:
    with weights_read_once():
        one = lm_of(small_lm)
        before = next(one.model.parameters()).clone()
        with torch.no_grad():
            next(one.model.parameters()).add_(1)
        again = lm_of(small_lm)
        assert torch.equal(next(again.model.parameters()), before)
        StackedLoRA(again.model, 2, AdapterSettings(2, 2.0))
        adapted = lm_of(small_lm)
        assert adapted.model is not again.model
        StackedLoRA(adapted.model, 2, AdapterSettings(2, 2.0)).remove()
        assert lm_of(small_lm).model is adapted.model
        assert len(reads) == 3
        assert lm_of(small_lm, dtype="bfloat16").model is not adapted.model
