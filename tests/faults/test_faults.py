"""Runs with wrong inputs and settings, and runs that are killed: one line, or the right numbers.

In the nightly lane; LINCORR_FAULTS_SEED=N makes other tries, and ``-k callbacks`` tries one kind.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.inputs import INPUTS, Maker
from tests.faults.runs import Work, check_files, check_line, run_cases, start
from tests.faults.settings import SETTINGS
from tests.small_runs import RESUMED, SMALL_RUNS, keeping, numbers

pytestmark = pytest.mark.nightly

N_TRIES = 60
_END_S = 10  # a run that is ended by a signal may take so long


def check(kind: str, make: Maker, work: Work, draw: random.Random, folder: Path) -> None:
    cases = []
    for i in range(N_TRIES):
        (folder / str(i)).mkdir()
        cases.append(make(draw, work, folder / str(i)))
    failures = run_cases(cases, folder)
    assert not failures, "\n".join(f"{kind}: {failure}" for failure in failures)


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs(kind: str, work: Work, draw: random.Random, tmp_path: Path) -> None:
    check(kind, INPUTS[kind], work, draw, tmp_path)


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings(kind: str, work: Work, draw: random.Random, tmp_path: Path) -> None:
    check(kind, SETTINGS[kind], work, draw, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("study", SMALL_RUNS)
def test_interruptions(
    study: str, number: int, work: Work, draw: random.Random, tmp_path: Path
) -> None:
    """A run that ends at a random moment leaves no half-written file, and goes on from the last."""
    whole, root, small = work.reference(study), tmp_path / "runs", SMALL_RUNS[study]
    more = keeping(tmp_path / "kept") if study in RESUMED else []
    run = start(small.command(work.inputs, root, *more), tmp_path / "killed")
    time.sleep(draw.uniform(0.5, 4))
    run.kill(number)
    status = run.ends(_END_S)
    assert status in (0, 128 + number)  # it may have been finished already
    if status and number != signal.SIGKILL:
        check_line(run.text, status, {status})
    check_files(tmp_path)
    written = [*tmp_path.glob("kept/*.ckpt"), *root.rglob("interrupted.ckpt")]
    last = max(written, key=lambda path: path.stat().st_mtime_ns, default=None)
    resumed = [f"--ckpt_path={last}"] if last and not list(root.rglob("results.json")) else []
    run = start(small.command(work.inputs, tmp_path / "again", *resumed), tmp_path / "again.stderr")
    assert run.ends() == 0, run.text[-2000:]
    (results,) = (tmp_path / "again").rglob("results.json")
    assert numbers(results.parent) == numbers(whole)


# Flags of the Trainer with values that must change no number.
NO_CHANGE = {
    "accelerator": ["auto"],
    "strategy": ["ddp"],
    "precision": ["32"],
    "logger": ["false", "CSVLogger --trainer.logger.save_dir={root}"],
    "callbacks+": ["LearningRateMonitor"],
    "max_time": ["00:01:00:00"],
    "limit_train_batches": ["1.0"],
    "val_check_interval": ["0.5"],
    "num_sanity_val_steps": ["1"],
    "enable_checkpointing": ["true"],
    "deterministic": ["true"],
    "inference_mode": ["false"],
    "profiler": ["simple"],
    "barebones": ["true"],
    "reload_dataloaders_every_n_epochs": ["1"],
}
# Values that change numbers, and what results then have. Where nothing is listed, the run is
# refused, or equals the one without the flag.
EDITS, WORLD, SAES = "full, independent", "pretraining", "SAEs"
CHANGE: dict[str, dict[str, dict[str, Any]]] = {
    "max_steps=4": {EDITS: {"n_steps": 4}, WORLD: {"n_steps": 4}, SAES: {"n_steps": 4}},
    "max_steps=0": {},
    "max_epochs=0": {},
    "max_epochs=-1": {},
    "max_time=00:00:00:00": {},
    "limit_train_batches=0": {},
    "limit_train_batches=2": {
        "probe": {"n_fit": 40},
        EDITS: {"n_steps": 2},
        WORLD: {"n_steps": 4},
        SAES: {"n_steps": 2},
    },
    "overfit_batches=2": {
        "probe": {"n_fit": 40},
        EDITS: {"n_steps": 2},
        WORLD: {"n_steps": 4},
        SAES: {"n_steps": 2},
    },
    "gradient_clip_val=0.001": {EDITS: {"n_steps": 15}, WORLD: {}, SAES: {"n_steps": 12}},
    "precision=bf16-mixed": {EDITS: {"n_steps": 15}, WORLD: {}},
    "precision=16-true": {},
    "strategy=fsdp": {},
    "devices=0": {},
    "plugins=x": {},
}
FLAGS = [f"{flag}={value}" for flag, values in NO_CHANGE.items() for value in values]


@pytest.mark.parametrize("study", ["probe", EDITS, "ablation", WORLD, SAES])
def test_trainer_flags(study: str, work: Work, tmp_path: Path) -> None:
    whole = numbers(work.reference(study))
    wrong = []
    for i, flag in enumerate([*CHANGE, *FLAGS]):
        root = tmp_path / str(i)
        options = f"--trainer.{flag}".replace("{root}", str(root)).split()
        run = start(SMALL_RUNS[study].command(work.inputs, root, *options), tmp_path / f"{i}.err")
        if status := run.ends():
            check_line(run.text, status, {1, 2})
            continue
        results = [numbers(path.parent) for path in root.rglob("results.json")]
        expected = CHANGE.get(flag, {}).get(study)
        is_right = results == [whole] or (
            expected is not None and results and expected.items() <= results[0][0].items()
        )
        if not is_right:
            wrong.append(flag)
    assert not wrong
