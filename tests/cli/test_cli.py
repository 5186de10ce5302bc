"""The program, as a user meets it."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lincorr_lightning import LinearMap
from lincorr_lightning.cli import main
from lincorr_lightning.cli.config import prepare_args
from lincorr_lightning.errors import CheckpointError, ConfigError, SubjectsError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUICK = [
    "--model.knowledge=[city,country,color]",
    "--data.n_subjects=300",
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
    assert (results["n_fit"], results["n_test"]) == (150, 150)
    assert len(results["pairs"]) == 6
    for pair in results["pairs"]:
        assert {
            "source",
            "target",
            "label_mean",
            "label_std",
            "instance_mean",
            "n_labels",
            "n_constant_labels",
            "permuted_label_mean",
            "precision",
        } <= set(pair)
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
    assert {"_hparams_/session_start_info", "_hparams_/experiment"} <= set(events.summary_metadata)
    assert tags["images"]
    assert any("text_summary" in tag for tag in tags["tensors"])


def test_each_run_has_a_folder_of_its_own_under_the_run_s_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(tmp_path) == tmp_path / "linear_probe" / "version_0"
    assert str(tmp_path / "linear_probe" / "version_0" / "figures") in capsys.readouterr().out
    assert fit(tmp_path) == tmp_path / "linear_probe" / "version_1"
    fit(tmp_path, "--name=mine", "--trainer.logger=false", "--results.formats=[pdf, svg]")
    folder = tmp_path / "mine" / "version_0"
    assert (folder / "results.json").is_file()
    names = {
        form: {path.stem for path in folder.glob(f"figures/*.{form}")}
        for form in ("png", "pdf", "svg")
    }
    assert names["png"] == names["pdf"] == names["svg"] != set()


def test_saved_config_gives_the_same_run_again(run: Path, tmp_path: Path) -> None:
    cli = main(
        ["fit", "--config", str(run / "config.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    )
    again = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    before = json.loads((run / "results.json").read_text())
    assert again["pairs"] == before["pairs"]


def test_matmul_precision_holds_for_the_run_alone(run: Path, tmp_path: Path) -> None:
    rounded = fit(tmp_path, "--matmul_precision=medium")
    settings = [
        json.loads((each / "results.json").read_text())["settings"] for each in (run, rounded)
    ]
    assert [each["matmul_precision"] for each in settings] == ["highest", "medium"]
    assert torch.get_float32_matmul_precision() == "highest"


def test_test_and_predict_take_the_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = run.rglob("*.ckpt")
    common = [
        "--config",
        "linear_probe.yaml",
        *QUICK,
        f"--trainer.default_root_dir={tmp_path}",
        "--ckpt_path",
        str(checkpoint),
    ]
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


def test_a_checkpoint_is_not_scored_on_what_it_was_fitted_on(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = run.rglob("*.ckpt")
    common = [
        "test",
        "--config",
        "linear_probe.yaml",
        *QUICK,
        f"--ckpt_path={checkpoint}",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    with pytest.raises(SubjectsError, match=r"of 150 held-out subjects.*fitted on"):
        main([*common, "--data.seed=1"])
    with pytest.raises(CheckpointError, match=r"fitted with the control prompt.*\{\} eats"):
        main([*common, "--model.control={} eats"])
    with pytest.raises(CheckpointError, match=r"--model\.lm\.dtype float32"):
        main([*common, "--model.lm.dtype=bfloat16"])
    with pytest.raises(CheckpointError, match=r"nowhere\.ckpt: No such file"):
        main([*common, "--ckpt_path=nowhere.ckpt"])


def test_settings_of_the_fit_are_reported_with_its_scores(run: Path, tmp_path: Path) -> None:
    (checkpoint,) = run.rglob("*.ckpt")
    cli = main(
        [
            "test",
            "--config",
            "linear_probe.yaml",
            *QUICK,
            f"--ckpt_path={checkpoint}",
            f"--trainer.default_root_dir={tmp_path}",
            "--model.ridge=100",
        ]
    )
    results = json.loads((Path(cli.trainer.log_dir) / "results.json").read_text())
    assert results["settings"]["ridge"] == "auto"
    assert results["settings"]["data"]["n_subjects"] == 300
    assert set(results["versions"]) >= {"torch", "lincorr-lightning"}


def test_maps_are_saved_also_when_nothing_is_scored(tmp_path: Path) -> None:
    folder = fit(tmp_path, "--trainer.limit_val_batches=0")
    assert LinearMap.from_pretrained(folder / "linear_map").pairs
    assert not (folder / "results.json").exists()


def test_help_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    printed = capsys.readouterr().out
    for word in (
        "fit",
        "validate",
        "test",
        "predict",
        "audit",
        "report",
        "compare",
        "weights",
        "reproduce",
    ):
        assert f"\n  {word} " in printed
    for verb, name in (("fit", "linear_probe"), ("test", "resilience"), ("predict", "forecast")):
        assert re.search(
            rf"^  lincorr {verb} --config configs/{name}\.yaml\n {{6}}\w", printed, re.M
        )
    assert "do correlations come from the vocabulary alone" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_config_names_its_command_and_its_folder(path: Path) -> None:
    """`lincorr --help` reads the command, and runs lie in the folder of the config's name."""
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^#   lincorr [a-z]+ --config configs/{path.name}", text, re.M)
    if path.stem != "reproduce":  # a folder of several runs
        assert yaml.safe_load(text)["name"] == path.stem


def test_audit_of_a_tokenizer_alone(
    small_lm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(small_lm) / name, tmp_path)
    main(["audit", "--lm", str(tmp_path), "--knowledge", "[city,color]"])
    alone = capsys.readouterr().out
    main(["audit", "--lm", small_lm, "--knowledge", "[city,color]"])
    other = capsys.readouterr().out
    # The folder stands above the table.
    assert alone[alone.index("knowledge ") :] == other[other.index("knowledge ") :]
    assert "unknown word" in " ".join(alone.split())


def test_null_unsets_an_option_of_an_lm(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--model.lm.revision=x --model.lm.dtype=bfloat16 --model.lm.revision null"
    with pytest.raises(SystemExit):
        main(["fit", "--config", "linear_probe.yaml", *options.split(), "--print_config"])
    lm = yaml.safe_load(capsys.readouterr().out)["model"]["init_args"]["lm"]
    assert lm["revision"] is None
    assert lm["dtype"] == "bfloat16"


def test_an_lm_may_be_a_file(small_lm: str, tmp_path: Path) -> None:
    overlay, other = tmp_path / "lm.yaml", tmp_path / "other.yaml"
    overlay.write_text(
        f"model:\n  init_args:\n    lm:\n      name_or_path: {small_lm}\n      dtype: bfloat16\n"
    )
    command, *passed = prepare_args(
        ["test", "--model.before", str(overlay), f"--model.lm={overlay}"]
    )
    assert command == "test"
    lm = {"name_or_path": small_lm, "dtype": "bfloat16"}
    options = [one.split("=", 1) for one in passed]
    assert [name for name, _ in options] == ["--model.before", "--model.lm"]
    assert [json.loads(value) for _, value in options] == [lm, lm]
    other.write_text("name_or_path: here\n")
    with pytest.raises(ConfigError, match=r"other\.yaml has no model\.init_args\.lm"):
        prepare_args(["test", "--model.before", str(other)])
