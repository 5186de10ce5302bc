"""Figures: all SAEs' curves, or some spread over the layers; scores by layer; densities."""

from itertools import pairwise

import pytest

from lincorr_lightning.sae.figures import training_figure
from lincorr_lightning.sae.hook_points import KINDS


def _history(n_layers: int, kinds=KINDS) -> dict[str, list[tuple[int, float]]]:
    return {
        f"{what}/{kind}.{layer}": [(0, 0.1), (10, 0.01 * layer), (20, 0.5)]
        for what in ("explained_variance", "dead", "threshold")
        for layer in range(n_layers)
        for kind in sorted(kinds)
    } | {"loss": [(0, 2.0), (10, 1.0)]}


def _curves(figure) -> dict[str, list[str]]:
    return {
        axes.get_title(loc="left"): [str(line.get_label()) for line in axes.get_lines()]
        for axes in figure.axes
        if axes.axison
    }


def test_few_stand_in_one_panel() -> None:
    curves = _curves(training_figure(_history(4), "my-lm"))
    assert set(curves) == {"explained_variance", "dead", "threshold", "loss"}
    assert len(curves["dead"]) == 12


@pytest.mark.parametrize("n_layers", [5, 12])
def test_more_have_a_panel_for_each_kind_and_none_is_left_out(n_layers: int) -> None:
    figure = training_figure(_history(n_layers), "my-lm")
    curves = _curves(figure)
    for what in ("explained_variance", "dead", "threshold"):
        for kind in KINDS:
            assert curves.pop(f"{what}, {kind}") == [f"layer {i}" for i in range(n_layers)]
    assert list(curves) == ["loss"]
    told = " ".join(text.get_text() for text in figure.texts)
    assert "Training of my-lm's SAEs" in told and "groups" not in told


def test_of_very_many_those_shown_are_spread_over_the_layers() -> None:
    curves = _curves(training_figure(_history(26, ("residual",)), "lm"))
    shown = [int(name.removeprefix("layer ")) for name in curves["dead, residual (12 of 26)"]]
    assert (shown[0], shown[-1], len(shown)) == (0, 25, 12)
    steps = {b - a for a, b in pairwise(shown)}
    assert steps <= {2, 3}
