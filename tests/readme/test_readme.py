"""Every command and snippet of README runs, in its order, in one folder, and tells its numbers."""

import importlib.util
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from contextlib import chdir
from importlib.resources import files
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from lincorr_lightning.cli import main
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.sae.formats import load_saes

SHORTER = {
    "configs/correlation_matrix.yaml": ["--data.n_subjects=400"],
    "configs/pretraining.yaml": ["--trainer.max_steps=3", "--trainer.limit_val_batches=1"],
    "configs/formation.yaml": ["--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=2"],
    "configs/sparse_autoencoders.yaml": ["--data.n_tokens=70000", "--data.n_held_out=500"],
    "configs/knowledge_geometry.yaml": ["--data.n_subjects=200"],
    "--data.words_per_subject": ["--data.n_subjects=400"],
}  # fmt: skip
# Whoever shares a line follows from one another in the tiny world.
TIED = (
    "city birthplace country continent language landmark food drink flower vacation music mother "
    "father",
    "ceo company job vehicle",
    "sport hobby",
    "color personality",
)
CORRELATION_MATRIX = ["fit", "--config", "configs/correlation_matrix.yaml"]
README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Code blocks of the README in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def lincorr_commands() -> list[list[str]]:
    """Arguments of every `lincorr` in the README's shell blocks."""
    whole = [block.replace("\\\n", " ") for block in blocks("bash")]
    lines = [line for block in whole for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part)[1:] for part in parts if part.startswith("lincorr ")]


def commands_with_tables() -> list[list[str]]:
    """Those of the probe whose numbers the README shows."""
    told = ("configs/linear_probe.yaml", "simile_color", "--model.given")
    return [
        next(command for command in lincorr_commands() if word in " ".join(command))
        for word in told
    ]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Run all of it in an empty folder, which is left as the current one.

    Yields:
        The run's folder of each command that has one.
    """
    tiny_world = str(files("lincorr_lightning.lm").joinpath("tiny_world"))
    folders: dict[str, Path] = {}
    with chdir(tmp_path_factory.mktemp("user")):
        for command in lincorr_commands():
            asked = " ".join(command)
            if "configs/trainer/ddp_cpu.yaml" in command:
                continue  # a launcher cannot start this test again; tests/processes runs it
            if command == CORRELATION_MATRIX:
                continue  # run in full by tests/cli
            if any("configs/lm/" in part or "texts.txt" in part for part in command):
                # Its checkpoint is not here: everything up to loading it must be right.
                with pytest.raises(SystemExit) as stop:
                    main([*command, "--print_config"])
                assert stop.value.code in (0, None)
                continue
            # Minutes as they stand; a little shows that they run.
            if command not in commands_with_tables():
                command = [*command, *next((s for c, s in SHORTER.items() if c in command), [])]
            if any("configs/source_finetune" in part for part in command):
                # tests/cli runs the configs as they stand.
                command = [*command, "--data.n_edits=16"]
            if any("configs/vocabulary_ablation" in part for part in command):
                command = [*command, "--model.compose.epochs=2", "--model.learn.epochs=2"]
            saes = "runs/sparse_autoencoders/version_0/sparse_autoencoders"
            places = {"path/to/checkpoint": tiny_world, "folder/of/one": f"{saes}/residual.0",
                      "folder/of/another": f"{saes}/mlp_out.0"}  # fmt: skip
            for name, place in places.items():
                command = [part.replace(name, place) for part in command]
            trainer = getattr(main(command), "trainer", None)
            if trainer is not None and trainer.log_dir is not None:
                folders[asked] = Path(trainer.log_dir).absolute()
        yield folders


@pytest.mark.slow
def test_commands_run_in_order(ran: dict[str, Path]) -> None:
    assert "fit --config configs/linear_probe.yaml" in ran
    assert len(ran) > 20
    assert all(folder.is_dir() for folder in ran.values())


@pytest.mark.slow
@pytest.mark.usefixtures("ran")
def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    tiny_world = str(files("lincorr_lightning.lm").joinpath("tiny_world"))
    capsys.readouterr()
    probe, own_module, features = (
        code.replace("path/to/checkpoint", tiny_world) for code in blocks("python")
    )
    exec(compile(probe, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip() in {
        answer.text.split()[0] for answer in Catalogue.load()["country"].answers
    }
    exec(compile(own_module, "README.md", "exec"), {"__name__": "readme"})
    learned, _ = capsys.readouterr().out.split()[-2:]
    assert float(learned) > 0
    names: dict[str, Any] = {}
    exec(compile(features, "README.md", "exec"), names)
    assert names["logits"].shape[:2] == names["features"].shape[:2]


def test_the_knowledge_file_is_valid(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    path = tmp_path / "rivers.yaml"
    path.write_text(text, encoding="utf-8")
    assert yaml.safe_load(text)["version"] == 1
    relation = Catalogue.load(path).relation("river->country")
    assert relation.reference is not None
    assert relation.reference["Rhine"] == {"Germany", "Switzerland", "Netherlands"}


def test_every_file_named_exists() -> None:
    root = Path(__file__).resolve().parents[2]
    for name in re.findall(r"(?:configs|benchmarks|tests|\.ci)/[\w./-]*\w", README):
        assert (root / name).exists(), name


@pytest.mark.slow
def test_numbers_are_those_of_a_fresh_run(ran: dict[str, Path]) -> None:
    """To the last digit but one: other processors round otherwise."""
    spec = importlib.util.spec_from_file_location(
        "readme_tables", Path(__file__).resolve().parents[2] / "benchmarks" / "readme_tables.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    results = [script.read(str(ran[" ".join(command)])) for command in commands_with_tables()]
    fresh = script.placed(README, script.tables(*results))
    tied = {pair for group in TIED for pair in permutations(group.split(), 2)}
    found = [pair for pair in results[2]["pairs"] if pair["q"] <= script.FINDING]
    assert {(pair["source"], pair["target"]) for pair in found} == tied
    number = re.compile(r"(?<![\w.])-?\d*\.\d+")
    stands, should = number.findall(README), number.findall(fresh)
    assert len(stands) == len(should)
    for ours, theirs in zip(stands, should, strict=True):
        assert float(ours) == pytest.approx(float(theirs), abs=0.0201)


@pytest.mark.slow
def test_predecessors_of_features_count_as_told(
    ran: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Matched predecessors switch features off at least three times as often as random ones.

    And the features that carry both answers of city->country are what the tie runs through.
    """
    folder = ran["test --config configs/feature_flow.yaml"]
    results = json.loads((folder / "results.json").read_text())
    for method in ("top-1", "top-5"):
        entry = results["deactivation"][method]
        assert entry["n"] >= 1000
        assert entry["matched_success"] >= 3 * entry["random_success"]
    relation = results["relation"]
    assert relation["same_carrier"]["attention_out.0"] > 0.5
    assert relation["same_carrier_permuted"]["attention_out.0"] < 0.05
    cuts = {(cut["cut"], cut["control"]): cut for cut in relation["cuts"]}
    assert cuts["none", False]["recall"] > 0.95
    assert cuts["carriers", True]["recall"] > cuts["carriers", False]["recall"] + 0.1
    steering = results["steering"]
    graphs = [steering[name]["score"] for name in ("constant", "linear", "exponential")]
    assert max(graphs) > steering["single"]["score"]

    # The README tells of this run. On another processor SAEs are trained a little otherwise.
    root = Path(__file__).resolve().parents[2]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["feature_flow.py", str(folder)])
    runpy.run_path(str(root / "benchmarks" / "feature_flow.py"), run_name="__main__")
    tables = [t for t in capsys.readouterr().out.split("\n\n") if t.startswith("| ")]
    assert len(tables) == 3
    number = re.compile(r"0\.\d{3}|1\.000")
    for table in tables:
        head, _, *fresh = table.strip().splitlines()
        _, _, *stands = README[README.index(head) :].split("\n\n")[0].splitlines()
        assert len(stands) == len(fresh)
        for ours, theirs in zip(stands, fresh, strict=True):
            assert ours.split("|")[1] == theirs.split("|")[1]
            told, found = ([float(x) for x in number.findall(row)] for row in (ours, theirs))
            assert told == pytest.approx(found, abs=0.08), ours
    saes = load_saes(folder / "sparse_autoencoders").values()
    assert f"of {sum(sae.n_features for sae in saes):,} features" in README
