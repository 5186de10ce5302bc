"""Results as plain data, and as files of a run's folder."""

import csv
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure as MatplotlibFigure
from pandas import isna

from lincorr_lightning.results.results import SCHEMA, Figure, Results, versions
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table, show


def draw() -> MatplotlibFigure:
    return MatplotlibFigure((3, 2), dpi=60)


def small_results() -> Results:
    rows = [["city->country", 0.98765, 1650], ["a|b", None, 3]]
    table = Table.of(
        "pairs",
        rows,
        ["pair", "r", "n"],
        "Pairs.",
        "Read me.",
        True,
        {"r": "label-wise r"},
        {"r": ".2f", "n": ","},
    )
    callback = Results(
        "generalization",
        {"generalized": 0.5},
        {},
        [Table.of("edits", [[1]], ["a"])],
        [Figure("edits", "Edits.", draw)],
    )
    return Results(
        "linear_probe",
        {"n_fit": 3},
        {"val/label_mean": 0.9},
        [table],
        [Figure("matrix", "All pairs.", draw)],
        {"name_or_path": "tiny-world"},
        {"ridge": 0.0},
        included=[callback, Results("silent")],
        verdict=["It is so."],
    )


def test_results_json_is_the_contract_s() -> None:
    written = small_results().to_json()
    assert written == {
        "study": "linear_probe",
        "schema": SCHEMA,
        "lm": {"name_or_path": "tiny-world"},
        "verdict": ["It is so."],
        "versions": versions(),
        "n_fit": 3,
        "generalization": {"generalized": 0.5},
        "settings": {"ridge": 0.0},
        "tables": [
            {
                "name": "pairs",
                "caption": "Pairs.",
                "note": "Read me.",
                "headline": True,
                "columns": [
                    {"key": "pair", "heading": "pair", "format": "", "dtype": "object"},
                    {"key": "r", "heading": "label-wise r", "format": ".2f", "dtype": "float64"},
                    {"key": "n", "heading": "n", "format": ",", "dtype": "int64"},
                ],
            },
            {
                "name": "edits",
                "caption": "",
                "note": "",
                "headline": False,
                "columns": [{"key": "a", "heading": "a", "format": "", "dtype": "int64"}],
            },
        ],
        "figures": [
            {"name": name, "caption": caption, "draw": f"{__name__}:draw", "of": [], "options": {}}
            for name, caption in (("matrix", "All pairs."), ("edits", "Edits."))
        ],
    }
    assert set(versions()) >= {"lincorr-lightning", "torch", "lightning", "transformers"}


def test_files_hold_what_results_hold(tmp_path: Path) -> None:
    results = small_results()
    results.write(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text()) == results.to_json()
    with (tmp_path / "tables" / "pairs.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [["pair", "r", "n"], ["city->country", "0.98765", "1650"], ["a|b", "", "3"]]
    png = (tmp_path / "figures" / "matrix.png").read_bytes()
    assert png == results.figures[0].png and png.startswith(b"\x89PNG")
    assert results.figures[0].png is results.figures[0].png, "drawn once"
    # The callback writes its own.
    assert not (tmp_path / "tables" / "edits.csv").exists()


def test_cells_as_text() -> None:
    table = small_results().table("pairs")
    assert table.texts() == [["city->country", "0.99", "1,650"], ["a|b", "", "3"]]
    first = table.first(1, "elsewhere")
    assert first.texts() == [["city->country", "0.99", "1,650"]]
    assert first.note == "Read me. The first 1 of 2 rows; all: elsewhere."
    assert table.first(2) is table
    assert first.markdown().splitlines() == [
        "| pair | label-wise r | n |",
        "| --- | ---: | ---: |",
        "| city→country | 0.99 | 1,650 |",
    ]


@pytest.mark.parametrize(
    ("form", "value", "shown"),
    [
        (".2f", -0.004, "0.00"),
        (".1%", -0.0001, "0.0%"),
        ("+.2f", 0.001, "0.00"),
        ("+.1%", -0.25, "−25.0%"),
        (".2f", -10.0, "−10.00"),
        (".2f", "all", "all"),
        ("", 0.5, "0.5"),
        ("d", 3, "3"),
        (".4f", True, "yes"),
    ],
)
def test_numbers_are_shown_by_their_format(form: str, value: object, shown: str) -> None:
    assert show(value, form) == shown


def test_cells_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    cells = {
        "text": ["007", None, "nan"],
        "float": [0.1 + 0.2, None, 3.0],
        "int": [12, None, 10**15],
        "truth": [True, None, False],
        "whole": [1, 2, 3],
        "digits": [0.9 - 0.95, 5e-324, 2 / 3],
    }
    table = Table.of("cells", zip(*cells.values(), strict=True), list(cells))
    Results("linear_probe", tables=[table], lm={"name_or_path": "x"}).write(tmp_path)
    frame = SavedRun.read(tmp_path).table("cells").frame
    for name, values in cells.items():
        assert [None if isna(value) else value for value in frame[name]] == values
    kinds = [str(kind) for kind in frame.dtypes]
    assert kinds == ["object", "float64", "Int64", "boolean", "Int64", "float64"]


def test_numbers_of_a_data_frame_are_numbers(tmp_path: Path) -> None:
    """Whatever is missing, in memory and read from a file."""
    rows = [["10", 10, None, None, True, 1.5], ["9", 9, 3, None, False, None]]
    columns = ["subject", "n", "rank", "partial_r", "right", "r"]
    results = Results("s", tables=[Table.of("t", rows, columns)])
    results.write(tmp_path)
    for table in (results.table("t"), SavedRun.read(tmp_path).table("t")):
        frame = table.to_pandas()
        kinds = ["object", "int64", "float64", "float64", "bool", "float64"]
        assert [str(kind).replace("str", "object") for kind in frame.dtypes] == kinds
        assert list(frame.sort_values("n")["subject"]) == ["9", "10"]
        assert list(frame["subject"]) == ["10", "9"]
        assert isna(frame["rank"][0]) and frame["rank"][1] == 3 and frame["r"][0] == 1.5
        frame.loc[0, "n"] = 0
        assert table.frame["n"][0] == 10


def test_a_run_is_shown_as_a_summary(tmp_path: Path) -> None:
    """Of what was measured, and of the headline tables of a saved run."""
    results = small_results()
    for text in ("linear_probe of tiny-world", "pairs (2), edits (1)", "matrix, edits", "0.99"):
        assert text in repr(results)
    results.write(tmp_path)
    for part in results.included:
        part.write_parts(tmp_path)
    text = str(SavedRun.read(tmp_path))
    for part in ("linear_probe of tiny-world", "matrix, edits", str(tmp_path), "0.99", "Read me."):
        assert part in text
