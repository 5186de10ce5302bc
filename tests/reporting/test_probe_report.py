"""A probe's report in every form: the contract's keys, no NaN, the same numbers everywhere."""

import csv
import errno
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.tensorboard import SummaryWriter

from lincorr_lightning.errors import OutputError
from lincorr_lightning.probe.pictures import drawings_of
from lincorr_lightning.probe.results import PairScore, ProbeReport
from lincorr_lightning.results.console import describe_run
from lincorr_lightning.results.tables import (
    influence_markdown,
    label_wise_rows,
    markdown_table,
    top_influences,
)

LABELS = {
    "city": ["Paris", "Rome", "Lyon", "a|b *c*"],
    "country": ["France", "Italy"],
    "X/2": ["1", "2", "3"],
}
RATES = {"1": 0.5, "3": 1.0, "5": 1.0, "n": 3}
Make = Callable[..., ProbeReport]
# The contract's keys, from the design.
PAIR_KEYS = {
    "source", "target", "label_mean", "label_std", "instance_mean", "n_labels",
    "n_constant_labels", "permuted_label_mean", "precision",
}  # fmt: skip

TIE_KEYS = {
    "label_error", "excess_error", "p", "q", "partial_label_mean", "through_given", "completeness",
}  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(report: ProbeReport, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    report.write(folder)
    return folder


# -- results.json ----------------------------------------------------------------------------


def test_results_are_those_of_the_contract(report: ProbeReport, folder: Path) -> None:
    text = (folder / "results.json").read_text(encoding="utf-8")
    results = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in results.json"))
    assert results["study"] == "linear_probe"
    assert (results["n_fit"], results["n_test"]) == (100, 50)
    assert (results["lm"], results["control"]) == ("tiny-world", "One day, {} saw a")
    assert results["settings"]["lm"] == {"name_or_path": "tiny-world"}
    assert len(results["pairs"]) == 6
    for found, score in zip(results["pairs"], report.pairs, strict=True):
        assert set(found) == PAIR_KEYS | TIE_KEYS | {"ridge", "control_label_mean", "excess"}
        for key in PAIR_KEYS - {"precision"}:
            assert found[key] == getattr(score, key)
        assert found["excess"] == pytest.approx(score.label_mean - 0.2)
    (precise,) = [found["precision"] for found in results["pairs"] if found["precision"]]
    assert precise == {
        "influenced": {"1": 0.5, "3": 1.0, "5": 1.0, "n": 3},
        "influencing": {"1": None, "3": 1.0, "5": 1.0, "n": 3},
    }
    assert [(p["source"], p["target"]) for p in results["ridge_path"]] == [
        (score.source, score.target) for score in report.pairs
    ]
    assert results["ridge_path"][0]["path"][1] == {
        "ridge": 1.0, "label_mean": 0.89, "influenced": RATES, "influencing": RATES,
    }  # fmt: skip
    assert results["ridge_path"][1]["path"][0]["influenced"] is None


def test_what_is_not_known_is_null(make_report: Make) -> None:
    (score, *_) = make_report().pairs
    values = {**vars_of(score), "label_mean": math.nan, "permuted_label_mean": None}
    found = PairScore(**values | {"instance_mean": math.inf, "label_std": math.nan}).results()
    assert [
        found[key]
        for key in ("label_mean", "permuted_label_mean", "instance_mean", "label_std", "excess")
    ] == [None] * 5


def vars_of(score: PairScore) -> dict[str, Any]:
    return {name: getattr(score, name) for name in score.__dataclass_fields__}


def test_scoring_a_stored_fit_has_no_ridge_path(tmp_path: Path, make_report: Make) -> None:
    make_report(ridge_path={}).write(tmp_path)
    assert "ridge_path" not in json.loads((tmp_path / "results.json").read_text())
    assert not (tmp_path / "tables" / "ridge_path.csv").exists()
    assert not (tmp_path / "figures" / "ridge_path.png").exists()
    assert (tmp_path / "figures" / "weights_city-country.png").is_file()


# -- tables ----------------------------------------------------------------------------------


def test_tables_say_what_the_results_say(report: ProbeReport, folder: Path) -> None:
    assert {path.name for path in (folder / "tables").iterdir()} == {
        "pairs.csv", "label_wise.csv", "correlation_matrix.csv", "permuted_matrix.csv",
        "std_matrix.csv", "instance_matrix.csv",
        "control_matrix.csv", "ridge_path.csv", "influences.csv",
    }  # fmt: skip
    results = json.loads((folder / "results.json").read_text())
    for row, found in zip(read(folder / "tables" / "pairs.csv"), results["pairs"], strict=True):
        for key in ("label_mean", "control_label_mean", "excess", "ridge", "n_labels"):
            assert float(row[key]) == found[key]
        assert (row["influenced_1"], row["influencing_1"], row["influenced_n"]) == (
            ("0.5", "", "3") if found["precision"] else ("", "", "")
        )
    matrix = {row["source"]: row for row in read(folder / "tables" / "correlation_matrix.csv")}
    assert list(matrix) == list(LABELS)
    for found in results["pairs"]:
        assert float(matrix[found["source"]][found["target"]]) == found["label_mean"]
    assert [matrix[name][name] for name in LABELS] == [""] * 3
    for name, value in (("permuted", 0.01), ("control", 0.2)):
        assert float(read(folder / "tables" / f"{name}_matrix.csv")[0]["country"]) == value
    path = read(folder / "tables" / "ridge_path.csv")
    assert len(path) == 18
    assert (path[2]["pair"], path[2]["ridge"], path[2]["influenced_1"]) == (
        "city->country", "10.0", "0.5",
    )  # fmt: skip


def test_label_wise_table_leaves_constant_labels_empty(report: ProbeReport, folder: Path) -> None:
    rows = read(folder / "tables" / "label_wise.csv")
    assert len(rows) == sum(len(score.label_r) for score in report.pairs)
    for score in report.pairs:
        own = [row for row in rows if row["pair"] == score.name]
        assert [row["label"] for row in own] == LABELS[score.target]
        assert own[0]["r"] == ""
        assert [float(row["r"]) for row in own[1:]] == score.label_r[1:].tolist()


def test_influences_are_the_highest_weights(report: ProbeReport, folder: Path) -> None:
    rows = read(folder / "tables" / "influences.csv")
    assert {row["pair"] for row in rows} == {"city->country"}, "the pair with a reference"
    weight = report.weights["city->country"]
    right = {("Paris", "France"), ("Lyon", "France"), ("Rome", "Italy")}
    for direction, labels, tokens, w in (
        ("influenced", LABELS["city"], LABELS["country"], weight.T),
        ("influencing", LABELS["country"], LABELS["city"], weight),
    ):
        own = [row for row in rows if row["direction"] == direction]
        assert len(own) == w.size
        for i, label in enumerate(labels):
            mine = [row for row in own if row["label"] == label]
            best = sorted(zip(w[i], tokens, strict=True), reverse=True)
            assert [(float(row["weight"]), row["token"]) for row in mine] == best
            assert [row["rank"] for row in mine] == [str(k + 1) for k in range(len(best))]
            for row in mine:
                ends = (label, row["token"])
                expected = "True" if ends in right or ends[::-1] in right else "False"
                assert row["right"] == ("" if label == "a|b *c*" else expected)


def test_top_influences_are_cut_and_without_reference_unjudged() -> None:
    weight = np.random.default_rng(0).normal(size=(20, 30))
    rows = top_influences(weight, [f"s{i}" for i in range(30)], [f"t{i}" for i in range(20)], n=3)
    assert len(rows) == 3 * (30 + 20)
    assert {row.right for row in rows} == {None}


def test_without_references_the_best_pairs_are_looked_at(tmp_path: Path, make_report: Make) -> None:
    report = make_report(reference={})
    report.write(tmp_path)
    assert {row["pair"] for row in read(tmp_path / "tables" / "influences.csv")} == {
        score.name for score in report.pairs
    }
    assert len(list((tmp_path / "figures").glob("weights_*.png"))) == 6
    assert (tmp_path / "figures" / "weights_city-Xover2.png").is_file()


def test_nulls_that_were_left_out_have_no_tables(tmp_path: Path, make_report: Make) -> None:
    without = [
        PairScore(**{**vars_of(score), "permuted_label_mean": None, "control_label_mean": None})
        for score in make_report().pairs
    ]
    make_report(pairs=without).write(tmp_path)
    assert not (tmp_path / "tables" / "permuted_matrix.csv").exists()
    assert not (tmp_path / "tables" / "control_matrix.csv").exists()
    assert (tmp_path / "figures" / "nulls.png").is_file()


def test_a_run_in_which_nothing_varies_still_reports(tmp_path: Path, make_report: Make) -> None:
    still = [
        PairScore(
            **{
                **vars_of(score),
                "label_mean": math.nan,
                "label_std": math.nan,
                "label_r": score.label_r * math.nan,
            }
        )
        for score in make_report().pairs
    ]
    report = make_report(pairs=still)
    report.write(tmp_path)
    writer = SummaryWriter(tmp_path)
    report.log_to_tensorboard(writer, 0)
    writer.close()
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert describe_run(tmp_path)


def test_one_pair(tmp_path: Path, make_report: Make) -> None:
    whole = make_report()
    (score,) = [s for s in whole.pairs if s.precision]
    path = {score.name: whole.ridge_path[score.name]}
    make_report(pairs=[score], ridge_path=path).write(tmp_path)
    (row,) = read(tmp_path / "tables" / "correlation_matrix.csv")
    assert row == {"source": "city", "country": str(score.label_mean)}


def test_markdown_says_what_it_is_given() -> None:
    table = markdown_table(["a|b", "r"], [["x_*y*", 0.98765], [None, 3], ["two\nlines", 1.0]])
    lines = table.splitlines()
    assert lines[0] == r"| a\|b | r |"
    assert lines[1] == "| --- | --- |"
    assert lines[2] == r"| x\_\*y\* | 0.988 |"
    assert lines[3] == "|  | 3 |"
    assert lines[4] == "| two lines | 1.000 |"


def test_influences_in_markdown_are_ticked_where_right(report: ProbeReport) -> None:
    (score,) = [s for s in report.pairs if s.precision]
    text = influence_markdown(report.influences(score), limit=3)
    assert "(3 of 4 labels)" in text
    ticked = set(re.findall(r"\*\*(\S+) -?[\d.]+ ✓\*\*", text))
    assert ticked <= {"Paris", "Rome", "Lyon", "France", "Italy"}
    w = report.weights["city->country"]
    best = max(range(4), key=lambda k: w[:, k].max())
    first = [line for line in text.splitlines() if line.startswith("| ")][2]
    assert first.startswith(f"| {LABELS['city'][best]}".split("|b")[0])


def test_label_wise_rows() -> None:
    rows = list(label_wise_rows("a->b", ["x", "y"], np.array([0.5, np.nan])))
    assert rows == [("a->b", "x", 0.5), ("a->b", "y", None)]


# -- figures ---------------------------------------------------------------------------------


def test_figures_are_pictures_with_file_names_that_any_system_takes(folder: Path) -> None:
    found = {path.name for path in (folder / "figures").iterdir()}
    assert found == {
        "correlation_matrix.png", "instance_matrix.png", "nulls.png", "ridge_path.png",
        "std_matrix.png", "permuted_matrix.png",
        "weights_city-country.png",
    }  # fmt: skip
    for name in found:
        with Image.open(folder / "figures" / name) as image:
            assert min(image.size) > 200
            assert image.convert("L").getextrema() != (255, 255)


def test_figures_are_limited_in_a_run_over_many_pairs(make_report: Make) -> None:
    whole = make_report()
    (score,) = [s for s in whole.pairs if s.precision]
    many = [
        PairScore(**{**vars_of(score), "source": f"city{i}", "label_mean": i / 100})
        for i in range(40)
    ]
    report = make_report(
        pairs=many,
        weights={s.name: whole.weights[score.name] for s in many},
        reference={s.name: whole.reference[score.name] for s in many},
        labels=LABELS | {s.source: LABELS["city"] for s in many},
        ridge_path={},
    )
    assert [s.label_mean for s in report.notable(12)] == [i / 100 for i in range(39, 27, -1)]
    drawn = [name for name in drawings_of(report) if name.startswith("weights")]
    assert drawn == [f"weights_city{i}-country" for i in range(39, 27, -1)]


def test_full_disk_is_told_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: ProbeReport
) -> None:
    fsync, count = os.fsync, [0]

    def fails_later(fd: int) -> None:
        count[0] += 1
        if count[0] > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails_later)
    with pytest.raises(OutputError, match=r"correlation_matrix\.csv: the disk is full"):
        report.write(tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["n_fit"] == 100
    assert {path.name for path in (tmp_path / "tables").iterdir()} == {
        "pairs.csv", "label_wise.csv",
    }  # fmt: skip


# -- the end of a run ------------------------------------------------------------------------


def test_end_of_a_run_says_numbers_and_places(folder: Path, report: ProbeReport) -> None:
    said = describe_run(folder)
    assert str(folder) in said
    assert str(folder / "figures") in said
    for score in report.pairs:
        (line,) = [line for line in said.splitlines() if score.name in line]
        assert f"{score.label_mean:.2f}" in line


def test_end_of_a_run_without_results_says_where_it_is(tmp_path: Path) -> None:
    assert str(tmp_path) in describe_run(tmp_path)
