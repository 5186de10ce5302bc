"""A probe's figures: every number where it is drawn."""

import math
from typing import Any

import numpy as np
import pytest
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.functional import HALF_DECADES
from lincorr_lightning.knowledge import Answer, Completeness, Domain, Label
from lincorr_lightning.probe.figures import (
    interesting_part,
    label_names,
    nulls_figure,
    ranking_figure,
    ridge_path_figure,
    top_weights_figure,
)
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import legible, to_png
from tests.figure_checks import LONG, assert_legible, texts


def make_domain(*answers: tuple[str, str, str]) -> Domain:
    """A domain of labels, each with its text, its answer's English name, and its answer."""
    labels = [
        Label(i, text, (Answer(*answer),), Completeness.WHOLE)
        for i, (text, *answer) in enumerate(answers)
    ]
    return Domain(None, tuple(labels), ())  # type: ignore[arg-type]


def test_interesting_part_has_the_highest_weights() -> None:
    weight = np.random.default_rng(0).normal(size=(60, 80))
    targets, sources = interesting_part(weight, n=10)
    assert targets == sorted(range(60), key=lambda i: -max(weight[i]))[:10]
    assert len(set(sources)) == 10 and {int(np.argmax(weight[i])) for i in targets} <= set(sources)
    sharp = np.zeros((30, 40))
    where = np.random.default_rng(1).permutation(40)[:30]
    sharp[np.arange(30), where] = np.linspace(0.5, 1.5, 30)
    assert (np.diag(sharp[np.ix_(*interesting_part(sharp))]) >= 0.5).all()


def test_labels_are_shown_so_that_all_can_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = make_domain(("巴黎", "Paris", "巴黎"), ("South", "South Korea", "South Korea"))
    monkeypatch.setattr(plots, "has_glyphs", lambda text: "巴" not in text)
    assert label_names(domain) == ["Paris", "South…"]
    monkeypatch.setattr(plots, "has_glyphs", lambda text: True)
    assert label_names(domain) == ["巴黎", "South…"]


@pytest.mark.parametrize("shape", [(25, 3), (40, 60)])
def test_the_highest_weights_are_legible_and_those_of_the_reference_framed(
    shape: tuple[int, int],
) -> None:
    rng = np.random.default_rng(0)
    weight, reference = rng.normal(size=shape), rng.random(shape) < 0.1
    names = [[f"label {side}{i}" for i in range(n)] for side, n in zip("ts", shape, strict=True)]
    target, source = (make_domain(*zip(each, each, each, strict=True)) for each in names)
    figure = top_weights_figure(weight, source, target, f"W in {LONG}", "ridge 1", reference)
    assert_legible(figure)
    axes = figure.axes[0]
    rows = [names[0].index(label.get_text()) for label in axes.get_yticklabels()]
    shown = legible(names[1])
    columns = [shown.index(label.get_text()) for label in axes.get_xticklabels()]
    cut = np.ix_(rows, columns)
    (image,) = axes.collections
    np.testing.assert_array_equal(np.asarray(image.get_array()), weight[cut])
    assert np.abs(weight[cut]).max() == image.get_clim()[1] == -image.get_clim()[0]
    assert weight.max() in weight[cut]
    frames = {
        (round(p.get_y() + 0.5), round(p.get_x() + 0.5))
        for p in axes.patches
        if isinstance(p, Rectangle)
    }
    assert frames == set(map(tuple, np.argwhere(reference[cut]).tolist()))
    assert "framed: in the reference" in " ".join(t.get_text() for t, _ in texts(figure))


def test_ridge_path_shows_its_numbers() -> None:
    rows = [
        {
            "pair": f"birthplace{i}->personality{i}",
            "ridge": ridge,
            "label_mean": 0.98 - 0.01 * j,
            "influenced_1": None if i == 1 else j / 20,
            "influencing_1": None if i == 1 else 1 - j / 20,
            "best_baseline_1": None if i == 1 else 0.4,
            "chance_influenced_1": None if i == 1 else 0.04,
            "chance_influencing_1": None if i == 1 else 0.02,
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
    r, hits = lines["label-wise r"], lines["top-1 target of a source"]
    np.testing.assert_allclose(r.get_xdata(), HALF_DECADES)
    np.testing.assert_allclose(r.get_ydata(), [0.98 - 0.01 * j for j in range(len(HALF_DECADES))])
    np.testing.assert_allclose(hits.get_ydata(), [j / 20 for j in range(len(HALF_DECADES))])
    levels = {"strongest baseline of the top-1 target": 0.4, "top-1 target by chance": 0.04}
    for name, level in (levels | {"top-1 source by chance": 0.02}).items():
        assert set(lines[name].get_ydata()) == {level}
    assert lines["ridge of this run"].get_xdata()[0] == 100
    assert lines["ridge 0: the paper’s map"].get_xdata()[0] == 0
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
            "random_label_mean": 0.9 * math.cos(i),
        }
        for i in range(n)
    ]
    return DataFrame(rows)


@pytest.mark.parametrize("n", [1, 70])
def test_nulls_are_legible(n: int) -> None:
    frame = scores(n)
    figure = nulls_figure(frame, LONG)
    assert_legible(figure)
    (axes,) = figure.axes
    best = frame.sort_values("label_mean", ascending=False)[:40]
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert shown == (best["source"] + "->" + best["target"]).tolist()
    lines: dict[Any, Any] = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    for name, key in (
        ("this pair", "label_mean"),
        ("control prompt as the source", "control_label_mean"),
        ("permuted baseline", "permuted_label_mean"),
        ("random words as source labels", "random_label_mean"),
    ):
        np.testing.assert_array_equal(lines[name], best[key])
    note = " ".join(text.get_text() for text, _ in texts(figure))
    assert ("40 of 70 pairs" in note) == (n == 70)


def test_unknown_nulls_are_left_out() -> None:
    frame = scores(2).astype(object)
    frame.loc[0, ["permuted_label_mean", "control_label_mean"]] = None
    frame.loc[1, "label_mean"] = None
    figure = nulls_figure(frame, "an LM")
    assert len(figure.axes[0].get_yticklabels()) == 1
    to_png(nulls_figure(frame[1:], "one where nothing varies"))


def test_the_ranking_says_that_it_is_a_difference() -> None:
    frame = scores(3).assign(
        excess=[0.5, 0.2, -0.1], excess_error=0.1, q=[0.001, 0.5, 1.0], partial_label_mean=None
    )
    (axes,) = ranking_figure(frame, [], "an LM").axes
    assert axes.get_xlabel() == "r minus r of the control prompt"
    (axes,) = ranking_figure(frame.assign(excess=None), [], "an LM").axes
    assert axes.get_xlabel() == "r"
