"""Figures of edits and of forecasts: what they show is what the numbers say."""

from typing import Any

import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from lincorr_lightning.finetune.cases import EditCase
from lincorr_lightning.finetune.figures import (
    outcomes_figure,
    reference_weights_figure,
    risk_figure,
)
from lincorr_lightning.finetune.forecasts import Forecasts
from lincorr_lightning.results.style import to_picture
from tests.finetune.test_results import case as make_case


def case(i: int, **changes: Any) -> EditCase:
    outcome = ("generalized", "hallucinated", "unchanged", "hallucinated")[i % 4]
    cause = {1: "imprecise W", 3: "low prior"}.get(i % 4, "")
    values = {"source_answer": "$Paris$", "weight_reference": i / 100 - 0.1, "cause": cause}
    return make_case(f"x{i}", outcome=outcome, **values | changes)


def forecasts(
    n: int = 4, names: tuple[str, ...] = ("map", "optimizer_step"), **changes: Any
) -> Any:
    generator = torch.Generator().manual_seed(0)
    mask = torch.zeros(n, 3, dtype=torch.bool)
    mask[:, 0] = True
    values: dict[str, Any] = {
        "relation": "city->country", "subjects": [f"x{i}" for i in range(n)],
        "source_answers": ["$Paris$"] * n, "references": ["法国"] * n,
        "labels": ["法国", "b", "c"], "before": torch.eye(3)[[1] * n], "reference_mask": mask,
        "predicted": {name: torch.randn(n, 3, generator=generator) for name in names},
    }  # fmt: skip
    return Forecasts(**values | changes)


def texts_of(figure: Figure) -> str:
    figure.canvas.draw()
    axes = figure.axes
    texts = [*figure.texts, *(text for a in axes for text in a.texts)]
    texts += [label for a in axes for label in a.get_yticklabels()]
    titles = [a.get_title(loc=place) for a in axes for place in ("left", "right")]
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    return "\n".join([*(text.get_text() for text in (*texts, *legends)), *titles])


def test_outcomes_are_bars_of_their_shares() -> None:
    cases = [case(i) for i in range(20)]
    figure = outcomes_figure(cases, "city->country", 0.04)
    (axes,) = figure.axes
    ends: dict[float, float] = {}
    for bar in axes.patches:
        y = round(bar.get_y() + bar.get_height() / 2)
        ends[y] = max(ends.get(y, 0), bar.get_x() + bar.get_width())
    assert ends == pytest.approx({0: 1.0, 1: 0.25, 2: 0.5, 3: 0.25})
    text = texts_of(figure)
    assert "Outcomes of 20 edits of city->country" in text
    assert "imprecise W (5, dark), low prior (5, pale)" in text
    assert "a random label is right (4.0%)" in text
    watched = outcomes_figure(cases, "city->country", taught=False)
    assert "20 watched subjects" in texts_of(watched)
    assert "source learned" not in texts_of(watched)


def test_every_case_with_a_weight_is_a_point() -> None:
    cases = [*(case(i) for i in range(40)), case(1, weight_reference=None)]
    figure = reference_weights_figure(cases, "city->country")
    (axes,) = figure.axes
    drawn = [x for points in axes.collections if isinstance(points, PathCollection)
             for x, _ in points.get_offsets().tolist()]  # fmt: skip
    weights = [
        case.weight_reference
        for case in cases
        if case.outcome != "unchanged" and case.weight_reference is not None
    ]
    assert sorted(drawn) == pytest.approx(sorted(weights))
    text = texts_of(figure)
    assert "generalized\nn = 10" in text and "hallucinated\nn = 20" in text
    # Where its line breaks depends on the font.
    assert "imprecise W (10)" in text and "Mann-Whitney test" in " ".join(text.split())


@pytest.mark.parametrize("n", [0, 1, 700])
def test_any_number_of_cases_can_be_drawn(n: int) -> None:
    cases = [case(i) for i in range(n)]
    for figure in (
        reference_weights_figure(cases, "city->country"),
        outcomes_figure(cases, "city->country"),
    ):
        assert to_picture(figure).width > 200


def test_predicted_hallucinations_are_counted() -> None:
    given = forecasts(40)
    text = texts_of(risk_figure(given))
    for name in given.predicted:
        share = given.outcomes(name).count("hallucinated") / 40
        assert f"predicted hallucinations: {share:.0%}" in text


def test_every_finite_risk_is_in_a_bar_and_no_bar_is_on_both_sides_of_zero() -> None:
    given = forecasts(30)
    given.predicted["optimizer_step"][3] = torch.inf
    for axes, n in zip(risk_figure(given).axes, (30, 29), strict=True):
        bars = [bar for bar in axes.patches if bar.get_height() > 0]
        assert sum(bar.get_height() for bar in bars) == n
        assert all(bar.get_x() >= 0 or bar.get_x() + bar.get_width() <= 1e-9 for bar in bars)


@pytest.mark.parametrize(
    "given",
    [
        forecasts(0, ("map",)),
        forecasts(4, ()),
        forecasts(4, predicted={"map": torch.full((4, 3), torch.nan)}),
        forecasts(4, predicted={"map": torch.zeros(4, 3)}),
        forecasts(4, tuple(f"地图 $r_{i}$" * 9 for i in range(9))),
    ],
    ids=["no edits", "no forecasters", "nan", "ties", "long names"],
)
def test_any_forecast_can_be_drawn(given: Forecasts) -> None:
    assert to_picture(risk_figure(given)).width > 200
