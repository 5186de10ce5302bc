"""Files that are written to while an LM is read from them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.loading import weights_read_once
from lincorr_lightning.lm.stored_rows import stored_head
from tests.lm.small_lms import (
    PROMPTS,
    TOKEN_IDS,
    config_of,
    naive_logits,
    random_model,
    small_tokenizer,
)

Write = Callable[[Path, Path], object]


def keep_time(old: Path, new: Path) -> None:
    before = old.stat()
    shutil.copyfile(new, old)
    os.utime(old, ns=(before.st_atime_ns, before.st_mtime_ns))


def save(folder: Path, seed: int, is_bin: bool = False) -> Path:
    model = random_model(config_of("llama"), seed)
    model.save_pretrained(folder, max_shard_size="1GB" if is_bin else "5KB")
    small_tokenizer().save_pretrained(folder)
    if is_bin:
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize(
    ("write", "is_other"),
    [
        (lambda old, new: shutil.copyfile(new, old), True),
        (keep_time, True),
        (lambda old, _: os.truncate(old, 0), True),  # reading would end the process
        (lambda old, new: new.replace(old), False),
        (lambda old, _: old.write_bytes(old.read_bytes()), False),
        (lambda old, _: old.unlink(), False),
    ],
    ids=["copied", "with its time", "cut short", "renamed", "the same", "removed"],
)
@pytest.mark.parametrize("is_bin", [False, True], ids=["safetensors", "bin"])
def test_logits_are_those_of_the_fingerprint(
    is_bin: bool, write: Write, is_other: bool, tmp_path: Path
) -> None:
    folder, other = (save(tmp_path / name, seed, is_bin) for seed, name in enumerate("ab"))
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    expected = naive_logits(model, PROMPTS, TOKEN_IDS)
    lm = LanguageModel.from_pretrained(str(folder))
    fingerprint = lm.fingerprint
    file = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])[-1]
    write(file, other / file.name)
    if is_other:
        for read in (lambda: lm.domain_logits(PROMPTS, TOKEN_IDS), lambda: lm.fingerprint):
            with pytest.raises(LanguageModelError, match=rf"{file} has been written to since"):
                read()
    else:
        logits = lm.domain_logits(PROMPTS, TOKEN_IDS)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        assert lm.fingerprint == fingerprint


def test_weights_in_another_dtype_are_no_longer_in_the_file(tmp_path: Path) -> None:
    folder, other = (save(tmp_path / name, seed) for seed, name in enumerate("ab"))
    lm = LanguageModel.from_pretrained(str(folder), dtype="bfloat16")
    logits = lm.domain_logits(PROMPTS, TOKEN_IDS)
    shutil.copytree(other, folder, dirs_exist_ok=True)
    assert torch.equal(lm.domain_logits(PROMPTS, TOKEN_IDS), logits)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model-00001-of-00005.safetensors"]
)
@pytest.mark.parametrize("write", [shutil.copyfile, shutil.move])
def test_parts_are_of_one_lm(name: str, write: Write, tmp_path: Path) -> None:
    folder, other = (save(tmp_path / name, seed) for seed, name in enumerate("ab"))
    lm = LanguageModel(LMConfig(str(folder)))
    assert lm.checkpoint is not None
    head = stored_head(lm.checkpoint, lm.tokenizer)
    write(other / name, folder / name)  # type: ignore[arg-type]
    for read in (lm.load, head.whole, lambda: head.fingerprint):
        with pytest.raises(LanguageModelError, match=rf"{name} has been written to while"):
            read()


def test_an_lm_that_is_kept_in_memory(tmp_path: Path) -> None:
    folder, other = (save(tmp_path / name, seed) for seed, name in enumerate("ab"))
    model = hf.AutoModelForCausalLM.from_pretrained(other, dtype="float32")
    with weights_read_once():
        LanguageModel.from_pretrained(str(folder))
        shutil.rmtree(folder)
        other.rename(folder)
        logits = LanguageModel.from_pretrained(str(folder)).domain_logits(PROMPTS, TOKEN_IDS)
    expected = naive_logits(model, PROMPTS, TOKEN_IDS)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
