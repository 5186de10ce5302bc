"""Two processes give the results of one: nothing is counted twice, lost or written twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lincorr_lightning.cli import main
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.lm.language_model import LanguageModel
from tests.launching import run_in_two
from tests.reproduce.test_reproduce import write_config

pytestmark = pytest.mark.slow

# Keys that depend on how a run was made.
HOW = {"seconds", "settings", "versions", "model"}
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]


def run_broken(
    code: str, study: str, lm: str, folder: Path, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a study of this code with the program, which starts the other process itself."""
    (folder / "study.py").write_text(code)
    return subprocess.run(  # which waits for four minutes at most
        [
            sys.executable,
            "-m",
            "lincorr_lightning",
            "fit",
            "--config",
            "linear_probe.yaml",
            "--config",
            "trainer/ddp_cpu.yaml",
            "--model",
            f"study.{study}",
            f"--model.lm.name_or_path={lm}",
            "--model.knowledge=[city,country]",
            "--model.require_reference=[]",
            "--data.n_subjects=200",
            "--data.batch_size=20",
            f"--trainer.default_root_dir={folder}",
            *QUIET,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environment},
    )


def check_log(folder: Path) -> None:
    """One event file, and no point twice."""
    (events,) = folder.rglob("events.out.tfevents.*")
    log = EventAccumulator(str(events), size_guidance={"scalars": 0})
    log.Reload()
    tags = log.Tags()["scalars"]
    for tag in tags:
        steps = [point.step for point in log.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag


def numbers(folder: Path) -> dict[str, Any]:
    """What the only run in a folder found."""
    (path,) = folder.rglob("results.json")
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: value for name, value in found.items() if name not in HOW}


def assert_close(ours: Any, theirs: Any, tolerance: float, where: str = "") -> None:
    """Equal, floats to a tolerance, at any depth."""
    assert type(ours) is type(theirs), (where, ours, theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_close(ours[key], theirs[key], tolerance, f"{where}/{key}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), where
        for place, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_close(*pair, tolerance, f"{where}/{place}")
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=tolerance), where
    else:
        assert ours == theirs, where


@pytest.fixture
def one_and_two(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Run a command on one process and on two; check the files of the latter."""

    def run(
        *common: str, one: tuple[str, ...] = (), two: tuple[str, ...] = ()
    ) -> tuple[Path, Path]:
        folders = tmp_path / "one", tmp_path / "two"
        overlays = [], ["--config", "trainer/ddp_cpu.yaml"]
        for folder, overlay, own in zip(folders, overlays, (one, two), strict=True):
            root = f"--trainer.default_root_dir={folder}"
            if not overlay:
                main([*common, *own, root, *QUIET])
                continue
            done = run_in_two(*common, *overlay, *own, root, *QUIET)
            assert done.returncode == 0, done.stderr[-3000:]
        check_log(folders[1])
        names = [
            sorted(p.name for p in f.rglob("*.*") if "tfevents" not in p.name) for f in folders
        ]
        assert names[0] == names[1]
        return folders

    return run


def tables(folders: tuple[Path, Path], tolerance: float) -> None:
    """Every table of two runs is the same."""

    def cell(text: str) -> float | str:
        try:
            return float(text)
        except ValueError:
            return text

    names = {path.name for path in folders[0].rglob("tables/*.csv")}
    assert names
    for name in names:
        texts = [next(folder.rglob(name)).read_text().splitlines() for folder in folders]
        assert_close(
            *([list(map(cell, line.split(","))) for line in lines] for lines in texts), tolerance
        )


def test_probe(small_lm, one_and_two):
    """Five batches a half: at the third step the second process has none."""
    folders = one_and_two(
        "fit",
        "--config",
        "linear_probe.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--model.knowledge=[city,country]",
        "--model.require_reference=[]",
        "--data.n_subjects=181",
        "--data.batch_size=20",
        "--model.ridge=auto",
    )
    one, two = map(numbers, folders)
    assert one["n_fit"] + one["n_test"] == 181
    assert_close(one, two, 1e-6)
    tables(folders, 1e-6)


def test_edits_made_elsewhere(small_lm, make_lm, one_and_two, tmp_path):
    """Each process reads all edits; their results are written once."""
    edited = make_lm(tmp_path / "edited", seed=1)
    edits = tmp_path / "edits.csv"
    edits.write_text("subject,answer\nname1,Paris\nname2,Tokyo\nname3,Rome\nname4,Atlantis\n")
    folders = one_and_two(
        "test",
        "--config",
        "edited_lm.yaml",
        f"--model.before.name_or_path={small_lm}",
        f"--model.lm.name_or_path={edited}",
        f"--data.edits_file={edits}",
        "--model.n_neighbours=5",
        "--model.n_subjects=100",
    )
    one, two = map(numbers, folders)
    assert one["n_edits"] == 3 and sum(one["skipped"].values()) == 1
    assert_close(one, two, 1e-6)
    tables(folders, 1e-6)


def test_forecasts_of_fewer_batches_than_processes(small_lm, one_and_two):
    folders = one_and_two(
        "predict",
        "--config",
        "forecast.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--data.n_edits=3",
        "--data.batch_size=8",
    )
    one, two = map(numbers, folders)
    assert one["n_edits"] == 3
    assert_close(one, two, 1e-6)
    tables(folders, 1e-6)


def test_probe_in_several_wordings(small_lm, one_and_two, tmp_path):
    path = tmp_path / "towns.yaml"
    path.write_text(
        "version: 1\nknowledge:\n  town: {family: attribute, language: en, answers: city,\n"
        '    templates: ["{} lives in the city of", "{} was born in the city of"]}\n'
    )
    folders = one_and_two(
        "fit",
        "--config",
        "linear_probe.yaml",
        f"--model.lm.name_or_path={small_lm}",
        f"--model.knowledge_files=[{path}]",
        "--model.knowledge=[town,country]",
        "--model.require_reference=[town->country]",
        "--data.n_subjects=181",
        "--data.batch_size=20",
        "--model.ridge=1.0",
    )
    one, two = map(numbers, folders)
    assert [pair["templates"]["n"] for pair in one["pairs"]] == [2, 2]
    assert_close(one, two, 1e-6)
    tables(folders, 1e-6)


def test_gradient_descent_of_a_probe(small_lm, one_and_two):
    """80 subjects make four batches of 20, and two steps of 40, for one process as for two."""
    folders = one_and_two(
        "fit",
        "--config",
        "linear_probe.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--model.knowledge=[city,country]",
        "--model.require_reference=[]",
        "--data.n_subjects=160",
        "--model.solver=sgd",
        "--model.ridge=5.0",
        "--trainer.max_epochs=8",
        "--trainer.check_val_every_n_epoch=8",
        "--trainer.log_every_n_steps=5",
        one=("--data.batch_size=40",),
        two=("--data.batch_size=20",),
    )
    one, two = map(numbers, folders)
    for found in (one, two):
        for pair in found["pairs"]:
            # It pairs the subjects of a batch, and batches are those of a process.
            assert pair.pop("permuted_label_mean") is not None
    assert one["n_fit"] == 80
    assert_close(one, two, 1e-6)
    maps, losses = [], []
    for folder in folders:
        (path,) = folder.rglob("linear_map.safetensors")
        maps.append(load_file(path))
        (events,) = folder.rglob("events.out.tfevents.*")
        log = EventAccumulator(str(events), size_guidance={"scalars": 0})
        log.Reload()
        losses.append([point.value for point in log.Scalars("train/loss")])
    assert maps[0].keys() == maps[1].keys()
    for name, weight in maps[0].items():
        assert torch.allclose(weight, maps[1][name], rtol=1e-5, atol=1e-6), name
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_pretraining(one_and_two):
    """The same statements in a step: one process takes 30 of them, two take 15 each.

    They do not divide: the last step has fewer, and one process then has none at all.
    """
    folders = one_and_two(
        "fit",
        "--config",
        "pretraining.yaml",
        "--data.world.n_people=31",
        "--data.world.nicknames=false",
        "--data.world.letters=false",
        "--data.world.numbered=false",
        "--data.world.towns_per_country=0",
        "--data.knowledge=[city,country]",
        "--data.repeats={}",
        "--data.mixup_fraction=0.7",
        "--model.size.hidden_size=32",
        "--model.size.intermediate_size=48",
        "--model.size.n_heads=2",
        "--trainer.max_epochs=3",
        "--model.mixing_epochs=1",
        "--trainer.log_every_n_steps=1",
        one=("--data.batch_size=30",),
        two=("--data.batch_size=15",),
    )
    one, two = map(numbers, folders)
    fingerprints = [found["lm"].pop("fingerprint") for found in (one, two)]
    assert fingerprints[0]["tokenizer"] == fingerprints[1]["tokenizer"]  # weights are rounded
    for found in (one, two):
        assert Path(found["lm"].pop("name_or_path")).name == "model"
    assert_close(one, two, 1e-3)
    assert one["n_steps"] == 9


def test_joint_edits_under_every_callback(small_lm, one_and_two, tmp_path):
    """Seven edits, four a step: two a process, and one and two at the second."""
    texts = tmp_path / "watch.jsonl"
    texts.write_text(json.dumps({"text": " ".join(f"name{i}" for i in range(14))}))
    folders = one_and_two(
        "fit",
        "--config",
        "source_finetune.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--model.protocol=joint",
        "--data.n_edits=7",
        "--trainer.max_epochs=2",
        "--trainer.callbacks+=Resilience",
        "--trainer.callbacks.every_n_steps=2",
        "--trainer.callbacks+=TokenGeometryMonitor",
        f"--trainer.callbacks.texts={texts}",
        "--trainer.callbacks.n_tokens=12",
        one=("--model.edits_per_step=4",),
        two=("--model.edits_per_step=2",),
    )
    one, two = map(numbers, folders)
    assert one["n_steps"] == 4
    assert_close(one, two, 1e-3)
    tables(folders, 1e-3)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_independent_edits(small_lm, one_and_two, method):
    """Five edits, or three groups of them: one process has no edit in the last round."""
    folders = one_and_two(
        "fit",
        "--config",
        "source_finetune.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--model.steps_per_edit=3",
        "--data.n_edits=5",
        f"--model.method={method}",
        "--model.edits_per_step=2",
    )
    one, two = map(numbers, folders)
    assert one["n_steps"] == (15 if method == "full" else 9)
    # The LM reads other prompts in one batch, which changes the rounding.
    assert_close(one, two, 1e-4)
    tables(folders, 1e-3)


def test_a_reproduction_of_several_runs(small_lm, tmp_path):
    """The other process runs the whole plan, too; the folder is the first one's."""
    found = []
    for name, overlays in (("one", []), ("two", ["trainer/ddp_cpu.yaml"])):
        config = write_config(tmp_path, overlays=overlays)
        command = [
            "reproduce",
            "--config",
            str(config),
            "--lm",
            small_lm,
            "--only=table6,figure10",
            "--output",
            str(tmp_path / name),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "lincorr_lightning", *command],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("Page: ") == 1
        found.append(
            {
                run: numbers(folder)
                for folder in (tmp_path / name / "runs").glob("*/*")
                if folder.is_dir()
                for run in [folder.name]
            }
        )
    one, two = found
    assert one.keys() == two.keys() == {"probe_attribute", "edits_city-country"}
    for ours, theirs in zip(*(run["probe_attribute"]["pairs"] for run in found), strict=True):
        for key in ("source", "target", "label_mean", "control_label_mean", "precision"):
            assert_close(ours[key], theirs[key], 1e-3, key)
    for key in ("n_edits", "generalized", "hallucinated", "source_learned"):
        assert one["edits_city-country"][key] == two["edits_city-country"][key]


# -- what goes wrong -------------------------------------------------------------------------------

BROKEN = """
import os
from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.probe import LinearProbe

class Broken(LinearProbe):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.trainer.global_rank == int(os.environ["BROKEN"]):
            raise NonFiniteError("what broke")
        return super().training_step(batch, batch_idx)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_fails_ends_the_run(small_lm, tmp_path, rank):
    done = run_broken(BROKEN, "Broken", small_lm, tmp_path, BROKEN=str(rank))
    assert done.returncode not in (0, None)
    assert "lincorr: error: what broke" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("results.json"))


KILLED = """
import os, signal, threading
from pathlib import Path
from lincorr_lightning.probe import LinearProbe

class Killed(LinearProbe):
    def training_step(self, batch, batch_idx):
        ready = Path(os.environ["READY"])
        if self.trainer.global_rank == 1:
            ready.touch()
            threading.Event().wait()  # as in a collective that nobody answers
        while not ready.exists():
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_end_when_the_first_is_killed(small_lm, tmp_path):
    """Both have the same stderr: that it comes to its end says that both are gone."""
    done = run_broken(KILLED, "Killed", small_lm, tmp_path, READY=str(tmp_path / "ready"))
    assert done.returncode == -signal.SIGKILL


def test_nonfinite_weights_are_reported_with_the_edits_of_both_ranks(small_lm, tmp_path):
    done = run_in_two(
        "fit",
        "--config",
        "source_finetune.yaml",
        "--config",
        "trainer/ddp_cpu.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--model.protocol=joint",
        "--data.n_edits=2",
        "--model.edits_per_step=1",
        "--model.learning_rate=1e37",
        f"--trainer.default_root_dir={tmp_path}",
        *QUIET,
    )
    assert done.returncode not in (0, None)
    lines = [line for line in done.stderr.splitlines() if "after the update a weight" in line]
    data = EditsDataModule(LanguageModel.from_pretrained(small_lm), n_edits=2)
    assert lines, done.stderr[-3000:]
    for edit in data.resolve().edits:
        assert all(f"{edit.subject!r} -> {edit.answer!r}" in line for line in lines), lines


def test_more_processes_than_edits(small_lm, tmp_path):
    done = run_in_two(
        "fit",
        "--config",
        "source_finetune.yaml",
        "--config",
        "trainer/ddp_cpu.yaml",
        f"--model.lm.name_or_path={small_lm}",
        "--data.n_edits=1",
        f"--trainer.default_root_dir={tmp_path}",
        *QUIET,
    )
    assert done.returncode not in (0, None)
    assert "2 processes cannot share 1 edits" in done.stderr
