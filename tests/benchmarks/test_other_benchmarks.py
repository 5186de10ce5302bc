"""The other scripts, on sizes that take seconds."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]
Rows = Callable[[str], list[list[str]]]


def test_solve(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("solve").main(n_source=12, n_targets=(5, 9), n_subjects=200, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == 3 * ["12 to 5"] + 3 * ["12 to 9"]
    assert all(float(row[4]) < 1e-10 for row in table)


@pytest.mark.slow
def test_processes(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("processes").main(n_subjects=200, knowledge="[city, country]")
    one, two = rows(capsys.readouterr().out)
    assert (one[0], two[0]) == ("1", "2")
    assert float(two[6]) < 1e-6


@pytest.mark.slow
def test_memory_of_studies(rows: Rows) -> None:
    # From a small process: a child's peak begins with what its parent held as it was forked.
    path = str(Path(__file__).resolve().parents[2] / "benchmarks" / "study_memory.py")
    call = (
        f"import runpy; runpy.run_path({path!r})['main'](['linear_probe'], "
        "['--data.n_subjects=200', '--model.knowledge=[city, country]'])"
    )
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    libraries, probe = rows(done.stdout)
    assert 100 < int(libraries[1].split()[0]) < int(probe[1].split()[0])


@pytest.mark.slow
def test_watching(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: Script,
    rows: Rows,
) -> None:
    monkeypatch.chdir(tmp_path)
    script("watching").main(steps=4, repeats=1)
    table = rows(capsys.readouterr().out)
    assert len(table) == 6
    assert float(table[0][2].removesuffix("x")) == 1


def test_stacked_edits(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("stacked_edits").main(side_by_side=(1, 4), n_edits=4, steps=2, rank=2, repeats=1)
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table] == ["one at a time, peft", "1 side by side", "4 side by side"]
    assert all(float(row[4]) < 1e-3 for row in table[1:])


def test_published_method(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("published_method").main(n_subjects=120, batch=60)
    assert rows(capsys.readouterr().out)


def test_all_pairs(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("all_pairs").main(n_fit=50, scale=0.03)
    assert rows(capsys.readouterr().out)


def test_feature_matching(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("feature_matching").main(
        n_features=64, width=16, n_layers=3, ks=(1,), threads=1, repeats=1
    )
    assert rows(capsys.readouterr().out)


def test_token_geometry(capsys: pytest.CaptureFixture[str], script: Script, rows: Rows) -> None:
    script("token_geometry").main(
        n_layers=2, n_tokens=64, width=16, range_scalings=(2, 4), ks=(1, 2), threads=1, repeats=1
    )
    assert rows(capsys.readouterr().out)
