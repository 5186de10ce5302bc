"""Figures: all SAEs' curves, or some spread over the layers; scores by layer."""

from itertools import pairwise

import numpy as np
import pytest

from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.figures import quality_figure, training_figure
from lincorr_lightning.sae.hook_points import KINDS
from lincorr_lightning.sae.scoring import SAEScore, feature_densities


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


def test_few_curves_share_a_panel() -> None:
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
    shown = " ".join(text.get_text() for text in figure.texts)
    assert "Training of my-lm's SAEs" in shown and "groups" not in shown


def test_of_many_layers_evenly_spaced_ones_are_shown() -> None:
    curves = _curves(training_figure(_history(26, ("residual",)), "lm"))
    shown = [int(name.removeprefix("layer ")) for name in curves["dead, residual (12 of 26)"]]
    assert (shown[0], shown[-1], len(shown)) == (0, 25, 12)
    steps = {b - a for a, b in pairwise(shown)}
    assert steps <= {2, 3}


def _score(kind: str, layer: int, **changes: float | None) -> SAEScore:
    values = {
        "explained_variance": 0.9, "l0": 10.0, "dead": 0.1, "loss_recovered": 0.8,
        "loss_spliced": 2.0, "loss_ablated": 3.0,
    }  # fmt: skip
    return SAEScore(f"{kind}.{layer}", kind, layer, 48, **values | changes)  # type: ignore[arg-type]


def test_scores_stand_at_their_layers_and_unknown_ones_are_left_out() -> None:
    scores = [_score("residual", layer, explained_variance=0.1 * layer) for layer in range(3)]
    scores += [_score("mlp_out", layer, loss_recovered=None) for layer in range(3)]
    figure = quality_figure(Table.of("scores", scores).frame, "lm")
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    stream, mlp = panels["explained variance"].get_lines()
    assert stream.get_xydata().tolist() == [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]
    assert mlp.get_ydata().tolist() == [0.9] * 3
    (recovered,) = panels["loss recovered (0: zeros, 1: unchanged)"].get_lines()
    assert recovered.get_ydata().tolist() == [0.8] * 3


def test_densities_are_histograms_of_each_hook_point() -> None:
    density = feature_densities(np.array([[0.0, 0.5, 1.0, 0.0002], [0.3, 0.3, 0.9, 0.9]]), [4, 2])
    np.testing.assert_allclose(density.sum(1), 1.0)
    # The columns beyond two features are ignored; 0.3 lies between 10^-1 and 10^-0.5.
    assert density[1].tolist() == [0.0] * 9 + [1.0, 0.0]
