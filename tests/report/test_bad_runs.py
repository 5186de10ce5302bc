"""What cannot be told, or not on one page: each with its reason and the way out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lincorr_lightning.errors import OutputError, ReportError
from lincorr_lightning.results.report import write_report

Make = Callable[..., Path]


def refused(*runs: Path, match: str, output: Path) -> str:
    with pytest.raises(ReportError, match=match) as caught:
        write_report(runs, output)
    assert not output.exists()
    return str(caught.value)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def test_a_run_that_did_not_finish(probe: Make, out: Path) -> None:
    run = probe()
    (run / "results.json").unlink()
    told = refused(probe(), run, match="did not finish", output=out)
    assert str(run) in told and f"lincorr fit --config {run}/config.yaml" in told
    assert "leave it out" in told


def test_a_folder_that_is_none(probe: Make, tmp_path: Path, out: Path) -> None:
    run = probe()
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, match="empty is no run's folder: there is no results.json", output=out)
    refused(tmp_path / "nowhere", match="nowhere does not exist", output=out)
    refused(run / "config.yaml", match="is a file", output=out)
    assert str(run) in refused(run.parent, match="holds some. Name them: ", output=out)
    refused(match="name the folder of a run", output=out)


def test_a_run_may_be_named_by_its_results_or_twice(probe: Make, out: Path) -> None:
    run = probe()
    page = write_report([run, run / ".", run / "results.json"], out).read_text()
    assert "from the folders of one run" in page


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"study": "linear_probe", "pai', "cut short or changed"),
        ('{"study": "x", "r": NaN}', "NaN is no JSON"),
        ("[1]", "holds no JSON object"),
        ('{"a": 1}', "does not say of which study"),
        ('{"study": "linear_probe", "lm": "x"}', "key 'pairs' is missing"),
        (
            '{"study": "linear_probe", "lm": "x", "pairs": 3, "n_fit": 1, "n_test": 1}',
            "is not what",
        ),
        ('{"study": "forecast", "lm": "x", "n_edits": 3}', "key .* is missing"),
        ('{"study": "vocabulary_ablation", "lm": "x"}', "key .* is missing"),
        ('{"study": "pretraining"}', "key 'recall' is missing"),
    ],
)
def test_damaged_results(text: str, match: str, tmp_path: Path, out: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "results.json").write_text(text)
    assert "results.json" in refused(run, match=match, output=out)


def test_one_damaged_run_among_others_is_named(probe: Make, out: Path) -> None:
    good, bad = probe("a"), probe("b")
    results = json.loads((bad / "results.json").read_text())
    del results["pairs"][1]["source"]
    (bad / "results.json").write_text(json.dumps(results))
    assert str(bad) in refused(good, bad, match="key 'source' is missing", output=out)


def test_damaged_figures_tables_and_settings(probe: Make, out: Path) -> None:
    run = probe()
    figure = run / "figures" / "correlation_matrix.png"
    whole = figure.read_bytes()
    figure.write_bytes(whole[: len(whole) // 2])
    refused(run, match=r"correlation_matrix.png is no PNG, or was cut short", output=out)
    figure.write_bytes(whole)
    table = run / "tables" / "label_wise.csv"
    table.write_text("pair,label,r\ncity->country,France\n")
    refused(run, match=r"label_wise.csv, line 2 has another number of cells", output=out)
    table.write_bytes(b"pair,label,r\n\xff\xfe,1,2\n")
    refused(run, match=r"label_wise.csv cannot be read", output=out)
    table.unlink()
    (run / "config.yaml").write_text("a: [")
    refused(run, match=r"config.yaml cannot be read", output=out)
    (run / "config.yaml").unlink()
    assert "The same run again" not in write_report([run], out).read_text()


def test_different_versions_are_not_mixed(probe: Make, out: Path) -> None:
    old, new = probe("a", version="0.0.9"), probe("b")
    told = refused(old, new, match="different versions", output=out)
    assert f"{old} (0.0.9)" in told and f"{new} (0.1.0)" in told
    # One that says nothing is let in, and named.
    silent = probe("c", version=None)
    page = write_report([new, silent], out).read_text()
    assert "was not recorded, so it is not known" in page


def test_two_lms_under_one_name(probe: Make, finetune: Make, out: Path) -> None:
    one, other = probe(weights="w1"), probe(weights="w2")
    told = refused(
        one, other, match="two LMs under one name, 'tiny-world': their weights", output=out
    )
    assert str(one) in told and str(other) in told
    # No fingerprint tells these apart, but their numbers do.
    refused(
        finetune(generalized=0.86), finetune(generalized=0.31),
        match=r"same settings and found other numbers \(generalized: 0.860 and 0.310\)", output=out,
    )  # fmt: skip


def test_one_lm_may_come_again(probe: Make, finetune: Make, out: Path) -> None:
    # In another dtype, under other settings, a little otherwise on another machine.
    write_report([probe(weights="w1"), probe(weights="w2", dtype="bfloat16")], out)
    other = finetune(generalized=0.3)
    (other / "config.yaml").write_text("{seed_everything: 8}")
    write_report([finetune(generalized=0.86), other], out)
    write_report([finetune(generalized=0.86), finetune(generalized=0.9)], out)


def test_a_place_that_cannot_be_written(probe: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file where a folder is needed"):
        write_report([probe()], tmp_path / "file" / "out")
