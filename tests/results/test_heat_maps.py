"""Heat maps as a reader meets them: nothing cut, nothing on top of another, the right colours."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.results.heat_maps import correlation_heatmap
from tests.figure_checks import LONG, assert_legible, pixels, texts


def colour_at(figure: Figure, row: float, column: float) -> np.ndarray:
    """Colour of the picture where a heat map's cell is, off its value."""
    picture = pixels(figure)
    x, y = figure.axes[0].transData.transform((column, row))
    return picture[round(picture.shape[0] - y), round(x)]


def names(n: int) -> list[str]:
    return [f"{'knowledge' if i % 3 else 'city'}{i}_{['es', 'zh'][i % 2]}" for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 8, 23, 110])
def test_heatmap_is_legible_at_every_size(n: int) -> None:
    matrix = np.random.default_rng(0).uniform(-1, 1, (n, n))
    frame = DataFrame(matrix, names(n), names(n))
    figure = correlation_heatmap(frame, f"Label-wise correlation in {LONG}", "5,000 subjects")
    assert_legible(figure)
    shown = [text.get_text() for text, _ in texts(figure)]
    for name in names(n):
        assert shown.count(name) == 2
    values = [text for text in figure.axes[0].texts if text.get_text()]
    assert len(values) == (n * n if n <= 23 else 0)


@pytest.mark.parametrize("shape", [(2, 30), (30, 2)])
def test_heatmap_need_not_be_square(shape: tuple[int, int]) -> None:
    matrix = np.zeros(shape)
    rows, columns = names(shape[0]), [f"t{i}" for i in range(shape[1])]
    figure = correlation_heatmap(DataFrame(matrix, rows, columns), f"in {LONG}")
    assert_legible(figure)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert [label.get_text() for label in axes.get_xticklabels()] == columns
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("source", "target")


def test_colours_mean_the_same_in_every_figure() -> None:
    matrix = np.array([[0.2, -0.2, 0.0], [np.nan, 0.1, 0.2]])
    figure = correlation_heatmap(DataFrame(matrix, list("ab"), list("xyz")), "title")
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
    figure = correlation_heatmap(DataFrame(matrix, list("ab"), list("ab")), "title", "subtitle")
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
    whole = correlation_heatmap(DataFrame(np.eye(2), list("ab"), list("ab")), "t")
    assert "hatched" not in " ".join(text.get_text() for text, _ in texts(whole))
