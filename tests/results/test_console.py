"""The summary at the end of a run."""

from collections.abc import Callable
from pathlib import Path

from lincorr_lightning.results.console import MAX_ROWS, describe_run
from lincorr_lightning.results.results import Results
from tests.results.tables import Column, make_table


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]


def test_headline_tables_and_files(probe: Callable[..., Path]) -> None:
    run = probe(r=0.876)
    (run / "events.out.tfevents.1").write_text("")
    lines = describe_run(run).splitlines()
    assert "Pairs and their r." in lines[0]
    assert cells(lines[2]) == ["pair", "r", "above control", "Hit@1"]
    assert cells(lines[4]) == ["city->country", "0.88", "−0.07", "0.50"]
    assert cells(lines[5]) == ["city->color", "0.20", "−0.07", ""]
    assert lines[-3:] == [
        f"Run folder:  {run}", f"Figures:     {run / 'figures'} (matrix.png)",
        f"TensorBoard: tensorboard --logdir {run}",
    ]  # fmt: skip
    assert "influences" not in "".join(lines) and "Highest weights" not in "".join(lines)


def test_a_long_table_is_cut_and_markup_is_text(tmp_path: Path) -> None:
    rows = [[f"[red]p{i}[/red]", i] for i in range(MAX_ROWS + 5)]
    table = make_table("t", ["name", Column("n", format=",")], rows, "Names.", headline=True)
    Results("study", tables=[table]).write(tmp_path)
    text = describe_run(tmp_path)
    assert f"The first {MAX_ROWS} of {MAX_ROWS + 5} rows." in text
    assert "[red]p0[/red]" in text and f"[red]p{MAX_ROWS}[/red]" not in text


def test_a_run_without_results(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1")
    assert describe_run(tmp_path) == f"Run folder:  {tmp_path}\n"
