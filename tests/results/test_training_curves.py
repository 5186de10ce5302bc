"""Curves of a run, read off the figure's own lines."""

import io
import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lincorr_lightning.results.style import to_picture
from lincorr_lightning.results.training_curves import training_curves


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(loc="left"): axes for axes in figure.axes if axes.axison}


def named(axes: Axes) -> dict[str, np.ndarray]:
    return {
        str(line.get_label()): line.get_xydata()
        for line in axes.get_lines()
        if not str(line.get_label()).startswith("_")
    }


def key(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def history(n: int) -> dict[str, list[tuple[int, float]]]:
    rng = np.random.default_rng(0)
    tags = (
        "train_loss", "generalization/generalized", "generalization/hallucinated",
        "control_unchanged/color",
    )  # fmt: skip
    return {tag: [(10 * i, float(v)) for i, v in enumerate(rng.random(n))] for tag in tags}


@pytest.mark.parametrize("n", [1, 2, 30, 500])
def test_a_panel_a_group_with_its_curves_over_each_other(n: int) -> None:
    figure = training_curves(history(n), "title")
    shown = panels(figure)
    assert list(shown) == ["train_loss", "generalization", "control_unchanged/color"]
    assert key(shown["generalization"]) == ["generalized", "hallucinated"]
    assert key(shown["train_loss"]) == [], "the title names a curve that is alone"
    for axes in shown.values():
        left, right = axes.get_xlim()
        assert left <= 0 and right >= 10 * (n - 1), "no step is cut off"
        assert left < right
    image = Image.open(io.BytesIO(to_picture(figure).png)).convert("RGB")
    assert len(image.getcolors(1 << 24)) > 20


def test_few_points_are_shown_as_they_are() -> None:
    given = history(40)
    for title, axes in panels(training_curves(given, "title")).items():
        for name, points in named(axes).items():
            tag = next(tag for tag in given if tag in (title, f"{title}/{name}"))
            np.testing.assert_array_equal(points, given[tag])


def test_many_points_are_smoothed_as_tensorboard_does_and_still_there() -> None:
    given = {"loss": [(i, float(v)) for i, v in enumerate(np.random.default_rng(1).random(300))]}
    figure = training_curves(given, "title")
    (axes,) = panels(figure).values()
    raw, smooth = (np.asarray(line.get_ydata()) for line in axes.get_lines())
    values = [value for _, value in given["loss"]]
    np.testing.assert_array_equal(raw, values)
    for i in (0, 1, 7, 299):
        weights = [0.6 ** (i - j) for j in range(i + 1)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert smooth[i] == pytest.approx(mean)
    assert any("smoothed" in text.get_text() for text in figure.texts)


def test_what_is_not_a_number_is_left_out_and_steps_are_put_in_order() -> None:
    given = {
        "r": [(3, 0.3), (1, 0.1), (2, math.nan), (4, math.inf)],
        "nothing/but": [(1, math.nan)],
    }
    shown = panels(training_curves(given, "title"))
    assert list(shown) == ["r"]
    (line,) = shown["r"].get_lines()
    assert line.get_xydata().tolist() == [[1, 0.1], [3, 0.3]]


def test_an_outcome_has_its_colour_in_every_panel() -> None:
    given = {
        "generalization/unchanged": [(1, 0.5)], "generalization/generalized": [(1, 0.2)],
        "edit_step/generalized": [(1, 0.1)], "edit_step/unchanged": [(1, 0.9)],
        "edit_step/other": [(1, 0.3)],
    }  # fmt: skip
    found: dict[str, set[object]] = {}
    for axes in panels(training_curves(given, "title")).values():
        for line in axes.get_lines():
            found.setdefault(str(line.get_label()), set()).add(line.get_color())
    assert all(len(colours) == 1 for colours in found.values())
    assert len(set.union(*found.values())) == 3


def test_the_number_of_groups_left_out_is_shown() -> None:
    figure = training_curves({f"group{i}/a": [(1, 1.0), (2, 2.0)] for i in range(9)}, "title")
    assert len(panels(figure)) == 6
    assert "6 of 9 groups" in " ".join(text.get_text() for text in figure.texts)
    crowd = training_curves({f"g/curve{i}": [(1, 1.0 * i)] for i in range(40)}, "title")
    assert list(panels(crowd)) == ["g (12 of 40)"]


def test_any_name_can_be_shown() -> None:
    given = {
        "gradient_correlation/$x_1$": [(1, 0.1)], "gradient_correlation/城市->国家": [(1, 0.2)],
        "a" * 90: [(1, 0.1)],
    }  # fmt: skip
    figure = training_curves(given, "$title$", "$sub$")
    assert to_picture(figure).png
    names = [name for axes in panels(figure).values() for name in key(axes)]
    assert names[0] == "$x_1$"
    page = figure.bbox
    for axes in figure.axes:
        for text in (axes.title, axes._left_title):
            box = text.get_window_extent()
            assert box.x1 <= page.x1 + 0.5


def test_nothing_logged() -> None:
    figure = training_curves({}, "title")
    assert "nothing was logged" in " ".join(text.get_text() for text in figure.texts)
    assert to_picture(figure).png
