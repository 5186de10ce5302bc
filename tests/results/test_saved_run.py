"""Reading folders of runs: what is there, and why a folder is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pandas import isna

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.results import SCHEMA, Results
from lincorr_lightning.results.saved_run import MAX_CONSOLE_ROWS, SavedRun, describe_run
from lincorr_lightning.results.table import Table

Make = Callable[..., Path]


def refused(folder: Path, match: str) -> str:
    with pytest.raises(ReportError, match=match) as caught:
        SavedRun.read(folder)
    return str(caught.value)


def test_a_run_is_read_as_it_was_written(probe: Make, geometry: Make) -> None:
    folder = probe("org/lm", r=0.9, ridge=3.0)
    run = SavedRun.read(folder)
    assert SavedRun.read(folder / "results.json").folder == folder
    assert (run.study, run.lm_name, run.n_parameters) == ("linear_probe", "org/lm", 1_360_000)
    assert run.lm["fingerprint"]["weights"] == "w of org/lm"
    assert run.values["settings"]["ridge"] == 3.0 and run.values["n_test"] == 501
    assert "torch" in run.values["versions"]
    assert run.command == f"lincorr fit --config {folder}/config.yaml"
    assert SavedRun.read(geometry()).command.startswith("lincorr test --config")  # type: ignore
    pairs, influences = run.tables
    assert (pairs.name, pairs.headline, pairs.caption) == ("pairs", True, "Pairs and their r.")
    assert list(pairs.frame.iloc[0]) == ["city->country", 0.9, 0.9 - 0.95, 0.5]
    assert isna(pairs.frame.iloc[1, 3])
    assert list(influences.frame.iloc[0]) == ["Paris", "France", 0.0, True]
    (figure,) = run.figures
    assert figure.png == (folder / "figures" / "matrix.png").read_bytes()


def test_files_that_were_deleted_are_left_out(probe: Make) -> None:
    folder = probe()
    (folder / "tables" / "influences.csv").unlink()
    (folder / "figures" / "matrix.png").unlink()
    (folder / "config.yaml").unlink()
    run = SavedRun.read(folder)
    assert run.command is None
    assert [table.name for table in run.tables] == ["pairs"] and run.figures == []


def test_a_folder_without_results(probe: Make, tmp_path: Path) -> None:
    run = probe()
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", match=r"empty has no results\.json: it is not the folder of a run")
    refused(tmp_path / "nowhere", match="nowhere is no folder")
    refused(run / "config.yaml", match="is no folder")
    (run / "results.json").unlink()
    assert f"lincorr fit --config {run}/config.yaml" in refused(run, match="did not finish")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"study": "x", "r": NaN}', "results.json: .*NaN is not JSON"),
        (f'{{"study": "x", "schema": {SCHEMA + 1}}}', "another version of lincorr-lightning"),
        (f'{{"schema": {SCHEMA}}}', "results.json was changed: key 'study'"),
    ],
)
def test_damaged_results(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    refused(tmp_path, match=match)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tables/pairs.csv", b"pair,r,execss,hit\n"),
        ("tables/pairs.csv", b"\xff\xfe"),
        ("tables/pairs.csv", b"pair,r,excess,hit\na,high,1,1\n"),
        ("tables/pairs.csv", b"pair,r,excess,hit\na,1,1,1,9,9\n"),
        ("config.yaml", b"\xff\xfe"),
    ],
)
def test_damaged_files(probe: Make, name: str, content: bytes) -> None:
    run = probe()
    (run / name).write_bytes(content)
    refused(run, match=f"{run / name} cannot be read.*Run the study again")


# -- the summary at the end of a run --


def cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


@pytest.mark.parametrize("in_notebook", [False, True])
def test_headline_tables_and_files(
    probe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, in_notebook: bool
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: in_notebook)
    run = probe(r=0.876)
    (run / "events.out.tfevents.1").write_text("")
    text = describe_run(run, SavedRun.read(run))
    rows = [cells(line) for line in text.splitlines()]
    assert ["city->country", "0.88", "−0.07", "0.50"] in rows
    assert ["city->color", "0.20", "−0.07"] in rows
    for shown in ("Pairs and their r.", "matrix.png", f"tensorboard --logdir={run}"):
        assert shown in text
    assert "influences" not in text and "Highest weights" not in text


def test_a_long_table_is_cut_and_markup_is_text(tmp_path: Path) -> None:
    rows = [[f"[red]p{i}[/red]", i] for i in range(MAX_CONSOLE_ROWS + 5)]
    table = Table.of("t", rows, ["name", "n"], "Names.", headline=True, formats={"n": ","})
    Results("study", tables=[table]).write(tmp_path)
    text = describe_run(tmp_path, SavedRun.read(tmp_path))
    assert f"The first {MAX_CONSOLE_ROWS} of {MAX_CONSOLE_ROWS + 5} rows." in text
    assert "[red]p0[/red]" in text and f"[red]p{MAX_CONSOLE_ROWS}[/red]" not in text


def test_a_wide_table_has_a_line_for_each_column(tmp_path: Path) -> None:
    names = [f"a number {i} with a headingwithoutspaces" for i in range(12)]
    rows = [["city->country", *range(11)], ["city->color", *range(11, 22)]]
    table = Table.of("t", rows, names, "Wide.", headline=True)
    Results("study", tables=[table]).write(tmp_path)
    _, head, *lines = filter(None, describe_run(tmp_path, SavedRun.read(tmp_path)).splitlines())
    assert cells(head) == [names[0], "city->country", "city->color"]
    shown = [cells(line) for line in lines[1:-1]]
    assert shown == [[name, str(i), str(i + 11)] for i, name in enumerate(names[1:])]


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_of_a_narrow_console_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Columns that do not fit are left out and named."""
    monkeypatch.setenv("COLUMNS", str(width))
    columns = [f"measure{i}" for i in range(12)]
    rows = [[f"city{n}->country", *(1022.25 + i + 100 * n for i in range(12))] for n in range(20)]
    formats = dict.fromkeys(columns, ".2f")
    table = Table.of("t", rows, ["pair", *columns], "c", headline=True, formats=formats)
    Results("study", tables=[table]).write(tmp_path)
    text = describe_run(tmp_path, SavedRun.read(tmp_path)).partition("Run folder")[0]
    assert max(map(len, text.splitlines())) <= width
    for name, *numbers in rows:
        (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
        shown = cells(line)[1:]
        assert shown and shown == [f"{number:.2f}" for number in numbers[: len(shown)]]
    note = " ".join(text.partition("More columns")[2].split())
    assert note.endswith(f": {', '.join(columns[len(shown) :])}.")


def test_a_run_without_results(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    assert describe_run(tmp_path, None) == f"Run folder:  {tmp_path}\n"
