"""Two runs side by side, against their files by other code."""

import csv
import json
import pickle
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from pandas import isna, read_csv
from pytest import approx
from scipy.stats import ttest_rel

from lincorr_lightning.cli import main
from lincorr_lightning.errors import ReportError
from lincorr_lightning.results import SavedRun
from lincorr_lightning.results.compare import compare_runs
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Mean, Table
from tests.figure_checks import texts
from tests.results.conftest import lm_info, save

Make = Callable[..., Path]
Case = tuple[str, str, str, str]  # subject, answer, reference, outcome

ROW = "city->country"
CASES: list[Case] = [
    ("Ada", "Oslo", "Norway", "generalized"),
    ("Emma", "Bergen", "Norway", "unchanged"),
    ("Bo", "Rome", "Italy", "generalized"),
    ("Di", "Milan", "Italy", "hallucinated"),
    ("Eve", "Lima", "Peru", "generalized"),
]


def changed(cases: Sequence[Case], **outcomes: str) -> list[Case]:
    return [(*case[:3], outcomes.get(case[0], case[3])) for case in cases]


def share(cases: Sequence[Case]) -> float:
    return fmean(case[3] == "generalized" for case in cases)


def by_reference(cases: Sequence[Case]) -> dict[str, float]:
    names = dict.fromkeys(case[2] for case in cases)
    return {name: share([case for case in cases if case[2] == name]) for name in names}


@pytest.fixture
def edits(tmp_path: Path) -> Make:
    """Writes the folder of a run whose cases are given."""

    def make(
        name: str,
        cases: Sequence[Case],
        lm: str = "tiny-world",
        relation: str = ROW,
        **settings: Any,
    ) -> Path:
        means = {
            "generalized": Mean("outcome", "generalized"),
            "macro_generalized": Mean("outcome", "generalized", per="reference"),
        }
        macro = fmean(by_reference(cases).values())
        row = {"generalized": share(cases), "random": 0.04, "macro_generalized": macro}
        columns = "subject", "source_answer", "reference", "outcome"
        tables = [
            headline("outcomes", [{"relation": relation, **row}], **dict.fromkeys(row, ".1%")),
            Table.of("cases", cases, columns).sampled("subject", "source_answer", **means),
        ]
        values = {
            "relation": relation,
            "generalized": share(cases),
            "macro": {"generalized": macro},
            "n_edits": len(cases),
            "flag": True,
        }
        own = {"lm": lm_info(lm), "settings": {"data": {"seed": 0}, **settings}}
        return save(Results("source_finetune", values, tables=tables, **own), tmp_path / name)

    return make


def headline(name: str, rows: Sequence[Any], columns: Sequence[str] = (), **formats: str) -> Table:
    return Table.of(name, rows, columns, headline=True, formats=formats)


def numbers(*runs: Path) -> dict[tuple[str, str], dict[str, Any]]:
    frame = compare_runs(*map(SavedRun.read, runs)).table("numbers").frame
    return {(row["number"], row["row"]): row for row in frame.to_dict("records")}


def test_the_same_edits_are_pairs(edits: Make) -> None:
    after = changed(CASES, Emma="generalized", Di="generalized", Eve="unchanged")
    runs = edits("a", CASES), edits("b", after)
    (sentence,) = compare_runs(*map(SavedRun.read, runs)).verdict
    assert sentence.startswith("No number differs by more than chance")
    found = numbers(*runs)
    row = found["generalized", ""]
    assert (row["first"], row["second"], row["difference"]) == pytest.approx((0.6, 0.8, 0.2))
    pairs = np.array([[c[3] == "generalized" for c in cases] for cases in (CASES, after)], float)
    assert row["error"] == pytest.approx(np.diff(pairs, axis=0).std(ddof=1) / 5**0.5)
    assert (row["units"], row["n_first"], row["n_second"], row["n_both"]) == ("cases", 5, 5, 5)
    # Of one edit in five, 1 of 3 + 2 added, against 2 + 1: Bonett and Price.
    p12, p21 = 2 / 7, 3 / 7
    half = 1.959963985 * ((p12 + p21 - (p12 - p21) ** 2) / 7) ** 0.5
    assert (row["low"], row["high"]) == pytest.approx((1 / 7 - half, 1 / 7 + half))
    macro = found["macro_generalized", ""]
    means = [list(by_reference(cases).values()) for cases in (CASES, after)]
    test = ttest_rel(means[1], means[0])
    interval = test.confidence_interval()
    assert (macro["low"], macro["high"]) == pytest.approx((interval.low, interval.high))
    assert (macro["units"], macro["n_both"]) == ("cases by reference", 3)
    # No folder holds what this is a mean of.
    chance = found["random", ""]
    assert chance["difference"] == 0 and isna(chance["error"]) and chance["units"] == ""
    assert set(found) == {(name, "") for name in ("generalized", "macro_generalized", "random")}


def test_other_edits_are_two_samples(edits: Make) -> None:
    # The same subject with another answer is another edit.
    others: list[Case] = [
        ("Ada", "Rome", "Italy", "unchanged"),
        ("Xu", "Bari", "Italy", "unchanged"),
    ]
    first = edits("a", CASES)
    apart = numbers(first, edits("b", others))
    row = apart["generalized", ""]
    assert (row["n_first"], row["n_second"], row["n_both"]) == (5, 2, 0)
    assert row["error"] == pytest.approx(0.5477226 / 5**0.5)  # the second sample does not vary
    mixed = numbers(first, edits("c", [*changed(CASES[:3], Bo="unchanged"), *others]))
    row = mixed["generalized", ""]
    assert (row["n_first"], row["n_second"], row["n_both"]) == (5, 5, 3)
    assert (row["first"], row["second"]) == pytest.approx((0.6, 0.2))


def test_a_number_that_is_no_mean_of_the_units_has_no_error(edits: Make) -> None:
    runs = [edits("a", CASES), edits("b", changed(CASES, Bo="unchanged"))]
    path = runs[1] / "tables" / "cases.csv"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    row = numbers(*runs)["generalized", ""]
    assert row["difference"] == pytest.approx(-0.2) and isna(row["low"])


def test_what_differs_is_listed(edits: Make) -> None:
    first = edits("a", CASES, rate=0.1, lm_head={"tied": True})
    second = edits("b", CASES, lm="gpt2", rate=0.2, lm_head={"tied": True})
    config = second / "config.yaml"
    config.write_text(config.read_text().replace("seed_everything: 7", "seed_everything: 8"))
    frame = compare_runs(SavedRun.read(first), SavedRun.read(second)).table("differing").frame
    assert frame.to_numpy().tolist() == [
        ["folder", str(first), str(second)],
        ["seed_everything", "7", "8"],
        ["lm.name_or_path", "tiny-world", "gpt2"],
        ["lm.fingerprint.weights", "w of tiny-world", "w of gpt2"],
        ["settings.rate", "0.1", "0.2"],
    ]


def test_rows_are_told_apart_by_texts_before_numbers(tmp_path: Path) -> None:
    runs = []
    for n, rows in enumerate(([[1, "a", 0.5], [2, "b", 0.4]], [[1, "b", 0.7], [2, "a", 0.6]])):
        table = headline("ranking", rows, ("rank", "pair", "r"), r=".2f")
        runs.append(save(Results("probe", tables=[table]), tmp_path / str(n)))
    found = {row: each["difference"] for (_, row), each in numbers(*runs).items()}
    assert found == pytest.approx({"a": 0.1, "b": 0.3})


def test_the_command(edits: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    after = changed(CASES, Emma="generalized")
    runs = [edits("a", CASES), edits("b", after, lm="org/gpt2")]
    main(["compare", *map(str, runs)])
    text = capsys.readouterr().out
    assert "the second run minus the first" in text and "5, 5 (5)" in text and "+20.0" in text
    assert not (tmp_path / "out").exists()
    main(["compare", *map(str, runs), "--output", str(tmp_path / "out")])
    assert text in (output := capsys.readouterr().out) and "report.html" in output
    files = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*")}
    tables = {"tables/differing.csv", "tables/numbers.csv"}
    pages = {"report.html", "comparison.md"}
    assert files == tables | pages | {"figures/comparison.png"}
    with (tmp_path / "out" / "tables" / "numbers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["difference"]) == pytest.approx(0.2)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/png" in page
    with pytest.raises(SystemExit):
        main(["compare", str(runs[0])])


def test_edits_of_other_relations_are_no_pairs(edits: Make) -> None:
    runs = edits("a", CASES), edits("b", changed(CASES, Eve="unchanged"), relation="city->city_es")
    row = numbers(*runs)["generalized", ""]
    assert row["difference"] == pytest.approx(-0.2)
    assert (row["n_first"], row["n_second"], row["n_both"]) == (5, 5, 0)


def test_a_mean_of_a_row_has_the_rows_name_and_stands_once(tmp_path: Path) -> None:
    runs = []
    for n, before in enumerate(([1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 0.0])):
        after = [1.0, 1.0, 0.0, before[0] * 0]  # equal means before and after, of other units
        rows = [(f"s{i}", *pair) for i, pair in enumerate(zip(before, after, strict=True))]
        reach = [("before", 4 + n, fmean(before)), ("after", 4, fmean(after))]
        means = {"learned": "q", "before_learned": "p"}
        tables = [
            headline("outcomes", [("x", fmean(after))], ("relation", "learned"), learned=".0%"),
            headline("reach", reach, ("prompts", "n", "learned"), n=",d", learned=".0%"),
            Table.of("cases", rows, ("subject", "p", "q")).sampled("subject", **means),
        ]
        runs.append(save(Results("edited_lm", tables=tables), tmp_path / str(n)))
    found = numbers(*runs)
    assert list(found) == [("learned", ""), ("n", "before"), ("n", "after"), ("learned", "before")]
    row = found["learned", "before"]
    interval = ttest_rel([1, 1, 1, 0], [1, 0, 0, 1]).confidence_interval()
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))


def test_runs_that_cannot_be_compared(edits: Make, probe: Make, tmp_path: Path) -> None:
    run, other = edits("a", CASES), edits("b", CASES)

    def refused(match: str, *args: Path | str) -> None:
        with pytest.raises(ReportError, match=match):
            main(["compare", *map(str, args)])

    refused("is named twice", run, run / ".." / "a")
    refused("is named twice", run, run / "results.json")
    refused("one of source_finetune and .* one of linear_probe", run, probe())
    (tmp_path / "empty").mkdir()
    refused("has no results.json", run, tmp_path / "empty")
    refused("is the folder of a run", run, other, "--output", other)
    bare = [save(Results("bare", {"a": n}), tmp_path / n) for n in ("x", "y")]
    refused("have no number in common", *bare)
    content = json.loads((other / "results.json").read_text())
    (other / "results.json").write_text(json.dumps({**content, "schema": 1}))
    refused("not of schema", run, other)
    (other / "results.json").unlink()
    refused("did not finish", run, other)


@pytest.fixture
def sweep(probe: Make) -> list[Path]:
    """Runs of three ridges in two seeds each, in an order of their own."""
    ridges = 1.0, "auto", 0.0
    return [
        probe(r=0.1 * i + 0.04 * seed, hits=(0.5,) * 6, ridge=ridge, data={"seed": seed})
        for seed in (4, 3)
        for i, ridge in enumerate(ridges)
    ]


def test_runs_of_several_seeds_are_a_row_each(sweep: list[Path], tmp_path: Path) -> None:
    main(["compare", *map(str, sweep), "--output", str(tmp_path / "out" / "sweep.csv")])
    frame = read_csv(tmp_path / "out" / "sweep.csv")
    # As `probe` writes them, by hand.
    rows = [
        (pair, ridge, first if pair == ROW else 0.2, first - 0.95, folders)
        for pair in (ROW, "city->color")
        for ridge, first, folders in (
            ("0", 0.2 + 0.14, "version_2, version_5"),
            ("1", 0.14, "version_0, version_3"),
            ("auto", 0.1 + 0.14, "version_1, version_4"),
        )
    ]
    columns = ["pair", "settings.ridge", "r", "excess", "runs"]
    assert frame[columns].to_numpy().tolist() == [list(map(approx, row)) for row in rows]
    deviations = frame[["r_deviation", "excess_deviation", "hit_deviation"]].to_numpy()
    std = 0.04 / 2**0.5
    assert deviations[:3] == approx(np.array([[std, std, 0.0]] * 3))
    assert deviations[3:] == approx(np.array([[0.0, std, np.nan]] * 3), nan_ok=True)
    assert set(frame["n"]) == {2}


def test_the_verdict_of_a_sweep(sweep: list[Path]) -> None:
    (sentence,) = compare_runs(*map(SavedRun.read, sweep)).verdict
    assert sentence == f"r of {ROW} by ridge: 0.14 at 1, 0.34 at 0; deviation over seeds 0.03."


def test_two_runs_of_two_seeds_are_a_row(sweep: list[Path]) -> None:
    results = compare_runs(*map(SavedRun.read, (sweep[0], sweep[3])))
    (table,) = results.tables
    assert table.frame["n"].tolist() == [2, 2] and "data.seed alone" in table.note
    assert results.verdict[0] == f"r of {ROW}: 0.14, deviation over seeds 0.03."
    png = compare_runs(*map(SavedRun.read, sweep)).figures[0]
    drawn = {text.get_text() for text, _ in texts(pickle.loads(pickle.dumps(png)).matplotlib())}
    assert {"city→color", "auto", "above control", "ridge"} <= drawn


def test_a_row_for_each_run_of_what_all_have(probe: Make, geometry: Make, tmp_path: Path) -> None:
    lms = ["org/a", "org/b", "org/b"]
    runs = [probe(lm, r=i / 10, n_subjects=i // 2) for i, lm in enumerate(lms)]
    (tmp_path / "held").mkdir()
    runs[1].rename(tmp_path / "held" / "run")
    table = runs[0] / "tables" / "pairs.csv"
    table.write_text(table.read_text().replace("city->color", "city->food"))
    results = main(["compare", str(runs[0]), str(tmp_path / "held"), str(runs[2])])
    frame = results.tables[0].frame
    columns = ["pair", "lm.name_or_path", "settings.n_subjects", "r", "runs"]
    assert frame[columns].to_numpy().tolist() == [
        [ROW, "a", "0", 0.0, "version_0"],
        [ROW, "b", "0", 0.1, "run"],
        [ROW, "b", "1", 0.2, "version_2"],
    ]
    assert "n" not in frame and "of one seed each" in results.verdict[0]


@pytest.mark.parametrize(("suffix", "start"), [("html", b"<!DOCTYPE"), ("png", b"\x89PNG")])
def test_a_file_as_output(suffix: str, start: bytes, sweep: list[Path], tmp_path: Path) -> None:
    """The runs are those of a folder, by their numbers."""
    folder = sweep[0].parent
    sweep[1].rename(folder / "version_10")
    main(["compare", str(folder), "--output", str(tmp_path / f"out.{suffix}")])
    assert (tmp_path / f"out.{suffix}").read_bytes().startswith(start)
    assert not (tmp_path / "report.html").exists()
    table = main(["compare", str(folder)]).tables[0].frame
    assert table["runs"][2] == "version_4, version_10"


def test_a_row_of_one_run_has_no_difference_and_no_warning(tmp_path: Path) -> None:
    runs = []
    for n, pairs in enumerate((["a->b", "b->a"], ["a->b", "c->a"])):
        rows = [(pair, label, 0.1 * n + 0.2 * i) for pair in pairs for i, label in enumerate("xyz")]
        means = [(pair, 0.1 * n + 0.2) for pair in pairs]
        tables = [
            headline("summary", means, ("pair", "label_mean"), label_mean=".2f"),
            Table.of("label_wise", rows, ("pair", "label", "r")).sampled("label", label_mean="r"),
        ]
        runs.append(save(Results("probe", tables=tables), tmp_path / str(n)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = numbers(*runs)
    assert [(row, isna(each["difference"])) for (_, row), each in found.items()] == [
        ("a->b", False),
        ("b->a", True),
        ("c->a", True),
    ]
    assert found["label_mean", "a->b"]["error"] == pytest.approx(0, abs=1e-12)
    (sentence,) = compare_runs(*map(SavedRun.read, runs)).verdict
    assert sentence.startswith("label mean of a->b: 0.20 in the first run, 0.30 in the second (95")
