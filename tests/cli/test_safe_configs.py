"""`--safe`: what an untrusted config may have; the rest is refused, and nothing happens."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonargparse._common
import lightning as L
import pytest
import yaml

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ConfigError, LanguageModelError, LincorrError

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


def run(config: dict[str, Any], study: str = "linear_probe", *options: str) -> L.Trainer:
    """Run a study with a config that is not trusted."""
    path = Path.cwd().parent / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    words = f"fit --safe --config {study}.yaml --trainer.enable_progress_bar=false".split()
    return main([*words, "--config", str(path), *options]).trainer


def refused(config: dict[str, Any], study: str = "linear_probe", *options: str) -> str:
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


def callback(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"trainer": {"callbacks": [{"class_path": class_path, "init_args": init_args}]}}


U = "URL"
PLACES: list[tuple[str, dict[str, Any]]] = [
    ("linear_probe", {"trainer": {"default_root_dir": U}}),
    ("linear_probe", model(lm={"name_or_path": U})),
    ("linear_probe", {"ckpt_path": U}),
    ("linear_probe", trainer("loggers", "TensorBoardLogger", save_dir=U)),
    ("linear_probe", callback("ModelCheckpoint", dirpath=U)),
    ("linear_probe", model(knowledge_files=["mine.yaml", U])),
    ("sparse_autoencoders", data(texts=[U])),
]
"""Settings of studies; the word URL in them stands for one."""
SCHEMES = (
    "http://127.0.0.1:9/x",
    "s3://bucket/x",
    "memory://x",
    "simplecache::ftp://127.0.0.1/x",
    "hf://datasets/a/b",
    "reference::x.json",
    "file:///x",
)
URLS = [(*place, url) for place, url in zip(PLACES, SCHEMES, strict=True)]


def replaced(node: Any, url: str) -> Any:
    if isinstance(node, dict):
        return {key: replaced(value, url) for key, value in node.items()}
    if isinstance(node, list):
        return [replaced(value, url) for value in node]
    return url if node == U else node


@pytest.mark.parametrize(("study", "config", "url"), URLS)
def test_urls_are_refused(study: str, config: dict[str, Any], url: str) -> None:
    message = refused(replaced(config, url), study)
    assert url in message and "--safe refuses" in message


@pytest.mark.parametrize("config", ["http://127.0.0.1:9/x.yaml", "ftp://127.0.0.1/x.yaml"])
def test_a_config_at_a_url_is_refused(config: str) -> None:
    refused({}, "linear_probe", "--config", config)
    refused({}, "linear_probe", "--model.lm", config)
    refused({"data": config}, "linear_probe")


def test_an_lm_of_the_hub_is_allowed() -> None:
    with pytest.raises(LanguageModelError, match="as a hub id it is not among earlier downloads"):
        run(model(lm={"name_or_path": "some/lm"}), "linear_probe")


# -- code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (callback("hostile.Hostile"), "hostile.Hostile"),
        (callback("LambdaCallback", on_fit_start="lincorr_lightning.io.remove"), "LambdaCallback"),
        (
            callback("BackboneFinetuning", lambda_func={"class_path": "subprocess.Popen"}),
            "subprocess.Popen",
        ),
        (callback("WeightAveraging", avg_fn={"class_path": "builtins.eval"}), "builtins.eval"),
        ({"model": {"class_path": "torch.hub.load"}}, "torch.hub.load"),
        (trainer("loggers", "MLFlowLogger"), "lightning.pytorch.loggers.MLFlowLogger"),
        ({"trainer": {"strategy": {"class_path": "os.system"}}}, "os.system"),
        (
            {"trainer": {"plugins": [{"class_path": "builtins.open", "init_args": {"file": "x"}}]}},
            "builtins.open",
        ),
    ],
)
def test_other_classes_and_functions_are_refused_before_they_are_imported(
    config: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hostile.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert named in refused(config)
    assert "hostile" not in sys.modules


@pytest.mark.parametrize(
    "config",
    [
        model(lm={"trust_remote_code": True}),
        model(lm={"attn_implementation": "kernels-community/attention"}),
        {"weights_only": False},
        {
            "trainer": {
                "profiler": {
                    "class_path": "lightning.pytorch.profilers.PyTorchProfiler",
                    "dict_kwargs": {"on_trace_ready": {"class_path": "hostile.Hostile"}},
                }
            }
        },
    ],
)
def test_settings_that_run_other_code_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--safe refuses .*, which runs code"):
        run(config)


def test_known_classes_run(small_lm: str) -> None:
    environment = "lightning.pytorch.plugins.environments.LightningEnvironment"
    config = {
        "trainer": {
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"},
                {"class_path": "LearningRateMonitor"},
            ],
            "plugins": [{"class_path": environment}],
            "profiler": {"class_path": "lightning.pytorch.profilers.SimpleProfiler"},
        }
    }
    options = ["--data.n_subjects=100", "--model.knowledge=[city,country]"]
    done = run(config, "linear_probe", *options, f"--model.lm.name_or_path={small_lm}")
    folder = Path(done.log_dir or "")
    assert (folder / "results.json").is_file()
    # Lightning would run the code of a checkpoint from a server.
    assert yaml.safe_load((folder / "config.yaml").read_text())["weights_only"] is True
