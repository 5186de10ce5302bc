"""Tables, figures and `Results` of edits, from plain data: what they show is what is counted."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.collections import PathCollection

from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.edit_files import RawEdit
from lincorr_lightning.finetune.figures import outcomes_figure, reference_weights_figure
from lincorr_lightning.finetune.results import case_results, finetune_results
from lincorr_lightning.results.plots import to_png
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table
from tests.finetune.test_cases import NEAR, worked_example


def case(subject: str, **changes: Any) -> EditCase:
    return replace(worked_example(nearness=NEAR)[0], subject=subject, **changes)


def test_cases_have_a_table_and_figures():
    changes = {"weight_reference": None, "prior_winner": -1.23456}
    cases = [case("Ann"), case("$Bob$", probability_reference_after=0.9, **changes)]
    table, figures = case_results(cases, "city->country", 0.04, suffix="_2")
    names = [table.name, *(figure.name for figure in figures)]
    assert names == ["cases_2", "reference_weights_2", "outcomes_2"]
    cells = dict(zip(table.keys, table.texts()[1], strict=True))
    assert (cells["weight_reference"], cells["prior_winner"]) == ("", "−1.23")
    assert cells["probability_reference_after"] == "90.0%"
    assert all(figure.png for figure in figures)


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
        Results("resilience", {"before": 1.0}),
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
    outcomes = found.table("outcomes")
    assert list(outcomes.frame["relation"]) == ["city->country", "X+1->X*2"], "its own first"
    shown = dict(zip(outcomes.keys, outcomes.texts()[0], strict=True))
    expected = {"generalized": "50.0%", "macro_generalized": "62.5%", "nearest_right": "35.0%"}
    expected |= {"right_before": "", "auroc": "0.62", "color_unchanged": "75.0%"}
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
        "gradient_correlation/city->country": [(1, 0.9)],
    }
    (figure,) = build([generalization("city->country")], **history).figures
    assert len(figure.draw().axes) == 3


# -- figures -----------------------------------------------------------------------------------


def cases_of(n: int) -> list[EditCase]:
    outcomes = ("generalized", "hallucinated", "unchanged", "hallucinated")
    causes = ("", "imprecise W", "", "low prior")
    return [
        case(f"x{i}", outcome=outcomes[i % 4], cause=causes[i % 4], weight_reference=i / 100 - 0.1)
        for i in range(n)
    ]


def test_outcomes_are_bars_of_their_shares():
    """Of all edits, also of those that were not learned."""
    cases = [replace(one, source_learned=i > 0) for i, one in enumerate(cases_of(20))]
    figure = outcomes_figure(cases, "city->country", 0.04)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == pytest.approx([0.25, 0.5, 0.25, 0])
    assert to_png(outcomes_figure([], "city->country")).startswith(b"\x89PNG")


def test_every_case_with_a_weight_is_a_point():
    cases = [*cases_of(40), case("y", weight_reference=None)]
    figure = reference_weights_figure(cases, "city->country")
    drawn = [
        x
        for points in figure.axes[0].collections
        if isinstance(points, PathCollection)
        for x, _ in points.get_offsets().tolist()
    ]
    weights = [c.weight_reference for c in cases[:40] if c.outcome != "unchanged"]
    assert sorted(drawn) == pytest.approx(sorted(weights))
    assert to_png(reference_weights_figure([], "city->country")).startswith(b"\x89PNG")
