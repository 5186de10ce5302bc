"""The modules that make the documents' tables, on sizes that take seconds."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.docs_tables import generalization

Rows = Callable[[str], list[list[str]]]


@pytest.mark.nightly
def test_generalization_over_seeds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: Rows
) -> None:
    generalization.main(
        n_edits=4,
        relations=("city->country",),
        seeds=(0, 1),
        learning_rate=2e-3,
        forecast=False,
        output=str(tmp_path),
        options=("--model.steps_per_edit=2",),
    )
    ((_, learned, generalized, *_),) = rows(capsys.readouterr().out)
    runs = [json.loads(p.read_text()) for p in sorted(tmp_path.glob("*/*/results.json"))]
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
