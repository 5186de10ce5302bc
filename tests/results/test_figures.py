"""Figures as a reader meets them: nothing cut, the right colours and fonts, every point drawn."""

import math
import subprocess
import sys
import warnings
from typing import Any

import matplotlib.style
import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.results import plots, results
from lincorr_lightning.results.plots import pairs_heatmap, to_png, training_curves
from lincorr_lightning.results.table import history_table
from tests.figure_checks import LONG, assert_legible, pixels
from tests.toys import drawn_figures


def heatmap(matrix: DataFrame, *titles: str, **options: Any) -> Figure:
    """The heat map of sources in the index."""
    return pairs_heatmap(matrix.rename_axis("source").reset_index(), *titles, **options)


def colour_at(figure: Figure, row: float, column: float) -> np.ndarray:
    """Colour of the picture where a heat map's cell is, off its value."""
    picture = pixels(figure)
    x, y = figure.axes[0].transData.transform((column, row))
    return picture[round(picture.shape[0] - y), round(x)]


def names(n: int) -> list[str]:
    return [f"{'knowledge' if i % 3 else 'city'}{i}_{['es', 'zh'][i % 2]}" for i in range(n)]


@pytest.mark.parametrize("shape", [(1, 1), (23, 23), (110, 110), (2, 30)])
def test_heatmap_is_legible_at_every_size(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).uniform(-1, 1, shape)
    rows, columns = names(shape[0]), [f"t{i}" for i in range(shape[1])]
    figure = heatmap(DataFrame(matrix, rows, columns), f"r in {LONG}", "5,000 subjects")
    assert_legible(figure)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == rows
    assert [label.get_text() for label in axes.get_xticklabels()] == columns
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("source", "target")
    values = [text for text in axes.texts if text.get_text()]
    assert len(values) == (matrix.size if max(shape) <= 30 else 0)


def test_colours_mean_the_same_in_every_figure() -> None:
    matrix = np.array([[0.2, -0.2, 0.0], [np.nan, 0.1, 0.2]])
    figure = heatmap(DataFrame(matrix, list("ab"), list("xyz")), "title")
    (image,) = figure.axes[0].collections
    assert image.get_clim() == (-1, 1)
    positive, negative, zero = (colour_at(figure, 0.35, i + 0.35) for i in range(3))
    assert positive[0] > positive[2] + 0.05, "positive r is red"
    assert negative[2] > negative[0] + 0.05, "negative r is blue"
    assert zero.min() > 0.93, "no r is white"
    bar = figure.axes[1]
    assert bar.get_ylabel() == "r per answer"
    assert bar.get_ylim() == (-1, 1)


@pytest.mark.parametrize(
    "style",
    [{"text.usetex": True}, matplotlib.style.library["dark_background"]],
    ids=lambda style: min(style),
)
def test_figures_are_not_in_the_user_s_style(style: dict[str, Any]) -> None:
    def draw() -> Figure:
        matrix = DataFrame([[0.5, math.nan]], ["a"], ["b", "c"])
        return heatmap(matrix, "a title", limits=(0, 0.001))

    with drawn_figures(), matplotlib.rc_context():
        matplotlib.rcdefaults()
        expected = results.Figure("name", "caption", draw).png
        matplotlib.rcParams.update(style)
        before = dict(matplotlib.rcParams)
        assert results.Figure("name", "caption", draw).png == expected
        assert dict(matplotlib.rcParams) == before


def test_a_figure_is_shown_in_a_notebook_as_it_was_changed() -> None:
    matrix = DataFrame([[0.5]], ["a"], ["b"])
    with drawn_figures():
        # As a formula, the title could not be drawn.
        drawn = results.Figure("name", "caption", lambda: heatmap(matrix, "$\\frac{$ of $W$"))
        figure: Any = drawn.matplotlib()
        assert figure._repr_png_() == drawn.png
        figure.texts[0].set_fontfamily("serif")
        assert figure._repr_png_() != drawn.png


# -- fonts and files ---------------------------------------------------------------------------


def test_fonts_follow_one_another_character_by_character(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character that the first font lacks is drawn in a later one, or escaped."""
    plots._glyphs.cache_clear()
    monkeypatch.setattr(plots, "_installed_fonts", lambda: ["STIXSizeOneSym", "DejaVu Sans"])
    first = font_manager.get_font(font_manager.findfont("STIXSizeOneSym")).get_charmap()
    assert ord("a") not in first
    figure = heatmap(DataFrame(np.eye(2), ["Москва", "上海"], ["a", "b"]), "东京 t")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's of a missing glyph
        plots.use_installed_fonts(figure)
        to_png(figure)
    shown = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shown == ["Москва", "\\u4e0a\\u6d77"]
    assert figure.texts[0].get_text() == "\\u4e1c\\u4eac t"
    plots._glyphs.cache_clear()


def test_labels_of_all_kinds() -> None:
    labels = ["$\\frac{$", "a\nb\tc", "", "w" * 60, "_^{}\\"]
    figure = heatmap(DataFrame(np.zeros((5, 5)), labels, labels), "100% of $W$ in a_b^c")
    assert_legible(figure)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:3] == ["$\\frac{$", "a b c", "␣"]
    assert shown[3].startswith("wwww") and shown[3].endswith("…")


def test_nothing_global_is_touched_and_nothing_is_imported_early() -> None:
    code = """
import sys
import lincorr_lightning.results
assert "matplotlib" not in sys.modules, "matplotlib is imported before anything is drawn"
import matplotlib
def settings():  # looking at the backend alone would choose one
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
before = settings()
from pandas import DataFrame
from lincorr_lightning.results import plots
plots.to_png(plots.pairs_heatmap(DataFrame({"source": list("ab"), "a": 0.1, "b": 0.2}), "t"))
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# -- training curves ---------------------------------------------------------------------------


def test_training_curves_have_a_panel_a_group_and_a_colour_a_name() -> None:
    """Points are as they are, in the order of the steps, without what is not a number."""
    given = {
        "train_loss": [(3, 0.3), (1, 0.1), (2, math.nan), (4, math.inf)],
        "generalization/unchanged": [(1, 0.5), (2, 0.4)],
        "generalization/generalized": [(1, 0.2)],
        "edit_step/generalized": [(1, 0.1)],
        "nothing/but": [(1, math.nan)],
    }
    figure = training_curves(history_table(given).frame, "title")
    panels = {axes.get_ylabel(): axes for axes in figure.axes if axes.get_lines()}
    assert list(panels) == ["train_loss", "generalization", "edit_step"]
    lines = [line for axes in panels.values() for line in axes.get_lines()]
    assert lines[0].get_xydata().tolist() == [[1, 0.1], [3, 0.3]]
    assert [line.get_label() for line in lines[1:]] == ["unchanged", "generalized", "generalized"]
    assert lines[2].get_color() == lines[3].get_color() != lines[1].get_color()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "train_loss",
        "unchanged",
        "generalized",
    ]
    empty = training_curves(history_table({}).frame, "title")
    assert "nothing was logged" in " ".join(text.get_text() for text in empty.texts)
