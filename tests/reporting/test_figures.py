"""Figures as a reader meets them: nothing cut, nothing on top of another, the right colours."""

import io
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from lincorr_lightning.results import style as canvas
from lincorr_lightning.results.heat_maps import correlation_heatmap, short
from lincorr_lightning.results.style import legible, to_picture
from tests.figure_checks import LONG, assert_legible, pixels, texts


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


@pytest.mark.filterwarnings("error:Glyph")
def test_signs_without_a_font_are_spelt_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "_installed", tuple)
    shown, note = legible(["Paris", "上海", "東"])
    assert shown == ["Paris", "U+4E0A U+6D77", "U+6771"]
    figure = correlation_heatmap(np.eye(2), ["上海", "Paris"], ["a", "b"], "t")
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


# -- the drawing program ---------------------------------------------------------------------


def test_picture_is_what_its_numbers_say() -> None:
    figure = correlation_heatmap(np.eye(2), ["a", "b"], ["a", "b"], "title")
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
