"""Forecasts, before and after the edits."""

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from lincorr_lightning.finetune.figures import forecast_figure, risk_figure
from lincorr_lightning.finetune.forecast_results import Forecast, ForecastReport
from lincorr_lightning.results.style import to_picture

SCORES: dict[str, dict[str, float | None]] = {
    "map": {"accuracy": 0.25, "auroc": 0.75},
    "first_order": {"accuracy": 0.5, "auroc": None},
    "answer before": {"accuracy": 0.125, "auroc": None},
}


def build(known: bool, **changes: Any) -> ForecastReport:
    values: dict[str, Any] = {
        "relation": "city->country",
        "subjects": ["Ann", "$Bob$", "Cy", "Di"],
        "source_answers": ["Paris", "Rome", "Bern", "Lyon"],
        "references": ["France|法国", "Italy", "Switzerland", "France|法国"],
        "answers_before": ["Spain", "Spain", "Italy", "Spain"],
        "forecasts": {
            "map": Forecast(["France", "Spain", "Spain", "法国"], [-1.5, 2.0, 0.5, -0.25]),
            "first_order": Forecast(["Spain", "Italy", "France", "France"], [3, -1, 9, math.inf]),
        },
        "outcomes": ["generalized", "unchanged", "hallucinated", "generalized"] if known else None,
        "answers_after": ["France", "Spain", "France", "法国"] if known else None,
        "scores": SCORES if known else {},
    }
    return ForecastReport(**values | changes)


def said(figure: Figure) -> str:
    figure.canvas.draw()
    axes = figure.axes
    texts = [*figure.texts, *(text for a in axes for text in a.texts)]
    texts += [label for a in axes for label in a.get_yticklabels()]
    titles = [a.get_title(loc=place) for a in axes for place in ("left", "right")]
    return "\n".join([*(text.get_text() for text in texts), *titles])


@pytest.mark.parametrize("known", [False, True])
def test_files(tmp_path: Path, known: bool) -> None:
    build(known).write(tmp_path)
    with (tmp_path / "tables" / "forecast.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = (
        "subject source_answer reference answer_before map_answer map_risk first_order_answer "
        "first_order_risk"
    ).split()
    assert list(rows[0]) == columns + (["answer_after", "outcome"] if known else [])
    assert [row["subject"] for row in rows] == ["Ann", "$Bob$", "Cy", "Di"]
    assert rows[0]["reference"] == "France|法国"
    assert [float(row["map_risk"]) for row in rows] == [-1.5, 2.0, 0.5, -0.25]
    assert rows[3]["first_order_risk"] == "", "no infinity in tables"
    picture = Image.open(tmp_path / "figures" / "forecast.png").convert("RGB")
    assert min(picture.size) > 200
    assert len(picture.getcolors(1 << 24)) > 20


def test_what_is_foreseen() -> None:
    report = build(known=False)
    assert report.foreseen("map") == [
        "generalized", "unchanged", "hallucinated", "generalized",
    ]  # fmt: skip
    text = said(risk_figure(report))
    assert "foreseen hallucinations: 25%" in text, "map"
    assert "foreseen hallucinations: 50%" in text, "first_order"


def test_every_finite_risk_is_in_a_bar_and_no_bar_is_on_both_sides_of_zero() -> None:
    for axes, n in zip(risk_figure(build(known=False)).axes, (4, 3), strict=True):
        bars = [bar for bar in axes.patches if bar.get_height() > 0]
        assert sum(bar.get_height() for bar in bars) == n
        assert all(bar.get_x() >= 0 or bar.get_x() + bar.get_width() <= 1e-9 for bar in bars)


def test_scores_are_drawn_beside_baselines() -> None:
    figure = forecast_figure(build(known=True))
    accuracy, auroc = figure.axes
    assert [bar.get_width() for bar in accuracy.patches] == [0.25, 0.5, 0.125]
    assert [bar.get_width() for bar in auroc.patches] == [0.75, 0, 0]
    colours = [bar.get_facecolor() for bar in accuracy.patches]
    assert colours[0] == colours[1] != colours[2]
    text = said(figure)
    assert "answer before" in text
    assert "2 generalized, 1 hallucinated, 1 unchanged" in text
    assert [t.get_text() for t in auroc.texts] == [".75", "–", "–"]


def test_markdown() -> None:
    known = build(known=True).markdown()
    scores, _, table = known.partition("\n\n")
    assert r"| first\_order | 0.500 |  |" in scores
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == [
        r"| \$Bob\$", "| Cy", "| Di", "| Ann",
    ]  # fmt: skip
    before = build(known=False).markdown(limit=2)
    assert before.startswith("| subject |")
    assert "2 of 4 edits" in before
    assert r"France\|法国" not in before


@pytest.mark.parametrize(
    "changes",
    [
        {name: [] for name in ("subjects", "source_answers", "references", "answers_before")}
        | {"forecasts": {"map": Forecast([], [])}},
        {"forecasts": {}},
        {"forecasts": {"map": Forecast(["a"] * 4, [math.nan] * 4)}},
        {"forecasts": {"map": Forecast(["a"] * 4, [0.0] * 4)}},
        {"forecasts": {f"地图 $r_{i}$" * 9: Forecast(["a"] * 4, [i, 1.0, 2, 3]) for i in range(9)}},
    ],
)
def test_any_forecast_can_be_drawn(changes: dict[str, Any], tmp_path: Path) -> None:
    report = build(False, **changes)
    report.write(tmp_path)
    assert Image.open(io.BytesIO(to_picture(risk_figure(report)).png)).size[0] > 200
    assert report.markdown()
