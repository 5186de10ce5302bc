"""The figure of scores by layer."""

from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.results import SAEScore, quality_figure


def _score(kind: str, layer: int, explained: float, recovered: float | None) -> SAEScore:
    name = f"{kind}.{layer}"
    return SAEScore(name, kind, layer, 48, explained, 10.0, 0.1, recovered, 2.0, 3.0)  # type: ignore[arg-type]


def test_scores_stand_at_their_layers_and_unknown_ones_are_left_out() -> None:
    scores = [_score("residual", layer, 0.1 * layer, 0.8) for layer in range(3)]
    scores += [_score("mlp_out", layer, 0.9, None) for layer in range(3)]
    figure = quality_figure(Table.of("scores", scores), "lm")
    panels = {axes.get_ylabel(): axes for axes in figure.axes}
    stream, mlp = panels["explained variance"].get_lines()
    assert stream.get_xydata().tolist() == [[0.0, 0.0], [1.0, 0.1], [2.0, 0.2]]
    assert mlp.get_ydata().tolist() == [0.9] * 3
    (recovered,) = panels["loss recovered"].get_lines()
    assert recovered.get_ydata().tolist() == [0.8] * 3
