"""Training curves: every point is drawn, smoothed as TensorBoard does where there are many."""

import math

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lincorr_lightning.results.plots import training_curves
from lincorr_lightning.results.style import to_png


def panels(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title("left"): axes for axes in figure.axes if axes.get_lines()}


def note(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.texts)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for one in figure.legends for text in one.get_texts()]


@pytest.mark.parametrize("n", [1, 2, 40])
def test_a_panel_a_group_with_its_points_as_they_are(n: int) -> None:
    rng = np.random.default_rng(0)
    tags = ["train_loss", "generalization/generalized", "generalization/hallucinated", "control/a"]
    given = {tag: [(10 * i, float(v)) for i, v in enumerate(rng.random(n))] for tag in tags}
    figure = training_curves(given, "title")
    shown = panels(figure)
    assert list(shown) == ["train_loss", "generalization", "control/a"]
    assert legend(figure) == ["train_loss", "generalized", "hallucinated", "a"]
    drawn = [line.get_xydata() for axes in shown.values() for line in axes.get_lines()]
    for points, expected in zip(drawn, given.values(), strict=True):
        np.testing.assert_array_equal(points, expected)
    assert to_png(figure)


def test_many_points_are_smoothed_as_tensorboard_does() -> None:
    values = [float(v) for v in np.random.default_rng(1).random(300)]
    figure = training_curves({"loss": list(enumerate(values))}, "title")
    (axes,) = panels(figure).values()
    (line,) = axes.get_lines()
    smooth = np.asarray(line.get_ydata())
    for i in (0, 1, 7, 299):
        weights = [0.6 ** (i - j) for j in range(i + 1)]
        mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
        assert smooth[i] == pytest.approx(mean)
    assert "smoothed" in note(figure)


def test_what_is_not_a_number_is_left_out_and_steps_are_put_in_order() -> None:
    given = {
        "r": [(3, 0.3), (1, 0.1), (2, math.nan), (4, math.inf)],
        "nothing/but": [(1, math.nan)],
    }
    shown = panels(training_curves(given, "title"))
    assert list(shown) == ["r"]
    (line,) = shown["r"].get_lines()
    assert line.get_xydata().tolist() == [[1, 0.1], [3, 0.3]]


def test_a_name_has_its_colour_in_every_panel() -> None:
    given = {
        "generalization/unchanged": [(1, 0.5)], "generalization/generalized": [(1, 0.2)],
        "edit_step/generalized": [(1, 0.1)], "edit_step/unchanged": [(1, 0.9)],
        "edit_step/other": [(1, 0.3)],
    }  # fmt: skip
    colours: dict[str, set[object]] = {}
    shown = panels(training_curves(given, "title", colours={"unchanged": "#767676"}))
    for axes in shown.values():
        for line in axes.get_lines():
            colours.setdefault(str(line.get_label()), set()).add(line.get_color())
    assert all(len(one) == 1 for one in colours.values()) and len(set.union(*colours.values())) == 3
    assert colours["unchanged"] == {"#767676"}


def test_what_is_left_out_is_shown() -> None:
    figure = training_curves({f"group{i}/a": [(1, 1.0), (2, 2.0)] for i in range(9)}, "title")
    assert len(panels(figure)) == 6 and "6 of 9 groups" in note(figure)
    crowd = training_curves({f"g/curve{i}": [(1, 1.0 * i)] for i in range(40)}, "title")
    assert list(panels(crowd)) == ["g (12 of 40)"]
    assert "nothing was logged" in note(training_curves({}, "title"))
