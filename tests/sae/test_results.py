"""Figures and tables: a line for every SAE; scores by layer; densities."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.hook_points import KINDS
from lincorr_lightning.sae.results import SAEScore, density_table, quality_figure, training_figure


def test_training_curves_have_a_panel_for_each_kind_and_none_is_left_out() -> None:
    points = [(0, 0.1), (10, 0.2), (20, 0.5)]
    history = {
        f"{what}/{kind}.{layer}": points
        for what in ("explained_variance", "dead") for layer in range(26) for kind in KINDS
    }  # fmt: skip
    figure = training_figure(history, "my-lm")
    panels = {axes.get_title(loc="left"): axes.get_lines() for axes in figure.axes}
    for what in ("explained variance", "dead"):
        for kind in ("residual stream", "MLP", "attention"):
            lines = panels.pop(f"{what}, {kind}")
            assert [line.get_label() for line in lines] == [f"layer {i}" for i in range(26)]
            assert all(line.get_xydata().tolist() == [list(p) for p in points] for line in lines)
    assert not panels
    assert "Training of my-lm's SAEs" in figure.texts[0].get_text()


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
    frequency = torch.tensor([[0.0, 0.5, 1.0, 0.0002], [0.3, 0.3, 0.9, 0.9]]).double()
    scores = [replace(_score("residual", layer), n_features=4 - 2 * layer) for layer in range(2)]
    table = density_table(scores, SimpleNamespace(frequency=frequency))  # type: ignore[arg-type]
    first, second = table.frame.iloc[:, 1:].to_numpy().tolist()
    assert first == [0.25, 0, 0, 0.25, 0, 0, 0, 0, 0, 0, 0.5]
    # The columns beyond two features are ignored; 0.3 lies between 10^-1 and 10^-0.5.
    assert second == [0.0] * 9 + [1.0, 0.0]
