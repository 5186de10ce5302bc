"""Tensor parallelism gives what one process computes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer

from lincorr_lightning import LanguageModel
from lincorr_lightning.cli import main
from lincorr_lightning.data.loaders import make_loader
from lincorr_lightning.data.subjects import SubjectBatch
from lincorr_lightning.distributed import DataShard
from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.finetune.adapters import AdapterSettings, add_adapter
from lincorr_lightning.finetune.forecasts import EditForecast
from lincorr_lightning.finetune.module import SourceFinetune
from lincorr_lightning.lm.sharding import split_matrices
from tests.launching import launch
from tests.processes.test_sharded import KEEPING
from tests.processes.test_two_processes import assert_same_tables
from tests.small_runs import QUIET, results_of
from tests.toys import assert_same, toy_model

PROMPTS = [f"name{i} lives in the city of" for i in range(5)] + ["name3", "a name4 lives"]
TOKENS = list(range(5, 40))
SMALL: dict[str, Any] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
# Each style of plan: by inputs and outputs, biases, norms of heads, gathered outputs.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen3": {"tie_word_embeddings": True},
    "olmo2": {},
}
CASES = [("llama", False), ("llama", True), ("qwen3", False), ("olmo2", True)]
SPLIT = (
    "--config trainer/tensor_parallel.yaml --trainer.accelerator=cpu --trainer.devices=2".split()
)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def answers(lm: LanguageModel) -> list[Tensor]:
    """Without and with prefix sharing, as training and scoring read."""
    found = [lm.domain_logits(PROMPTS, TOKENS)]
    for share in (True, False):
        object.__setattr__(lm.config, "share_prefixes", share)
        with torch.inference_mode():
            found.append(lm.joint_logits([PROMPTS, PROMPTS[::-1]], [TOKENS, TOKENS[:7]]))
    return found


def gradients(lm: LanguageModel) -> dict[str, Tensor]:
    ids, mask = lm.pad(lm.rows(PROMPTS))
    logits = lm.model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    (logits[..., 7] * mask).sum().neg().backward()
    trained = {n: p for n, p in lm.model.named_parameters() if p.requires_grad}
    found = {n: whole(p.grad).clone() for n, p in trained.items() if p.grad is not None}
    assert found.keys() == trained.keys()
    found["norm"] = whole(nn.utils.clip_grad_norm_(trained.values(), 0.5))
    # As on a GPU; the large epsilon keeps tiny gradients from being blown up to whole steps.
    torch.optim.AdamW(trained.values(), lr=1.0, eps=1.0, foreach=True).step()
    return found | {f"{n} updated": whole(p.detach()).clone() for n, p in trained.items()}


def check_lm(folder: Path, mesh: DeviceMesh, adapter: bool) -> None:
    lm, split = (LanguageModel.from_pretrained(str(folder)) for _ in range(2))
    for one in (lm, split):
        if not adapter:
            one.model.requires_grad_(True)
            continue
        add_adapter(one.model, AdapterSettings(rank=2))
        stream = torch.Generator().manual_seed(1)
        for name, parameter in one.model.named_parameters():
            if "lora_B" in name:  # of zeros, the other half would have no gradient
                nn.init.normal_(parameter, generator=stream)
    split.shard(mesh)
    assert split.fingerprint == lm.fingerprint
    for name, parameter in split.model.named_parameters():
        assert isinstance(parameter, DTensor)
        held = parameter.to_local().untyped_storage().nbytes()
        if name.endswith(("proj.weight", "base_layer.weight")):
            assert held == parameter.numel() * 4 / mesh.size(), name
    near = [one.nearest_words() for one in (split, lm)]
    nearness = [words.weights(TOKENS[:7], TOKENS[7:]) for words in near if words is not None]
    assert len(nearness) != 1
    torch.testing.assert_close(*nearness or (0, 0))
    for ours, theirs in zip(answers(split), answers(lm), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    ours, theirs = gradients(split), gradients(lm)
    assert ours.keys() == theirs.keys()
    for name in ours:
        off = (ours[name] - theirs[name]).norm() / theirs[name].norm()
        assert off < 1e-3, (folder, name, off)


def work(rank: int, shape: tuple[int, int], root: Path, *commands: list[str]) -> None:
    """One process."""
    del rank
    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    # Of two ranks, one with adapters and one with a tied head; four ranks read them all nightly.
    for family, adapter in CASES[1:3] if shape == (1, 2) else CASES:
        check_lm(root / family, mesh, adapter)
    for command in commands:
        main(command)
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def lms(small_lm: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of an LM of each family."""
    root = tmp_path_factory.mktemp("families")
    tokenizer = AutoTokenizer.from_pretrained(small_lm)
    for name, options in FAMILIES.items():
        toy_model(name, len(tokenizer), std=0.4, **SMALL | options).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


@pytest.mark.nightly
def test_split_matrices_are_sharded_too(lms: Path) -> None:
    """Two data shards of two ranks: matrices are split over ranks, then sharded."""
    launch(4, work, (2, 2), lms)


@pytest.mark.slow
def test_matrices_are_split(lms: Path) -> None:
    """Logits and gradients of LMs whose matrices two ranks split are those of the whole LMs."""
    launch(2, work, (1, 2), lms)


@pytest.mark.nightly
def test_probe_and_joint_edits(small_lm: str, lms: Path, tmp_path: Path) -> None:
    """Also resumed in the middle of an epoch at another world size."""
    options = (
        f"--config linear_probe.yaml --model.lm.name_or_path={small_lm} --data.n_subjects=181 "
        "--model.knowledge=[city,country] --model.require_reference=[] --data.batch_size=20 "
        "--model.ridge=auto"
    )
    probe = [*options.split(), *QUIET]
    options = (
        "fit --config source_finetune.yaml --model.protocol=joint --data.n_edits=7 "
        "--model.edits_per_step=4 --trainer.max_epochs=2 --trainer.gradient_clip_val=0.5"
    )
    edits = [*options.split(), *QUIET, *KEEPING]
    full = [*edits, f"--model.lm.name_or_path={small_lm}"]
    lora = [*edits, f"--model.lm.name_or_path={lms / 'llama'}", "--model.method=lora"]

    def at(name: str) -> str:
        return f"--trainer.default_root_dir={tmp_path / name}"

    def checkpoint(name: str, step: int) -> Path:
        (found,) = (tmp_path / name).rglob(f"step={step}.ckpt")
        return found

    def run(where: str, *more: str) -> list[list[str]]:
        return [
            ["fit", *probe, *more, at(f"probe {where}")],
            [*full, *more, at(f"full {where}")],
            [*lora, *more, at(f"lora {where}")],
        ]

    def resume(name: str, command: list[str], other: str, *more: str) -> list[str]:
        path = checkpoint(f"{name} {other}", 3)
        return [*command, *more, at(f"{name} of {other}"), f"--ckpt_path={path}"]

    for command in run("one"):
        main(command)
    launch(2, work, (1, 2), lms, *run("two", *SPLIT), resume("lora", lora, "one", *SPLIT))
    main(resume("full", full, "two"))

    one = results_of(tmp_path / "probe one")
    assert one["n_fit"] + one["n_test"] == 181
    assert_same(results_of(tmp_path / "probe two"), one, 1e-6)
    assert_same_tables((tmp_path / "probe one", tmp_path / "probe two"), 1e-6)
    for name, others in (("full", ("two", "of two")), ("lora", ("two", "of one"))):
        one = results_of(tmp_path / f"{name} one")
        assert one["n_steps"] == 4
        assert_same(results_of(tmp_path / f"{name} two"), one, 1e-3)
        assert_same_tables((tmp_path / f"{name} one", tmp_path / f"{name} two"), 1e-3)
        want = torch.load(checkpoint(f"{name} one", 4), weights_only=False)["state_dict"]
        for other in others:
            found = torch.load(checkpoint(f"{name} {other}", 4), weights_only=False)["state_dict"]
            assert found.keys() == want.keys()
            for key in want:
                assert type(found[key]) is Tensor
                torch.testing.assert_close(found[key], want[key], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("counts", [True, False])
def test_ranks_that_read_the_same_count_once(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = DataShard(1, 2, counts)
    monkeypatch.setattr("lincorr_lightning.data.loaders.data_shard", lambda _: shard)
    batches = [SubjectBatch([str(i)], i, "fit") for i in range(5)]
    read = [(batch.first, batch.is_padding) for batch in make_loader(batches, None)]
    assert read == [(1, not counts), (3, not counts), (0, True)]


def fake_mesh(n: int) -> Any:
    return SimpleNamespace(size=lambda: n)


@pytest.mark.parametrize(
    ("family", "options", "n", "message"),
    [
        ("gpt2", {}, 2, r"GPT2LMHeadModel\).*transformers has no plan"),
        ("mixtral", {"num_local_experts": 2}, 2, "moe_tp_experts.* is not supported"),
        ("llama", {}, 4, "num_key_value_heads, 2, is not divisible by 4"),
        ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 1}, 2, "num_attention_heads"),
        ("llama", {"intermediate_size": 47}, 2, r"mlp\.gate_proj, 47, is not divisible by 2"),
    ],
)
def test_lms_that_cannot_be_split(
    family: str, options: dict[str, Any], n: int, message: str
) -> None:
    model = toy_model(family, **SMALL | options)
    with pytest.raises(LanguageModelError, match=message) as refusal:
        split_matrices(model, fake_mesh(n))
    assert "trainer/fsdp.yaml" in str(refusal.value)


@pytest.mark.parametrize(
    ("make", "message"), [(EditForecast, "EditForecast"), (SourceFinetune, "model.protocol joint")]
)
def test_studies_that_need_the_whole_lm(make: Any, message: str, tmp_path: Path) -> None:
    module = make()
    module.trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=ModelParallelStrategy(1, 1),
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ConfigError, match=message) as refusal:
        module.setup("fit")
    assert "trainer/ddp.yaml" in str(refusal.value)
