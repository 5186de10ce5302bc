"""Valid inputs with settings or weights that do not go with them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.faults.inputs import Maker, command
from tests.faults.runs import Case, Work
from tests.small_runs import RESUMED, SMALL_RUNS

_FIT = [name for name, study in SMALL_RUNS.items() if study.verb == "fit"]
_READING = ["probe", "token geometry", "forecast"]


def _callback(name: str, **options: Any) -> list[str]:
    init = {"class_path": name, "init_args": options}
    return [f"--trainer.callbacks+={json.dumps(init)}"]


# With callbacks that no study takes first.
_REFUSED = [
    "StochasticWeightAveraging",
    "ModelPruning",
    "BackboneFinetuning",
    "LearningRateFinder",
    "BatchSizeFinder",
    "GradientAccumulationScheduler",
]
_CALLBACKS = [
    _callback("StochasticWeightAveraging", swa_lrs=0.01),
    _callback("ModelPruning", pruning_fn="l1_unstructured", amount=0.5),
    _callback("BackboneFinetuning"),
    _callback("LearningRateFinder"),
    _callback("BatchSizeFinder"),
    _callback("GradientAccumulationScheduler", scheduling={"0": 2}),
    _callback("Timer", duration={"seconds": 0}, interval="step"),
    _callback("Timer", duration={"hours": 1}),
    ["--trainer.max_time={seconds: 1}"],
    _callback("EarlyStopping", monitor="nothing"),
    _callback("EMAWeightAveraging"),
    _callback("DeviceStatsMonitor"),
    _callback("LearningRateMonitor"),
    _callback("RichProgressBar"),
    _callback("ModelSummary", max_depth=-1),
    _callback("OnExceptionCheckpoint", dirpath="."),
    _callback("ModelCheckpoint", monitor="nothing"),
    _callback("ModelCheckpoint", save_last=True),
]


def _callbacks(draw: random.Random, work: Work, folder: Path) -> Case:
    study, options = draw.choice(_FIT), draw.choice(_CALLBACKS)
    must_fail = any(name in options[0] for name in _REFUSED)
    return Case(command(study, work, *options), f"{study}: {options}", must_fail)


# Options that change no number of a resumed run, and those that are files or an LM.
_FREE = {"save_model", "saes", "eval_batch_size", "lm", "before", "batch_size"}


def _changed(settings: Mapping[str, Any], owner: str) -> Iterator[tuple[str, Any]]:
    """Yield options with another value than a run had."""
    for name, value in settings.items():
        if name in _FREE or name[0] == "_":
            continue
        if isinstance(value, Mapping):
            yield from _changed(value, f"{owner}.{name}")
        elif isinstance(value, bool):
            yield f"{owner}.{name}", str(not value).lower()
        elif isinstance(value, (int, float)):
            yield f"{owner}.{name}", value + 1 if isinstance(value, int) else value * 0.75 + 1e-3


def _resume(draw: random.Random, work: Work, folder: Path) -> Case:
    """Go on with another setting."""
    study = draw.choice(RESUMED)
    path = draw.choice(work.checkpoints(study))
    content = torch.load(path, weights_only=True)
    keys = {"hyper_parameters": "model", "datamodule_hyper_parameters": "data"}
    options = [one for key, owner in keys.items() for one in _changed(content.get(key, {}), owner)]
    name, value = draw.choice([*options, ("trainer.limit_train_batches", 3)])
    words = command(study, work, f"--{name}={value}", f"--ckpt_path={path}")
    return Case(words, f"{study}: {name} {value} at {path.name}", True)


def _sizes(draw: random.Random, work: Work, folder: Path) -> Case:
    """Change numbers of an LM's config.json."""
    path = shutil.copytree(work.inputs / "lm", folder / "input") / "config.json"
    config = json.loads(path.read_text())
    numbers = [key for key, value in config.items() if isinstance(value, (int, float))]
    for key in draw.sample(numbers, draw.choice([1, 1, 2])):
        config[key] = draw.choice([0, -1, 1, 3, 999, 10**6, 10**18, 0.5, 1e300])
    path.write_text(json.dumps(config))
    study = draw.choice(_READING)
    words = command(study, work, f"--model.lm.name_or_path={path.parent}")
    changed = {key: config[key] for key in numbers}
    return Case(words, f"{study}: {changed}", config["num_hidden_layers"] != 2)


def _weights(draw: random.Random, work: Work, folder: Path) -> Case:
    """Make weights NaN, infinite, huge, tiny or zero."""
    path = shutil.copytree(work.inputs / "lm", folder / "input") / "model.safetensors"
    weights = load_file(path)
    name = draw.choice(sorted(weights))
    factor = draw.choice([0.0, 1e-30, 1e30, 3e38, float("nan"), float("inf"), -1.0, 1e4])
    part = weights[name] if draw.random() < 0.5 else weights[name][:1]
    part *= factor
    save_file(weights, path, {"format": "pt"})
    study = draw.choice(_READING)
    words = command(study, work, f"--model.lm.name_or_path={path.parent}")
    return Case(words, f"{study}: {name} * {factor}")


SETTINGS: dict[str, Maker] = {
    "callbacks": _callbacks,
    "resume": _resume,
    "sizes": _sizes,
    "weights": _weights,
}
"""Kinds of settings: name -> what makes a case."""
