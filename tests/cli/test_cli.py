"""The program, as a user meets it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lincorr_lightning import LinearMap
from lincorr_lightning.cli import main
from lincorr_lightning.errors import CheckpointError, ConfigError, OutputError, SubjectsError
from lincorr_lightning.probe import LinearProbe
from lincorr_lightning.results.run_folder import run_folder
from tests.small_runs import SMALL_RUNS

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUICK = [
    "--model.knowledge=[city,country,color]",
    "--data.n_subjects=120",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def fit(folder: Path, *extra: str) -> Path:
    """`lincorr fit` in this process; returns the run's folder."""
    root = f"--trainer.default_root_dir={folder}"
    cli = main(["fit", "--config", "linear_probe.yaml", root, *QUICK, *extra])
    return Path(cli.trainer.log_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("runs"))


def test_outputs_are_those_of_the_contract(run: Path) -> None:
    results = json.loads(
        (run / "results.json").read_text(), parse_constant=lambda name: pytest.fail(name)
    )
    assert results["study"] == "linear_probe"
    assert (results["n_fit"], results["n_test"]) == (60, 60)
    assert len(results["pairs"]) == 6
    (precise,) = (
        p["precision"]
        for p in results["pairs"]
        if (p["source"], p["target"]) == ("city", "country")
    )
    for way in "influenced", "influencing":
        assert set(precise[way]) == {"1", "3", "5", "n"}
    assert (run / "config.yaml").read_text().startswith("# lincorr fit --config config.yaml\n")
    assert (run / "tables" / "subjects.csv").read_text().startswith("subject,half")
    assert list((run / "figures").glob("*.png"))
    assert "city->country" in LinearMap.from_pretrained(run / "linear_map").pairs
    events = EventAccumulator(str(run))
    events.Reload()
    tags = events.Tags()
    assert any("city" in tag and "country" in tag for tag in tags["scalars"])
    assert len(tags["scalars"]) <= 60
    assert tags["images"]
    assert any("text_summary" in tag for tag in tags["tensors"])


def forecast(lm: str, folder: Path, *extra: str) -> Path:
    """`lincorr predict`, which takes a second; returns the run's folder."""
    words = ["predict", "--config", "forecast.yaml", "--data.n_edits=3", *QUICK[2:]]
    cli = main(
        [*words, f"--model.lm.name_or_path={lm}", f"--trainer.default_root_dir={folder}", *extra]
    )
    return run_folder(cli.trainer)


def test_each_run_has_a_folder_of_its_own_under_the_run_s_name(
    small_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert forecast(small_lm, tmp_path) == tmp_path / "forecast" / "version_0"
    assert str(tmp_path / "forecast" / "version_0") in capsys.readouterr().out
    assert forecast(small_lm, tmp_path) == tmp_path / "forecast" / "version_1"
    folder = forecast(small_lm, tmp_path, "--name=mine", "--trainer.logger=false")
    assert folder == tmp_path / "mine" / "version_0" and (folder / "results.json").is_file()


_SLURM = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0"}
_SLURM |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NAME": "mine"}
_TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
_TWO = ("--config", "trainer/ddp_cpu.yaml")


@pytest.mark.parametrize("variables", [{"LOCAL_RANK": "1"}, {"SLURM_PROCID": "1"}, _SLURM], ids=str)
def test_a_rank_of_another_program_loses_nothing(
    variables: dict[str, str], small_lm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 1)  # as Lightning finds it at its import
    folder = forecast(small_lm, tmp_path)
    assert (folder / "results.json").is_file() and list(folder.glob("events.*"))


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"RANK": "abc"}, (), "RANK of the environment is 'abc'; unset it"),
        ({"LOCAL_RANK": "0"}, _TWO, "of 2 processes .* is process 0 of 1"),
        ({"LOCAL_RANK": "5", "MASTER_PORT": "1"}, _TWO, "is process 5 of 2"),
        ({"NODE_RANK": "1"}, _TWO, "is process 2 of 2"),
        (_SLURM, _TWO, "is process 0 of 1"),
        (_SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, (), "of 1 processes .* of 2"),
        (_TORCHRUN, (), "of 1 processes .* of 2"),
        (_TORCHRUN | {"WORLD_SIZE": "3"}, _TWO, "of 2 processes .* is process 1 of 3"),
        ({"TORCHELASTIC_RUN_ID": "1"}, (), "has not set the variable 'WORLD_SIZE'"),
    ],
)
def test_another_number_of_processes_than_a_launcher_started(
    variables: dict[str, str],
    options: tuple[str, ...],
    message: str,
    small_lm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        forecast(small_lm, tmp_path, *options)


@pytest.mark.parametrize(
    ("way", "logger"),
    [("moved", ""), ("removed", ""), ("replaced", ""), ("removed", "CSVLogger")],
)
def test_a_folder_that_is_lost_during_the_run(
    way: str, logger: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LinearProbe.training_step

    def lose_folder(self: LinearProbe, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            folder = run_folder(self.trainer).rename(tmp_path / "moved")
            if way != "moved":
                shutil.rmtree(folder)
            if way == "replaced":
                run_folder(self.trainer).write_text("a file")
        step(self, batch, batch_idx)

    monkeypatch.setattr(LinearProbe, "training_step", lose_folder)
    csv = (f"--trainer.logger={logger}", f"--trainer.logger.save_dir={tmp_path}") if logger else ()
    command = SMALL_RUNS["probe"].command(inputs, tmp_path, *csv)
    if way == "replaced":
        with pytest.raises(OutputError, match=r"cannot write .*version_0"):
            main(command)
    else:
        folder = run_folder(main(command).trainer)
        assert (folder / "results.json").is_file()
        assert list(folder.glob("metrics.csv" if logger else "events.*"))


@pytest.mark.slow
def test_saved_config_gives_the_same_run_again(run: Path, tmp_path: Path) -> None:
    cli = main(
        ["fit", "--config", str(run / "config.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    )
    again = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    before = json.loads((run / "results.json").read_text())
    assert again["pairs"] == before["pairs"]


def test_matmul_precision_holds_for_the_run_alone(small_lm: str, tmp_path: Path) -> None:
    for options, expected in (((), "highest"), (("--matmul_precision=high",), "high")):
        folder = forecast(small_lm, tmp_path, *options)
        settings = json.loads((folder / "results.json").read_text())["settings"]
        assert settings["matmul_precision"] == expected
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.slow
def test_test_and_predict_take_the_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = run.rglob("*.ckpt")
    paths = f"--ckpt_path={checkpoint}", f"--trainer.default_root_dir={tmp_path}"
    common = ["--config", "linear_probe.yaml", *QUICK, *paths]
    for command in "validate", "test":
        cli = main([command, *common])
        scored = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
        before = json.loads((run / "results.json").read_text())
        for ours, theirs in zip(scored["pairs"], before["pairs"], strict=True):
            assert ours["label_mean"] == pytest.approx(theirs["label_mean"], abs=1e-6)
    cli = main(["predict", *common, '--data.predict_subjects=["Paris","Ada"]'])
    folder = Path(cli.trainer.log_dir)
    lines = (folder / "tables" / "predictions.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 6
    printed = capsys.readouterr().out
    subject, pair, label, logit, *_ = lines[1].split(",")
    assert re.search(rf"^{subject} +{pair} +{label} +{float(logit):.2f} ", printed, re.M)
    assert "The first 10 of 12 rows." in printed
    assert f"\nAll rows:    {folder / 'tables' / 'predictions.csv'}\n" in printed
    assert (folder / "predictions.safetensors").is_file()
    assert not (folder / "results.json").exists()


def test_a_checkpoint_is_not_scored_on_what_it_was_fitted_on(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = run.rglob("*.ckpt")
    paths = f"--ckpt_path={checkpoint}", f"--trainer.default_root_dir={tmp_path}"
    common = ["test", "--config", "linear_probe.yaml", *QUICK, *paths]
    with pytest.raises(SubjectsError, match=r"of 60 held-out subjects.*fitted on"):
        main([*common, "--data.seed=1"])
    with pytest.raises(CheckpointError, match=r"--model\.lm\.dtype float32"):
        main([*common, "--model.lm.dtype=bfloat16"])


def test_maps_are_saved_also_when_nothing_is_scored(tmp_path: Path) -> None:
    folder = fit(tmp_path, "--trainer.limit_val_batches=0")
    assert LinearMap.from_pretrained(folder / "linear_map").pairs
    assert not (folder / "results.json").exists()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_config_names_its_command_and_its_folder(path: Path) -> None:
    """`lincorr --help` reads the command, and runs lie in the folder of the config's name."""
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^#   lincorr [a-z]+ --config configs/{path.name}", text, re.M)
    if path.stem != "reproduce":  # a folder of several runs
        assert yaml.safe_load(text)["name"] == path.stem


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("--help", "lincorr fit --config configs/linear_probe.yaml\n      "),
        ("audit --knowledge [city,color]", "city"),
        ("report {run} --output {out}", "report.html"),
        ("compare {run} {other} --output {out}", "report.html"),
        ("weights {run} city->country Rome Italy", "Italy"),
        ("cache {out}", ""),
        ("reproduce --plan --only figure3 --output {out}", "probe_attribute"),
    ],
)
def test_each_command_beside_the_trainers(
    command: str, expected: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    (tmp_path / "out").mkdir()
    paths = {"run": run, "other": other, "out": tmp_path / "out"}
    main([word.format(**paths) for word in command.split()])
    assert expected in capsys.readouterr().out


def test_null_unsets_an_option_of_an_lm(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model.lm.revision=x --model.lm.dtype=bfloat16 --model.lm.revision null"
    with pytest.raises(SystemExit):
        main(["fit", "--config", "linear_probe.yaml", *options.split(), "--print_config"])
    lm = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["lm"]
    assert lm["revision"] is None
    assert lm["dtype"] == "bfloat16"
