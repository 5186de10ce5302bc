"""Tables, figures and `Results` of edits, from plain data: what they show is what is counted."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.collections import PathCollection
from pandas import DataFrame

from lincorr_lightning.finetune.cases import EditCase, case_statistics
from lincorr_lightning.finetune.edit_files import RawEdit
from lincorr_lightning.finetune.figures import (
    outcomes_figure,
    reference_weights_figure,
    training_figure,
)
from lincorr_lightning.finetune.results import edits_results, finetune_results
from lincorr_lightning.finetune.verdict import edits_verdict
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table
from tests.figure_checks import assert_legible
from tests.finetune.test_cases import NEAR, worked_example


def case(subject: str, **changes: Any) -> EditCase:
    return replace(worked_example(nearness=NEAR)[0], subject=subject, **changes)


def test_cases_have_a_table_and_figures():
    changes = {"weight_reference": None, "prior_winner": -1.23456}
    cases = [case("Ann"), case("$Bob$", probability_reference_after=0.9, **changes)]
    values = {"relation": "city->country", "n_edits": 0, **case_statistics(cases)}
    results = edits_results("generalization", values, cases, {}).numbered("_2")
    (table,) = results.tables
    names = [table.name, *(figure.name for figure in results.figures)]
    assert names == ["cases_2", "outcomes_2", "reference_weights_2"]
    assert results.figures[0].to_json()["of"] == ["cases_2"]
    cells = dict(zip(table.keys, table.texts()[1], strict=True))
    assert (cells["weight_reference"], cells["prior_winner"]) == ("", "−1.23")
    assert cells["probability_reference_after"] == "90.0%"
    assert all(figure.png for figure in results.figures)


def step(n: int, specific: float) -> dict[str, Any]:
    return {"step": n, "specific": specific}


SAID = {
    "n_edits": 9,
    "relation": "city->country",
    "source_learned": 1.0,
    "right_before": 0.0,
    "specific": {"mean": 0.3, "low": 0.1, "high": 0.5},
    "leak": {"mean": 0.25, "low": 0.2, "high": 0.3},
    "n_others": 8,
    "by_step": [step(1, 0.2), step(3, 0.6), step(9, 0.3)],
    "above_best_baseline": {"baseline": "causal_inner_product", "macro": 0.4, "generalized": 0.55}
    | {"mean": 0.15, "low": 0.05, "high": 0.25},
    "nearest": {"wrong": {"n": 4, "generalized": 0.5}},
}
NEAREST = SAID["above_best_baseline"]


@pytest.mark.parametrize(
    ("changes", "nth", "expected"),
    [
        ({}, 0, "city→country: 60 % specific to their subject after 3 steps, 30 % after 9: stop"),
        ({"by_step": [step(1, 0.0), step(9, -0.1)]}, 0, "are at no step specific"),
        ({"source_learned": 0.5}, 0, "50 % learned, 30 % specific .*: train longer"),
        ({"by_step": [], "source_learned": 0.5}, 0, r"50 % learned, 30 % specific to .* subject\."),
        ({}, 1, "55 % .* the nearest word is right for 40 %: more than the nearest word"),
        ({"above_best_baseline": NEAREST | {"low": -0.1}}, 1, "no more than .*−10 to .25 points"),
        ({"above_best_baseline": NEAREST | {"low": -0.1, "high": -0.05}}, 1, "fewer than the near"),
        ({"above_best_baseline": NEAREST | {"low": None, "high": None}}, 1, "too few different"),
        ({"above_best_baseline": NEAREST | {"baseline": "constant"}}, 1, "more than one constant"),
        ({}, 2, "^The new country is then said of 25 % of other people"),
        ({"specific": {"mean": 0.0, "low": -0.1, "high": 0.1}}, 2, "^Said of everybody: the new"),
    ],
)
def test_a_verdict_says_what_the_numbers_are(changes: Any, nth: int, expected: str):
    sentence = edits_verdict(SAID | changes)[nth].replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(expected, sentence), sentence


RUN = {"protocol": "joint", "method": "full", "n_edits": 4, "n_steps": 7, "seconds": 1.23}


def generalization(relation: str, name: str = "generalization", **changes: Any) -> Results:
    values = {
        "relation": relation,
        "n_edits": 4,
        "source_learned": 1.0,
        "generalized": 0.5,
        "hallucinated": 0.25,
        "unchanged": 0.25,
        "random": 0.04,
        "constant": 0.75,
        "macro": {"generalized": 0.625, "hallucinated": 0.125},
        "nearest": {"right": 0.35, "macro": 0.45},
        "controls": {"color": {"unchanged": 0.75}},
        "forecast": {"causal_inner_product": {"auroc": 0.625, "auroc_within": None}},
    }
    return Results(name, values | changes)


def build(measured: list[Results], edits: Any = None, **history: Any) -> Results:
    return finetune_results(measured, RUN, edits, history, "joint")


def test_the_run_s_own_relation_stands_at_the_top():
    measured = [
        generalization("X+1->X*2", generalized=0.125),
        generalization("city->country", "generalization_2"),
        Results("gradient_correlation", {"relation": "city->color", "gradient_correlation": 0.1}),
        Results(
            "gradient_correlation_2",
            {"relation": "city->country", "gradient_correlation": 0.9, "logit_correlation": 0.8},
            tables=[Table.of("gradient_correlation_2", [], ["step"])],
        ),
        Results("resilience", {"before": 1.0}, verdict=["the last"]),
    ]
    texts = SimpleNamespace(texts=[])
    relation = SimpleNamespace(name="city->country", source=texts, target=texts)
    skipped = [RawEdit("e.csv, line 2", "Ada", "Atlantis", problem="no label")] * 2
    found = build(measured, SimpleNamespace(relation=relation, edits=[], skipped=skipped))
    results = found.values
    at_top = {"relation": "city->country", "n_edits": 4, "generalized": 0.5, "seconds": 1.23}
    at_top |= {"gradient_correlation": 0.9, "logit_correlation": 0.8, "skipped": {"no label": 2}}
    assert at_top.items() <= results.items()
    assert len(found.table("skipped")) == 2
    assert results["generalizations"]["X+1->X*2"]["generalized"] == 0.125
    assert set(results["gradients"]) == {"city->color", "city->country"}
    assert [bool(one.values) for one in found.included] == [False] * 4 + [True]
    assert len(found.all_sentences) == 2 and found.all_sentences[-1] == "the last"
    summary = found.table("summary")
    assert list(summary.frame["relation"]) == ["city->country", "X+1->X*2"], "its own first"
    shown = dict(zip(summary.keys, summary.texts()[0], strict=True))
    expected = {"generalized": "50.0%", "macro_generalized": "62.5%", "nearest_macro": "45.0%"}
    assert expected.items() <= shown.items()


def test_without_callbacks_the_contract_s_keys_are_null():
    results = build([])
    for key in ("relation", "generalized", "random", "constant", "macro", "controls", "forecast"):
        assert results.values[key] is None
    assert not results.tables and not results.figures


def test_the_curves_of_all_callbacks_make_one_figure():
    history = {
        "generalization/generalized": [(0, 0.0), (1, 0.5)],
        "probability/reference": [(0, 0.1), (1, 0.2)],
        "gradient_correlation/city->country": [(1, 0.9), (2, 0.8)],
        "generalization/macro_generalized": [(0, 0.0), (1, 0.5)],
    }
    (figure,) = build([generalization("city->country")], **history).figures
    panels = [axes for axes in figure.matplotlib().axes if axes.axison]
    assert [axes.get_ylabel() for axes in panels] == [
        "share of edits",
        "share or probability",
        "r of city→country",
    ]
    assert [len(axes.get_lines()) for axes in panels] == [1, 1, 1]
    assert panels[2].get_ylim() == (-1.02, 1.02)


# -- figures -----------------------------------------------------------------------------------


def cases_of(n: int) -> list[EditCase]:
    outcomes = ("generalized", "hallucinated", "unchanged", "hallucinated")
    causes = ("", "imprecise W", "", "low prior")
    return [
        case(f"x{i}", outcome=outcomes[i % 4], cause=causes[i % 4], weight_reference=i / 100 - 0.1)
        for i in range(n)
    ]


def frame(cases: list[EditCase]) -> Any:
    return Table.of("cases", cases, EditCase).frame


def test_curves_of_another_relation_have_panels_of_their_own():
    keys = ("edit_step/leak", "country->language/edit_step/leak", "country->language/probability/a")
    rows = [(step, 0.1 * step, key) for key in keys for step in (0, 1)]
    figure = training_figure(DataFrame(rows, columns=["step", "value", "number"]), "a→b", "")
    panels = [axes for axes in figure.axes if axes.axison]
    titles = [axes.get_ylabel().replace("\n", " ") for axes in panels]
    assert titles == [
        "share of edits",
        "share of edits, country→language",
        "share or probability, country→language",
    ]
    assert all(axes.get_ylim() == (-0.02, 1.02) for axes in panels)


def test_a_number_of_one_step_draws_no_curve():
    rows = DataFrame([(0, 0.5, "edit_step/leak")], columns=["step", "value", "number"])
    figure = training_figure(rows, "a→b", "")
    assert not [line for axes in figure.axes for line in axes.lines]


def test_outcomes_are_bars_of_their_shares():
    """Of all edits, also of those that were not learned; in parts by their nearest word."""
    cases = [replace(one, source_learned=i > 0) for i, one in enumerate(cases_of(20))]
    cases += [replace(one, nearest_risk=0.5) for one in cases]
    figure = outcomes_figure(frame(cases), "city->country")
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([x / 2 for x in (0.95, 0.25, 0.5, 0.25, 0) for _ in "rw"])
    assert_legible(figure)
    assert outcomes_figure(frame([]), "city->country").axes


def test_every_case_with_a_weight_is_a_point():
    cases = [*cases_of(40), case("y", weight_reference=None)]
    figure = reference_weights_figure(frame(cases), "city->country", 0.5)
    drawn = [
        x
        for points in figure.axes[0].collections
        if isinstance(points, PathCollection)
        for x, _ in points.get_offsets().tolist()
    ]
    weights = [c.weight_reference for c in cases[:40] if c.outcome != "unchanged"]
    assert sorted(drawn) == pytest.approx(sorted(weights))
    assert reference_weights_figure(frame([]), "city->country", None).axes
