"""Figures of `SparseAutoencoders`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lincorr_lightning.results.plots import MAX_CURVES, History, curves, training_curves
from lincorr_lightning.results.style import BLUE, GREEN, ORANGE
from lincorr_lightning.sae.hook_points import KINDS

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
    """Draw the training curves, a panel per curve and kind of hook point if one is not enough."""
    title = f"Training of {lm}'s SAEs"
    names = {name for tag in history if (name := tag.partition("/")[2])}
    if len(names) <= MAX_CURVES:
        return training_curves(history, title)
    layers: dict[str, list[int]] = {}
    for kind, _, number in (name.rpartition(".") for name in names):
        layers.setdefault(kind, []).append(int(number))
    panels: dict[str, Sequence[tuple[int, float]]] = {}
    for what in dict.fromkeys(tag.partition("/")[0] for tag in history if "/" in tag):
        for kind in (kind for kind in KINDS if kind in layers):
            own = sorted(layers[kind])
            n = min(len(own), MAX_CURVES)
            some = f" ({n} of {len(own)})" if n < len(own) else ""
            for i in range(n):  # evenly spaced from the first to the last layer
                layer = own[round(i * (len(own) - 1) / max(n - 1, 1))]
                points = history.get(f"{what}/{kind}.{layer}")
                if points is not None:
                    panels[f"{what}, {kind}{some}/layer {layer}"] = points
    panels |= {tag: points for tag, points in history.items() if "/" not in tag}
    return training_curves(panels, title, max_panels=len(panels))
