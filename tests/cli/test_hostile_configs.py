"""`--safe` with configs that want to contact a server or run code: refused, and nothing happens."""

import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonargparse._common
import pytest
import torch
import yaml

from lincorr_lightning.cli import main
from lincorr_lightning.errors import LanguageModelError, LincorrError
from tests.cli.test_safe_configs import callback

# What opens a connection, looks a name up or starts a program; an audit hook cannot be removed.
_EVENTS = (
    "socket.connect",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.sendto",
    "socket.sendmsg",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
)
_seen: list[str] = []
_is_watched = False


# Jsonargparse asks a new Python for its import path.
_ALLOWED = "import sys, json; print(json.dumps(sys.path))"


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _is_watched and event in _EVENTS and _ALLOWED not in str(args):
        _seen.append(f"{event} {args}")
        raise ConnectionRefusedError(event)


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Nothing connects, nothing starts, and no file appears here; `--safe` ends with the test."""
    if not hasattr(sys, "_hostile_configs_are_watched"):
        sys._hostile_configs_are_watched = True  # type: ignore[attr-defined]
        sys.addaudithook(_watch)
    settings = dict(jsonargparse._common.parsing_settings)
    monkeypatch.setattr(jsonargparse._common, "parsing_settings", settings)
    monkeypatch.setattr(sys.modules[__name__], "_is_watched", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    _seen.clear()
    yield
    assert not _seen
    assert [path.name for path in Path().iterdir() if path.name != "runs"] == []
    assert not list(Path().rglob("*:"))


def run(config: dict[str, Any], study: str, *options: str) -> None:
    """Run a study with a config that is not trusted."""
    path = Path.cwd().parent / "hostile.yaml"
    path.write_text(yaml.safe_dump(config))
    main(
        [
            "fit",
            "--safe",
            "--config",
            f"{study}.yaml",
            "--config",
            str(path),
            "--trainer.enable_progress_bar=false",
            *options,
        ]
    )


def refused(config: dict[str, Any], study: str, *options: str) -> str:
    with pytest.raises(LincorrError) as refusal:
        run(config, study, *options)
    assert len(str(refusal.value).splitlines()) == 1
    return str(refusal.value)


# -- URLs -----------------------------------------------------------------------------------------


def model(**init_args: Any) -> dict[str, Any]:
    return {"model": {"init_args": init_args}}


def data(**init_args: Any) -> dict[str, Any]:
    return {"data": {"init_args": init_args}}


def trainer(part: str, class_path: str, **init_args: Any) -> dict[str, Any]:
    made = {"class_path": f"lightning.pytorch.{part}.{class_path}", "init_args": init_args}
    return {"trainer": {part.removesuffix("s") if part != "strategies" else "strategy": made}}


U = "URL"
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("linear_probe", {"trainer": {"default_root_dir": U}}),
    ("linear_probe", model(lm={"name_or_path": U})),
    ("linear_probe", {"ckpt_path": U}),
    ("linear_probe", trainer("loggers", "TensorBoardLogger", save_dir=U)),
    ("linear_probe", callback("ModelCheckpoint", dirpath=U)),
    ("linear_probe", {"name": U}),
    ("linear_probe", model(lm={"tokenizer": U})),
    ("linear_probe", model(lm={"cache_dir": U})),
    ("linear_probe", model(lm={"name_or_path": "a/b", "revision": U})),
    ("linear_probe", model(knowledge_files=["mine.yaml", U])),
    ("linear_probe", data(subjects_file=U)),
    ("linear_probe", trainer("loggers", "CSVLogger", save_dir=U)),
    ("linear_probe", trainer("loggers", "CSVLogger", save_dir="runs", name=U)),
    ("linear_probe", trainer("loggers", "TensorBoardLogger", save_dir="runs", version=U)),
    ("linear_probe", trainer("loggers", "TensorBoardLogger", save_dir="runs", sub_dir=U)),
    ("linear_probe", trainer("profilers", "SimpleProfiler", dirpath=U, filename="a")),
    ("linear_probe", trainer("profilers", "AdvancedProfiler", dirpath="runs", filename=U)),
    ("linear_probe", trainer("strategies", "DeepSpeedStrategy", config=U)),
    ("linear_probe", trainer("strategies", "DDPStrategy", process_group_backend=U)),
    ("linear_probe", callback("ModelCheckpoint", filename=U)),
    ("linear_probe", callback("OnExceptionCheckpoint", dirpath=U)),
    ("linear_probe", callback("TokenGeometryMonitor", texts=U)),
    ("source_finetune", data(edits_file=U)),
    ("source_finetune", data(knowledge_files=[U])),
    ("source_finetune", callback("Generalization", edits=U)),
    ("source_finetune", callback("GradientCorrelation", linear_map=U)),
    ("source_finetune", callback("FeatureMovement", saes=U)),
    ("sparse_autoencoders", data(texts=[U])),
]
"""Settings of studies; the word URL in them stands for one."""
SCHEMES = (
    "http://127.0.0.1:9/x",
    "ftp://127.0.0.1/x",
    "s3://bucket/x",
    "memory://x",
    "simplecache::ftp://127.0.0.1/x",
    "https://example.org/x",
    "hf://datasets/a/b",
    "gs://b/x",
    "reference::x.json",
    "file:///x",
    "github://a:b@c/x",
    "tcp://127.0.0.1:1",
)
_N_FAST = 5
URLS = [
    pytest.param(study, config, next(scheme), marks=() if i < _N_FAST else pytest.mark.nightly)
    for scheme in [itertools.cycle(SCHEMES)]
    for i, (study, config) in enumerate(PLACES * 3)
]


def replaced(node: Any, url: str) -> Any:
    if isinstance(node, dict):
        return {key: replaced(value, url) for key, value in node.items()}
    if isinstance(node, list):
        return [replaced(value, url) for value in node]
    return url if node == U else node


@pytest.mark.parametrize(("study", "config", "url"), URLS)
def test_urls_are_refused(study: str, config: dict[str, Any], url: str) -> None:
    message = refused(replaced(config, url), study)
    assert url in message
    assert "--safe refuses" in message or "is a URL, to which nothing is written" in message


@pytest.mark.parametrize("config", ["http://127.0.0.1:9/x.yaml", "ftp://127.0.0.1/x.yaml"])
def test_a_config_at_a_url_is_refused(config: str) -> None:
    refused({}, "linear_probe", "--config", config)
    refused({}, "linear_probe", "--model.lm", config)
    refused({"data": config}, "linear_probe")


def test_models_of_a_registry_are_refused() -> None:
    assert "--safe refuses" in refused({"ckpt_path": "registry:a/b"}, "linear_probe")


def test_an_lm_of_the_hub_is_allowed() -> None:
    with pytest.raises(LanguageModelError, match="as a hub id it is not among earlier downloads"):
        run(model(lm={"name_or_path": "some/lm"}), "linear_probe")


# -- code -----------------------------------------------------------------------------------------


class _Touch:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch payload",)


def _own_code(folder: Path, lm: Path) -> dict[str, Any]:
    settings = json.loads((lm / "config.json").read_text())
    settings |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"},
    }
    (lm / "config.json").write_text(json.dumps(settings))
    (lm / "mine.py").write_text("open('payload', 'w')\n")
    return model(lm={"name_or_path": str(lm)})


def _own_tokenizer(folder: Path, lm: Path) -> dict[str, Any]:
    settings = json.loads((lm / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.T", "mine.T"]}}
    (lm / "tokenizer_config.json").write_text(json.dumps(settings))
    (lm / "tokenizer.json").unlink()
    (lm / "mine.py").write_text("open('payload', 'w')\n")
    return model(lm={"name_or_path": str(lm)})


def _pickled_weights(folder: Path, lm: Path) -> dict[str, Any]:
    (lm / "model.safetensors").unlink()
    torch.save({"model.norm.weight": _Touch()}, lm / "pytorch_model.bin")
    return model(lm={"name_or_path": str(lm)})


def _pickled_checkpoint(folder: Path, lm: Path) -> dict[str, Any]:
    torch.save({"pytorch-lightning_version": "2.6.0", "state_dict": _Touch()}, folder / "a.ckpt")
    return {"ckpt_path": str(folder / "a.ckpt")}


def _tagged_knowledge(folder: Path, lm: Path) -> dict[str, Any]:
    tag = "version: 1\nsource: !!python/object/apply:os.system ['touch payload']\n"
    (folder / "mine.yaml").write_text(tag)
    return model(knowledge_files=[str(folder / "mine.yaml")])


FILES = [_own_code, _own_tokenizer, _pickled_weights, _pickled_checkpoint, _tagged_knowledge]


@pytest.mark.nightly
@pytest.mark.parametrize("make", FILES)
def test_code_in_files_is_not_run(
    make: Callable[[Path, Path], dict[str, Any]], small_lm: str, tmp_path: Path
) -> None:
    lm = tmp_path / "lm"
    shutil.copytree(small_lm, lm)
    refused(make(tmp_path, lm), "linear_probe")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [
        callback("ThroughputMonitor", batch_size_fn="os.system"),
        callback("StochasticWeightAveraging", swa_lrs=0.1, avg_fn="os.system"),
        callback("ModelPruning", pruning_fn={"class_path": "subprocess.Popen"}),
        callback("EarlyStopping", monitor={"class_path": "os.system"}),
        callback("lightning.pytorch.callbacks.callback.os.system"),
        callback("builtins.exec"),
        callback("runpy.run_path"),
        callback("WeightAveraging", device="cpu", avg_fn={"class_path": "builtins.eval"}),
        {"trainer": {"plugins": [{"class_path": "builtins.open", "init_args": {"file": "x"}}]}},
        {"trainer": {"strategy": {"class_path": "os.system"}}},
        {"trainer": {"accelerator": {"class_path": "subprocess.Popen"}}},
        {
            "trainer": {
                "profiler": {
                    "class_path": "lightning.pytorch.profilers.PyTorchProfiler",
                    "init_args": {"dirpath": "runs"},
                    "dict_kwargs": {"schedule": "os.system"},
                }
            }
        },
        {"trainer": {"logger": {"class_path": "lightning.pytorch.loggers.WandbLogger"}}},
        {"data": {"class_path": "lightning.pytorch.demos.mnist_datamodule.MNISTDataModule"}},
        {"model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"}},
        {"model": {"class_path": "torch.hub.load"}},
    ],
)
def test_code_in_configs_is_not_run(config: dict[str, Any]) -> None:
    refused(config, "linear_probe")
