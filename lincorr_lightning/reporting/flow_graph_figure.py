"""A flow graph to be read: layers from below, attention left, MLP right of the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import FancyBboxPatch

from lincorr_lightning.reporting.canvas import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    finish,
    legible,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lincorr_lightning.sae.flow_graph import Edge, Feature, FlowGraph

_COLOURS = {"residual": BLUE, "mlp_out": ORANGE, "attention_out": GREEN}
_TITLES = {"attention_out": "attention out", "residual": "residual stream", "mlp_out": "MLP out"}
_MOST = 4  # boxes of one place; more cannot be read
_WIDTH, _HEIGHT, _GAP = 1.62, 0.5, 0.14  # of a box, in inches
_ROW = 2.75  # from layer to layer
_RISE = 1.35  # how far the stream stands above what is added to it
_AISLE = 0.7  # between attention and MLP, where the stream comes from below


def flow_graph_figure(
    graphs: Sequence[FlowGraph],
    title: str,
    names: Mapping[str, str] | None = None,
    subtitle: str = "",
) -> Figure:
    """Draw where one feature, or several that are tied, come from and go to.

    Args:
        graphs: Of each start; what two have in common is drawn once.
        title: Of the figure.
        names: Feature's id -> what to call it, written below its number.
        subtitle: In grey below the title.
    """
    starts = {graph.start for graph in graphs}
    edges = {(e.source, e.target): e for graph in graphs for e in graph.edges}
    kept, n_left_out = _choose(starts, edges)
    layers = sorted({feature.place.layer for feature in kept})
    rooms = {
        kind: max(sum((f.place.kind, f.place.layer) == (kind, layer) for f in kept)
                  for layer in layers) * (_WIDTH + _GAP)
        for kind in _COLOURS
    }  # fmt: skip
    half = max(rooms["residual"] / 2, rooms["attention_out"] + _AISLE / 2,
               rooms["mlp_out"] + _AISLE / 2, 2.6)  # fmt: skip
    if not rooms["attention_out"] and not rooms["mlp_out"]:
        half = max(rooms["residual"] / 2, 2.6)
    middle, width = half + 0.75, 2 * half + 0.9
    places = _lay_out(kept, edges, layers, middle)
    height = max(y for _, y in places.values()) + _HEIGHT + 0.35
    told = [subtitle] if subtitle else []
    told.append("on the lines: cosine of the decoders; thick frame: where it starts")
    shared = {f for f in kept if sum(f in graph.features for graph in graphs) > 1}
    if shared:
        told.append("shaded: in both flows")
    if n_left_out:
        what = "feature with a lower cosine" if n_left_out == 1 else "features with lower cosines"
        told.append(f"{n_left_out} {what} left out")
    figure = new_figure(width, height, title, "; ".join(told))
    axes = figure.add_subplot()
    axes.set_xlim(0, width)
    axes.set_ylim(-0.1, height - 0.1)
    axes.set_axis_off()
    for row, layer in enumerate(layers):
        base = row * _ROW
        axes.text(0.05, base + (_RISE + _HEIGHT) / 2, f"layer {layer}", ha="left", va="center",
                  color=GREY, fontsize=9)  # fmt: skip
        if row:
            line = base - (_ROW - _RISE - _HEIGHT) / 2
            axes.axhline(line, color=PALE, linewidth=0.8, zorder=0)
        for kind in sorted({f.place.kind for f in kept if f.place.layer == layer}):
            own = [places[f] for f in kept if (f.place.kind, f.place.layer) == (kind, layer)]
            left, right = min(x for x, _ in own), max(x for x, _ in own) + _WIDTH
            below = kind != "residual"
            y = own[0][1] - 0.05 if below else own[0][1] + _HEIGHT + 0.05
            # On the outside, where no line from the stream below passes.
            side = {"attention_out": "left", "residual": "center", "mlp_out": "right"}[kind]
            x = {"left": left, "center": (left + right) / 2, "right": right}[side]
            axes.text(x, y, _TITLES[kind], ha=side, fontsize=8.5, color=_COLOURS[kind],
                      va="top" if below else "bottom", fontweight="bold")  # fmt: skip
    _draw_edges(axes, [e for ends, e in edges.items() if set(ends) <= kept], places)
    for feature in kept:
        _draw_box(axes, feature, places[feature], (names or {}).get(feature.id, ""),
                  is_start=feature in starts, is_shared=feature in shared)  # fmt: skip
    return finish(figure)


def _choose(
    starts: set[Feature], edges: Mapping[tuple[Feature, Feature], Edge]
) -> tuple[set[Feature], int]:
    """The starts, and at each place those with the highest cosine on an edge."""
    strongest: dict[Feature, float] = dict.fromkeys(starts, np.inf)
    for edge in edges.values():
        for end in (edge.source, edge.target):
            strongest[end] = max(strongest.get(end, -np.inf), edge.cosine)
    kept: set[Feature] = set()
    for place in {feature.place for feature in strongest}:
        own = sorted((f for f in strongest if f.place == place), key=lambda f: (-strongest[f], f))
        kept.update(own[:_MOST])
    while True:  # what is left out may have been all that another one led to
        tied = {end for ends in edges if set(ends) <= kept for end in ends} | starts
        if kept <= tied:
            break
        kept &= tied
    return kept, len(strongest) - len(kept)


def _lay_out(
    kept: set[Feature],
    edges: Mapping[tuple[Feature, Feature], Edge],
    layers: Sequence[int],
    middle: float,
) -> dict[Feature, tuple[float, float]]:
    """Lower left corner of each box; from above, each stands about below what it leads to."""
    places: dict[Feature, tuple[float, float]] = {}
    step = _WIDTH + _GAP
    for row in range(len(layers) - 1, -1, -1):
        for kind in ("residual", "attention_out", "mlp_out"):
            own = [f for f in kept if (f.place.kind, f.place.layer) == (kind, layers[row])]
            above = {f: _mean_x(f, edges, places) for f in own}
            own.sort(key=lambda f, above=above: (above[f], f))  # type: ignore[misc]
            left = middle + _AISLE / 2
            if kind == "residual":
                left = middle - (len(own) * step - _GAP) / 2
            elif kind == "attention_out":
                left = middle - _AISLE / 2 - len(own) * step + _GAP
            y = row * _ROW + (_RISE if kind == "residual" else 0.0) + 0.15
            places |= {feature: (left + i * step, y) for i, feature in enumerate(own)}
    return places


def _mean_x(
    feature: Feature,
    edges: Mapping[tuple[Feature, Feature], Edge],
    places: Mapping[Feature, tuple[float, float]],
) -> float:
    """Where what it leads to stands."""
    to = [places[target][0] for source, target in edges if source == feature and target in places]
    return float(np.mean(to)) if to else np.inf


def _draw_edges(
    axes: Axes, edges: Sequence[Edge], places: Mapping[Feature, tuple[float, float]]
) -> None:
    written: list[tuple[float, float]] = []
    for edge in sorted(edges, key=lambda e: e.cosine):
        (x0, y0), (x1, y1) = places[edge.source], places[edge.target]
        x0, x1 = x0 + _WIDTH / 2, x1 + _WIDTH / 2
        y0, y1 = y0 + _HEIGHT, y1
        colour = _COLOURS[edge.source.place.kind]
        axes.plot([x0, x1], [y0, y1], color=colour, alpha=0.75, zorder=1,
                  linewidth=0.6 + 3.4 * max(edge.cosine, 0) ** 2)  # fmt: skip
        # Where no other number stands.
        spots = [(x0 + s * (x1 - x0), y0 + s * (y1 - y0)) for s in (0.35, 0.55, 0.2, 0.75, 0.45)]
        spot = max(spots, key=lambda p: min((_apart(p, q) for q in written), default=9.0) > 1)
        written.append(spot)
        axes.text(*spot, f"{edge.cosine:.2f}".lstrip("0"), fontsize=7, color=colour, ha="center",
                  va="center", zorder=2,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.9},
                  )  # fmt: skip


def _apart(a: tuple[float, float], b: tuple[float, float]) -> float:
    """Above 1 where two numbers do not touch."""
    return max(abs(a[0] - b[0]) / 0.26, abs(a[1] - b[1]) / 0.13)


def _draw_box(
    axes: Axes,
    feature: Feature,
    corner: tuple[float, float],
    name: str,
    *,
    is_start: bool,
    is_shared: bool,
) -> None:
    colour = _COLOURS[feature.place.kind]
    face = "#F3EBC8" if is_shared else "white"
    box = FancyBboxPatch(corner, _WIDTH, _HEIGHT, boxstyle="round,pad=0,rounding_size=0.07",
                         facecolor=face, edgecolor=colour, zorder=3,
                         linewidth=2.6 if is_start else 1.0)  # fmt: skip
    axes.add_patch(box)
    x, y = corner[0] + _WIDTH / 2, corner[1] + _HEIGHT / 2
    if not name:
        axes.text(x, y, str(feature.index), ha="center", va="center", fontsize=9, color=INK,
                  zorder=4)  # fmt: skip
        return
    axes.text(x, y + 0.12, str(feature.index), ha="center", va="center", fontsize=9,
              fontweight="bold", color=INK, zorder=4)  # fmt: skip
    # A sign that no font has would else spell the whole name in numbers.
    parts = legible(name.split(" → "), 11)[0]
    axes.text(x, y - 0.11, " → ".join(parts), ha="center", va="center", fontsize=7,
              color=INK, zorder=4)  # fmt: skip
