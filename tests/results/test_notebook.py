"""Results in a notebook: DataFrames, tables and figures by name, and how they show themselves."""

import sys
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from matplotlib.figure import Figure as MatplotlibFigure
from pandas.testing import assert_frame_equal

from lincorr_lightning.errors import ResultsError
from lincorr_lightning.results import Column, Figure, Results, SavedRun, Table
from tests.html_checks import ParsedHTML

Make = Callable[..., Path]


def draw() -> MatplotlibFigure:
    return MatplotlibFigure((3, 2), dpi=60)


def make_results(n_rows: int = 3) -> Results:
    rows = [["city->country", 0.98765, 1650, True], ["<script>a & b</script>", None, 3, False]]
    rows += [[f"X->{i}", i / 8, i, True] for i in range(n_rows - len(rows))]
    columns = ["pair", Column("r", "label-wise r", ".2f"), Column("n", format=","), "known"]
    pairs = Table("pairs", columns, rows, "Pairs.", headline=True)
    callback = Results(
        "generalization", tables=[Table("cases", ["subject"], [["Emma"]])],
        figures=[Figure("outcomes", "", draw)],
    )  # fmt: skip
    return Results(
        "linear_probe", {"n_fit": 1000, "share": 1 / 3, "is_sharp": True, "name": "a"}, {},
        [Table("subjects", ["subject"], []), pairs], [Figure("nulls", "Nulls.", draw)],
        {"name_or_path": "org/<lm>"}, included=[callback],
    )  # fmt: skip


def test_a_data_frame_is_what_pandas_reads_from_the_csv_file(tmp_path: Path) -> None:
    results = make_results(5)
    results.write(tmp_path)
    read = pandas.read_csv(tmp_path / "tables" / "pairs.csv")
    assert_frame_equal(results.table("pairs").to_pandas(), read)
    assert_frame_equal(SavedRun.read(tmp_path).table("pairs").to_pandas(), read)
    assert list(results.table("subjects").to_pandas().columns) == ["subject"]


def test_without_pandas_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ResultsError, match=r"'pairs' .* `pip install pandas`"):
        make_results().table("pairs").to_pandas()


def test_unknown_names_are_refused_with_similar_ones(probe: Make) -> None:
    results, run = make_results(), SavedRun.read(probe())
    similar = r"no table 'pair'\. Did you mean 'pairs'\? There are subjects, pairs, cases\."
    with pytest.raises(ResultsError, match=similar):
        results.table("pair")
    with pytest.raises(ResultsError, match=r"no figure 'x'\. There are nulls, outcomes\."):
        results.figure("x")
    with pytest.raises(ResultsError, match="Did you mean 'influences'"):
        run.table("influence")
    with pytest.raises(ResultsError, match="Did you mean 'matrix'"):
        run.figure("matrices")
    with pytest.raises(ResultsError, match=r"no figure 'x'\. There is no figure at all\."):
        Results("empty").figure("x")


def test_tables_and_figures_of_callbacks_are_found() -> None:
    results = make_results()
    (callback,) = results.included
    assert results.table("cases") is callback.tables[0]
    assert results.figure("outcomes") is callback.figures[0]


def test_a_figure_shows_the_picture_that_is_written(tmp_path: Path) -> None:
    results = make_results()
    results.write(tmp_path)
    written = (tmp_path / "figures" / "nulls.png").read_bytes()
    assert results.figure("nulls")._repr_png_() == written
    assert SavedRun.read(tmp_path).figure("nulls")._repr_png_() == written


def test_a_table_shows_its_first_rows_with_texts_escaped() -> None:
    html = make_results(3).table("pairs")._repr_html_()
    assert "<script>" not in html
    page = ParsedHTML(html)
    assert page.rows == [
        ["pair", "label-wise r", "n", "known"],
        ["city->country", "0.99", "1,650", "yes"],
        ["<script>a & b</script>", "", "3", "no"],
        ["X->0", "0.00", "0", "yes"],
    ]
    assert "Pairs." in page.text
    long = ParsedHTML(make_results(1200).table("pairs")._repr_html_())
    assert len(long.rows) == 1 + 10 and "Pairs (first 10 of 1,200 rows)" in long.text


def test_results_show_numbers_the_headline_table_and_names(tmp_path: Path) -> None:
    results = make_results()
    html = results._repr_html_()
    page = ParsedHTML(html)
    assert page.tags <= {"p", "b", "code", "div", "table", "caption", "tr", "th", "td"}
    assert page.rows == ParsedHTML(results.table("pairs")._repr_html_()).rows
    first, *_, tables, figures = page.text.splitlines()
    assert first == "linear_probe of org/<lm>: n fit 1,000, share 0.3333"
    assert tables == "table(name): subjects, pairs, cases"
    assert figures == "figure(name): nulls, outcomes"
    assert ParsedHTML(Results("empty")._repr_html_()).text == "empty"


def test_a_saved_run_shows_what_its_results_did(tmp_path: Path) -> None:
    results = make_results()
    (callback,) = results.included
    callback.write_parts(tmp_path)
    results.write(tmp_path)
    saved = SavedRun.read(tmp_path)
    assert saved._repr_html_() == results._repr_html_()
