"""Figures as a reader meets them: nothing cut, nothing on top of another, the right colours."""

import io
import math
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from lincorr_lightning.probe.results import PairScore
from lincorr_lightning.probe.ridge_path import RidgePoint
from lincorr_lightning.results import style as canvas
from lincorr_lightning.results.heat_maps import (
    correlation_heatmap,
    interesting_part,
    nulls_figure,
    ridge_path_figure,
    short,
    weight_heatmap,
)
from lincorr_lightning.results.style import legible, to_picture

LONG = "/home/someone/checkpoints/a-very-long-name-of-a-language-model-7b-instruct-v3-final/step-9"


def texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """All texts that drawing the figure draws, with where."""
    drawn: list[Text] = []
    draw = Text.draw

    def record(self: Text, renderer: Any) -> None:
        drawn.append(self)
        draw(self, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.canvas.draw()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    return [(text, text.get_window_extent()) for text in shown]


def assert_legible(figure: Figure, smallest: float = 6.0) -> None:
    """Nothing leaves the picture, nothing is too small, no text touches another."""
    page = figure.bbox
    drawn = texts(figure)
    assert drawn
    for text, box in drawn:
        said = text.get_text()
        assert text.get_fontsize() >= smallest, said
        assert box.x0 >= -0.5 and box.y0 >= -0.5, f"{said!r} leaves the picture"
        assert box.x1 <= page.x1 + 0.5 and box.y1 <= page.y1 + 0.5, f"{said!r} leaves the picture"
    boxes = [(box.padded(-0.8), text.get_text()) for text, box in drawn]
    edges = np.array([[b.x0, b.y0, b.x1, b.y1] for b, _ in boxes])
    x0, y0, x1, y1 = edges.T
    meet = (x0[:, None] < x1) & (x0 < x1[:, None]) & (y0[:, None] < y1) & (y0 < y1[:, None])
    np.fill_diagonal(meet, False)
    assert not meet.any(), [(boxes[i][1], boxes[j][1]) for i, j in np.argwhere(meet)[:5]]


def pixels(figure: Figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(to_picture(figure).png)).convert("RGB")) / 255


def colour_at(figure: Figure, row: float, column: float) -> np.ndarray:
    """Colour of the picture where a heat map's cell is, off its value."""
    picture = pixels(figure)
    x, y = figure.axes[0].transData.transform((column, row))
    return picture[round(picture.shape[0] - y), round(x)]


def names(n: int) -> list[str]:
    return [f"{'knowledge' if i % 3 else 'city'}{i}_{['es', 'zh'][i % 2]}" for i in range(n)]


# -- heat map of r ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 8, 23, 110])
def test_heatmap_is_legible_at_every_size(n: int) -> None:
    matrix = np.random.default_rng(0).uniform(-1, 1, (n, n))
    figure = correlation_heatmap(
        matrix, names(n), names(n), f"Label-wise correlation in {LONG}", "5,000 held-out X’s"
    )
    assert_legible(figure)
    shown = [text.get_text() for text, _ in texts(figure)]
    for name in names(n):
        assert shown.count(name) == 2
    values = [text for text in figure.axes[0].texts if text.get_text()]
    assert len(values) == (n * n if n <= 23 else 0)


def test_values_stay_in_their_cells() -> None:
    matrix = np.full((23, 23), -1.0)
    figure = correlation_heatmap(matrix, names(23), names(23), "t")
    figure.draw_without_rendering()
    axes = figure.axes[0]
    cell = axes.get_window_extent().width / 23
    for value in axes.texts:
        assert value.get_window_extent().width < cell


@pytest.mark.parametrize("shape", [(2, 30), (30, 2)])
def test_heatmap_need_not_be_square(shape: tuple[int, int]) -> None:
    matrix = np.zeros(shape)
    rows, columns = names(shape[0]), [f"t{i}" for i in range(shape[1])]
    figure = correlation_heatmap(matrix, rows, columns, f"in {LONG}")
    assert_legible(figure)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert [label.get_text() for label in axes.get_xticklabels()] == columns
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("source", "target")


def test_colours_mean_the_same_in_every_figure() -> None:
    matrix = np.array([[0.2, -0.2, 0.0], [np.nan, 0.1, 0.2]])
    figure = correlation_heatmap(matrix, ["a", "b"], ["x", "y", "z"], "title")
    (image,) = figure.axes[0].get_images()
    assert image.get_clim() == (-1, 1)
    positive, negative, zero = (colour_at(figure, 0.35, i + 0.35) for i in range(3))
    assert positive[0] > positive[2] + 0.05, "positive r is red"
    assert negative[2] > negative[0] + 0.05, "negative r is blue"
    assert zero.min() > 0.93, "no r is white"
    bar = figure.axes[1]
    assert bar.get_ylabel() == "label-wise Pearson r"
    assert bar.get_ylim() == (-1, 1)


def test_missing_values_are_hatched_and_explained() -> None:
    matrix = np.array([[np.nan, 0.5], [0.5, np.nan]])
    figure = correlation_heatmap(matrix, ["a", "b"], ["a", "b"], "title", "subtitle")
    picture = pixels(figure)
    axes = figure.axes[0]
    (x0, y0), (x1, y1) = axes.transData.transform([(-0.4, -0.4), (0.4, 0.4)])
    height = picture.shape[0]
    cell = picture[int(height - y0) : int(height - y1), int(x0) : int(x1)]
    assert np.ptp(cell) > 0.1, "hatching has two shades"
    assert np.ptp(cell, axis=2).max() < 0.05, "and is grey"
    said = " ".join(text.get_text() for text, _ in texts(figure))
    assert "subtitle; hatched: no value" in said
    assert sum(text.get_text() == ".50" for text in axes.texts) == 2
    assert "hatched" not in " ".join(
        t.get_text() for t, _ in texts(correlation_heatmap(np.eye(2), ["a", "b"], ["a", "b"], "t"))
    )


def test_short_numbers() -> None:
    for value in np.linspace(-2, 2, 81):
        assert float(short(value).replace("−", "-")) == pytest.approx(value, abs=0.0051)
    assert short(-1.0) == "−1.00"
    assert short(10.5) == "10.50"


# -- heat map of W ---------------------------------------------------------------------------


def test_interesting_part_has_the_highest_weights() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(60, 80))
    targets, sources = interesting_part(weight, n=10)
    assert len(set(targets)) == len(set(sources)) == 10
    best = sorted(range(60), key=lambda i: -max(weight[i]))[:10]
    assert targets == best
    strongest = {int(np.argmax(weight[i])) for i in best}
    assert strongest <= set(sources)


def test_interesting_part_of_a_sharp_map_is_a_diagonal() -> None:
    weight = np.zeros((30, 40))
    where = np.random.default_rng(1).permutation(40)[:30]
    weight[np.arange(30), where] = np.linspace(0.5, 1.5, 30)
    part = interesting_part(weight, n=25)
    assert (np.diag(weight[np.ix_(*part)]) >= 0.5).all()


@pytest.mark.parametrize("shape", [(1, 1), (6, 25), (25, 6), (3, 2)])
def test_interesting_part_of_a_small_map_is_all_of_it(shape: tuple[int, int]) -> None:
    targets, sources = interesting_part(np.random.default_rng(0).normal(size=shape))
    assert sorted(targets) == list(range(shape[0]))
    assert sorted(sources) == list(range(shape[1]))


@pytest.mark.parametrize("shape", [(25, 25), (6, 25), (25, 3)])
def test_weights_are_legible_and_right_ones_framed(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=shape)
    right = rng.random(shape) < 0.1
    figure = weight_heatmap(
        weight, names(shape[1]), [f"label {i}" for i in range(shape[0])], f"W in {LONG}", "r", right
    )
    assert_legible(figure)
    axes = figure.axes[0]
    frames = {
        (round(p.get_y() + 0.5), round(p.get_x() + 0.5))
        for p in axes.patches
        if isinstance(p, Rectangle)
    }
    assert frames == set(map(tuple, np.argwhere(right).tolist()))
    assert "framed: right in the world" in " ".join(t.get_text() for t, _ in texts(figure))
    (image,) = axes.get_images()
    np.testing.assert_array_equal(np.asarray(image.get_array()), weight)
    assert image.get_clim() == (-np.abs(weight).max(), np.abs(weight).max())
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("target label", "source label")


def test_map_of_zeros_and_labels_of_all_kinds() -> None:
    labels = ["$\\frac{$", "a\nb\tc", "", "w" * 60, "_^{}\\"]
    figure = weight_heatmap(np.zeros((5, 5)), labels, labels, "100% of $W$ in a_b^c")
    assert_legible(figure)
    to_picture(figure)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:3] == ["$\\frac{$", "a b c", "␣"]
    assert shown[3].startswith("wwww") and shown[3].endswith("…")


@pytest.mark.filterwarnings("error:Glyph")
def test_signs_without_a_font_are_spelt_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "_installed", tuple)
    shown, note = legible(["Paris", "上海", "東"])
    assert shown == ["Paris", "U+4E0A U+6D77", "U+6771"]
    figure = weight_heatmap(np.eye(2), ["上海", "Paris"], ["a", "b"], "t")
    to_picture(figure)
    assert note in " ".join(text.get_text() for text, _ in texts(figure))
    assert legible(["Paris", "São Paulo", "Москва"]) == (["Paris", "São Paulo", "Москва"], "")


def test_other_fonts_are_asked_for_signs_that_the_first_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(canvas, "_installed", lambda: ("Some CJK", "Other"))
    monkeypatch.setattr(canvas, "_has", lambda f, sign: ord(sign) < 999 or f == "Some CJK")
    assert legible(["上海 x"]) == (["上海 x"], "")
    assert canvas._families("上海") == ["DejaVu Sans", "Some CJK"]


# -- ridge path ------------------------------------------------------------------------------


def path(grid: list[float], reference: bool = True) -> list[RidgePoint]:
    def rates(value: float) -> dict[str, float] | None:
        return {"1": value, "3": value, "5": 1.0, "n": 20} if reference else None

    return [
        RidgePoint(ridge, 0.98 - 0.01 * i, rates(i / len(grid)), rates(1 - i / len(grid)))
        for i, ridge in enumerate(grid)
    ]


GRID = [0.0, *(10 ** (e / 2) for e in range(-2, 13))]


@pytest.mark.parametrize("n", [1, 2, 5, 14])
def test_ridge_path_is_legible(n: int) -> None:
    paths = {f"birthplace{i}->personality{i}": path(GRID, i % 3 != 1) for i in range(n)}
    chosen = {pair: 0.0 if i % 2 else 100.0 for i, pair in enumerate(paths)}
    figure = ridge_path_figure(paths, chosen, f"Along the ridge in {LONG}")
    assert_legible(figure)
    panels = [axes for axes in figure.axes if axes.get_lines()]
    assert len(panels) == min(n, 12)
    said = " ".join(text.get_text() for text, _ in texts(figure))
    assert ("12 of 14 pairs" in said) == (n == 14)


def test_ridge_path_shows_its_numbers() -> None:
    figure = ridge_path_figure({"a->b": path(GRID)}, {"a->b": 100.0}, "title")
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.get_lines()}
    r = lines["label-wise r"]
    np.testing.assert_allclose(r.get_ydata(), [p.label_mean for p in path(GRID)])
    hits = lines["Hit@1 influenced target"].get_ydata()
    np.testing.assert_allclose(hits, [p.influenced["1"] for p in path(GRID)])  # type: ignore[index]
    at = np.asarray(r.get_xdata(), dtype=float)
    np.testing.assert_allclose(at[1:], np.log10(GRID[1:]))
    assert at[0] < at[1], "0 stands left of the smallest strength"
    assert axes.get_xticks()[0] == at[0]
    assert axes.get_xticklabels()[0].get_text() == "0"
    assert all(a < b for a, b in pairwise(axes.get_xticks()))
    assert lines["ridge of this run"].get_xdata()[0] == pytest.approx(2)  # type: ignore[index]
    assert lines["ridge 0: the paper’s map"].get_xdata()[0] == at[0]  # type: ignore[index]


def test_ridge_ticks_stand_at_their_numbers() -> None:
    figure = ridge_path_figure({"a->b": path(GRID)}, {}, "title")
    axes = figure.axes[0]
    superscripts = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
    for at, label in list(zip(axes.get_xticks(), axes.get_xticklabels(), strict=True))[1:]:
        said = label.get_text()
        plain = not (set(said) - set("0123456789."))
        value = float(said) if plain else 10.0 ** int(said[2:].translate(superscripts))
        assert math.log10(value) == pytest.approx(at)


@pytest.mark.parametrize("grid", [[0.0], [1.0], [0.0, 3.0], [1e-6, 1e6]])
def test_odd_grids(grid: list[float]) -> None:
    figure = ridge_path_figure({"a->b": path(grid)}, {"a->b": 50.0}, "title")
    assert_legible(figure)
    assert ("0" in [label.get_text() for label in figure.axes[0].get_xticklabels()]) == (0 in grid)


# -- nulls -----------------------------------------------------------------------------------


def score(i: int, **changes: Any) -> PairScore:
    values: dict[str, Any] = {
        "source": f"birthplace{i}", "target": f"personality{i}", "label_mean": math.cos(i),
        "label_std": 0.1, "instance_mean": 0.5, "n_labels": 3, "n_constant_labels": 0,
        "permuted_label_mean": 0.01 * (i % 5 - 2), "control_label_mean": 0.3 * math.sin(i),
        "ridge": 0.0, "label_r": np.zeros(3), "precision": None,
    }  # fmt: skip
    return PairScore(**values | changes)


@pytest.mark.parametrize("n", [1, 12, 40, 70])
def test_nulls_are_legible(n: int) -> None:
    scores = [score(i) for i in range(n)]
    figure = nulls_figure(scores, f"Correlation beside its nulls in {LONG}")
    assert_legible(figure)
    (axes,) = figure.axes
    shown = [label.get_text() for label in axes.get_yticklabels()]
    best = sorted(scores, key=lambda s: s.label_mean, reverse=True)[:40]
    assert shown == [f"{s.source}->{s.target}" for s in best]
    lines = {line.get_label(): line.get_xdata() for line in axes.get_lines()}
    np.testing.assert_array_equal(lines["this pair"], [s.label_mean for s in best])
    np.testing.assert_array_equal(
        lines["unrelated prompt as the source"], [s.control_label_mean for s in best]
    )
    np.testing.assert_array_equal(lines["targets permuted"], [s.permuted_label_mean for s in best])
    low, high = axes.get_xlim()
    assert low < min(min(map(float, x)) for x in lines.values() if len(x) == len(best))
    assert high > 1
    said = " ".join(text.get_text() for text, _ in texts(figure))
    assert ("40 of 70 pairs" in said) == (n == 70)


def test_nulls_that_are_not_known_are_left_out() -> None:
    scores = [
        score(0, permuted_label_mean=None, control_label_mean=None),
        score(1, label_mean=math.nan),
    ]
    figure = nulls_figure(scores, "title")
    assert_legible(figure)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [scores[0].name]
    to_picture(nulls_figure(scores[1:], "nothing varies"))


# -- the drawing program ---------------------------------------------------------------------


def test_picture_is_what_its_numbers_say() -> None:
    figure = nulls_figure([score(0)], "title")
    picture = to_picture(figure)
    image = Image.open(io.BytesIO(picture.png))
    assert image.size == (picture.width, picture.height)
    assert image.format == "PNG"
    corner = np.asarray(image.convert("RGB"))[0, 0] / 255
    assert corner.tolist() == list(to_rgb("white"))


def test_nothing_global_is_touched_and_nothing_is_imported_early() -> None:
    code = """
import sys
import lincorr_lightning.results
assert "matplotlib" not in sys.modules, "matplotlib is imported before anything is drawn"
import matplotlib
def settings():  # looking at the backend alone would choose one
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
before = settings()
import numpy as np
from lincorr_lightning.results import style as canvas, heat_maps as figures
canvas.to_picture(figures.correlation_heatmap(np.eye(2), ["a", "b"], ["a", "b"], "t"))
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_oracle_for_overlap_can_fail() -> None:
    figure = Figure(figsize=(2, 1))
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.text(0.1, 0.5, "one text")
    figure.text(0.15, 0.5, "another")
    with pytest.raises(AssertionError, match="one text"):
        assert_legible(figure)
