"""Reading folders of runs: what is there, and why a folder is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pandas import isna

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.results import SCHEMA
from lincorr_lightning.results.saved_run import SavedRun

Make = Callable[..., Path]


def refused(folder: Path, match: str) -> str:
    with pytest.raises(ReportError, match=match) as caught:
        SavedRun.read(folder)
    return str(caught.value)


def change(run: Path, **values: Any) -> None:
    path = run / "results.json"
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in found.items() if v != "gone"}))


def test_a_run_is_read_as_it_was_written(probe: Make) -> None:
    folder = probe("org/lm", r=0.9, ridge=3.0)
    run = SavedRun.read(folder)
    assert SavedRun.read(folder / "results.json").folder == folder
    assert (run.study, run.lm_name, run.n_parameters) == ("linear_probe", "org/lm", 1_360_000)
    assert run.fingerprint["weights"] == "w of org/lm"
    assert run.settings["ridge"] == 3.0 and run.values["n_test"] == 501
    assert "torch" in run.versions
    assert run.seeds == {"seed_everything": 7, "model.seed": 5}
    assert run.command == f"lincorr fit --config {folder}/config.yaml"
    pairs, influences = run.tables
    assert (pairs.name, pairs.headline, pairs.caption) == ("pairs", True, "Pairs and their r.")
    assert list(pairs.frame.iloc[0]) == ["city->country", 0.9, 0.9 - 0.95, 0.5]
    assert isna(pairs.frame.iloc[1, 3])
    assert list(influences.frame.iloc[0]) == ["Paris", "France", 0.0, True]
    (figure,) = run.figures
    png, width, height = figure.read()
    assert (width, height) == (180, 120) and png == figure.path.read_bytes()


def test_a_run_without_config_has_no_command_and_the_seeds_of_its_settings(probe: Make) -> None:
    folder = probe()
    (folder / "config.yaml").unlink()
    run = SavedRun.read(folder)
    assert run.command is None and run.seeds == {"data.seed": 3}


def test_the_verb_of_the_command(geometry: Make) -> None:
    assert SavedRun.read(geometry()).command.startswith("lincorr test --config")  # type: ignore


def test_files_that_were_deleted_are_left_out(probe: Make) -> None:
    folder = probe()
    (folder / "tables" / "influences.csv").unlink()
    (folder / "figures" / "matrix.png").unlink()
    run = SavedRun.read(folder)
    assert [table.name for table in run.tables] == ["pairs"] and run.figures == []


def test_a_run_that_did_not_finish(probe: Make) -> None:
    run = probe()
    (run / "results.json").unlink()
    message = refused(run, match="did not finish")
    assert str(run) in message and f"lincorr fit --config {run}/config.yaml" in message
    assert "leave it out" in message


def test_a_folder_that_is_not_a_run_s(probe: Make, tmp_path: Path) -> None:
    run = probe()
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", match="empty is not the folder of a run: it has no results.json")
    refused(tmp_path / "nowhere", match="nowhere does not exist")
    refused(run / "config.yaml", match="is a file")
    assert str(run) in refused(run.parent, match="holds some. Name them: ")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"study": "linear_probe", "pai', "cut short or changed"),
        ('{"study": "x", "r": NaN}', "NaN is not JSON"),
        ("[1]", "it is not a JSON object"),
        ('{"a": 1}', "does not name its study"),
        ('{"study": "x", "lm": "tiny-world"}', "before 0.2 wrote it.*Run the study again with"),
        (f'{{"study": "x", "schema": {SCHEMA + 1}}}', "a newer version of lincorr-lightning"),
        (f'{{"study": "x", "schema": {SCHEMA}}}', "key 'lm' is missing"),
    ],
)
def test_damaged_results(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    assert "results.json" in refused(tmp_path, match=match)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"tables": "gone"}, "key 'tables' is missing"),
        ({"tables": [{"name": "pairs", "columns": []}]}, "columns pair, r, excess, hit; .* says"),
        ({"tables": [{"columns": []}]}, "key 'name' is missing"),
        ({"tables": 3}, "is not what linear_probe of this version writes"),
        ({"figures": [{}]}, "key 'name' is missing"),
        ({"lm": "tiny-world"}, "is not what"),
        ({"settings": None}, "is not what"),
        ({"versions": "gone"}, "key 'versions' is missing"),
    ],
)
def test_changed_results(probe: Make, values: dict[str, Any], match: str) -> None:
    run = probe()
    change(run, **values)
    assert str(run) in refused(run, match=match)


def test_damaged_figures_tables_and_settings(probe: Make) -> None:
    run = probe()
    figure = run / "figures" / "matrix.png"
    whole = figure.read_bytes()
    figure.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ReportError, match=r"matrix\.png is no PNG, or was cut short"):
        SavedRun.read(run).figures[0].read()
    figure.write_bytes(whole)
    table = run / "tables" / "pairs.csv"
    text = table.read_text()
    table.write_text(f"{text}city->country,1\n")
    refused(run, match=r"pairs\.csv, line 4 has 2 cells for 4 columns.*delete the file")
    table.write_text(text.replace("excess", "execss"))
    refused(run, match=r"pairs\.csv has the columns pair, r, execss, hit; results\.json says")
    table.write_bytes(b"\xff\xfe")
    refused(run, match=r"pairs\.csv cannot be read")
    table.write_bytes(b"")
    refused(run, match=r"pairs\.csv has the columns ; ")
    table.unlink()
    (run / "config.yaml").write_text("a: [")
    refused(run, match=r"config\.yaml cannot be read")
    (run / "config.yaml").write_text("[1]")
    refused(run, match=r"config\.yaml holds no settings")
