"""The modules that measure, and those that make other tables, on sizes that take seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common
from benchmarks.docs_tables import costs, generalization
from benchmarks.speed import (
    commands,
    finetune_steps,
    forecast,
    gpu,
    random_lms,
    reading,
    stacked_edits,
)
from lincorr_lightning.cli import main
from lincorr_lightning.results.table import Table

PROBE = (
    "fit --config configs/linear_probe.yaml --data.n_subjects=60 --model.random_labels=0 "
    "--model.knowledge=[city,country]"
)


@pytest.fixture(autouse=True)
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Results go to a folder, and the documents' tables here."""
    tables: dict[str, str] = {}
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(common, "place_tables", tables.update)
    return tables


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return common.read_csv(folder / "speed" / f"{name}.csv").to_dict("records")


def test_stacked_edits(tmp_path: Path, placed: dict[str, str]) -> None:
    stacked_edits.main(side_by_side=(1, 4), n_edits=4, steps=2, repeats=1)
    alone, *stacked = rows_of(tmp_path, "stacked_edits")
    assert alone["faster"] == 1 and [row["side_by_side"] for row in stacked] == [1, 4]
    assert all(row["seconds"] > 0 for row in stacked) and "stacked edits" in placed


def test_a_step_with_callbacks_takes_longer(tmp_path: Path, placed: dict[str, str]) -> None:
    finetune_steps.main(n_edits=2, repeats=1)
    (row,) = rows_of(tmp_path, "finetune_steps")
    assert row["measured"] > row["alone"] > 0 and "fine-tune steps" in placed


@pytest.mark.parametrize("shape", ["", "small"])
def test_reading(
    tmp_path: Path,
    small_lm: str,
    placed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    shape: str,
) -> None:
    """All ways give the same logits, and as many prompts as they were given; old rows stay.

    Factors of 1 are the published way's and the fastest other package's.
    """
    monkeypatch.setattr(reading, "find_spec", lambda name: None)
    lm: dict[str, Any] = {"shape": shape, "dtype": "bfloat16"} if shape else {"lm": small_lm}
    about = Path(shape or small_lm).name, lm.get("dtype", "float32")
    machine = f"{torch.get_num_threads()} CPU threads"
    other = reading.ReadingSpeed(*about, machine, 2, "nnsight", "0", "trace", 80, 1e9, 0.0)
    common.add_rows(Table.of("reading", [other]), "package")
    reading.main(**lm, knowledge=("city", "country"), n_subjects=40, n_published=6)
    rows = rows_of(tmp_path, "reading")
    packages = ["nnsight", *["transformers"] * 3, *["lincorr-lightning"] * 3]
    assert [row["package"] for row in rows] == packages
    assert [row["prompts"] for row in rows] == [80, 12, 80, 80, 80, 80, 80]
    assert all(row["differs"] < (0.1 if shape else 1e-4) for row in rows[:-1])
    cells = [line.split(" | ") for line in placed["reading"].splitlines()[2:]]
    assert cells[1][6] == "1.0" and cells[0][7] == "1.00"
    assert {row[7] for row in cells[1:]} == {"0.00"}


def test_what_growth_is_measured_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe runs on the made-up knowledge and on an LM with random weights."""
    monkeypatch.setattr(random_lms, "LABELS", (20,))
    monkeypatch.setattr(random_lms, "SHAPES", {"15M": (64, 1)})
    random_lms.main(tmp_path)
    plan = commands.GROUPS["labels"]
    own = f" --model.lm.name_or_path={tmp_path / '15M'} --model.random_labels=0"
    text = f"{plan['prefix']} {plan['commands']['20']} {own} --data.n_subjects=60"
    _, _, _, *words = commands.words_of(text, shared=str(tmp_path), runs=str(tmp_path))
    results = common.read_numbers(Path(main(words).trainer.log_dir) / "results.json")
    assert {pair["n_labels"] for pair in results["pairs"]} == {20}


@pytest.mark.nightly
def test_forecast(tmp_path: Path, placed: dict[str, str]) -> None:
    forecast.main(lms=("toy",))
    (row,) = rows_of(tmp_path, "forecast")
    assert row["head"] == "384,000 in bfloat16" and row["peak"] > row["processor"] > 0
    assert "forecast" in placed


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: dict[str, str]) -> None:
    short = {"repeats": 2, "commands": {"version": "lincorr --version", "python": "python -c ''"}}
    monkeypatch.setitem(commands.GROUPS, "startup", short)
    commands.main(only=("startup",))
    assert [row["command"] for row in rows_of(tmp_path, "commands")] == ["version", "python"]
    assert set(placed) == {"startup", "studies", "second runs", "growth"}
    commands.main(only=("startup",), earlier=common.ROOT, threads=2, commands=("version",))
    (row,) = rows_of(tmp_path, "versions")
    assert (row["command"], row["threads"], row["runs"]) == ("version", 2, 2)
    assert 0 < row["processor_ratio"] < 9 and row["peak_before"] > 5 and "versions" in placed


@pytest.mark.slow
def test_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are compared with that of the CPU; what fails is a row that says so."""

    def run_words(words: list[str], seconds: float) -> tuple[float, str | None]:
        if words[0] != "lincorr_lightning":
            return gpu_run(words, seconds)
        main(words[1:])
        return 1.0, None

    gpu_run = gpu.run
    monkeypatch.setattr(gpu, "run", run_words)
    study = {
        "command": PROBE,
        "numbers": ["pairs"],
        "strategies": ["CPU", "again"],
    }
    plan = {"scripts": {"missing": "no_such"}, "strategies": {"CPU": "", "again": ""}}
    monkeypatch.setattr(gpu, "PLAN", plan | {"studies": {"probe": study}})
    gpu.main()
    missing, probe = rows_of(tmp_path, "gpu")
    assert "no_such" in missing["error"] and probe["strategy"] == "again"
    assert probe["largest"] == probe["mean"] == 0


@pytest.mark.nightly
def test_generalization(tmp_path: Path, placed: dict[str, str]) -> None:
    options = ("--model.steps_per_edit=2", "--model.learning_rate=2e-3")
    generalization.main(n_edits=2, relations=("city->country",), seeds=(0,), options=options)
    rows = common.read_csv(tmp_path / "tiny_world" / "generalization.csv")
    assert rows["seed"].tolist() == [0] and "city→country" in placed["table5"]


def test_rows_replace_those_with_the_same_keys(tmp_path: Path) -> None:
    for rows in ([("a", 1.0), ("b", 2.0)], [("b", 3.0)]):
        common.add_rows(Table.of("t", rows, ["name", "r"]), "name")
    assert (tmp_path / "speed" / "t.csv").read_text() == "name,r\na,1\nb,3\n"
    assert f"{common.Estimate(0.5, 0.25, 0.75):.2f}" == "0.50 (0.25 to 0.75)"


def test_tables_are_put_between_their_markers() -> None:
    text = "a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb"
    assert common.placed(text, {"one": "| x |", "two": "y"}) == text.replace("old", "| x |")
    table = common.markdown_table(["a_b", "c"], [["x_y|z", 0.98765], [None, 3]])
    assert table.splitlines()[2:] == ["| x\\_y\\|z | 0.988 |", "|  | 3 |"]


def test_costs_follow_from_the_rates_and_configs() -> None:
    """Of the probe by hand: 2,000 subjects, ten kinds and the unrelated prompt, 16.06 GB loaded."""
    parts = costs.tables()
    assert common.placed(common.all_text(), parts) == common.all_text()
    row, _ = (row for row in parts["costs table"].splitlines() if row.startswith("| probe"))
    seconds = 2000 * 11 / 6965.5 + 16.06 + 25.06
    assert f" {seconds / 60:.1f} | {seconds / 3600:.2f} |" in row
