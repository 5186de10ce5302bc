"""A probe's report in every form: the contract's keys, no NaN, the same numbers everywhere."""

import csv
import errno
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from lincorr_lightning.errors import OutputError
from lincorr_lightning.reporting import (
    PairScore,
    ProbeReport,
    RidgePoint,
    describe_run,
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
# The contract's keys, from the design.
PAIR_KEYS = {
    "source", "target", "label_mean", "label_std", "instance_mean", "n_labels",
    "n_constant_labels", "permuted_label_mean", "precision",
}  # fmt: skip


def make_report(**changes: Any) -> ProbeReport:
    rng = np.random.default_rng(0)
    pairs = []
    for i, source in enumerate(LABELS):
        for j, target in enumerate(LABELS):
            if source == target:
                continue
            r = rng.uniform(-1, 1, len(LABELS[target]))
            r[0] = math.nan
            pairs.append(
                PairScore(
                    source=source, target=target, label_mean=float(np.nanmean(r)),
                    label_std=float(np.nanstd(r)), instance_mean=0.1 * i + 0.01 * j,
                    n_labels=len(r), n_constant_labels=1, permuted_label_mean=0.01,
                    control_label_mean=0.2, ridge=0.0, label_r=r,
                    precision={"influenced": RATES, "influencing": RATES | {"1": math.nan}}
                    if (source, target) == ("city", "country") else None,
                )
            )  # fmt: skip
    right = np.array([[True, False, True, False], [False, True, False, False]])
    values: dict[str, Any] = {
        "lm": "tiny-world", "n_fit": 100, "n_test": np.int64(50), "pairs": pairs,
        "ridge_path": {
            pair.name: [
                RidgePoint(ridge, 0.9 - ridge / 100, *([RATES, RATES] if pair.precision else [None, None]))
                for ridge in (0.0, 1.0, 10.0)
            ]
            for pair in pairs
        },
        "weights": {
            p.name: rng.normal(size=(len(LABELS[p.target]), len(LABELS[p.source]))) for p in pairs
        },
        "labels": LABELS,
        "reference": {p.name: right if p.precision else None for p in pairs},
        "settings": {
            "ridge": 0.0, "control": "One day, {} saw a", "ridge_grid": None,
            "knowledges": ["city", "country"], "lm": {"name_or_path": "tiny-world"},
        },
    }  # fmt: skip
    return ProbeReport(**values | changes)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def report() -> ProbeReport:
    return make_report()


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
        assert set(found) == PAIR_KEYS | {"ridge", "control_label_mean", "excess"}
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


def test_what_is_not_known_is_null() -> None:
    (score, *_) = make_report().pairs
    values = {**vars_of(score), "label_mean": math.nan, "permuted_label_mean": None}
    found = PairScore(**values | {"instance_mean": math.inf, "label_std": math.nan}).results()
    assert [
        found[key]
        for key in ("label_mean", "permuted_label_mean", "instance_mean", "label_std", "excess")
    ] == [None] * 5


def vars_of(score: PairScore) -> dict[str, Any]:
    return {name: getattr(score, name) for name in score.__dataclass_fields__}


def test_scoring_a_stored_fit_has_no_ridge_path(tmp_path: Path) -> None:
    make_report(ridge_path={}).write(tmp_path)
    assert "ridge_path" not in json.loads((tmp_path / "results.json").read_text())
    assert not (tmp_path / "tables" / "ridge_path.csv").exists()
    assert not (tmp_path / "figures" / "ridge_path.png").exists()
    assert (tmp_path / "figures" / "weights_city-country.png").is_file()


# -- tables ----------------------------------------------------------------------------------


def test_tables_say_what_the_results_say(report: ProbeReport, folder: Path) -> None:
    assert {path.name for path in (folder / "tables").iterdir()} == {
        "pairs.csv", "label_wise.csv", "correlation_matrix.csv", "permuted_matrix.csv",
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


def test_without_references_the_best_pairs_are_looked_at(tmp_path: Path) -> None:
    report = make_report(reference={})
    report.write(tmp_path)
    assert {row["pair"] for row in read(tmp_path / "tables" / "influences.csv")} == {
        score.name for score in report.pairs
    }
    assert len(list((tmp_path / "figures").glob("weights_*.png"))) == 6
    assert (tmp_path / "figures" / "weights_city-Xover2.png").is_file()


def test_nulls_that_were_left_out_have_no_tables(tmp_path: Path) -> None:
    without = [
        PairScore(**{**vars_of(score), "permuted_label_mean": None, "control_label_mean": None})
        for score in make_report().pairs
    ]
    make_report(pairs=without).write(tmp_path)
    assert not (tmp_path / "tables" / "permuted_matrix.csv").exists()
    assert not (tmp_path / "tables" / "control_matrix.csv").exists()
    assert (tmp_path / "figures" / "nulls.png").is_file()


def test_a_run_in_which_nothing_varies_still_reports(tmp_path: Path) -> None:
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


def test_one_pair(tmp_path: Path) -> None:
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
        "weights_city-country.png",
    }  # fmt: skip
    for name in found:
        with Image.open(folder / "figures" / name) as image:
            assert min(image.size) > 200
            assert image.convert("L").getextrema() != (255, 255)


def test_figures_are_limited_in_a_run_over_many_pairs() -> None:
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
    drawn = [name for name in report._drawings() if name.startswith("weights")]
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


# -- TensorBoard -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def events(
    report: ProbeReport, tmp_path_factory: pytest.TempPathFactory
) -> tuple[EventAccumulator, Path]:
    folder = tmp_path_factory.mktemp("tensorboard")
    writer = SummaryWriter(folder)
    report.log_to_tensorboard(writer, step=7)
    writer.close()
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    return events, folder


def test_scalars(events: tuple[EventAccumulator, Path], report: ProbeReport) -> None:
    (score,) = [s for s in report.pairs if s.precision]
    for tag, value in (
        ("label_wise/city-country", score.label_mean),
        ("control/city-country", 0.2),
        ("hit1_influenced/city-country", 0.5),
        ("hit5_influencing/city-country", 1.0),
    ):
        (event,) = events[0].Scalars(tag)
        assert event.step == 7
        assert event.value == pytest.approx(value)
    tags = events[0].Tags()["scalars"]
    assert "label_wise/city-Xover2" in tags
    assert "hit1_influencing/city-country" not in tags, "NaN is not logged"
    assert not [tag for tag in tags if re.search(r"[^\w/.-]", tag)]


def test_pictures(events: tuple[EventAccumulator, Path], report: ProbeReport) -> None:
    tags = events[0].Tags()["images"]
    assert set(tags) == {f"figures/{name}" for name in report.pictures}
    for tag in tags:
        (event,) = events[0].Images(tag)
        image = Image.open(io.BytesIO(event.encoded_image_string))
        assert image.size == (event.width, event.height)


def test_text_tables(events: tuple[EventAccumulator, Path]) -> None:
    tags = [tag for tag in events[0].Tags()["tensors"] if tag.endswith("/text_summary")]
    assert set(tags) == {
        "pairs/text_summary", "top_influences/city-country/text_summary",
    }  # fmt: skip
    (event,) = events[0].Tensors("top_influences/city-country/text_summary")
    assert "✓" in event.tensor_proto.string_val[0].decode()
    (event,) = events[0].Tensors("pairs/text_summary")
    assert r"city-\>country" in event.tensor_proto.string_val[0].decode()


def test_settings_are_in_the_run_s_own_log(events: tuple[EventAccumulator, Path]) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert [path.name[:19] for path in events[1].rglob("*")] == ["events.out.tfevents"]
    content = events[0].PluginTagToContent("hparams")
    data = HParamsPluginData.FromString(content["_hparams_/session_start_info"])
    found = {key: value for key, value in data.session_start_info.hparams.items()}
    assert found["ridge"].number_value == 0.0
    assert found["lm/name_or_path"].string_value == "tiny-world"
    assert found["ridge_grid"].string_value == "None"
    assert found["knowledges"].string_value == "['city', 'country']"
    experiment = HParamsPluginData.FromString(content["_hparams_/experiment"])
    metrics = {info.name.tag for info in experiment.experiment.metric_infos}
    assert "label_wise/city-country" in metrics
    assert metrics <= set(events[0].Tags()["scalars"])


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
