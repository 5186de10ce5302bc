"""`--safe`: which classes and settings an untrusted config may have."""

import sys
from pathlib import Path
from typing import Any

import jsonargparse._common
import lightning as L
import pytest
import yaml

from lincorr_lightning.cli import main
from lincorr_lightning.cli.lightning_cli import check_datamodule
from lincorr_lightning.data import SubjectsDataModule
from lincorr_lightning.data.subjects import SubjectBatch
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.probe import LinearProbe


@pytest.fixture(autouse=True)
def restored_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--safe` holds for the rest of a process."""
    settings = dict(jsonargparse._common.parsing_settings)
    monkeypatch.setattr(jsonargparse._common, "parsing_settings", settings)


def safe_fit(folder: Path, config: dict[str, Any], *extra: str) -> L.Trainer:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    return main(
        [
            "fit",
            "--safe",
            "--config",
            "linear_probe.yaml",
            "--config",
            str(path),
            "--data.n_subjects=100",
            "--model.knowledge=[city,country]",
            "--trainer.enable_progress_bar=false",
            f"--trainer.default_root_dir={folder}",
            *extra,
        ]
    ).trainer


def callback(class_path: str, **init_args: Any) -> dict[str, Any]:
    return {"trainer": {"callbacks": [{"class_path": class_path, "init_args": init_args}]}}


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        (callback("hostile.Hostile"), "hostile.Hostile"),
        (callback("lincorr_lightning.io.shutil.rmtree"), "lincorr_lightning.io.shutil.rmtree"),
        (callback("LambdaCallback", on_fit_start="lincorr_lightning.io.remove"), "LambdaCallback"),
        (callback("BackboneFinetuning", lambda_func="os.system"), "os.system"),
        (callback("BackboneFinetuning", lambda_func="torch.hub.load"), "torch.hub.load"),
        (
            callback("BackboneFinetuning", lambda_func={"class_path": "subprocess.Popen"}),
            "subprocess.Popen",
        ),
        ({"model": {"class_path": "hostile.Hostile"}}, "hostile.Hostile"),
        (
            {"trainer": {"logger": {"class_path": "lightning.pytorch.loggers.MLFlowLogger"}}},
            "lightning.pytorch.loggers.MLFlowLogger",
        ),
    ],
)
def test_other_classes_and_functions_are_refused_before_they_are_imported(
    config: dict[str, Any],
    refused: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "hostile.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"--safe refuses .*{refused}"):
        safe_fit(tmp_path, config)
    assert "hostile" not in sys.modules


@pytest.mark.parametrize(
    "config",
    [
        {"model": {"init_args": {"lm": {"trust_remote_code": True}}}},
        {"model": {"init_args": {"lm": {"attn_implementation": "kernels-community/attention"}}}},
        {"model": {"init_args": {"lm": {"attn_implementation": "flash_attention_2"}}}},
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
def test_settings_that_run_other_code_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--safe refuses .*, which runs code"):
        safe_fit(tmp_path, config)


def test_known_classes_run_and_the_saved_config_runs_again(small_lm: str, tmp_path: Path) -> None:
    config = {
        "trainer": {
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint"},
                {"class_path": "LearningRateMonitor"},
            ],
            "plugins": [
                {"class_path": "lightning.pytorch.plugins.environments.LightningEnvironment"}
            ],
            "profiler": {"class_path": "lightning.pytorch.profilers.SimpleProfiler"},
        }
    }
    trainer = safe_fit(tmp_path, config, f"--model.lm.name_or_path={small_lm}")
    saved = Path(trainer.log_dir) / "config.yaml"
    again = main(["fit", "--safe", "--config", str(saved)]).trainer
    assert (Path(again.log_dir) / "results.json").is_file()
    # Lightning would run the code of a checkpoint from a server.
    assert yaml.safe_load(saved.read_text())["weights_only"] is True


class Foreign(L.LightningDataModule):
    """A user's own datamodule."""


def test_a_foreign_datamodule_is_left_to_what_it_yields() -> None:
    check_datamodule(LinearProbe, Foreign)
    check_datamodule(L.LightningModule, SubjectsDataModule)
    Foreign.batch_type = type("Mine", (SubjectBatch,), {})
    check_datamodule(LinearProbe, Foreign)
