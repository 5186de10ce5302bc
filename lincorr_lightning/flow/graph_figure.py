"""A flow graph to be read: layers from below, attention left, MLP right of the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.patches import FancyBboxPatch

from lincorr_lightning.results.style import (
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

    from lincorr_lightning.flow.graph import Edge, Feature, FlowGraph
    from lincorr_lightning.sae.hook_points import HookPoint

_COLOURS = {"residual": BLUE, "mlp_out": ORANGE, "attention_out": GREEN}
_TITLES = {"attention_out": "attention out", "residual": "residual stream", "mlp_out": "MLP out"}
_MOST = 4  # boxes of one place; more cannot be read
_WIDTH, _HEIGHT, _GAP = 1.62, 0.5, 0.14  # of a box, in inches
_AISLE = 0.55  # between the stream's boxes and what stands beside them
_MARGIN = 0.75  # where layers are numbered
_NAME = 1.25  # left of the stream's boxes, for its name
_RISE = 1.0  # least height between two layers' streams, where their edges run

Edges = Mapping["tuple[Feature, Feature]", "Edge"]


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
    kept, drawn = _choose(starts, edges)
    n_left_out = len({f for graph in graphs for f in graph.features} - kept)
    layout = _Layout(kept, drawn)
    told = [subtitle] if subtitle else []
    told.append("on the lines: cosine of the decoders; thick frame: where it starts")
    shared = {f for f in kept if sum(f in graph.features for graph in graphs) > 1}
    if shared:
        told.append("shaded: in both flows")
    if n_left_out:
        what = "1 feature" if n_left_out == 1 else f"{n_left_out:,} features"
        told.append(f"of each place the {_MOST} tied closest to what is drawn, {what} left out")
    figure = new_figure(layout.width, layout.height, title, "; ".join(told))
    axes = figure.add_subplot()
    axes.set_xlim(0, layout.width)
    axes.set_ylim(0, layout.height)
    axes.set_axis_off()
    layout.draw_frame(axes)
    _draw_edges(axes, drawn, layout.boxes)
    for feature in kept:
        _draw_box(axes, feature, layout.boxes[feature], (names or {}).get(feature.id, ""),
                  is_start=feature in starts, is_shared=feature in shared)  # fmt: skip
    return finish(figure)


def _choose(starts: set[Feature], edges: Edges) -> tuple[set[Feature], list[Edge]]:
    """What is drawn: the starts, and place by place outward what is tied closest to them.

    Every feature has a path of drawn edges to a start, all in one direction.
    """
    kept = set(starts)
    drawn: dict[tuple[Feature, Feature], Edge] = {}
    for near, far in ((1, 0), (0, 1)):  # backward, then forward
        # Edges lead from layer to layer, and within one from its MLP or attention to its stream.
        reached = set(starts)
        by_hook_point: dict[HookPoint, list[Edge]] = {}
        for edge in edges.values():
            by_hook_point.setdefault((edge.source, edge.target)[far].hook_point, []).append(edge)
        outward = sorted(by_hook_point, key=_height, reverse=not far)
        for hook_point in outward:
            strongest: dict[Feature, float] = {}
            own = [e for e in by_hook_point[hook_point] if (e.source, e.target)[near] in reached]
            for edge in own:
                end = (edge.source, edge.target)[far]
                strongest[end] = max(strongest.get(end, -np.inf), edge.cosine)
            room = _MOST - sum(f.hook_point == hook_point for f in kept)
            new = sorted(strongest.keys() - kept, key=lambda f: (-strongest[f], f))[: max(room, 0)]
            kept.update(new)
            reached |= kept & strongest.keys()
            for edge in own:
                if (edge.source, edge.target)[far] in kept:
                    drawn[edge.source, edge.target] = edge
    return kept, sorted(drawn.values())


def _height(hook_point: HookPoint) -> tuple[int, int]:
    """Order of places from below."""
    return hook_point.layer, hook_point.kind == "residual"


class _Layout:
    """Where boxes stand: the stream in the middle, attention left and MLP right below it.

    What stands beside the stream is beyond its widest row, so that no edge of it passes behind.
    """

    def __init__(self, kept: set[Feature], drawn: Sequence[Edge]) -> None:
        self.boxes: dict[Feature, tuple[float, float]] = {}  # lower left corners
        self._rows: dict[int, float] = {}  # layer -> its stream's y
        self._floors: dict[int, float] = {}  # layer -> y below it
        self._names: list[tuple[float, float, str, str]] = []  # x, y, kind, alignment
        layers = sorted({feature.hook_point.layer for feature in kept})
        own = {
            (kind, layer): [
                f for f in kept if (f.hook_point.kind, f.hook_point.layer) == (kind, layer)
            ]
            for kind in _COLOURS
            for layer in layers
        }
        step = _WIDTH + _GAP
        widest = max(len(own["residual", layer]) for layer in layers) * step - _GAP
        has = {kind: any(own[kind, layer] for layer in layers) for kind in _COLOURS}
        left = _MARGIN + max(_NAME, has["attention_out"] * (_WIDTH + _AISLE))
        self._middle = left + max(widest, 0) / 2
        right = left + max(widest, 0) + _AISLE
        columns = {"attention_out": _MARGIN, "mlp_out": right}
        self.width = max(right + (_WIDTH + 0.1 if has["mlp_out"] else -_AISLE + 0.1), 6.0)
        y = 0.0
        for layer in layers:
            self._floors[layer] = y
            beside = max(len(own[kind, layer]) for kind in columns)
            rise = beside * (_HEIGHT + _GAP) + 0.45 if beside else 0.0
            if layer != layers[0]:
                rise = max(rise, _RISE)
            self._rows[layer] = y + rise + 0.1
            y += rise + _HEIGHT + 0.25
        self.height = y
        for layer in reversed(layers):
            stream = self._rows[layer]
            self._row(own["residual", layer], stream, drawn)
            for kind, x in columns.items():
                # The highest stands nearest to what it leads to, so that few lines cross.
                to = {f: _mean_x(f, drawn, self.boxes) for f in own[kind, layer]}
                sign = 1 if kind == "attention_out" else -1
                stack = sorted(to, key=lambda f, to=to, sign=sign: (sign * to[f], f))  # type: ignore[misc]
                top = stream - 0.3 - _HEIGHT
                for i, feature in enumerate(stack):
                    self.boxes[feature] = (x, top - i * (_HEIGHT + _GAP))
                if stack:
                    self._names.append((x, top + _HEIGHT + 0.05, kind, "left"))
            if own["residual", layer]:
                first = min(self.boxes[f][0] for f in own["residual", layer])
                self._names.append((first - 0.1, stream + _HEIGHT / 2, "residual", "right"))

    def _row(self, own: Sequence[Feature], y: float, drawn: Sequence[Edge]) -> None:
        above = {f: _mean_x(f, drawn, self.boxes) for f in own}
        step = _WIDTH + _GAP
        left = self._middle - (len(own) * step - _GAP) / 2
        for i, feature in enumerate(sorted(own, key=lambda f: (above[f], f))):
            self.boxes[feature] = (left + i * step, y)

    def draw_frame(self, axes: Axes) -> None:
        """Write what stands where."""
        for layer, floor in self._floors.items():
            axes.text(0.05, self._rows[layer] + _HEIGHT / 2, f"layer {layer}", ha="left",
                      va="center", color=GREY, fontsize=9)  # fmt: skip
            if floor:
                axes.axhline(floor, color=PALE, linewidth=0.8, zorder=0)
        for x, y, kind, side in self._names:
            axes.text(x, y, _TITLES[kind], ha=side, fontsize=8.5, color=_COLOURS[kind],
                      va="center" if kind == "residual" else "bottom",
                      fontweight="bold")  # fmt: skip


def _mean_x(
    feature: Feature, drawn: Sequence[Edge], boxes: Mapping[Feature, tuple[float, float]]
) -> float:
    """Where what it leads to stands."""
    to = [boxes[edge.target][0] for edge in drawn if edge.source == feature]
    return float(np.mean(to)) if to else np.inf


def _draw_edges(
    axes: Axes, edges: Sequence[Edge], hook_points: Mapping[Feature, tuple[float, float]]
) -> None:
    written: list[tuple[float, float]] = []
    for edge in sorted(edges, key=lambda e: e.cosine):
        (x0, y0), (x1, y1) = hook_points[edge.source], hook_points[edge.target]
        kind = edge.source.hook_point.kind
        # From the side that looks at the stream, or from above.
        x0 += {"residual": _WIDTH / 2, "attention_out": _WIDTH, "mlp_out": 0.0}[kind]
        y0 += _HEIGHT if kind == "residual" else _HEIGHT / 2
        x1 += _WIDTH / 2
        colour = _COLOURS[kind]
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
    colour = _COLOURS[feature.hook_point.kind]
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
