"""Every flag of Lightning's Trainer with five studies: the right numbers, or one line.

In the nightly lane, whose log has the table.
"""

from __future__ import annotations

import inspect
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lincorr_lightning.cli import console
from tests.faults.runs import finished
from tests.faults.studies import STUDIES, make_inputs

pytestmark = pytest.mark.nightly

PROBE, EDITS, ABLATION, WORLD, SAES = (
    "linear_probe",
    "source_finetune",
    "vocabulary_ablation",
    "pretraining",
    "sparse_autoencoders",
)
# Keys of results.json that depend on how a run was made, or on its folder.
_NOT_COMPARED = {"seconds", "settings", "versions", "lm", "model"}

# Values that must not change a number, by flag.
NO_CHANGE: dict[str, list[str]] = {
    "accelerator": ["auto"],
    "strategy": ["ddp"],
    "devices": ["auto"],
    "num_nodes": ["1"],
    "precision": ["32"],
    "logger": ["true", "false", "CSVLogger --trainer.logger.save_dir={root}"],
    "callbacks": ["LearningRateMonitor", "DeviceStatsMonitor"],
    "min_epochs": ["1"],
    "min_steps": ["1"],
    "max_time": ["00:01:00:00"],
    "limit_train_batches": ["1.0"],
    "limit_val_batches": ["1.0", "1000"],
    "limit_test_batches": ["0"],
    "limit_predict_batches": ["0"],
    "overfit_batches": ["0"],
    "val_check_interval": ["1.0", "0.5", "1"],
    "check_val_every_n_epoch": ["1"],
    "num_sanity_val_steps": ["0", "1", "-1"],
    "log_every_n_steps": ["1", "7"],
    "enable_checkpointing": ["false", "true"],
    "enable_progress_bar": ["true"],
    "enable_model_summary": ["true"],
    "accumulate_grad_batches": ["1"],
    "gradient_clip_val": [],
    "gradient_clip_algorithm": ["norm"],
    "deterministic": ["true", "warn"],
    "benchmark": ["true"],
    "inference_mode": ["false"],
    "use_distributed_sampler": ["false"],
    "profiler": ["simple", "advanced"],
    "detect_anomaly": ["true"],
    "barebones": ["true"],
    "plugins": ["[]"],
    "sync_batchnorm": ["true"],
    "reload_dataloaders_every_n_epochs": ["1"],
    "default_root_dir": ["other"],
    "enable_autolog_hparams": ["false"],
    "model_registry": ["null"],
    "max_epochs": [],
    "max_steps": ["-1"],
    "fast_dev_run": ["false"],
}
# Values that change numbers, and what results then have, from the number of steps of an epoch: 15
# of five edits of three steps, 38 of 301 statements in eights, and 48 of 3072 tokens in 64s. Where
# nothing is listed, the run is refused, or equals the one without the flag.
_NOTHING = "no results"
CHANGE: dict[str, dict[str, Any]] = {
    "max_steps=4": {
        EDITS: {"n_steps": 4, "n_edits": 1},
        WORLD: {"n_steps": 4},
        SAES: {"n_steps": 4},
    },
    "max_steps=0": {},
    "max_epochs=0": {},
    "max_epochs=2": {EDITS: {"n_steps": 2 * 15, "n_edits": 5}, WORLD: {"n_steps": 2 * 38}},
    "max_epochs=-1": {},
    "max_time=00:00:00:00": {},
    "limit_train_batches=0": {},
    "limit_train_batches=2": {
        PROBE: {"n_fit": 40},
        EDITS: {"n_steps": 2, "n_edits": 0},
        WORLD: {"n_steps": 3 * 2},
        SAES: {"n_steps": 2},
    },
    "overfit_batches=2": {
        PROBE: {"n_fit": 40},
        EDITS: {"n_steps": 2, "n_edits": 0},
        WORLD: {"n_steps": 3 * 2},
        SAES: {"n_steps": 2},
    },
    "accumulate_grad_batches=2": {WORLD: {"n_steps": 3 * 19}},
    "gradient_clip_val=0.001": {
        EDITS: {"n_steps": 15},
        WORLD: {"n_steps": 3 * 38},
        SAES: {"n_steps": 48},
    },
    # The config of the pre-training clips.
    "gradient_clip_val=null": {WORLD: {"n_steps": 3 * 38}},
    "gradient_clip_val=1e9": {WORLD: {"n_steps": 3 * 38}},
    "gradient_clip_algorithm=value": {WORLD: {"n_steps": 3 * 38}},
    "precision=bf16-mixed": {EDITS: {"n_steps": 15}, WORLD: {"n_steps": 3 * 38}},
    "precision=64-true": {EDITS: {"n_steps": 15}},
    "precision=16-true": {},
    # A probe keeps its maps, with a warning, and SAEs theirs.
    "limit_val_batches=0": {
        PROBE: _NOTHING,
        WORLD: {"n_steps": 3 * 38, "recall": {}},
        SAES: {"n_steps": 48},
    },
    "check_val_every_n_epoch=2": {
        PROBE: _NOTHING,
        WORLD: {"n_steps": 3 * 38},
        SAES: {"n_steps": 48},
    },
    "val_check_interval=1000": {},
    "callbacks=null": {EDITS: {"n_steps": 15}},
    "strategy=fsdp": {},
    "strategy=deepspeed": {},
    "devices=0": {},
    "accelerator=tpu": {},
    "plugins=x": {},
    "model_registry=x": {},
    "fast_dev_run=true": dict.fromkeys((PROBE, EDITS, ABLATION, WORLD, SAES), _NOTHING),
}


def _numbers(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return results and tables of a finished run."""
    results = json.loads((folder / "results.json").read_text())
    tables = {path.name: path.read_text() for path in folder.glob("tables/*.csv")}
    return {key: value for key, value in results.items() if key not in _NOT_COMPARED}, tables


def _run(study: str, inputs: Path, root: Path, option: str, monkeypatch: Any, capsys: Any) -> str:
    """Run a study in this process; return its error, or nothing."""
    command = STUDIES[study].command(inputs, root)
    command = (
        command[: command.index("--trainer.enable_checkpointing=true")] + command[-3:]
        if (STUDIES[study].checkpoint)
        else command
    )
    monkeypatch.setattr(sys, "argv", ["lincorr", *command, *option.split()])
    try:
        console()
    except SystemExit as stop:
        line = capsys.readouterr().err.partition("lincorr: error: ")[2]
        is_line = stop.code in (1, 2) and len(line.splitlines()) == 1
        return f"refused: {line.strip()}" if is_line else f"WRONG: status {stop.code}, {line}"
    except Exception:
        return f"WRONG: {traceback.format_exc().splitlines()[-1]}"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        capsys.readouterr()
    return ""


def _outcome(root: Path, whole: Path, wanted: Any) -> str:
    """Return what a run without an error left: the same, what is wanted, or what is wrong."""
    if not list(root.rglob("results.json")):
        return _NOTHING if wanted == _NOTHING else "WRONG: no results"
    ours, theirs = _numbers(finished(root)), _numbers(finished(whole))
    if ours == theirs:
        return "same"
    if wanted and all(ours[0][key] == value for key, value in wanted.items()):
        return ", ".join(f"{key} {value}" for key, value in wanted.items())
    differ = [key for key in theirs[0] if ours[0].get(key) != theirs[0][key]]
    return f"WRONG: other {differ or 'tables'}"


def test_every_flag_has_a_value() -> None:
    flags = set(inspect.signature(L.Trainer.__init__).parameters) - {"self"}
    assert flags == set(NO_CHANGE)
    assert {option.partition("=")[0] for option in CHANGE} <= flags


def test_every_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_inputs(inputs := tmp_path / "inputs")
    monkeypatch.chdir(tmp_path)
    studies = (PROBE, EDITS, ABLATION, WORLD, SAES)
    for study in studies:
        assert not _run(study, inputs, tmp_path / "whole" / study, "", monkeypatch, capsys)
    tries: list[tuple[str, dict[str, Any]]] = [
        (f"{flag}{'+' * (flag == 'callbacks')}={value}", {})  # beside those that measure
        for flag, values in NO_CHANGE.items()
        for value in values
    ]
    wrong = []
    for number, (option, wanted) in enumerate([*CHANGE.items(), *tries]):
        cells = []
        for study in studies:
            root = tmp_path / str(number) / study
            given = f"--trainer.{option}"
            if "default_root_dir" in option:
                given += f"/{study}"
                root = tmp_path / option.partition("=")[2] / study
            given = given.replace("{root}", str(root))
            cell = _run(study, inputs, root, given, monkeypatch, capsys) or _outcome(
                root, tmp_path / "whole" / study, wanted.get(study)
            )
            if cell.startswith("WRONG"):
                wrong.append(f"{study}, {option}: {cell}")
            cells.append(cell)
        with capsys.disabled():
            print(f"{option:<40} | " + " | ".join(cells), flush=True)  # noqa: T201
    assert not wrong, "\n".join(wrong)
