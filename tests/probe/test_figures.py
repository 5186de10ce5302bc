"""A probe's figures: every number where it is drawn."""

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.functional import HALF_DECADES
from lincorr_lightning.probe.figures import (
    random_words_figure,
    ridge_path_figure,
    weights_figure,
)
from lincorr_lightning.probe.results import shown_part
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import legible, to_png
from tests.figure_checks import LONG, assert_legible, texts

PAIR = "city->country"


def test_the_part_of_w_that_is_shown_depends_on_the_reference_alone() -> None:
    rng = np.random.default_rng(0)
    reference = np.zeros((30, 60), dtype=bool)
    reference[np.repeat(np.arange(20), 3), np.arange(60)] = True
    for weight in rng.normal(size=(2, 30, 60)):
        targets, sources = shown_part(weight, reference)
        assert targets == list(range(16)) and sources == list(range(0, 48, 3))
    few = np.zeros((3, 40), dtype=bool)
    few[np.arange(40) % 3, np.arange(40)] = True
    targets, sources = shown_part(rng.normal(size=(3, 40)), few)
    assert targets == [0, 1, 2]
    assert sources == [*range(0, 18, 3), *range(1, 16, 3), *range(2, 17, 3)]


def cells(shape: tuple[int, int], **changes: Any) -> DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {
            "pair": PAIR,
            "source": f"source {j}",
            "target": f"target {i}",
            "share": rng.uniform(-1, 1),
            "nearest_share": rng.uniform(-1, 1),
            "reference": i == j,
        }
        for i in range(shape[0])
        for j in range(shape[1])
    ]
    other = [{**rows[0], "pair": "city->pet", "share": 9.0}]
    return DataFrame(rows + other).assign(**changes)


@pytest.mark.parametrize("shape", [(16, 16), (3, 16), (3, 9)])
def test_w_stands_beside_the_nearest_word(shape: tuple[int, int]) -> None:
    frame = cells(shape)
    figure = weights_figure(frame, PAIR, LONG, 31.6, [0.8, 0.4], {})
    assert_legible(figure)
    for axes, column in zip(figure.axes, ("share", "nearest_share"), strict=False):
        rows, columns = (
            [label.get_text() for label in labels]
            for labels in (axes.get_yticklabels(), axes.get_xticklabels())
        )
        assert (len(rows), len(columns)) == shape
        drawn = np.asarray(axes.collections[0].get_array())
        of_pair = frame[frame["pair"] == PAIR]
        for cell in of_pair.to_dict("records"):
            shown = drawn[rows.index(cell["target"]), columns.index(cell["source"])]
            assert shown == cell[column]
        assert axes.collections[0].get_clim() == (-1, 1)
        frames = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        places = {(patch.get_y() + 0.5, patch.get_x() + 0.5) for patch in frames}
        assert places == {(float(i), float(i)) for i in range(min(shape))}
    assert "80%" in figure.axes[0].get_title("left")


def test_labels_are_shown_so_that_all_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = cells((1, 1), source="巴黎", nearest_share=math.nan, reference=False)
    monkeypatch.setattr(plots, "has_glyphs", lambda text: "巴" not in text)
    figure = weights_figure(frame, PAIR, "an LM", 0.0, [None, None], {"巴黎": "Paris"})
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["Paris"]
    assert len(figure.axes) == 2, "one panel and the colours"


def test_ridge_path_shows_its_numbers() -> None:
    rows = [
        {
            "pair": f"birthplace{i}->personality{i}",
            "ridge": ridge,
            "label_mean": 0.98 - 0.01 * j,
            "macro_1": None if i == 1 else j / 20,
            "best_macro_1": None if i == 1 else 0.4,
        }
        for i in range(14)
        for j, ridge in enumerate(HALF_DECADES)
    ]
    ridges = {f"birthplace{i}->personality{i}": 100.0 for i in (2, 0, 1)}
    figure = ridge_path_figure(DataFrame(rows), ridges, LONG)
    assert_legible(figure)
    assert len([axes for axes in figure.axes if axes.get_lines()]) == 3
    assert "3 of 14 pairs" in " ".join(text.get_text() for text, _ in texts(figure))
    axes = figure.axes[0]
    assert axes.get_title("left").startswith("birthplace2")
    lines: dict[Any, Any] = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_allclose(lines["r"].get_xdata(), HALF_DECADES)
    heights = [0.98 - 0.01 * j for j in range(len(HALF_DECADES))]
    np.testing.assert_allclose(lines["r"].get_ydata(), heights)
    heights = [j / 20 for j in range(len(HALF_DECADES))]
    np.testing.assert_allclose(lines["right first"].get_ydata(), heights)
    assert set(lines["best baseline"].get_ydata()) == {0.4}
    assert lines["ridge of this run"].get_xdata()[0] == 100
    places = axes.transData.transform([(tick, 0) for tick in axes.get_xticks()])[:, 0]
    assert (np.diff(places) > 10).all(), "0 stands left of the smallest strength"


def scores(n: int) -> DataFrame:
    rows = [
        {
            "source": f"birthplace{i}",
            "target": f"personality{i}",
            "label_mean": math.cos(i),
            "permuted_label_mean": 0.01 * (i % 5 - 2),
            "control_label_mean": 0.3 * math.sin(i),
            "partial_label_mean": None,
            "random_label_mean": 0.9 * math.cos(i),
            "excess_over_random": 0.1 * math.cos(i),
            "excess_over_random_low": 0.1 * math.cos(i) - 0.02,
            "excess_over_random_high": 0.1 * math.cos(i) + 0.02,
            "q": 0.001 if math.cos(i) > 0.5 else 0.5,
        }
        for i in range(n)
    ]
    return DataFrame(rows)


@pytest.mark.parametrize("n", [1, 70])
def test_pairs_are_in_the_order_of_r_above_random_words(n: int) -> None:
    frame = scores(n)
    figure = random_words_figure(frame, LONG, ["pet"])
    assert_legible(figure)
    left, right = figure.axes
    best = frame.sort_values("excess_over_random", ascending=False)[:40]
    shown = [label.get_text() for label in left.get_yticklabels()]
    assert shown == legible(best["source"] + "→" + best["target"], 50)
    lines: dict[Any, Any] = {line.get_label(): line.get_xdata() for line in left.get_lines()}
    for name, key in (
        ("this pair", "label_mean"),
        ("unrelated prompt", "control_label_mean"),
        ("permuted targets", "permuted_label_mean"),
        ("as many random words", "random_label_mean"),
    ):
        np.testing.assert_array_equal(lines[name], best[key])
    assert "without pet" not in lines, "nothing was partialled out"
    filled, hollow = (line.get_xdata() for line in right.get_lines()[:2])
    assert list(filled) == best["excess_over_random"][best["q"] <= 0.01].tolist()
    assert list(hollow) == best["excess_over_random"][best["q"] > 0.01].tolist()
    note = " ".join(text.get_text() for text, _ in texts(figure))
    assert ("40 of 70 pairs" in note) == (n == 70)


def test_unknown_numbers_are_left_out() -> None:
    frame = scores(2).astype(object)
    frame.loc[0, ["permuted_label_mean", "control_label_mean"]] = None
    frame.loc[1, "label_mean"] = None
    figure = random_words_figure(frame, "an LM", [])
    assert len(figure.axes[0].get_yticklabels()) == 1
    to_png(random_words_figure(frame[1:], "one where nothing varies", []))
    unknown = ["excess_over_random", "excess_over_random_low", "excess_over_random_high", "q"]
    figure = random_words_figure(frame.assign(**dict.fromkeys(unknown, None)), "an LM", [])
    assert len(figure.axes[0].get_yticklabels()) == 1
