"""Runs that are killed and resumed, and runs on several ranks, through the program."""

import json
import os
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.module import SourceFinetune
from tests.launching import run_alone, run_in_two


def killed(n_batches: int, arguments: list[str]) -> None:
    """Run the program, and kill it when one batch more is to be trained."""
    step, seen = SourceFinetune.training_step, []

    def training_step(self, batch, batch_idx):
        seen.append(batch)
        if len(seen) > n_batches:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch, batch_idx)

    SourceFinetune.training_step = training_step
    main(arguments)


NOT_COMPARED = {"seconds", "settings", "versions"}


def command(lm: str, root: Path, *more: str) -> list[str]:
    return [
        "fit", "--config", "source_finetune.yaml", f"--model.lm.name_or_path={lm}",
        f"--trainer.default_root_dir={root}", "--trainer.enable_progress_bar=false",
        "--model.forecast=false", "--model.steps_per_edit=3", *more,
    ]  # fmt: skip


def checkpoints(root: Path) -> list[str]:
    return [
        "--trainer.enable_checkpointing=true", "--trainer.callbacks+=ModelCheckpoint",
        f"--trainer.callbacks.dirpath={root}", "--trainer.callbacks.filename={step}",
        "--trainer.callbacks.every_n_train_steps=4", "--trainer.callbacks.save_top_k=-1",
    ]  # fmt: skip


def results_of(root: Path) -> dict:
    (path,) = root.rglob("results.json")
    return json.loads(path.read_text())


def without(results: dict, names: set[str]) -> dict:
    return {name: value for name, value in results.items() if name not in names}


PROTOCOLS = {
    # Three batches an epoch; killed in the fourth epoch, at its second batch.
    "joint": ["--model.protocol=joint", "--trainer.max_epochs=4", "--model.edits_per_step=4",
              "--data.n_edits=11", "--model.forecast=true"],
    # Three steps an edit; killed in the middle of the fourth edit.
    "independent": ["--data.n_edits=5"],
    "stacked": ["--model.method=lora", "--model.edits_per_step=2", "--data.n_edits=9",
                "--model.learning_rate=0.03"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_killed_run_ends_as_an_uninterrupted_one(small_lm, tmp_path, protocol):
    options = PROTOCOLS[protocol]

    def arguments(name):
        root = tmp_path / name
        return command(small_lm, root, *options, *checkpoints(root / "kept"))

    main(arguments("whole"))
    assert run_alone(killed, 10, arguments("broken")) == -signal.SIGKILL
    kept = sorted(path.name for path in (tmp_path / "broken" / "kept").iterdir())
    assert kept == ["step=4.ckpt", "step=8.ckpt"]
    assert not list((tmp_path / "broken").rglob("results.json"))

    last = tmp_path / "broken" / "kept" / "step=8.ckpt"
    main([*arguments("resumed"), f"--ckpt_path={last}"])
    whole, resumed = (
        torch.load(tmp_path / name / "kept" / "step=12.ckpt", weights_only=True)
        for name in ("whole", "resumed")
    )
    assert whole["state_dict"].keys() == resumed["state_dict"].keys()
    for name, value in whole["state_dict"].items():
        assert torch.equal(value, resumed["state_dict"][name]), name
    moments = [c["optimizer_states"][0]["state"] for c in (whole, resumed)]
    assert moments[0].keys() == moments[1].keys()
    for i, state in moments[0].items():
        assert all(torch.equal(value, moments[1][i][name]) for name, value in state.items())

    ours, theirs = results_of(tmp_path / "resumed"), results_of(tmp_path / "whole")
    assert without(ours, NOT_COMPARED) == without(theirs, NOT_COMPARED)
    cases = [
        next((tmp_path / name).rglob("cases.csv")).read_text() for name in ("resumed", "whole")
    ]
    assert cases[0] == cases[1]


def test_a_checkpoint_of_another_lm_or_adapter_is_refused(finetune, make_lm, tmp_path):
    options = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, "end")]}
    finetune(trainer=options, protocol="joint", method="lora")
    options = {"ckpt_path": tmp_path / "end.ckpt", "max_epochs": 2}
    other = str(make_lm(tmp_path / "other", seed=7))
    for changed, message in (
        ({"lm": other}, "whose weights differs from that of"),
        ({"adapter": AdapterSettings(rank=3)}, r"written with model.adapter .*'rank': 8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            finetune(trainer=dict(options), protocol="joint", method="lora", **changed)


def test_independent_edits_on_several_ranks_are_not_resumed(finetune):
    """The checkpoint has the edits of rank 0 alone: the others would be lost silently."""
    run = finetune()
    state = run.module.checkpoint_state()
    assert state["n_ranks"] == 1
    run.module.restore(state)
    state["n_ranks"] = 2
    with pytest.raises(CheckpointError, match="2 ranks cannot be resumed"):
        run.module.restore(state)


# -- two processes -----------------------------------------------------------------------------


def two_processes(*arguments: str) -> None:
    done = run_in_two(*arguments, "--config", "trainer/ddp_cpu.yaml")
    assert done.returncode == 0, done.stderr[-3000:]


def assert_close(ours, theirs, rel):
    """Equal, floats to rounding, at any depth."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other, rel)
    else:
        assert ours == (pytest.approx(theirs, rel=rel, abs=rel) if type(ours) is float else theirs)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_processes_share_independent_edits(small_lm, tmp_path, method):
    """Five edits, or three groups of them: one process has no edit in the last round."""
    options = [
        "--data.n_edits=5", f"--model.method={method}", "--model.edits_per_step=2",
        "--model.forecast=true",
    ]  # fmt: skip
    main(command(small_lm, tmp_path / "one", *options))
    two_processes(*command(small_lm, tmp_path / "two", *options))
    one, two = results_of(tmp_path / "one"), results_of(tmp_path / "two")
    assert one["n_steps"] == two["n_steps"] == (15 if method == "full" else 9)
    # The LM reads other prompts in one batch, which changes the rounding.
    assert_close(without(one, NOT_COMPARED), without(two, NOT_COMPARED), 1e-4)
    for table in ("cases.csv", "edits.csv", "forecast.csv"):
        ours, theirs = (
            pd.read_csv(next((tmp_path / name).rglob(table))) for name in ("one", "two")
        )
        pd.testing.assert_frame_equal(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_two_processes_train_joint_edits_as_one(small_lm, tmp_path):
    """Of nine edits, four a step, one process has none at the third step."""
    common = ["--data.n_edits=9", "--model.protocol=joint", "--trainer.max_epochs=2",
              "--model.save_model=true", "--model.method=lora"]  # fmt: skip
    main(command(small_lm, tmp_path / "one", *common, "--model.edits_per_step=4"))
    two_processes(*command(small_lm, tmp_path / "two", *common, "--model.edits_per_step=2"))
    one, two = results_of(tmp_path / "one"), results_of(tmp_path / "two")
    assert one["n_steps"] == two["n_steps"] == 6
    from transformers import AutoModelForCausalLM

    models = [
        AutoModelForCausalLM.from_pretrained(next((tmp_path / name).rglob("model")))
        for name in ("one", "two")
    ]
    with torch.no_grad():
        ours, theirs = (model(torch.tensor([[3, 50, 4, 5, 6, 7]])).logits for model in models)
    torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-3)
    names = ("source_learned", "generalized", "hallucinated", "unchanged", "probability_reference")
    assert_close({n: one[n] for n in names}, {n: two[n] for n in names}, 1e-2)
