"""Loading an LM: what is read, and errors about its name, folder and files."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm import loading
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from tests.lm.small_lms import config_of, random_model, small_tokenizer
from tests.toys import toy_config


def refusal(name: str | Path, **options: Any) -> str:
    with pytest.raises(LanguageModelError) as caught:
        LanguageModel.from_pretrained(str(name), **options)
    return str(caught.value)


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


def test_float32_by_default_whatever_the_checkpoint_has(tmp_path: Path) -> None:
    random_model(config_of("llama")).to(torch.bfloat16).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    path = str(tmp_path)
    assert LanguageModel.from_pretrained(path).model.dtype == torch.float32
    assert LanguageModel.from_pretrained(path, dtype="auto").model.dtype == torch.bfloat16
    assert LanguageModel.from_pretrained(path, dtype="float16").model.dtype == torch.float16


@pytest.mark.parametrize(
    "name", ["./none", "/none/such", "~/none_such_lm", "a/b/c", "none/", "a b"]
)
def test_missing_folder(name: str) -> None:
    message = refusal(name)
    assert "does not exist" in message and "lm.name_or_path" in message


def test_folder_with_the_name_of_a_hub_id_is_the_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "org").mkdir()
    shutil.copytree(folder, folder / "org" / "name", ignore=shutil.ignore_patterns("org"))
    monkeypatch.chdir(folder)
    assert LanguageModel.from_pretrained("org/name").is_loaded
    assert "lm.revision is 'v2'" in refusal(folder, revision="v2")


def change_config(folder, name="config.json", **changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tokenizer(folder, **changes):
    change_config(folder, "tokenizer_config.json", **changes)


def change_weights(folder, change):
    """Save what a function returns for the tensors by name."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def leave_out(folder, part):
    change_weights(folder, lambda tensors: {n: t for n, t in tensors.items() if part not in n})


def remove_tokenizer(folder, config="{}"):
    """Without its class, transformers fails; with it, it silently makes an empty tokenizer."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(config)


def shrink_head(folder):
    name = "lm_head.weight"
    change_weights(folder, lambda tensors: tensors | {name: tensors[name][:5].clone()})


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_code(folder):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": print}, folder / "pytorch_model.bin")


def empty_weights(folder):
    """As DeepSpeed's stage 3 leaves the weights of a model."""
    change_weights(
        folder, lambda ts: {k: torch.empty(0) if "mlp" in k else t for k, t in ts.items()}
    )


def add_prefix(folder, prefix):
    change_weights(folder, lambda tensors: {prefix + key: t for key, t in tensors.items()})


def leave_pieces(folder):
    remove_tokenizer(folder, LLAMA_TOKENIZER)
    (folder / "tokenizer.model").write_bytes(b"pieces")


def rename_weights(folder, name):
    (folder / "model.safetensors").rename(folder / name)


def put(folder, name):
    """Leave something else where the LM was."""
    for file in folder.iterdir():
        file.unlink()
    write(folder, name, "something")


def write(folder, name, text):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


PREFIXES = "_orig_mod.", "module.", "net.", "base_model.model."
FILES = "config.json", "tokenizer.json", "model.safetensors"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
SIGNS = {
    "snapshots/ab12": "pass it",
    "checkpoint-500": "pass it",
    "model_index.json": "is of diffusers",
    "checkpoints/epoch=0.ckpt": "call save_pretrained of its LM",
    "last.ckpt": "call save_pretrained of its LM",
    "lit_model.pth": "litgpt convert_from_litgpt",
    "meta.pt": "load its folder by its strategy",
    "__0_0.distcp": "accelerate merge-weights",
    "pytorch_model_fsdp_0/__0_0.distcp": "accelerate merge-weights",
    "zero_to_fp32.py": "run it",
    "tf_model.h5": "is not read",
}
LLAMA_TOKENIZER = '{"tokenizer_class": "LlamaTokenizer"}'
BROKEN = [
    (lambda f: (f / "config.json").unlink(), "has no config.json (it holds ", "model.safetensors"),
    (lambda f: (f / "config.json").write_text("{nope"), "config.json of", "Is it complete"),
    (lambda f: change_config(f, model_type="zork"), "config.json of", "zork"),
    (remove_tokenizer, "Copy the tokenizer files"),
    (lambda f: remove_tokenizer(f, LLAMA_TOKENIZER), "no vocabulary", "Copy the tokenizer files"),
    (leave_pieces, "tokenizer.model needs the package sentencepiece: run `pip install"),
    (cut_short, "the weights of the folder ", "cannot be read"),
    (lambda f: rename_weights(f, "model.fp16.safetensors"), "fp16.safetensors is a variant"),
    (lambda f: (f / "model.safetensors").unlink(), "no file named model.safetensors", "complete"),
    (lambda f: leave_out(f, "mlp"), "lack model.layers.0.mlp.", "and 1 more", "at random"),
    (lambda f: leave_out(f, "lm_head"), "lack lm_head.weight, which"),
    (pickle_code, "the weights of the folder ", "cannot be read"),
    (shrink_head, "lm_head.weight of", "is (5, 16)", "by its config (33, 16) (1 "),
    (empty_weights, "model.layers.0.mlp.down_proj.weight of", "is (0,)", "zero_to_fp32.py"),
    *((lambda f, p=p: add_prefix(f, p), f"have the prefix '{p}'") for p in PREFIXES),
    *((lambda f, n=n: put(f, n), f"/{n} ", sign) for n, sign in SIGNS.items()),
    *((lambda f, n=n: write(f, n, POINTER), f"/{n} is a pointer of git-lfs") for n in FILES),
    *((lambda f, n=n: write(f, n, ""), f"/{n} is empty") for n in FILES),
    (lambda f: write(f, "model.safetensors", "<html>"), "model.safetensors is a web page"),
    (lambda f: change_config(f, max_position_embeddings=2), "has positions for 2 tokens"),
    (lambda f: change_config(f, num_hidden_layers=1), "have model.layers.1.inp", "has 1 layers"),
    (lambda f: change_tokenizer(f, model_max_length="9"), "the tokenizer of"),
]


@pytest.mark.parametrize(("damage", "fragments"), [(damage, rest) for damage, *rest in BROKEN])
def test_broken_folders(damage, fragments, folder):
    damage(folder)
    message = refusal(folder)
    assert all(fragment in message for fragment in [str(folder), *fragments]), message
    assert len(message) < 2000


def test_layers_of_other_parts_are_left_out(folder: Path) -> None:
    """Vision towers, and layers that predict more tokens."""
    names = "vision_tower.model.layers.5.weight", "mtp.layers.3.weight", "model.layers.2.eh.weight"
    change_weights(folder, lambda tensors: tensors | {name: torch.zeros(3) for name in names})
    assert "have model.layers.2.eh.weight" in refusal(folder)
    change_config(folder, num_nextn_predict_layers=1)
    assert LanguageModel.from_pretrained(str(folder)).is_loaded


@pytest.mark.parametrize(
    ("auto", "model_type", "kind"),
    [
        (hf.AutoModelForMaskedLM, "bert", "an encoder (BertForMaskedLM)"),
        (hf.AutoModelForSeq2SeqLM, "t5", "an encoder-decoder (T5ForConditionalGeneration)"),
        (hf.AutoModel, "vit", "a model that transformers does not load as a causal LM (ViTModel)"),
    ],
)
def test_not_a_causal_lm(auto: Any, model_type: str, kind: str, tmp_path: Path) -> None:
    auto.from_config(toy_config(model_type)).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    assert f"the folder {tmp_path} holds {kind}, and not an LM that predicts" in refusal(tmp_path)


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_code_of_the_hub_that_a_config_names_is_refused(folder: Path, key: str) -> None:
    change_config(folder, **{key: "kernels-community/flash-attn"})
    with pytest.raises(LanguageModelError, match=r"is code from the hub.* Set lm\.attn_impl"):
        LanguageModel.from_pretrained(str(folder))
    lm = LanguageModel.from_pretrained(str(folder), attn_implementation="sdpa")
    assert lm.model.config._attn_implementation == "sdpa"


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
    assert "hf download some-org/some-lm" in message
    refusal("some-org/some-lm", local_files_only=True)
    assert len(calls) == 1


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


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "llama", "mistral", "qwen2", "gemma3"])
def test_a_tokenizer_is_of_the_class_that_transformers_chooses(
    model_type: str, folder: Path
) -> None:
    # Some types' configs have infinite numbers.
    config = {"model_type": model_type, "limits": [0.0, float("inf")]}
    (folder / "config.json").write_text(json.dumps(config))
    change_tokenizer(folder, tokenizer_class="PreTrainedTokenizerFast")
    found = loading.read_tokenizer(loading.find_checkpoint(LMConfig(str(folder)), "the tokenizer"))
    expected = hf.AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected)
    saved = Tokenizer.from_file(str(folder / "tokenizer.json"))  # some classes build another
    texts = ["Paris lies in the country of", " Anna 12", "<s>x"]
    assert found(texts)["input_ids"] == [saved.encode(text).ids for text in texts]
    assert found.all_special_tokens == expected.all_special_tokens


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "Qwen2Tokenizer"])
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "added", "post_processor"])
def test_a_tokenizer_is_the_one_that_was_saved(class_name: str, part: str, folder: Path) -> None:
    letters = {letter: i for i, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Tokenizer(models.BPE({**letters, "12": 256}, [("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    if part == "normalizer":
        tokenizer.normalizer = normalizers.Lowercase()
    elif part == "added":
        tokenizer.add_tokens(["Paris"])
    elif part == "pre_tokenizer":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, tokenizer.pre_tokenizer])
    else:
        tokenizer.post_processor = processors.TemplateProcessing("! $A", special_tokens=[("!", 0)])
    (folder / "config.json").write_text(json.dumps({"model_type": class_name[:-9].lower()}))
    tokenizer.save(str(folder / "tokenizer.json"))
    change_tokenizer(folder, tokenizer_class=class_name)
    found = loading.read_tokenizer(loading.find_checkpoint(LMConfig(str(folder)), "the tokenizer"))
    text = "Paris has 12 ways"
    assert found(text)["input_ids"] == tokenizer.encode(text).ids
    assert type(found).__name__ == class_name
