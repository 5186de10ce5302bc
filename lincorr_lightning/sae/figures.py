"""Figures of `SparseAutoencoders`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lincorr_lightning.results.plots import History, curves
from lincorr_lightning.results.style import BLUE, GREEN, ORANGE

if TYPE_CHECKING:
    from pandas import DataFrame

_KINDS = {"residual": "residual stream", "mlp_out": "MLP", "attention_out": "attention"}
_COLOURS = dict(zip(_KINDS.values(), (BLUE, ORANGE, GREEN), strict=True))
_SCORES = {
    "explained_variance": "explained variance",
    "loss_recovered": "loss recovered (0: zeros, 1: unchanged)",
    "l0": "active features per token",
    "dead": "dead features (active at no token)",
}


def quality_figure(scores: DataFrame, subtitle: str) -> Figure:
    """Draw the scores of SAEs by layer, a panel per score; the rows are `SAEScore`."""
    points = scores.melt(["kind", "layer"], list(_SCORES), "score")
    points = points.assign(
        value=points["value"].astype(float),
        kind=points["kind"].map(_KINDS),
        score=points["score"].map(_SCORES),
    )

    def limit(axes: Axes, score: str, rows: DataFrame) -> None:
        low, high = rows["value"].min(), rows["value"].max()
        whole = score != _SCORES["l0"]
        axes.set_ylim(min(0.0, low) - 0.02, max(1.02, 1.02 * high) if whole else 1.15 * high)

    return curves(
        points, "layer", "value", "kind", "score", title="Sparse autoencoders by layer",
        subtitle=subtitle, colours=_COLOURS, labels=("layer", ""), per_row=2, each=limit,
    )  # fmt: skip


def training_figure(history: History, lm: str) -> Figure:
    """Draw the training curves: a panel per curve and kind of hook point, a line per layer."""
    from pandas import DataFrame

    rows = []
    for tag, points in history.items():
        what, _, name = tag.partition("/")
        kind, _, layer = name.rpartition(".")
        panel = f"{what}, {_KINDS.get(kind, kind)}".replace("_", " ")
        rows += [(panel, f"layer {layer}", step, value) for step, value in points]
    frame = DataFrame(rows, columns=["panel", "layer", "step", "value"])
    return curves(
        frame.sort_values("panel", kind="stable"), "step", "value", "layer", "panel",
        title=f"Training of {lm}'s SAEs", labels=("step", ""),
    )  # fmt: skip
