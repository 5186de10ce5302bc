"""Figures of edits and of forecasts: what they show is what the numbers say."""

from typing import Any

import numpy as np
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
from lincorr_lightning.results.plots import to_png
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
    to_png(figure)
    texts = [text for axes in figure.axes for text in axes.texts + axes.get_yticklabels()]
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    # Where a title's lines break depends on the font.
    return " ".join("\n".join(t.get_text() for t in (*figure.texts, *texts, *legends)).split())


def test_outcomes_are_bars_of_their_shares():
    cases = [case(i) for i in range(20)]
    figure = outcomes_figure(cases, "city->country", 0.04)
    (axes,) = figure.axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([1.0, 0.25, 0.5, 0.25])
    text = texts_of(figure)
    assert "Outcomes of 20 edits of city->country" in text
    assert "imprecise W (5), low prior (5)" in text
    assert "a random label is right (4.0%)" in text
    assert to_png(outcomes_figure([], "city->country")).startswith(b"\x89PNG")
    watched = outcomes_figure(cases, "city->country", taught=False)
    assert "20 watched subjects" in texts_of(watched)
    assert len(watched.axes[0].patches) == 3


def test_every_case_with_a_weight_is_a_point():
    cases = [*(case(i) for i in range(40)), case(1, weight_reference=None)]
    figure = reference_weights_figure(cases, "city->country")
    (axes,) = figure.axes
    drawn = [x for points in axes.collections if isinstance(points, PathCollection)
             for x, _ in points.get_offsets().tolist()]  # fmt: skip
    weights = [c.weight_reference for c in cases[:40] if c.outcome != "unchanged"]
    assert sorted(drawn) == pytest.approx(sorted(weights))
    assert to_png(reference_weights_figure([], "city->country")).startswith(b"\x89PNG")
    text = texts_of(figure)
    assert "generalized n = 10" in text and "hallucinated n = 20" in text
    assert "low prior (10)" in text and "Mann-Whitney test" in text


def test_curves_of_risks_are_their_distribution():
    given = forecasts(40)
    given.predicted["optimizer_step"][3] = torch.inf
    figure = risk_figure(given)
    (axes,) = figure.axes
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    for line, name in zip(lines, given.predicted, strict=True):
        risks = np.array(given.risks(name))
        drawn = dict(zip(*(np.asarray(d).tolist() for d in line.get_data()), strict=True))
        assert drawn == pytest.approx({x: (risks <= x).mean() for x in risks[np.isfinite(risks)]})
        share = given.outcomes(name).count("hallucinated") / 40
        assert f": {share:.0%} wrong" in texts_of(figure)


@pytest.mark.parametrize("given", [
    forecasts(0, ("map",)),
    forecasts(4, predicted={"map": torch.full((4, 3), torch.nan)}),
    forecasts(4, tuple(f"地图 $r_{i}$" * 9 for i in range(9))),
], ids=["no edits", "nan", "long names"])  # fmt: skip
def test_any_forecast_can_be_drawn(given):
    assert to_png(risk_figure(given))
