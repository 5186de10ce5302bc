"""Valid inputs with settings, weights or surroundings that do not go with them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.faults.inputs import CONFIGS, KNOWLEDGE, Maker, command
from tests.faults.runs import Case, checkpoints, start
from tests.faults.studies import STUDIES, Work
from tests.toys import NAMES

_FIT = [name for name, study in STUDIES.items() if study.verb == "fit"]
_RESUMED = [name for name, study in STUDIES.items() if study.checkpoint]
_READING = ["linear_probe", "token_geometry", "forecast", "source_finetune"]


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
]
_CALLBACKS = [
    _callback("StochasticWeightAveraging", swa_lrs=0.01),
    _callback("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=1),
    _callback("ModelPruning", pruning_fn="l1_unstructured", amount=0.5),
    _callback("BackboneFinetuning"),
    _callback("LearningRateFinder"),
    _callback("BatchSizeFinder"),
    _callback("Timer", duration={"seconds": 0}, interval="step"),
    _callback("Timer", duration={"hours": 1}),
    _callback("Timer"),
    ["--trainer.max_time={seconds: 1}"],
    _callback("EarlyStopping", monitor="nothing"),
    _callback("EarlyStopping", monitor="train/loss"),
    _callback("EarlyStopping", monitor="train/loss", check_on_train_epoch_end=True, strict=False),
    _callback("EMAWeightAveraging"),
    _callback("EMAWeightAveraging", decay=0.0),
    _callback("SpikeDetection"),
    _callback("DeviceStatsMonitor"),
    _callback("LearningRateMonitor"),
    _callback("GradientAccumulationScheduler", scheduling={"0": 2}),
    _callback("RichProgressBar"),
    _callback("ModelSummary", max_depth=-1),
    _callback("OnExceptionCheckpoint", dirpath="."),
    _callback("ModelCheckpoint", monitor="nothing"),
    _callback("ModelCheckpoint", save_last=True),
    _callback("ModelCheckpoint", every_n_train_steps=1) * 2,
]


def _callbacks(draw: random.Random, work: Work, folder: Path) -> Case:
    study, options = draw.choice(_FIT), draw.choice(_CALLBACKS)
    must_fail = any(name in options[0] for name in _REFUSED)
    return Case(command(study, work, *options), f"{study}: {options}", must_fail)


_FLAGS: dict[str, list[Any]] = {
    "accelerator": ["cpu", "gpu", "tpu"],
    "strategy": ["auto", "ddp", "fsdp", "none"],
    "devices": [1, 0, "auto", "[0]"],
    "num_nodes": [1, 0],
    "precision": ["32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "8"],
    "logger": ["true", "false", "CSVLogger"],
    "fast_dev_run": ["true", 2, 0],
    "max_epochs": [0, 1, 2],
    "min_epochs": [1, 5],
    "max_steps": [0, 1, 7],
    "min_steps": [1, 3],
    "max_time": ["00:00:00:00", "00:01:00:00", "soon"],
    "limit_train_batches": [0, 1, 2, 0.5, -1],
    "limit_val_batches": [0, 1, 0.5],
    "limit_test_batches": [0, 1, 3, 0.5, 1.5],
    "limit_predict_batches": [0, 1, 0.5],
    "overfit_batches": [0, 1, 0.5],
    "val_check_interval": [1, 2, 0.5, 1.5, 10**6],
    "check_val_every_n_epoch": [1, 2, 0, "null"],
    "num_sanity_val_steps": [0, 1, -1, -2],
    "log_every_n_steps": [0, 1, -1, 10**9],
    "enable_checkpointing": ["true", "false"],
    "enable_progress_bar": ["true"],
    "enable_model_summary": ["true"],
    "accumulate_grad_batches": [1, 2, 0, -1],
    "gradient_clip_val": [0, 0.5, -1],
    "gradient_clip_algorithm": ["norm", "value", "x"],
    "deterministic": ["true", "warn"],
    "benchmark": ["true"],
    "inference_mode": ["false"],
    "use_distributed_sampler": ["false"],
    "profiler": ["simple", "advanced", "x"],
    "detect_anomaly": ["true"],
    "barebones": ["true"],
    "sync_batchnorm": ["true"],
    "reload_dataloaders_every_n_epochs": [1, -1],
    "enable_autolog_hparams": ["false"],
    "plugins": ["x"],
    "model_registry": ["x"],
}


def _flags(draw: random.Random, work: Work, folder: Path) -> Case:
    study, name = draw.choice(list(STUDIES)), draw.choice(list(_FLAGS))
    value = draw.choice(_FLAGS[name])
    option = f"--trainer.{name}={value}"
    is_dry = (name, value) in (("fast_dev_run", "true"), ("fast_dev_run", 2))
    words = command(study, work, option)
    return Case(words, f"{study}: {option}", is_dry=is_dry)


# Options that change no number of a resumed run, and those that are files or an LM.
_FREE = {"save_model", "saes", "eval_batch_size", "lm", "before", "note"}


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
    study = draw.choice(_RESUMED)
    path = draw.choice(checkpoints(work.reference(study)[0]))
    content = torch.load(path, weights_only=True)
    keys = {"hyper_parameters": "model", "datamodule_hyper_parameters": "data"}
    options = [one for key, owner in keys.items() for one in _changed(content.get(key, {}), owner)]
    if study.startswith("source_finetune"):  # which trains model.edits_per_step at a time
        options = [one for one in options if one[0] != "data.batch_size"]
    options += [("seed_everything", 7), ("trainer.limit_train_batches", 3)]
    name, value = draw.choice(options)
    words = STUDIES[study].command(work.inputs, folder / "runs")
    words += [f"--{name}={value}", f"--ckpt_path={path}"]
    return Case(words, f"{study}: {name} {value} at {path.name}", True)


def _sizes(draw: random.Random, work: Work, folder: Path) -> Case:
    """Change numbers of an LM's config.json."""
    path = shutil.copytree(work.inputs / "lm", folder / "input") / "config.json"
    config = json.loads(path.read_text())
    numbers = [key for key, value in config.items() if isinstance(value, (int, float))]
    for key in draw.sample(numbers, draw.choice([1, 1, 2])):
        config[key] = draw.choice([0, -1, 1, 3, 999, 9999, 10**6, 10**9, 10**18, 0.5, 1e300])
    path.write_text(json.dumps(config))
    study = draw.choice(_READING)
    changed = {key: config[key] for key in numbers}
    words = command(study, work, f"--model.lm.name_or_path={path.parent}")
    must_fail = config["num_hidden_layers"] != 2
    return Case(words, f"{study}: {changed}", must_fail)


def _weights(draw: random.Random, work: Work, folder: Path) -> Case:
    """Make weights NaN, infinite, huge, tiny or zero."""
    path = shutil.copytree(work.inputs / "lm", folder / "input") / "model.safetensors"
    weights = load_file(path)
    is_double = draw.random() < 0.3
    weights = {name: one.double() for name, one in weights.items()} if is_double else weights
    name = draw.choice(sorted(weights))
    factors = [0.0, 1e-30, 1e30, 3e38, float("nan"), float("inf"), -1.0, 1e4]
    factor = draw.choice([*factors, 1e200, 1e-200, 1e300] if is_double else factors)
    part = weights[name] if draw.random() < 0.5 else weights[name][:1]
    part *= factor
    save_file(weights, path, {"format": "pt"})
    study = draw.choice(_READING[:3])
    options = [f"--model.lm.name_or_path={path.parent}", "--model.lm.dtype=auto"]
    if is_double:
        config = json.loads((path.parent / "config.json").read_text()) | {"dtype": "float64"}
        (path.parent / "config.json").write_text(json.dumps(config))
    return Case(command(study, work, *options), f"{study}: {name} * {factor}, double {is_double}")


_PATTERNS = [
    r"^(([a-z0-9 ])+.)+([A-Z]([a-z])+)+$",
    r"([a-z ]*)*\d{30}",
    r"(x+x+)+y",
    r"(",
    r"",
    r".*",
    r"(a|aa)+$",
    r"\p{Nope}",
    r"(?<=a+)b",
    r"(\w*\s*)*#",
]


def _tokenizer(draw: random.Random, work: Work, folder: Path) -> Case:
    """Give an LM's tokenizer a pattern that is wrong, or that takes for ever."""
    path = shutil.copytree(work.inputs / "lm", folder / "input") / "tokenizer.json"
    content, pattern = json.loads(path.read_text()), {"Regex": draw.choice(_PATTERNS)}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    if draw.random() < 0.6:
        content["pre_tokenizer"]["pretokenizers"].insert(draw.choice([0, 2]), split)
    else:
        content["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "a"}
    path.write_text(json.dumps(content))
    study = draw.choice([*_READING, "vocabulary_ablation", "sparse_autoencoders"])
    words = command(study, work, f"--model.lm.name_or_path={path.parent}")
    return Case(words, f"{study}: {pattern}")


@contextmanager
def _no_memory(at: int) -> Iterator[None]:
    """Let memory run out while a figure is drawn."""
    from lincorr_lightning.results import plots

    draw, drawn = plots.to_png, []

    def to_png(figure: Any) -> bytes:
        drawn.append(figure)
        if len(drawn) == at:
            raise MemoryError("Unable to allocate 9 GiB")
        return draw(figure)

    with patch.object(plots, "to_png", to_png):
        yield


def _memory(draw: random.Random, work: Work, folder: Path) -> Case:
    study, at = draw.choice(list(STUDIES)), draw.randint(1, 4)
    prepare = partial(_no_memory, at)
    return Case(command(study, work), f"{study}: figure {at}", must_end=True, prepare=prepare)


def _output(draw: random.Random, work: Work, folder: Path) -> Case:
    study, output = draw.choice(list(STUDIES)), draw.choice(["full", "closed", "unread"])
    what = f"{study}: standard output {output}"
    return Case(command(study, work), what, must_end=True, stdout=output)


_SCHEMES = [
    "http://127.0.0.1:9/x",
    "https://example.invalid/x",
    "ftp://127.0.0.1/x",
    "s3://b/x",
    "gs://b/x",
    "hf://b/x",
    "memory://x",
    "abfs://b/x",
    "webdav://x/y",
]
_PLACES = [
    ("linear_probe", "--model.lm.name_or_path={}"),
    ("linear_probe", "--model.lm.tokenizer={}"),
    ("linear_probe", "--data.subjects_file={}"),
    ("linear_probe", "--model.knowledge_files=[{}]"),
    ("linear_probe", "--ckpt_path={}"),
    ("linear_probe", "--trainer.default_root_dir={}"),
    ("token_geometry", "--data.texts=[{}]"),
    ("feature_flow", "--model.saes={}"),
    ("resilience", "--model.linear_map={}"),
    ("source_finetune", "--data.edits_file={}"),
    ("resilience", "--model.before.name_or_path={}"),
    (
        "linear_probe",
        '--trainer.logger={{"class_path":"CSVLogger","init_args":{{"save_dir":"{}"}}}}',
    ),
    (
        "linear_probe",
        '--trainer.logger={{"class_path":"TensorBoardLogger","init_args":{{"save_dir":"{}"}}}}',
    ),
    (
        "linear_probe",
        '--trainer.callbacks+={{"class_path":"ModelCheckpoint","init_args":{{"dirpath":"{}"}}}}',
    ),
    ("linear_probe", "--config={}"),
]


def _urls(draw: random.Random, work: Work, folder: Path) -> Case:
    (study, option), url = draw.choice(_PLACES), draw.choice(_SCHEMES)
    words = [*command(study, work), option.format(url), "--safe"]
    return Case(words, f"{study}: {option.format(url)}", True)


_REPRODUCE = ["reproduce", "--config=settings.yaml", "--lm=lm", "--output=page", "--only=figure3"]
_TOWNS = ["town", "country"]


@cache
def _reproduction(inputs: Path) -> Path:
    """Return a folder with a finished reproduction, and all files that it names."""
    folder = inputs.parent / "reproduction"
    shutil.copytree(inputs / "lm", folder / "lm")
    (folder / "subjects.txt").write_text("\n".join(NAMES[:90]) + "\n")
    (folder / "towns.yaml").write_text(KNOWLEDGE)
    probe = {"ridge": 1.0, "knowledge": _TOWNS, "knowledge_files": ["towns.yaml"]}
    subjects = {"subjects_file": "subjects.txt"}
    mine = {
        "trainer": {"max_epochs": 1},
        "model": {"class_path": "LinearProbe", "init_args": probe},
        "data": {"class_path": "SubjectsDataModule", "init_args": subjects},
    }
    (folder / "mine.yaml").write_text(yaml.safe_dump(mine))
    settings = yaml.safe_load((CONFIGS / "reproduce.yaml").read_text(encoding="utf-8"))
    size = settings["sizes"][settings["size"]]
    size["probe"] = {"config": "mine.yaml", "options": {"data.n_subjects": 80}}
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
    run = start(_REPRODUCE, folder / "stderr")
    assert run.ends() == 0, run.text[-2000:]
    return folder


def _reproduced(draw: random.Random, work: Work, folder: Path) -> Case:
    """Change a file that a finished reproduction has read, or none."""
    shutil.copytree(_reproduction(work.inputs), folder, dirs_exist_ok=True)
    subject, word = draw.choice(NAMES[:90]), draw.choice(["Oslo", "saw"])
    texts = {
        "subjects.txt": (subject, f"{subject}x"),
        "towns.yaml": (word, f"{word}s"),
        "mine.yaml": ("ridge: 1", "ridge: 2"),
        "settings.yaml": (": 80", ": 90"),
    }
    name = draw.choice([*texts, "lm/config.json", "lm/model.safetensors", "nothing"])
    path = folder / name
    if name in texts:
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(*texts[name], 1), encoding="utf-8")
    elif path.suffix == ".json":
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config | {"rms_norm_eps": draw.choice([1e-3, 1e-4])}))
    elif path.suffix:
        weights = load_file(path)
        weights[draw.choice(sorted(weights))] *= 1.5
        save_file(weights, path, {"format": "pt"})
    is_same = name == "nothing"
    return Case(_REPRODUCE, f"reproduce: {name}", not is_same, must_end=is_same, is_dry=True)


SETTINGS: dict[str, Maker] = {
    "callbacks": _callbacks,
    "flags": _flags,
    "resume": _resume,
    "sizes": _sizes,
    "weights": _weights,
    "tokenizer": _tokenizer,
    "memory": _memory,
    "output": _output,
    "urls": _urls,
    "reproduced": _reproduced,
}
"""Kinds of settings: name -> what makes a case."""
