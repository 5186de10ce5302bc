"""The modules that make the documents' tables, on sizes that take seconds."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import common
from benchmarks.docs_tables import generalization

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
    options = ("--model.steps_per_edit=2", "--model.learning_rate=2e-3", "--model.forecast=false")
    generalization.main(n_edits=4, relations=("city->country",), seeds=(0, 1), options=options)
    ((_, learned, generalized, *_),) = rows(capsys.readouterr().out)
    assert {run["settings"]["learning_rate"] for run in runs} == {2e-3}
    for cell, key in ((learned, "source_learned"), (generalized, "generalized")):
        shares = [run[key] for run in runs]
        assert cell == f"{statistics.mean(shares):.0%} ± {statistics.stdev(shares):.0%}"


def test_tables_are_put_between_their_markers() -> None:
    text = "a\n<!-- one: begin -->\nold\n<!-- one: end -->\nb"
    assert common.placed(text, {"one": "| x |", "two": "y"}) == text.replace("old", "| x |")
    with pytest.raises(ValueError, match="no document has the marker"):
        common.place_tables({"no such table": ""})


def test_cells_are_escaped_and_numbers_are_short() -> None:
    table = common.markdown_table(["a", "b"], [["x_y|z", 0.98765], [None, 3]])
    assert table.splitlines()[2:] == ["| x\\_y\\|z | 0.988 |", "|  | 3 |"]
