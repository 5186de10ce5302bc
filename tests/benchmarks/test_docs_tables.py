"""The modules that make the documents' tables, on sizes that take seconds."""

import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common
from benchmarks.docs_tables import feature_flow, generalization

Rows = Callable[[str], list[list[str]]]


@pytest.mark.nightly
def test_generalization_over_seeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rows: Rows
) -> None:
    runs: list[dict[str, Any]] = []

    def kept(*arguments: str) -> dict[str, Any]:
        runs.append(common.results_of(*arguments))
        return runs[-1]

    monkeypatch.setattr(generalization, "results_of", kept)
    options = ("--model.steps_per_edit=2", "--model.learning_rate=2e-3")
    generalization.main(n_edits=4, relations=("city->country",), seeds=(0, 1), options=options)
    ((_, learned, generalized, *_),) = rows(capsys.readouterr().out)
    assert {run["settings"]["learning_rate"] for run in runs} == {2e-3}
    for cell, key in ((learned, "source_learned"), (generalized, "generalized")):
        shares = [run[key] for run in runs]
        assert cell == f"{statistics.mean(shares):.0%} ± {statistics.stdev(shares):.0%}"


def test_groups_of_features_are_compared_with_chance_and_with_nowhere(rows: Rows) -> None:
    pair = {"group": "From nowhere", "other": "From MLP", "n": 8, "share": 0.5, "expected": 0.751}
    other = {"group": "From RES & MLP", "other": "From MLP", "n": 8, "share": 1, "expected": 1}
    results = {"groups": [{"layer": 3, "pairs": [pair, other]}]}
    assert rows(feature_flow.shared(results)) == [["3", "From nowhere", "", "", "50%, 75%", ""]]
    test = {
        "layer": 3,
        "source": "mlp_out",
        "group": "From nowhere",
        "other": "From MLP",
        "n": 90,
        "n_other": 7,
        "auroc": 0.8,
        "p": 0.001,
        "q": 0.0123,
    }
    # The cosines to another kind of predecessors say nothing of where these features come from.
    tests = {"cosine_tests": [test, {**test, "source": "residual"}]}
    assert rows(feature_flow.cosines(tests)) == [["3", "mlp out", "7", "90", "0.80", "0.01"]]


def test_tables_are_put_between_their_markers() -> None:
    text = "a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb"
    assert common.placed(text, {"one": "| x |", "two": "y"}) == text.replace("old", "| x |")
    with pytest.raises(ValueError, match="no document has the marker"):
        common.place_tables({"no such table": ""})


def test_all_digits_of_a_table_are_read(tmp_path: Path) -> None:
    numbers = [0.1 + 0.2, 0.9 - 0.95, 5e-324, 2 / 3]
    (tmp_path / "a.csv").write_text("\n".join(["r", *map(repr, numbers)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert common.read_csv(tmp_path / "a.csv")["r"].tolist() == numbers


def test_cells_are_escaped_and_numbers_are_short() -> None:
    table = common.markdown_table(["a", "b"], [["x_y|z", 0.98765], [None, 3]])
    assert table.splitlines()[2:] == ["| x\\_y\\|z | 0.988 |", "|  | 3 |"]
