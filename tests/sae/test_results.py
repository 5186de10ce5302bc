"""Figures and tables: a line for every SAE; scores by layer; densities."""

from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.hook_points import KINDS
from lincorr_lightning.sae.results import SAEScore, quality_figure, training_figure


def test_training_curves_have_a_panel_for_each_kind_and_none_is_left_out() -> None:
    points = [(0, 0.1), (10, 0.2), (20, 0.5)]
    history = {
        f"{what}/{kind}.{layer}": points
        for what in ("explained_variance", "dead")
        for layer in range(26)
        for kind in KINDS
    }
    figure = training_figure(history, "my-lm")
    panels = {axes.get_ylabel().replace("\n", " "): axes.get_lines() for axes in figure.axes}
    for what in ("explained variance", "dead"):
        for kind in ("residual stream", "MLP", "attention"):
            lines = panels.pop(f"{what}, {kind}")
            assert [line.get_label() for line in lines] == [f"layer {i}" for i in range(26)]
            assert all(line.get_xydata().tolist() == [list(p) for p in points] for line in lines)
    assert not panels
    assert "Training of my-lm's SAEs" in figure.texts[0].get_text()


def _score(kind: str, layer: int, **changes: float | None) -> SAEScore:
    values = {
        "explained_variance": 0.9,
        "l0": 10.0,
        "dead": 0.1,
        "loss_recovered": 0.8,
        "loss_spliced": 2.0,
        "loss_ablated": 3.0,
    }
    return SAEScore(f"{kind}.{layer}", kind, layer, 48, **values | changes)  # type: ignore[arg-type]


def test_scores_stand_at_their_layers_and_unknown_ones_are_left_out() -> None:
    scores = [_score("residual", layer, explained_variance=0.1 * layer) for layer in range(3)]
    scores += [_score("mlp_out", layer, loss_recovered=None) for layer in range(3)]
    figure = quality_figure(Table.of("scores", scores).frame, "lm")
    panels = {axes.get_ylabel().replace("\n", " "): axes for axes in figure.axes}
    stream, mlp = panels["explained variance"].get_lines()
    assert stream.get_xydata().tolist() == [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]
    assert mlp.get_ydata().tolist() == [0.9] * 3
    (recovered,) = panels["loss recovered (0: zeros, 1: unchanged)"].get_lines()
    assert recovered.get_ydata().tolist() == [0.8] * 3
