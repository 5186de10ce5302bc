"""A sharded LM gives the logits of the whole one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from pandas import read_csv
from pandas.testing import assert_frame_equal
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from lincorr_lightning import LanguageModel
from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.lm.batching import MicroBatches
from lincorr_lightning.lm.sharding_strategy import check_strategy
from lincorr_lightning.study import Study
from tests.launching import launch, run_in_two
from tests.nearness import causal_nearness
from tests.small_runs import results_of
from tests.toys import assert_same, save_toy_lm

KEEPING = (
    "--trainer.enable_checkpointing=true --trainer.callbacks+=ModelCheckpoint "
    "--trainer.callbacks.filename={step} --trainer.callbacks.every_n_train_steps=1 "
    "--trainer.callbacks.save_top_k=-1"
).split()
"""Options that keep the checkpoint of every step."""
PROMPTS = [f"name{i} lives in the city of" for i in range(9)] + ["name3", "a name4 lives"]
TOKENS = list(range(5, 40))
SHARDED = "--config trainer/fsdp.yaml --trainer.devices=2 --trainer.accelerator=cpu".split()


def read(rank: int, folder: str, out: str) -> None:
    """Rank 0 reads five times as much as rank 1."""
    distributed.init_process_group("gloo")
    lm = LanguageModel.from_pretrained(folder, tokens_per_forward=16)
    whole = lm.fingerprint
    lm.shard(init_device_mesh("cpu", (2,)))
    assert lm.fingerprint == whole
    held = sum(p.to_local().numel() for p in lm.model.parameters())
    mine = PROMPTS[: 10 if rank == 0 else 2]
    logits = lm.domain_logits(mine, TOKENS)
    # The prompts of one rank have common prefixes, those of the other have none.
    joint = lm.joint_logits([mine, mine] if rank == 0 else [mine, PROMPTS[-2:]], [TOKENS, TOKENS])
    words = lm.nearest_words()
    assert words is not None
    near = words.weights(TOKENS[:20], TOKENS[20:])
    found = {"held": held, "logits": logits, "joint": joint, "near": near}
    torch.save(found, f"{out}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_whole_lm(tmp_path: Path, tied: bool) -> None:
    folder = str(save_toy_lm(tmp_path / "lm", architecture="llama-tied" if tied else "llama"))
    whole = LanguageModel.from_pretrained(folder)
    launch(2, read, folder, str(tmp_path))
    n = sum(p.numel() for p in whole.model.parameters())
    head = whole.model.get_output_embeddings().weight.detach().numpy()
    near = torch.from_numpy(causal_nearness(head, TOKENS[:20], TOKENS[20:]))
    for rank, mine in enumerate((PROMPTS[:10], PROMPTS[:2])):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["held"] < 0.6 * n
        torch.testing.assert_close(found["near"], near)
        torch.testing.assert_close(found["logits"], whole.domain_logits(mine, TOKENS))
        others = mine if rank == 0 else PROMPTS[-2:]
        want = torch.cat([whole.domain_logits(p, TOKENS) for p in (mine, others)], 1)
        torch.testing.assert_close(found["joint"], want, atol=1e-4, rtol=1e-4)


def program(*arguments: str) -> None:
    done = run_in_two(*arguments, *SHARDED)
    assert done.returncode == 0, done.stderr[-3000:]


def diverge(rank: int, folder: str, out: str) -> None:
    """A weight of rank 1 becomes infinite."""
    distributed.init_process_group("gloo")
    lm = LanguageModel.from_pretrained(folder)
    lm.model.requires_grad_(True)
    lm.shard(init_device_mesh("cpu", (2,)))
    norms = [Study.trained_norm(lm.model)]
    if rank:
        local = next(p.to_local() for p in lm.model.parameters() if p.to_local().numel())
        with torch.no_grad():
            local.flatten()[0] = torch.inf
    norms.append(Study.trained_norm(lm.model))
    torch.save(torch.stack(norms), f"{out}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_all_ranks_see_that_weights_of_one_diverged(small_lm: str, tmp_path: Path) -> None:
    launch(2, diverge, small_lm, str(tmp_path))
    whole = LanguageModel.from_pretrained(small_lm).model
    expected = torch.cat([p.flatten() for p in whole.parameters()]).double().norm()
    for rank in (0, 1):
        before, after = torch.load(tmp_path / f"{rank}.pt")
        assert float(before) == pytest.approx(float(expected), rel=1e-4)
        assert not after.isfinite()


@pytest.mark.slow
def test_probe_and_its_checkpoint(small_lm: str, tmp_path: Path) -> None:
    common = (
        "--config linear_probe.yaml --model.knowledge=[city,country] --data.n_subjects=181 "
        "--data.batch_size=20 --model.require_reference=[] --trainer.enable_progress_bar=false "
        f"--trainer.enable_checkpointing=true --model.lm.name_or_path={small_lm}"
    ).split()
    program("fit", *common, f"--trainer.default_root_dir={tmp_path / 'two'}")
    main(["fit", *common, f"--trainer.default_root_dir={tmp_path / 'one'}"])
    (checkpoint,) = (tmp_path / "two").rglob("*.ckpt")
    again = [f"--trainer.default_root_dir={tmp_path / 'again'}", f"--ckpt_path={checkpoint}"]
    main(["test", *common, *again])
    one, two, scored = (results_of(tmp_path / name)["pairs"] for name in ("one", "two", "again"))
    assert_same(two, one, 5e-7)
    for key in ("label_mean", "instance_mean", "control_label_mean"):
        assert_same([pair[key] for pair in scored], [pair[key] for pair in one], 5e-7)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.nightly)])
def test_joint_edits(small_lm: str, tmp_path: Path, method: str) -> None:
    common = (
        f"fit --config source_finetune.yaml --model.lm.name_or_path={small_lm} "
        f"--model.protocol=joint --model.method={method} --data.n_edits=7 --trainer.max_epochs=2 "
        "--trainer.enable_progress_bar=false --trainer.callbacks+=Forecast"
    ).split() + KEEPING

    def at(name: str, n_edits: int) -> list[str]:
        return [
            f"--model.edits_per_step={n_edits}",
            f"--trainer.default_root_dir={tmp_path / name}",
        ]

    def after_an_epoch(name: str) -> str:
        (path,) = (tmp_path / name).rglob("step=2.ckpt")
        return f"--ckpt_path={path}"

    program(*common, *at("two", 2))
    main([*common, *at("one", 4)])
    # Each goes on with what the other has left.
    program(*common, *at("two of one", 2), after_an_epoch("one"))
    main([*common, *at("one of two", 4), after_an_epoch("two")])
    one, *others = (results_of(tmp_path / x) for x in ("one", "two", "two of one", "one of two"))
    for other in others:
        assert_same(other, one, 5e-4)
    tables = [read_csv(next((tmp_path / x).rglob("forecast.csv"))) for x in ("one", "two")]
    assert len(tables[0]) == 7
    assert_frame_equal(*tables, rtol=0, atol=1e-6)
    # The checkpoint of a sharded LM is consolidated on rank 0.
    want, *found = (
        torch.load(next((tmp_path / name).rglob("step=4.ckpt")), weights_only=False)["state_dict"]
        for name in ("one", "two", "two of one", "one of two")
    )
    for state in found:
        assert state.keys() == want.keys()
        for key in want:
            torch.testing.assert_close(state[key], want[key], atol=1e-4, rtol=1e-3)


def test_an_lm_without_layers_is_refused(small_lm: str) -> None:
    lm = LanguageModel.from_pretrained(small_lm)
    lm.model._no_split_modules = None
    with pytest.raises(LanguageModelError, match="which of its modules are layers"):
        lm.shard(SimpleNamespace(mesh_dim_names=None))  # type: ignore[arg-type]


def test_rows_of_one_length_are_not_padded() -> None:
    ran: list[list[int]] = []
    MicroBatches(20).run([5, 7, 5, 7, 7, 5], "cpu", ran.append, equal_lengths=True)
    assert ran == [[1, 3], [4], [0, 2, 5]]


def test_unsupported_strategy() -> None:
    with pytest.raises(ConfigError, match="FSDPStrategy"):
        check_strategy(SimpleNamespace(strategy=FSDPStrategy()))
