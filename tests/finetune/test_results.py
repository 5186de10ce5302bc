"""Tables, figures and `Results` of edits, from plain data: what they show is what is counted."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.edits import Skipped
from lincorr_lightning.finetune.figures import outcomes_figure, reference_weights_figure
from lincorr_lightning.finetune.results import case_results, finetune_results
from lincorr_lightning.results.plots import to_png
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table

COLUMNS = (
    "subject source_answer reference answer_before answer_after outcome source_learned "
    "weight_reference weight_answer weight_max prior_reference prior_winner "
    "probability_reference_before probability_reference_after vocabulary_risk cause completeness "
    "ambiguous"
).split()
OUTCOMES = ["generalized", "unchanged", "hallucinated", "generalized"]
AFTER = ["France", "Spain", "France", "法国"]
SUBJECTS = ["Ann", "$Bob$", "Cy", "Di"]
ANSWERS = ["Paris", "Rome", "Bern", "Lyon"]


def case(subject: str, **changes: Any) -> EditCase:
    values: dict[str, Any] = {
        "subject": subject,
        "source_answer": "Paris",
        "reference": "France|法国",
        "answer_before": "Spain",
        "answer_after": "France",
        "outcome": "generalized",
        "source_learned": True,
        "weight_reference": 0.5,
        "weight_answer": 0.25,
        "weight_max": 0.75,
        "prior_reference": 1.0,
        "prior_winner": 2.0,
        "probability_reference_before": 0.1,
        "probability_reference_after": 0.9,
        "vocabulary_risk": -0.1,
        "cause": "",
    }
    return EditCase(**values | changes)


# -- edits -------------------------------------------------------------------------------------


def test_cases_have_a_table_and_figures():
    cases = [case("Ann"), case("$Bob$", weight_reference=None, prior_winner=-1.23456)]
    table, _ = case_results(cases, "city->country")
    assert (table.name, table.keys) == ("cases", COLUMNS)
    assert table.frame["weight_reference"].tolist()[0] == 0.5
    cells = dict(zip(table.keys, table.texts()[1], strict=True))
    assert (cells["weight_reference"], cells["prior_winner"]) == ("", "−1.23")
    assert cells["probability_reference_after"] == "90.0%"
    assert "| taught |" in table.markdown()
    watched, figures = case_results(cases, "city->country", 0.04, taught=False, suffix="_2")
    assert "| taught |" not in watched.markdown()
    names = [watched.name, *(figure.name for figure in figures)]
    assert names == ["cases_2", "reference_weights_2", "outcomes_2"]
    assert all(figure.png for figure in figures)


# -- a fine-tune -------------------------------------------------------------------------------

RUN = {"protocol": "joint", "method": "full", "n_edits": 4, "n_steps": 7, "seconds": 1.23}


def generalization(relation: str, name: str = "generalization", **changes: Any) -> Results:
    cases = [
        case(subject, source_answer=answer, answer_after=after, outcome=outcome)
        for subject, answer, after, outcome in zip(SUBJECTS, ANSWERS, AFTER, OUTCOMES, strict=True)
    ]
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
        "vocabulary": {"right": 0.35, "macro_right": 0.45},
        "controls": {"color": {"unchanged": 0.75}},
        "causes": {},
        "forecast": {"vocabulary": {"auroc": 0.625, "auroc_within": None}},
    }
    table, _ = case_results(cases, relation, suffix=name.removeprefix("generalization"))
    return Results(name, values | changes, tables=[table])


def build(measured: list[Results], dataset: Any = None, **history: Any) -> Results:
    return finetune_results(measured, RUN, dataset, history, "joint")


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
    relation = SimpleNamespace(name="city->country")
    skipped = [Skipped("e.csv, line 2", "Ada", "Atlantis", "no label")] * 2
    dataset = SimpleNamespace(relation=relation, edits=[], skipped=skipped)
    found = build(measured, dataset=dataset)
    results = found.values
    assert (results["relation"], results["n_edits"], results["generalized"]) == (
        "city->country",
        4,
        0.5,
    )
    assert (results["gradient_correlation"], results["logit_correlation"]) == (0.9, 0.8)
    assert results["skipped"] == {"no label": 2}
    assert found.table("skipped").frame.values.tolist() == [list(row) for row in skipped]
    assert results["generalizations"]["X+1->X*2"]["generalized"] == 0.125
    assert set(results["gradients"]) == {"city->color", "city->country"}
    assert [bool(one.values) for one in found.included] == [False] * 4 + [True]
    assert results["seconds"] == 1.23
    assert [table.name for table in found.tables] == ["outcomes", "correlations", "skipped"]
    outcomes = found.table("outcomes")
    assert list(outcomes.frame["relation"]) == ["city->country", "X+1->X*2"], "its own first"
    assert outcomes.texts()[0] == [
        "city->country",
        "4",
        "100.0%",
        "50.0%",
        "62.5%",
        "75.0%",
        "35.0%",
        "45.0%",
        "4.0%",
        "25.0%",
        "12.5%",
        "25.0%",
        "75.0%",
        "0.62",
        "",
    ]


def test_without_callbacks_the_contract_s_keys_are_null():
    results = build([])
    keys = (
        "relation",
        "source_learned",
        "generalized",
        "random",
        "constant",
        "macro",
        "controls",
        "gradient_correlation",
        "forecast",
        "forecast_default",
    )
    assert [results.values[key] for key in keys] == [None] * 10
    assert not results.tables and not results.figures


def test_the_curves_of_all_callbacks_make_one_figure():
    history = {
        "generalization/generalized": [(0, 0.0), (1, 0.5)],
        "probability/reference": [(0, 0.1), (1, 0.2)],
        "gradient_correlation/city->country": [(1, 0.9)],
    }
    (figure,) = build([generalization("city->country")], **history).figures
    drawn = figure.draw()
    texts = [text.get_text() for text in drawn.texts]
    assert "Training on edits of city->country" in texts
    assert len(drawn.axes) == 3


# -- figures -----------------------------------------------------------------------------------


def cases_of(n: int) -> list[EditCase]:
    outcomes = ("generalized", "hallucinated", "unchanged", "hallucinated")
    causes = ("", "imprecise W", "", "low prior")
    return [
        case(f"x{i}", outcome=outcomes[i % 4], cause=causes[i % 4], weight_reference=i / 100 - 0.1)
        for i in range(n)
    ]


def texts_of(figure: Figure) -> str:
    to_png(figure)
    texts = [text for axes in figure.axes for text in axes.texts + axes.get_yticklabels()]
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    # Where a title's lines break depends on the font.
    return " ".join("\n".join(t.get_text() for t in (*figure.texts, *texts, *legends)).split())


def test_outcomes_are_bars_of_their_shares():
    figure = outcomes_figure(cases_of(20), "city->country", 0.04)
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([0.25, 0.5, 0.25, 0])
    text = texts_of(figure)
    assert "Outcomes of 20 edits of city->country" in text
    assert "imprecise W (5), low prior (5)" in text
    assert "the vocabulary alone is right (100.0%)" in text and "random" not in text
    unknown = [replace(one, vocabulary_risk=None) for one in cases_of(20)]
    text_of_others = texts_of(outcomes_figure(unknown, "city->country", 0.04))
    assert "a random label is right (4.0%)" in text_of_others
    assert "the best constant label is right (100.0%)" in text and "mean over references" in text
    assert to_png(outcomes_figure([], "city->country")).startswith(b"\x89PNG")
    watched = outcomes_figure(cases_of(20), "city->country", taught=False)
    assert "20 watched subjects" in texts_of(watched)
    assert len(watched.axes[0].patches) == 3


def test_every_case_with_a_weight_is_a_point():
    cases = [*cases_of(40), case("y", weight_reference=None)]
    figure = reference_weights_figure(cases, "city->country")
    (axes,) = figure.axes
    drawn = [
        x
        for points in axes.collections
        if isinstance(points, PathCollection)
        for x, _ in points.get_offsets().tolist()
    ]
    weights = [c.weight_reference for c in cases[:40] if c.outcome != "unchanged"]
    assert sorted(drawn) == pytest.approx(sorted(weights))
    assert to_png(reference_weights_figure([], "city->country")).startswith(b"\x89PNG")
    text = texts_of(figure)
    assert "generalized n = 10" in text and "hallucinated n = 20" in text
    assert "hollow: low prior" in text and "Mann-Whitney test" in text
