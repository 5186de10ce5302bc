"""A probe's results: the keys of the contract, no NaN, the same numbers in every form."""

import json
import math
import re
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lincorr_lightning.knowledge import Answer, Completeness, Domain, Label
from lincorr_lightning.linear_map.layout import JointLayout
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.probe.results import ProbeFindings, probe_results
from lincorr_lightning.results.results import Results

LABELS = {
    "city": ["Paris", "Rome", "Lyon", "a|b *c*"],
    "country": ["France", "Italy"],
    "X/2": ["1", "2", "3"],
}
HITS: dict[str, Any] = {
    f"{way}_{n}": rate
    for way in ("influenced", "influencing")
    for n, rate in (("1", 0.5), ("3", 1.0), ("5", 1.0), ("n", 3))
}
HITS |= {"influencing_1": None, "macro_1": 0.6, "n_references": 2}
RANKS = {"W": torch.tensor([1, 2, 1]), "causal_inner_product": torch.tensor([1, 1, 2])}
PAIR = "city", "country"
REFERENCE = np.array([[True, False, True, False], [False, True, False, False]])
# Keys of an entry, from the contract and from docs/concepts.md.
PAIR_KEYS = """source target label_mean label_std instance_mean n_labels n_constant_labels
permuted_label_mean control_label_mean precision ridge excess label_error p q
partial_label_mean through_given completeness baselines excess_over_random_labels
above_best_baseline excess_over_unembedding decomposition random_label_mean excess_over_random
random_target_label_mean same_prompt_label_mean best_baseline_1 best_baseline_macro_1
templates""".split()
FIRST_LOGGED = ("label_mean", "macro_1", "excess_over_random")


def make_scores(**changes: Any) -> list[PairScore]:
    """Scores of all pairs of three kinds of knowledge, one of which has a reference."""
    rng = np.random.default_rng(0)
    scores = []
    for i, source in enumerate(LABELS):
        for j, target in enumerate(LABELS):
            if source == target:
                continue
            r = rng.uniform(-1, 1, len(LABELS[target]))
            r[0] = math.nan
            numbers = {
                "label_mean": float(np.nanmean(r)),
                "label_std": float(np.nanstd(r)),
                "instance_mean": 0.1 * i + 0.01 * j,
                "n_labels": len(r),
                "n_constant_labels": 1,
                "permuted_label_mean": 0.01,
                "control_label_mean": 0.2,
                "excess": float(np.nanmean(r)) - 0.2,
                "excess_over_random": 0.1 * i - 0.03 * j,
                "ridge": 0.0,
                **(HITS if (source, target) == PAIR else {}),
            }
            ranks = RANKS if (source, target) == PAIR else {}
            score = PairScore(source, target, numbers | changes, label_r=r, ranks=ranks)
            scores.append(score)
    return scores


def changed(score: PairScore, **numbers: Any) -> PairScore:
    return replace(score, numbers={**score.numbers, **numbers})


def make_domain(texts: list[str]) -> Domain:
    answers = [(Answer(text, text),) for text in texts]
    labels = map(Label, range(len(texts)), texts, answers, repeat(Completeness.WHOLE))
    return Domain(None, tuple(labels), ())  # type: ignore[arg-type]


def make_results(scores: list[PairScore] | None = None, **changes: Any) -> Results:
    scores = make_scores() if scores is None else scores
    rng = np.random.default_rng(0)
    labels = {score.source: LABELS["city"] for score in scores} | LABELS
    layout: Any = JointLayout(
        {name: make_domain(texts) for name, texts in labels.items()},
        tuple(score.ends for score in scores),
        "One day, {} saw a",
        {score.ends: REFERENCE if score["influenced_n"] else None for score in scores},
    )
    sizes = {s.ends: (len(labels[s.target]), len(labels[s.source])) for s in scores}
    path = [
        {s.ends: {**s.numbers, "ridge": ridge, "label_mean": 0.9 - ridge / 100} for s in scores}
        for ridge in (0.0, 1.0, 10.0)
    ]
    values: dict[str, Any] = {
        "weights": {pair: rng.normal(size=size) for pair, size in sizes.items()},
        "path": path,
        "wordings": scores,
        "subjects": {"fit": ["Ada", "Bob"], "test": ["Cyd"]},
        "n_fit": 2,
        "n_test": np.int64(1),
    }
    found = ProbeFindings(phase="val", scores=scores, layout=layout, **values | changes)
    return probe_results(found, "/lms/tiny", 0.0)


def cells(results: Results, name: str) -> list[dict[str, Any]]:
    frame = results.table(name).frame
    return frame.astype(object).where(frame.notna(), None).to_dict("records")


def figure_names(results: Results) -> list[str]:
    return [figure.name for figure in results.figures]


@pytest.fixture(scope="module")
def results() -> Results:
    return make_results()


def test_results_are_those_of_the_contract(results: Results) -> None:
    def refuse(name: str) -> None:
        pytest.fail(f"{name} in results.json")

    found = json.loads(json.dumps(results.to_json()), parse_constant=refuse)
    assert (found["study"], found["control"]) == ("linear_probe", "One day, {} saw a")
    assert (found["n_fit"], found["n_test"]) == (2, 1)
    for pair, score in zip(found["pairs"], make_scores(), strict=True):
        assert set(pair) == set(PAIR_KEYS)
        for key in ("source", "label_mean", "label_std", "instance_mean", "n_labels", "excess"):
            assert pair[key] == (score.source if key == "source" else score[key])
        assert pair["baselines"] is pair["decomposition"] is pair["templates"] is None
    (precise,) = [pair["precision"] for pair in found["pairs"] if pair["precision"]]
    assert precise["influenced"] == {"1": 0.5, "3": 1.0, "5": 1.0, "n": 3}
    assert precise["influencing"] == {"1": None, "3": 1.0, "5": 1.0, "n": 3}
    assert precise["macro"]["1"] == 0.6 and precise["baselines"] is None
    pairs = [(pair["source"], pair["target"]) for pair in found["pairs"]]
    assert [(path["source"], path["target"]) for path in found["ridge_path"]] == pairs
    point = found["ridge_path"][0]["path"][1]
    assert (point.pop("ridge"), point.pop("label_mean")) == (1.0, 0.89)
    assert point == {key: precise[key] for key in ("influenced", "influencing")}
    assert found["ridge_path"][1]["path"][0]["influenced"] is None


def test_scalars(results: Results) -> None:
    (score,) = [score for score in make_scores() if score["influenced_n"]]
    expected = {
        "val/label_mean/city-country": score["label_mean"],
        "val/control_label_mean/city-country": 0.2,
        "val/influenced_1/city-country": 0.5,
        "val/influencing_5/city-country": 1.0,
    }
    assert {key: results.scalars[key] for key in expected} == expected
    assert "val/label_mean/city-Xover2" in results.scalars
    assert "val/influencing_1/city-country" not in results.scalars, "what is unknown is left out"
    assert not [key for key in results.scalars if re.search(r"[^\w/.-]", key)]
    first = list(results.scalars)[:8]
    assert all(key.split("/")[1] in FIRST_LOGGED for key in first)


def test_tables_have_the_numbers_of_the_results(results: Results) -> None:
    names = {table.name for table in results.tables}
    matrices = {"correlation_matrix", "std_matrix", "instance_matrix"}
    others = {"summary", "pairs", "label_wise", "answers", "ridge_path", "weights"}
    assert names == matrices | others | {"random_words_matrix", "subjects"}
    entries = results.values["pairs"]
    for row, entry in zip(cells(results, "pairs"), entries, strict=True):
        for key in ("label_mean", "control_label_mean", "excess", "ridge", "n_labels"):
            assert row[key] == entry[key]
        hits = row["influenced_1"], row["influencing_1"], row["influenced_n"]
        assert hits == ((0.5, None, 3) if entry["precision"] else (None, None, None))
    matrix = {row["source"]: row for row in cells(results, "correlation_matrix")}
    assert list(matrix) == list(LABELS)
    for entry in entries:
        assert matrix[entry["source"]][entry["target"]] == entry["label_mean"]
    assert [matrix[name][name] for name in LABELS] == [None] * 3
    path = cells(results, "ridge_path")
    assert len(path) == 18
    assert [path[2][key] for key in ("pair", "ridge", "influenced_1")] == ["city->country", 10, 0.5]
    subjects = [("Ada", "fit"), ("Bob", "fit"), ("Cyd", "test")]
    assert [tuple(row.values()) for row in cells(results, "subjects")] == subjects


def test_the_summary_ranks_pairs_above_random_words_and_is_the_headline(results: Results) -> None:
    rows = cells(results, "summary")
    ranked = sorted(make_scores(), key=lambda score: -score["excess_over_random"])
    assert [(row["pair"], row["excess_over_random"]) for row in rows] == [
        (score.pair, score["excess_over_random"]) for score in ranked
    ]
    assert [row["macro_1"] for row in rows if row["pair"] == "city->country"] == [0.6]
    assert [table.name for table in results.tables if table.headline] == ["summary"]
    assert len(rows[0]) <= 8 and list(rows[0])[-1] == "control_label_mean"


def test_answers_that_w_alone_gives_are_listed(results: Results) -> None:
    rows = cells(results, "answers")
    found = [(row["answer"], row["reference"], row["rank_W"], row["only_w"]) for row in rows]
    assert found == [
        ("Paris", "France", 1, False),
        ("Rome", "Italy", 2, False),
        ("Lyon", "France", 1, True),
    ]


NEAREST = "causal_inner_product"
BEST = {"best_macro_1": 0.5, "n_references": 9, "q": 0.5, "random_label_mean": 0.9}


@pytest.mark.parametrize(
    ("low", "high", "baseline", "expected"),
    [
        (0.1, 0.2, NEAREST, "more than the vocabulary"),
        (-0.2, -0.1, NEAREST, "less than the vocabulary"),
        (-0.2, 0.1, NEAREST, "no more than the vocabulary (95 %: −20 to +10 points)"),
        (-1.28, 0.08, NEAREST, "no more than the vocabulary (95 %: −100 to +8 points)"),
        (-0.2, 0.1, "constant", "no better than a constant answer (95 %: −20 to +10 points)"),
        (None, None, NEAREST, "9 different answers are too few"),
    ],
)
def test_the_verdict_names_what_w_is_worth(
    low: float | None, high: float | None, baseline: str, expected: str
) -> None:
    score = next(score for score in make_scores() if score.ends == PAIR)
    best = BEST | {"above_best_macro_low": low, "above_best_macro_high": high}
    judged = changed(score, **best, best_macro_baseline=baseline)
    first, alone, r, *others = make_results([judged]).verdict
    name = "one constant answer" if baseline == "constant" else "the nearest word"
    start = f"city→country: W gives the right country for 60 % of answers (mean by country), {name}"
    first = first.replace("\N{NO-BREAK SPACE}", " ")
    assert first.startswith(f"{start} for 50 %: ") and expected in first
    assert "for 1 of 3 answers (Lyon); the nearest word alone for 1." in alone
    assert "no more than random words" in r
    assert not others


def test_the_verdict_says_what_helps() -> None:
    score = next(score for score in make_scores() if score.ends == PAIR)
    imprecise = changed(score, influenced_1=0.25, label_mean=0.9)
    assert "try model.ridge auto" in make_results([imprecise]).verdict[-1]
    at_edge = changed(imprecise, ridge=1e6)
    assert "is 1e+06, the strongest that is tried" in make_results([at_edge]).verdict[-1]


def test_without_references_the_best_pairs_are_shown() -> None:
    scores = make_scores(**dict.fromkeys(HITS))
    found = make_results(scores)
    weights = [name for name in figure_names(found) if name.startswith("weights_")]
    assert len(weights) == 6 and "weights_city-Xover2" in weights


def test_labels_that_never_vary_have_results(tmp_path: Path) -> None:
    still = [
        replace(score, label_r=score.label_r * math.nan)
        for score in make_scores(label_mean=None, label_std=None, excess=None)
    ]
    found = make_results(still)
    found.write(tmp_path)
    assert "NaN" not in (tmp_path / "results.json").read_text()
    assert len(found.table("summary")) == 6


def test_figures_are_limited_in_a_run_over_many_pairs() -> None:
    (score,) = [score for score in make_scores() if score["influenced_n"]]
    many = [replace(changed(score, label_mean=i / 100), source=f"city{i}") for i in range(40)]
    drawn = [name for name in figure_names(make_results(many, path=[])) if "weights" in name]
    assert drawn == [f"weights_city{i}-country" for i in range(12)]
