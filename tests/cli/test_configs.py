"""Every shipped YAML runs, or, where it needs a machine or checkpoint that is not here, parses."""

from pathlib import Path

import pytest
import yaml

from lincorr_lightning.cli import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
QUIET = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
STUDIES = {path.name for path in CONFIGS.glob("*.yaml")}
# Studies whose config as it stands is long; what is laid over to see it run all the same.
SHORTENED = {
    "pretraining.yaml": ["--trainer.max_steps=3", "--trainer.limit_val_batches=1"],
}


# What is asked of a study that is not fitted.
COMMANDS = {"forecast.yaml": "predict"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STUDIES))
def test_study_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    cli = main(
        [COMMANDS.get(name, "fit"), "--config", str(CONFIGS / name),
         f"--trainer.default_root_dir={tmp_path}", *QUIET, *SHORTENED.get(name, [])]
    )  # fmt: skip
    assert (Path(cli.trainer.log_dir) / "results.json").is_file()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda p: p.stem)
def test_overlay_parses_over_a_study(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", "linear_probe.yaml", "--config", str(path), "--print_config"])
    assert stop.value.code in (0, None)
    merged = yaml.safe_load(capsys.readouterr().out)

    def leaves(tree: object, trail: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], object]]:
        if isinstance(tree, dict):
            return [leaf for key, value in tree.items() for leaf in leaves(value, (*trail, key))]
        return [(trail, tree)]

    for trail, value in leaves(yaml.safe_load(path.read_text(encoding="utf-8"))):
        found = merged
        for key in trail:
            found = found[key]
        assert found == value, trail


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.name)
def test_every_key_has_a_comment(path: Path) -> None:
    """A key that sets a value has a comment above it, or above the block it stands in."""
    above = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text and not text.startswith(("#", "-")) and ": " in text and "class_path" not in text:
            assert above.startswith("#"), f"{path.name}: {text}"
        above = text
