"""States kept on disk: the same numbers without reading, and never those of another LM."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LanguageModelError, OutputError
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.state_folder import drop_oldest, state_files
from tests.lm.small_lms import (
    SPECIAL,
    VOCAB,
    WORDS,
    Folder,
    config_of,
    naive_logits,
    random_model,
    small_tokenizer,
    word_ids,
)
from tests.toys import word_tokenizer

INPUTS = ["Paris", "Lima", "old house", "Oslo and Tokyo", "red", "London"]
TEMPLATES = ["{} lives in the city of", "{} lives in the country of", "One day {} saw a"]
DOMAINS = [[5, 30, 4], [17, 22, 9, 2], [6]]
NEW = "{} speaks the language"


def prompts(templates: list[str] = TEMPLATES) -> list[list[str]]:
    return [[template.format(x) for x in INPUTS] for template in templates]


Loader = Callable[..., LanguageModel]


@pytest.fixture
def load(lm_folder: Folder, tmp_path: Path) -> Loader:
    """Return an LM whose states are kept in the test's folder, or not."""

    def load(name: str = "llama", kept: bool = True, **options: Any) -> LanguageModel:
        folder = {"state_cache": str(tmp_path / "states")} if kept else {}
        where = name if "/" in name else str(lm_folder(name))
        lm = LanguageModel.from_pretrained(where, **folder | options)
        lm.domain_logits([], DOMAINS[0])  # how it can be read is tested once
        return lm

    return load


@pytest.fixture
def read_tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of tokens of the forward passes of a transformers model."""
    sizes: list[int] = []
    call = hf.PreTrainedModel.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if {"return_dict", "input_ids"} <= {*kwargs}:  # not of one model within another
            sizes.append(kwargs["input_ids"].numel())
        return call(self, *args, **kwargs)

    monkeypatch.setattr(hf.PreTrainedModel, "__call__", counted)
    yield sizes


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "states").glob("*/*.safetensors"))


def test_the_same_bits_without_reading(
    architecture: str, load: Loader, read_tokens: list[int]
) -> None:
    tokens = [4, 9, 30, 5]
    alone = load(architecture, kept=False)
    expected = alone.joint_logits(prompts(), DOMAINS), alone.domain_logits(INPUTS, tokens)
    for is_known in (False, True):
        lm = load(architecture)
        del read_tokens[:]
        ours = lm.joint_logits(prompts(), DOMAINS), lm.domain_logits(INPUTS, tokens)
        assert all(map(torch.equal, ours, expected))
        # The LM's own function of the product takes a forward pass of one token.
        assert (max(read_tokens, default=0) <= 1) == is_known
    # Labels are not part of what is kept.
    others = [[7, 8], [11, 12, 13], [20]]
    assert torch.equal(lm.joint_logits(prompts(), others), alone.joint_logits(prompts(), others))
    assert max(read_tokens, default=0) > 1  # those of the LM without the folder


def test_states_are_those_of_transformers(load: Loader, tmp_path: Path) -> None:
    lm = load()
    lm.joint_logits(prompts(), DOMAINS)
    kept: dict[bytes, torch.Tensor] = {}
    assert len(files(tmp_path)) == len(TEMPLATES)
    for path in files(tmp_path):
        content = load_file(path)
        assert content["states"].dtype == torch.float32
        kept |= zip(map(bytes, content["keys"].numpy()), content["states"], strict=True)
    assert len(kept) == len(TEMPLATES) * len(INPUTS)
    for prompt in itertools.chain(*prompts()):
        ids = word_ids(prompt)
        with torch.no_grad():
            state = lm.model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
        key = hashlib.blake2b(struct.pack(f"<{len(ids)}q", *ids), digest_size=16).digest()
        torch.testing.assert_close(kept[key], state, atol=1e-5, rtol=0)


def test_a_prompt_that_is_new_is_read_alone(load: Loader, read_tokens: list[int]) -> None:
    load().joint_logits(prompts(), DOMAINS)
    lm, more = load(), [*TEMPLATES[:1], NEW, *TEMPLATES[1:]]
    labels = [DOMAINS[0], [10, 11], *DOMAINS[1:]]
    del read_tokens[:]
    ours = lm.joint_logits(prompts(more), labels)
    assert sum(read_tokens) <= len(INPUTS) * max(len(word_ids(p)) for p in prompts([NEW])[0])
    expected = load(kept=False).joint_logits(prompts(more), labels)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    del read_tokens[:]
    assert torch.equal(lm.joint_logits(prompts(more), labels), ours)
    assert not read_tokens


def _one_ulp(lm: LanguageModel) -> None:
    weight = lm.model.model.layers[0].mlp.up_proj.weight
    version = weight._version
    weight.data[0, 0] = torch.nextafter(weight.data[0, 0], torch.tensor(torch.inf))
    assert weight._version == version  # nobody is told


def _rope(lm: LanguageModel) -> None:
    lm.model.model.rotary_emb.inv_freq *= 1.5


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"attn_implementation": "eager"},
        {"share_prefixes": False},
        {"tokens_per_forward": 9},
        {"add_bos": False},
    ],
    ids=str,
)
def test_another_way_to_read_never_hits(
    options: dict[str, Any], load: Loader, tmp_path: Path
) -> None:
    load().joint_logits(prompts(), DOMAINS)
    ours = load(**options).joint_logits(prompts(), DOMAINS)
    assert torch.equal(ours, load(kept=False, **options).joint_logits(prompts(), DOMAINS))
    assert len({path.parent for path in files(tmp_path)}) == 2


def test_states_of_another_number_of_threads_are_not_taken(load: Loader, tmp_path: Path) -> None:
    load().joint_logits(prompts(), DOMAINS)
    n = torch.get_num_threads()
    torch.set_num_threads(n + 1)
    try:
        load().joint_logits(prompts(), DOMAINS)
    finally:
        torch.set_num_threads(n)
    assert len({path.parent for path in files(tmp_path)}) == 2


def _activation(lm: LanguageModel) -> None:
    lm.model.model.layers[0].mlp.act_fn = nn.ReLU()


def _attribute(lm: LanguageModel) -> None:
    lm.model.model.layers[1].self_attn.scaling *= 2


@pytest.mark.parametrize("change", [_one_ulp, _rope, _activation, _attribute])
def test_a_changed_lm_never_hits(
    change: Callable[[LanguageModel], None], load: Loader, read_tokens: list[int], tmp_path: Path
) -> None:
    lm, alone = load(), load(kept=False)
    lm.joint_logits(prompts(), DOMAINS)
    for one in (lm, alone):
        change(one)
    del read_tokens[:]
    ours = lm.joint_logits(prompts(), DOMAINS)
    # Read anew, though some processors round the change by one ulp away.
    assert max(read_tokens, default=0) > 1
    assert torch.equal(ours, alone.joint_logits(prompts(), DOMAINS))
    assert len({path.parent for path in files(tmp_path)}) == 2


def test_another_tokenizer_or_prefix_never_hits(
    lm_folder: Folder, load: Loader, tmp_path: Path
) -> None:
    load().joint_logits(prompts(), DOMAINS)
    changed = shutil.copytree(lm_folder("llama"), tmp_path / "changed")
    word_tokenizer(WORDS[::-1], SPECIAL, "<s> $A").save_pretrained(changed)
    load(str(changed)).joint_logits(prompts(), DOMAINS)
    assert len({path.parent for path in files(tmp_path)}) == 2
    options = {"name_or_path": str(changed), "state_cache": str(tmp_path / "states")}
    LanguageModel(options, prefix="One day").load().joint_logits(prompts(), DOMAINS)
    assert len({path.parent for path in files(tmp_path)}) == 3


def test_only_a_frozen_lm_without_hooks(load: Loader, tmp_path: Path) -> None:
    lm = load()
    handle = lm.model.model.layers[0].register_forward_hook(lambda _, args, output: output)
    lm.joint_logits(prompts(), DOMAINS)
    handle.remove()
    lm.model.get_input_embeddings().weight.requires_grad_(True)
    lm.joint_logits(prompts(), DOMAINS)
    assert not files(tmp_path)
    lm.model.requires_grad_(False)
    lm.joint_logits(prompts(), DOMAINS)
    assert files(tmp_path)


class Scaled(nn.Linear):
    """A head of another kind."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden * 2)


def test_other_heads_are_read_each_time_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = random_model(config_of("llama")).requires_grad_(False)
    model.lm_head = Scaled(16, VOCAB).requires_grad_(False)
    lm = LanguageModel.from_module(model, small_tokenizer(), state_cache=str(tmp_path / "states"))
    for _ in range(2):
        expected = naive_logits(model, prompts()[0], DOMAINS[0])
        ours = lm.domain_logits(prompts()[0], DOMAINS[0])
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("lm.state_cache is not used: the head is not" in line for line in lines) == 1
    assert not files(tmp_path)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    with safe_open(path, "pt") as file:
        state = file.get_tensor("states")[2, 3].numpy().tobytes()
    content[content.index(state)] ^= 1
    path.write_bytes(content)


def _exchange(path: Path) -> None:
    """Two numbers of a state change places."""
    content = path.read_bytes()
    with safe_open(path, "pt") as file:
        state = file.get_tensor("states")[2].numpy()
    place, changed = content.index(state.tobytes()), state[[1, 0, *range(2, len(state))]].tobytes()
    path.write_bytes(content[:place] + changed + content[place + len(changed) :])


@pytest.mark.parametrize(
    "damage", [_cut, _flip_a_bit, _exchange, lambda path: path.write_bytes(b"")]
)
def test_a_damaged_file_is_read_anew(
    damage: Callable[[Path], None], load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load().joint_logits(prompts(), DOMAINS)
    whole = files(tmp_path)
    content = [path.read_bytes() for path in whole]
    for path in whole:
        damage(path)
    assert [path.read_bytes() for path in whole] != content
    assert torch.equal(load().joint_logits(prompts(), DOMAINS), expected)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("Reading prompts anew" in line for line in lines) == len(whole)
    assert [path.read_bytes() for path in whole] == content


def test_the_folder_is_bounded_and_the_oldest_goes_first(load: Loader, tmp_path: Path) -> None:
    lm = load()
    lm.joint_logits(prompts(), DOMAINS)
    first, second, third = files(tmp_path)
    for age, path in enumerate((second, third, first), 1):  # first was used longest ago
        os.utime(path, (age * 1000, age * 1000))
    with safe_open(second, "pt") as opened:
        size = sum(path.stat().st_size for path in files(tmp_path))
        assert not drop_oldest(tmp_path / "states", size, 5000)
        assert len(files(tmp_path)) == 3
        assert not drop_oldest(tmp_path / "states", size - 1, 5000)
        assert files(tmp_path) == sorted([first, third])
        assert opened.get_tensor("states").isfinite().all()
    # A run that knew the file reads its prompts again.
    expected = load(kept=False).joint_logits(prompts(), DOMAINS)
    torch.testing.assert_close(lm.joint_logits(prompts(), DOMAINS), expected, atol=1e-5, rtol=0)
    assert len(files(tmp_path)) == 3
    small = load(state_cache_gib=1e-9)
    small.joint_logits(prompts([NEW]), DOMAINS[:1])
    assert not files(tmp_path)


def test_a_run_with_more_states_than_the_bound_keeps_its_first_ones(
    load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a run begins with is what the next one asks for first."""
    load().joint_logits(prompts([NEW]), DOMAINS[:1])
    (before,) = files(tmp_path)
    os.utime(before, (1000, 1000))  # of a run long ago
    bound = 2.5 * before.stat().st_size / 2**30
    for n_found in (0, 2 * len(INPUTS)):
        lm = load(state_cache_gib=bound)
        caplog.clear()
        for template in TEMPLATES:
            lm.joint_logits(prompts([template]), DOMAINS[:1])
        assert lm.state_cache is not None and lm.state_cache.n_found == n_found
        assert len(files(tmp_path)) == 2 and before not in files(tmp_path)
        lines = [record.getMessage() for record in caplog.records]
        assert sum("exceed lm.state_cache_gib" in line for line in lines) == 1


def test_single_prompts_are_read_each_time(load: Loader, tmp_path: Path) -> None:
    lm = load()
    for prompt in prompts()[0]:
        lm.domain_logits([prompt], DOMAINS[0])
    assert not files(tmp_path)


class OfOtherCode(hf.LlamaForCausalLM):
    """As an LM whose code comes with its checkpoint."""


def test_an_lm_of_other_code_is_kept(load: Loader, tmp_path: Path) -> None:
    lm = load()
    lm.model.__class__ = OfOtherCode
    lm.joint_logits(prompts(), DOMAINS)
    assert files(tmp_path)


class Steered(nn.Module):
    """A layer as people write them: what it adds is no buffer."""

    def __init__(self, layer: nn.Module, added: Any) -> None:
        super().__init__()
        self.layer, self.added = layer, added

    def forward(self, *inputs: Any, **options: Any) -> Any:
        added = self.added() if callable(self.added) else self.added
        return self.layer(*inputs, **options) + torch.as_tensor(added)


@pytest.mark.parametrize(
    "kind", [float, torch.tensor, lambda x: [x], np.array, lambda x: lambda: x]
)
@pytest.mark.filterwarnings("always")
def test_what_a_layer_of_others_adds_is_part_of_the_key(
    kind: Callable[[float], Any], load: Loader, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    found = []
    for size in (0.5, 3.0):
        lm, alone = load(), load(kept=False)
        for one in (lm, alone):
            layer: Any = one.model.model.layers[0]
            layer.mlp = Steered(layer.mlp, kind(size))
        found.append(lm.domain_logits(prompts()[0], DOMAINS[0]))
        assert torch.equal(found[-1], alone.domain_logits(prompts()[0], DOMAINS[0]))
    assert not torch.equal(*found)
    is_hashed = isinstance(kind(1.0), float | torch.Tensor | list)
    assert bool(files(tmp_path)) == is_hashed
    told = "mlp has an attribute that cannot be hashed"
    assert any(told in str(one.message) for one in recwarn) != is_hashed


def test_files_and_folders_that_another_run_removes(load: Loader, tmp_path: Path) -> None:
    """A link to nothing is listed like a file that is removed before it is looked at."""
    load().joint_logits(prompts(), DOMAINS)
    first = files(tmp_path)[0]
    size = sum(path.stat().st_size for path in files(tmp_path))
    for name in ("0" * 32, "f" * 32):
        (first.parent / f"1-{name}.safetensors").symlink_to(tmp_path / "nowhere")
    drop_oldest(tmp_path / "states", size - 1, 0)
    assert sum(not path.is_symlink() for path in files(tmp_path)) == 2
    assert state_files(tmp_path / "nowhere") == {}


def test_a_file_in_use_is_kept_longer(load: Loader, tmp_path: Path) -> None:
    load().joint_logits(prompts(), DOMAINS)
    for path in files(tmp_path):
        os.utime(path, (1000, 1000))
    load().domain_logits(prompts()[0], DOMAINS[0])
    assert sorted(path.stat().st_mtime > 2000 for path in files(tmp_path)) == [False, False, True]


def test_a_folder_that_cannot_be_written(
    load: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot write"):
        load(state_cache=str(tmp_path / "file"))
    with pytest.raises(LanguageModelError, match=r"lm\.state_cache is empty"):
        load(state_cache="")
    with pytest.raises(ConfigError, match=r"lm\.state_cache_gib is 0; it must be above 0"):
        load(state_cache_gib=0)
    lm = load()
    (tmp_path / "states").rmdir()
    (tmp_path / "states").touch()  # as after a disk has failed
    expected = load(kept=False).joint_logits(prompts(), DOMAINS)
    for _ in range(2):
        assert torch.equal(lm.joint_logits(prompts(), DOMAINS), expected)
    assert sum("No more states" in record.getMessage() for record in caplog.records) == 1


def test_a_folder_that_can_only_be_read(
    load: Loader,
    read_tokens: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected, folder = load().joint_logits(prompts(), DOMAINS), tmp_path / "states"
    before, damaged = contents(folder), next(folder.rglob("*.safetensors"))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    # The user of the tests may be root, to whom modes of files mean nothing.
    monkeypatch.setattr("lincorr_lightning.io.TemporaryFile", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    lm = load()
    read_tokens.clear()
    assert torch.equal(lm.joint_logits(prompts(), DOMAINS), expected) and not read_tokens
    assert torch.isfinite(lm.joint_logits([[f"{x} saw a" for x in INPUTS]], DOMAINS[:1])).all()
    assert contents(folder) == before
    lines = [record.getMessage() for record in caplog.records]
    (line,) = lines
    assert line.startswith("lm.state_cache is only read") and "Read-only file system" in line
    caplog.clear()
    damaged.write_bytes(damaged.read_bytes()[:-8])
    for _ in range(3):  # it stays, and is told once
        found = lm.joint_logits(prompts(), DOMAINS)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert [f"{damaged} is damaged" in record.getMessage() for record in caplog.records] == [True]


def test_a_full_disk_is_an_error_at_the_start(
    load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("lincorr_lightning.io.TemporaryFile", refuse)
    with pytest.raises(OutputError, match="No space left on device"):
        load()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_number_of_cached_prompts_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def run(kinds: str) -> str:
        caplog.clear()
        main(
            [
                "fit",
                "--config",
                "configs/linear_probe.yaml",
                f"--model.knowledge={kinds}",
                "--model.control=null",
                "--model.random_labels=0",
                "--data.n_subjects=20",
                "--model.require_reference=[]",
                f"--model.lm.state_cache={tmp_path / 'states'}",
                f"--trainer.default_root_dir={tmp_path}",
            ]
        )
        return caplog.text

    assert " 0 of 40 prompts of" in run("[city,color]")
    assert f" 40 of 60 prompts of tiny-world were in {tmp_path / 'states'}" in run(
        "[city,color,pet]"
    )


_RUN = """
import sys, torch
from lincorr_lightning.lm.language_model import LanguageModel
from tests.lm.test_state_cache import DOMAINS, prompts
lm = LanguageModel.from_pretrained(sys.argv[1], state_cache=sys.argv[2])
sys.stdin.readline()
print(lm.joint_logits(prompts(), DOMAINS).numpy().tobytes().hex())
"""


def test_two_processes_at_once(load: Loader, lm_folder: Folder, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(lm_folder("llama")), str(tmp_path / "states")]
    pipe = subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    runs = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        for _ in range(2)
    ]
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    outputs = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    # A run that begins later may find some of the states, and reads the others without them.
    expected = load(kept=False).joint_logits(prompts(), DOMAINS)
    for output in outputs:
        logits = torch.frombuffer(bytearray.fromhex(output), dtype=torch.float64)
        torch.testing.assert_close(logits.view_as(expected), expected, atol=1e-5, rtol=0)
    n_files = len(files(tmp_path))
    load().joint_logits(prompts(), DOMAINS)
    assert len(files(tmp_path)) == n_files >= len(TEMPLATES)


def test_saying_how_torch_rounds_by_default_changes_nothing(load: Loader, tmp_path: Path) -> None:
    matmul: Any = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        for precision in ("none", "ieee"):
            matmul.fp32_precision = precision
            load().joint_logits(prompts(), DOMAINS)
            assert len(files(tmp_path)) == len(TEMPLATES)
    finally:
        matmul.fp32_precision = before


def test_the_command(
    load: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str], lm_folder: Folder
) -> None:
    load().joint_logits(prompts(), DOMAINS)
    load("gpt2").joint_logits(prompts()[:2], DOMAINS[:2])
    folder = tmp_path / "states"
    own = files(tmp_path)[0].with_name("notes.txt")
    own.touch()
    (folder / "mine.safetensors").touch()
    main(["cache", str(folder)])
    head, *lines, end = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["LM", "dtype", "prompts", "MiB"] and end == "states of LMs: 2"
    shown = {Path(line.split()[0]): line.split()[1:3] for line in lines}
    assert shown == {lm_folder("llama"): ["float32", "18"], lm_folder("gpt2"): ["float32", "12"]}
    main(["cache", str(folder), "--clear", "true"])
    left = sorted(path for path in folder.rglob("*") if path.is_file())
    assert left == sorted([own, folder / "mine.safetensors"])
    with pytest.raises(ConfigError, match="there is no folder"):
        main(["cache", str(tmp_path / "nowhere")])


def test_the_command_shows_and_clears_what_it_cannot_name(
    load: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load().joint_logits(prompts(), DOMAINS)
    load("gpt2").joint_logits(prompts()[:2], DOMAINS[:2])
    damaged, removed = (path / "lm.json" for path in sorted((tmp_path / "states").iterdir()))
    damaged.write_text("{")
    removed.unlink()
    main(["cache", str(tmp_path / "states")])
    shown = [line.split()[:3] for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert sorted(shown) == [["unknown", "unknown", "12"], ["unknown", "unknown", "18"]]
    main(["cache", str(tmp_path / "states"), "--clear", "true"])
    assert "removed the states of LMs: 2" in capsys.readouterr().out
    assert not list((tmp_path / "states").iterdir())
