"""What the figures draw, against the tables they are drawn from."""

from pandas import DataFrame

from lincorr_lightning.geometry import figures


def test_history_is_a_heat_map_per_observable() -> None:
    rows = [(name, layer, step, 10 * layer + step) for name in ("overlap_k=2", "angle")
            for layer in (1, 10, 2) for step in (0, 5)]  # fmt: skip
    frame = DataFrame(
        [*rows, ("loss", None, 0, 1.0)], columns=["observable", "layer", "step", "mean"]
    )
    figure = figures.history_figure(frame, "means")
    first = figure.axes[0]
    assert first.get_title(loc="left") == "overlap with the next layer, k = 2"
    assert first.get_images()[0].get_array().tolist() == [[10, 15], [20, 25], [100, 105]]
