"""States kept on disk: the same numbers without reading, and never those of another LM."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, OutputError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.lm import state_cache
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.small_lms import Folder, word_ids

INPUTS = ["Paris", "Lima", "old house", "Oslo and Tokyo", "red", "London"]
TEMPLATES = ["{} lives in the city of", "{} lives in the country of", "One day {} saw a"]
DOMAINS = [[5, 30, 4], [17, 22, 9, 2], [6]]
NEW = "{} speaks the language"

Loader = Callable[..., LanguageModel]


def prompts(templates: list[str] = TEMPLATES, inputs: list[str] = INPUTS) -> list[list[str]]:
    return [[template.format(x) for x in inputs] for template in templates]


@pytest.fixture
def load(lm_folder: Folder, tmp_path: Path) -> Loader:
    """Return an LM whose states are kept in the test's folder, or not."""

    def load(name: str = "llama", kept: bool = True, **options: Any) -> LanguageModel:
        folder = {"state_cache": str(tmp_path / "states")} if kept else {}
        lm = LanguageModel.from_pretrained(str(lm_folder(name)), **folder | options)
        lm.domain_logits([], DOMAINS[0])  # how it can be read is tested once
        return lm

    return load


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "states").glob("*/*.safetensors"))


def n_lines(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in record.getMessage() for record in caplog.records)


def test_the_same_bits_without_reading(
    architecture: str, load: Loader, read_tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_cache, "_N_CHECKED", 0)  # no prompt is read to verify a file
    tokens = [4, 9, 30, 5]
    alone = load(architecture, kept=False)
    expected = alone.joint_logits(prompts(), DOMAINS), alone.domain_logits(INPUTS, tokens)
    for is_known in (False, True):
        lm = load(architecture)
        read_tokens.clear()
        logits = lm.joint_logits(prompts(), DOMAINS), lm.domain_logits(INPUTS, tokens)
        assert all(map(torch.equal, logits, expected))
        # The LM's own function of the product takes a forward pass of one token.
        assert (max(read_tokens, default=0) <= 1) == is_known
    # Labels are not part of what is kept; of a call with more prompts, the new ones are read.
    templates, labels = [*TEMPLATES, NEW], [[7, 8], [11, 12, 13], [20], [10, 11]]
    logits = lm.joint_logits(prompts(templates), labels)
    longest = max(len(word_ids(prompt)) for prompt in prompts([NEW])[0])
    assert sum(read_tokens) <= (len(INPUTS) + 3) * longest  # one of them is read in two ways more
    assert torch.equal(load(architecture).joint_logits(prompts(templates), labels), logits)
    expected = alone.joint_logits(prompts(templates), labels)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def change_by_one_ulp(lm: LanguageModel) -> None:
    weight = lm.model.model.layers[0].mlp.up_proj.weight
    version = weight._version
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(torch.inf))
    assert weight._version == version  # nobody is told


def test_another_lm_or_way_to_read_has_another_folder(
    load: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def n_lms(lm: LanguageModel) -> int:
        lm.joint_logits(prompts(), DOMAINS)
        return len([*(tmp_path / "states").iterdir()])

    lm = load()
    assert n_lms(lm) == 1
    assert n_lms(load(dtype="bfloat16")) == 2
    assert n_lms(load(attn_implementation="eager")) == 3
    assert n_lms(load(share_prefixes=False)) == 4
    assert n_lms(load(tokens_per_forward=9)) == 5
    change_by_one_ulp(lm)
    assert n_lms(lm) == 6
    lm.model.model.rotary_emb.inv_freq *= 1.5
    assert n_lms(lm) == 7
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert n_lms(load()) == 8


def scaled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose output, or the first of its outputs, is another."""

    def scale(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return (output[0] * 1.001, *output[1:]) if isinstance(output, tuple) else output * 1.001

    return scale


def replace_attention_with_masks(patch: pytest.MonkeyPatch) -> None:
    """Only prompts that share prefixes change."""
    plain = nn.functional.scaled_dot_product_attention

    def attention(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        return (plain if attn_mask is None else scaled(plain))(*args, attn_mask=attn_mask, **kwargs)

    patch.setattr(nn.functional, "scaled_dot_product_attention", attention)


def register_global_hook(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.modules.module, "_global_forward_hooks", OrderedDict())  # is undone
    nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 1.001 if isinstance(module, nn.Embedding) else None
    )


CODE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "function": lambda patch: patch.setattr(nn.functional, "silu", scaled(nn.functional.silu)),
    "function with masks": replace_attention_with_masks,
    "registered attention": lambda patch: patch.setitem(
        hf.AttentionInterface._global_mapping, "sdpa", scaled(hf.AttentionInterface()["sdpa"])
    ),
    "global hook": register_global_hook,
}


@pytest.mark.parametrize("code", CODE)
def test_changed_code_discards_the_states(
    code: str, load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = load().joint_logits(prompts(), DOMAINS)
    with pytest.MonkeyPatch.context() as patch:
        CODE[code](patch)
        logits = load().joint_logits(prompts(), DOMAINS)
        assert not torch.equal(logits, before)
        assert torch.equal(logits, load(kept=False).joint_logits(prompts(), DOMAINS))
        assert n_lines(caplog, f"Discarding {files(tmp_path)[0].parent}") == 1
        assert torch.equal(load().joint_logits(prompts(), DOMAINS), logits)
    assert torch.equal(load().joint_logits(prompts(), DOMAINS), before)
    assert n_lines(caplog, "Discarding") == 2


def test_an_lm_that_did_not_change_discards_nothing(
    architecture: str, load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is read together; and no random stream of a training is touched."""
    n_files = 0
    for inputs, templates in ((INPUTS, TEMPLATES), (INPUTS[:2], [NEW]), (INPUTS[1:], [NEW, "{}"])):
        lm = load(architecture)
        streams = random.getstate(), torch.get_rng_state()
        lm.joint_logits(prompts(templates, inputs), DOMAINS[: len(templates)])
        lm.domain_logits([f"{x} and {x}" for x in inputs], DOMAINS[0])
        assert random.getstate() == streams[0]
        assert torch.equal(torch.get_rng_state(), streams[1])
        assert len(files(tmp_path)) > n_files
        n_files = len(files(tmp_path))
    assert n_lines(caplog, "Discarding") == 0


def test_lms_with_adapters_or_in_training_are_read_each_time(load: Loader, tmp_path: Path) -> None:
    lm = load()
    adapters = StackedLoRA(lm.model, 2, AdapterSettings(2, 4.0))
    with pytest.warns(UserWarning, match=r"without lm\.state_cache"):
        lm.joint_logits(prompts(), DOMAINS)
    adapters.remove()
    lm.model.get_input_embeddings().weight.requires_grad_(True)
    lm.joint_logits(prompts(), DOMAINS)
    lm.model.requires_grad_(False)
    lm.domain_logits(["Paris"], DOMAINS[0])  # a file for one prompt costs more than to read it
    assert not files(tmp_path)
    lm.joint_logits(prompts(), DOMAINS)
    assert files(tmp_path)


def save_with(path: Path, **tensors: torch.Tensor) -> None:
    """Change a file, but not its checksum."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | tensors, path, metadata)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "changed byte": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
    "exchanged": lambda path: save_with(path, states=load_file(path)["states"].flip(0)),
    "one more tensor": lambda path: save_with(path, more=torch.zeros(2)),
    "another LM": lambda path: shutil.copy(*{*path.parents[1].glob("*/18-*")} - {path}, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_or_of_another_lm_is_read_anew(
    damage: str, load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load().joint_logits(prompts(), DOMAINS)
    (path,) = files(tmp_path)
    other = load()
    change_by_one_ulp(other)
    other.joint_logits(prompts(), DOMAINS)
    states = load_file(path)["states"].clone()
    DAMAGES[damage](path)
    assert torch.equal(load().joint_logits(prompts(), DOMAINS), expected)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"Reading prompts anew: {path}")
    assert torch.equal(load_file(path)["states"], states)


def test_the_folder_is_bounded(
    load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What was not used for longest goes; a run keeps what it and the next one begin with."""
    for template in TEMPLATES:
        load().joint_logits(prompts([template]), DOMAINS[:1])
    for path in files(tmp_path):
        os.utime(path, (1000, 1000))
    load().joint_logits(prompts(TEMPLATES[1:2]), DOMAINS[:1])
    (used,) = [path for path in files(tmp_path) if path.stat().st_mtime > 1000]
    os.utime(used, (2000, 2000))
    gib = used.stat().st_size / 2**30
    load(state_cache_gib=3.5 * gib).joint_logits(prompts([NEW]), DOMAINS[:1])
    assert len(files(tmp_path)) == 3 and used in files(tmp_path)
    for n_found in (0, 2 * len(INPUTS)):
        lm = load(state_cache_gib=2.5 * gib)
        caplog.clear()
        for template in ("{} red", "{} blue", "{} and"):
            lm.joint_logits(prompts([template]), DOMAINS[:1])
        assert lm.state_cache is not None and lm.state_cache.n_found == n_found
        assert len(files(tmp_path)) == 2 and used not in files(tmp_path)
        assert n_lines(caplog, "exceed lm.state_cache_gib") == 1


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_and_a_folder_that_can_only_be_read(
    load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm, expected = load(), load(kept=False).joint_logits(prompts(), DOMAINS)
    with monkeypatch.context() as patch:
        patch.setattr(state_cache, "save_file", refuse)
        for _ in range(2):
            assert torch.equal(lm.joint_logits(prompts(), DOMAINS), expected)
        assert n_lines(caplog, "No more states are kept") == 1 and not files(tmp_path)
        patch.setattr("lincorr_lightning.io.TemporaryFile", refuse)
        with pytest.raises(OutputError, match="No space left on device"):
            load()
    load().joint_logits(prompts(), DOMAINS)
    (path,) = files(tmp_path)
    # The user of the tests may be root, to whom modes of files mean nothing.
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    for content in (path.read_bytes(), b"damaged"):
        path.write_bytes(content)
        caplog.clear()
        lm = load()
        for _ in range(2):  # a damaged file stays, and is reported once
            assert torch.equal(lm.joint_logits(prompts(), DOMAINS), expected)
        assert n_lines(caplog, "lm.state_cache is only read") == 1
        assert n_lines(caplog, "Reading prompts anew") == (content == b"damaged")
        assert lm.state_cache is not None
        assert (lm.state_cache.n_found == 0) == (content == b"damaged")


def test_the_command(
    load: Loader, lm_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load().joint_logits(prompts(), DOMAINS)
    load("gpt2").joint_logits(prompts(TEMPLATES[:2]), DOMAINS[:2])
    load("opt").joint_logits(prompts(TEMPLATES[:1]), DOMAINS[:1])
    folder = tmp_path / "states"
    (opt,) = folder.glob("*/6-*")
    opt.with_name("lm.json").write_text("{")  # damaged
    others = {opt.with_name("notes.txt"), folder / "other.safetensors"}
    for path in others:
        path.touch()
    main(["cache", str(folder)])
    _, *lines, end = capsys.readouterr().out.splitlines()
    assert end == "states of LMs: 3"
    shown = {tuple(line.split()[:3]) for line in lines}
    llama, gpt2 = str(lm_folder("llama")), str(lm_folder("gpt2"))
    known = {(llama, "float32", "18"), (gpt2, "float32", "12")}
    assert shown == known | {("unknown", "unknown", "6")}
    main(["cache", str(folder), "--clear", "true"])
    assert {path for path in folder.rglob("*") if path.is_file()} == others
    with pytest.raises(ConfigError, match="there is no folder"):
        main(["cache", str(tmp_path / "nowhere")])
