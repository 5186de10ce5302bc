"""Figures of `SparseAutoencoders`."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    finish,
    new_figure,
    plain_axes,
)
from lincorr_lightning.results.training_curves import MAX_CURVES, History, training_curves
from lincorr_lightning.sae.hook_points import KINDS, HookKind
from lincorr_lightning.sae.scoring import SCORES, SAEScore

_LOOKS: dict[HookKind, tuple[str, str, str]] = {
    "residual": (BLUE, "o", "residual stream"),
    "mlp_out": (ORANGE, "s", "MLP"),
    "attention_out": (GREEN, "^", "attention"),
}
_PANELS = {
    "explained_variance": ("explained variance", "share of the variance"),
    "loss_recovered": ("loss recovered", "share, from zeros to clean"),
    "l0": ("L0", "active features per token"),
    "dead": ("dead features", "share, active at no token"),
}


def quality_figure(scores: Sequence[SAEScore], subtitle: str) -> Figure:
    """Draw the scores of SAEs by layer, a panel per score."""
    layers = sorted({score.layer for score in scores})
    width = min(max(3.2, 1.6 + 0.16 * len(layers)), 6.0)
    figure = new_figure(2 * width + 0.6, 5.2, "Sparse autoencoders by layer", subtitle)
    panels = figure.subplots(2, 2, sharex=True)
    for i, (panel, name) in enumerate(zip(panels.flat, SCORES, strict=True)):
        title, label = _PANELS[name]
        plain_axes(panel, title, "layer" if i >= 2 else "", label)
        _draw_score(panel, scores, name)
    # The lower left is usually free: SAEs worth showing explain most of the variance.
    panels[0, 0].legend(loc="lower left", frameon=False, fontsize=8, labelcolor=INK)
    return finish(figure)


def _draw_score(axes: Axes, scores: Sequence[SAEScore], name: str) -> None:
    kinds = [kind for kind in _LOOKS if any(score.kind == kind for score in scores)]
    is_single = len({score.layer for score in scores}) == 1
    known: list[float] = []
    for i, kind in enumerate(kinds):
        colour, marker, label = _LOOKS[kind]
        of_kind = [(score.layer, getattr(score, name)) for score in scores if score.kind == kind]
        points = [(layer, value) for layer, value in of_kind if value is not None]
        known += [value for _, value in points]
        # The kinds of a single layer stand side by side instead of on top of each other.
        shift = (i - (len(kinds) - 1) / 2) * 0.2 if is_single else 0.0
        axes.plot(
            [layer + shift for layer, _ in points], [value for _, value in points],
            color=colour, marker=marker, markersize=5.5, linewidth=1.5, label=label,
            clip_on=not points, zorder=3,  # an unclipped line without points breaks the layout
        )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    if is_single:
        layer = scores[0].layer
        axes.set_xlim(layer - 0.6, layer + 0.6)
        axes.set_xticks([layer])
    if name == "l0":
        axes.set_ylim(0, 1.15 * max(known))
    else:
        axes.set_ylim(min(0.0, *known) if known else 0.0, max(1.0, *known) if known else 1.0)


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
            # Evenly spaced from the first to the last layer.
            shown = [own[round(i * (len(own) - 1) / max(n - 1, 1))] for i in range(n)]
            some = f" ({n} of {len(own)})" if n < len(own) else ""
            for layer in shown:
                points = history.get(f"{what}/{kind}.{layer}")
                if points is not None:
                    panels[f"{what}, {kind}{some}/layer {layer}"] = points
    ungrouped = {tag: points for tag, points in history.items() if "/" not in tag}
    return training_curves(panels | ungrouped, title, max_panels=len(panels | ungrouped))
