"""Two processes give the results of one: nothing is counted twice, lost or written twice."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from pandas import read_csv
from pandas.testing import assert_frame_equal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lincorr_lightning.cli import main
from lincorr_lightning.data.subjects import SubjectBatch
from lincorr_lightning.errors import NonFiniteError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.probe.module import LinearProbe
from tests.launching import run_in_two
from tests.small_runs import QUIET, SMALL_RUNS, results_of
from tests.toys import assert_same

pytestmark = pytest.mark.slow


def check_log(folder: Path) -> None:
    """One event file, and no point twice."""
    (events,) = folder.rglob("events.out.tfevents.*")
    log = EventAccumulator(str(events), size_guidance={"scalars": 0})
    log.Reload()
    tags = log.Tags()["scalars"]
    for tag in tags:
        steps = [point.step for point in log.Scalars(tag)]
        assert len(steps) == len(set(steps)), tag


def assert_same_tables(folders: tuple[Path, Path], tolerance: float) -> None:
    for name in {path.name for path in folders[0].rglob("tables/*.csv")}:
        one, two = (read_csv(next(folder.rglob(name))) for folder in folders)
        assert_frame_equal(one, two, rtol=tolerance, atol=tolerance)


class Case(NamedTuple):
    """Options of a run on one process and on two, and numbers that it must have."""

    common: str = ""
    one: str = ""
    two: str = ""
    holds: Mapping[str, int] = MappingProxyType({})
    tolerance: float = 1e-6


_WORLD = (
    "--data.n_people=31 --data.second_home_repeats=0 --data.knowledge=[city,country] "
    "--trainer.max_epochs=3 "
    "--trainer.check_val_every_n_epoch=50 --trainer.log_every_n_steps=1"
)
_CALLBACKS = (
    "--data.n_edits=7 --trainer.callbacks+=Resilience --trainer.callbacks.every_n_steps=2 "
    "--trainer.callbacks+=TokenGeometryMonitor --trainer.callbacks.n_tokens=12 "
    "--trainer.callbacks.texts={inputs}/texts.txt"
)
# Studies on one process and on two: what both have, what each has, and what results then hold.
CASES: dict[str, Case] = {
    # Five batches a half: at the third step the second process has none.
    "probe": Case("--data.n_subjects=181 --model.ridge=auto", holds={"n_fit": 90}),
    # Each process reads all edits; their results are written once.
    "edited LM": Case(holds={"n_edits": 4}),
    # The texts of a step do not divide.
    "ablation": Case("--data.n_new=13"),
    # Six batches of four prompts.
    "token geometry": Case("--data.batch_size=4"),
    # Fewer batches than processes.
    "forecast": Case("--data.n_edits=3 --data.batch_size=8", holds={"n_edits": 3}),
    # The same statements in a step. They do not divide: at the last, one process has none at all.
    "pretraining": Case(
        _WORLD, "--data.batch_size=30", "--data.batch_size=15", {"n_steps": 9}, tolerance=1e-3
    ),
    # Seven edits, four a step: two a process, and one and two at the second.
    "full, joint": Case(
        _CALLBACKS,
        "--model.edits_per_step=4",
        "--model.edits_per_step=2",
        {"n_steps": 4},
        tolerance=1e-3,
    ),
    # One process has no edit in the last round. The LM reads other prompts in one batch.
    "full, independent": Case(holds={"n_steps": 15}, tolerance=1e-3),
    "LoRA, independent": Case(holds={"n_steps": 9}, tolerance=1e-3),
}


@pytest.mark.parametrize(
    "study",
    [pytest.param(x, marks=pytest.mark.nightly if x[:4] == "LoRA" else ()) for x in CASES],
)
def test_two_processes_have_the_numbers_of_one(study: str, inputs: Path, tmp_path: Path) -> None:
    case, small = CASES[study], SMALL_RUNS[study]
    folders = tmp_path / "one", tmp_path / "two"
    one, two = (
        small.command(inputs, folder, *f"{case.common} {more}".format(inputs=inputs).split())
        for folder, more in zip(folders, (case.one, case.two), strict=True)
    )
    main(one)
    done = run_in_two(*two, "--config", "trainer/ddp_cpu.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    check_log(folders[1])
    names = [sorted(p.name for p in f.rglob("*.*") if "tfevents" not in p.name) for f in folders]
    assert names[0] == names[1]
    found, others = map(results_of, folders)
    if study == "pretraining":  # trains the LM, whose weights are rounded
        assert found["lm"].pop("fingerprint") and others["lm"].pop("fingerprint")
    assert found.items() >= case.holds.items()
    assert_same(found, others, case.tolerance)
    assert_same_tables(folders, case.tolerance)


def change_silu(rank: int) -> None:
    silu = torch.nn.functional.silu
    torch.nn.functional.silu = lambda x, inplace=False: silu(x) * 1.001


def test_cache_of_states(inputs: Path, tmp_path: Path) -> None:
    """Ranks discard what another LM computed, fill the cache together, and find all prompts."""
    states = str(tmp_path / "states")

    def command(name: str, *more: str) -> list[str]:
        options = f"--model.lm.state_cache={states}", "--data.n_subjects=60"
        return SMALL_RUNS["probe"].command(inputs, tmp_path / name, *options, *more)

    def run(name: str, prepare: Callable[[int], None] | None = None) -> str:
        done = run_in_two(*command(name, "--config", "trainer/ddp_cpu.yaml"), prepare=prepare)
        assert done.returncode == 0, done.stderr[-3000:]
        return str(done.stderr)

    main(command("first"))
    all_found = rf"(?m)^(\d+) of \1 prompts of {inputs / 'lm'} were in {states}$"
    log = run("changed", change_silu)
    assert not re.search(all_found, log) and "Discarding" in log
    assert results_of(tmp_path / "changed") != results_of(tmp_path / "first")
    log = run("again", change_silu)
    assert re.search(all_found, log) and "Discarding" not in log
    assert results_of(tmp_path / "changed") == results_of(tmp_path / "again")


# -- what goes wrong -------------------------------------------------------------------------------


def break_second(rank: int) -> None:
    step = LinearProbe.training_step

    def broken(self: LinearProbe, batch: SubjectBatch, batch_idx: int) -> None:
        if batch_idx == 1 and rank == 1:
            raise NonFiniteError("what broke")
        step(self, batch, batch_idx)

    LinearProbe.training_step = broken  # type: ignore[method-assign]


def test_a_process_that_fails_ends_the_run(inputs: Path, tmp_path: Path) -> None:
    small = SMALL_RUNS["probe"].command(inputs, tmp_path, "--config", "trainer/ddp_cpu.yaml")
    done = run_in_two(*small, prepare=break_second)
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


@pytest.mark.nightly  # the program starts the second process itself, with all its imports
def test_processes_end_when_the_first_is_killed(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have the same stderr: that it comes to its end says that both are gone."""
    (tmp_path / "study.py").write_text(KILLED)
    more = "--config", "trainer/ddp_cpu.yaml", "--model=study.Killed"
    command = SMALL_RUNS["probe"].command(inputs, tmp_path, *more)
    for name, value in {"READY": f"{tmp_path}/ready", "PYTHONPATH": f"{tmp_path}"}.items():
        monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "lincorr_lightning", *command],
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


EDITS = "fit --config source_finetune.yaml --config trainer/ddp_cpu.yaml".split()


def test_nonfinite_weights_are_reported_with_the_edits_of_both_ranks(small_lm, tmp_path):
    lm, root = f"--model.lm.name_or_path={small_lm}", f"--trainer.default_root_dir={tmp_path}"
    options = "--model.protocol=joint --data.n_edits=2 --model.edits_per_step=1".split()
    done = run_in_two(*EDITS, *options, "--model.learning_rate=1e37", lm, root, *QUIET)
    assert done.returncode not in (0, None)
    lines = [line for line in done.stderr.splitlines() if "after the update a weight" in line]
    data = EditsDataModule(LanguageModel.from_pretrained(small_lm), n_edits=2)
    assert lines, done.stderr[-3000:]
    for edit in data.resolve().edits:
        assert all(f"{edit.subject!r} -> {edit.answer!r}" in line for line in lines), lines


def test_more_processes_than_edits(small_lm, tmp_path):
    lm, root = f"--model.lm.name_or_path={small_lm}", f"--trainer.default_root_dir={tmp_path}"
    done = run_in_two(*EDITS, "--data.n_edits=1", lm, root, *QUIET)
    assert done.returncode not in (0, None)
    assert "2 processes cannot share 1 edits" in done.stderr
