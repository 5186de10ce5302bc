"""Figures of the feature flow, after those of Laptev et al., 2025 (arXiv 2502.03032)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import PercentFormatter

from lincorr_lightning.flow.deactivation import METHODS, CutEffect, lowest_r, mean_over_cases
from lincorr_lightning.flow.graph import GROUPS, SHORT, Edge, FlowGraph
from lincorr_lightning.flow.groups import LayerGroups
from lincorr_lightning.flow.relation_flow import RelationFlow
from lincorr_lightning.flow.steering import STRATEGIES, SteeringPoint, mean_steering
from lincorr_lightning.flow.transitions import Transition
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
    plain_axes,
    short_name,
)
from lincorr_lightning.sae.hook_points import Feature, HookKind, HookPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KIND_COLOURS: dict[HookKind, str] = {
    "residual": BLUE, "mlp_out": ORANGE, "attention_out": GREEN
}  # fmt: skip
_GROUP_COLOURS = dict(
    zip(
        GROUPS,
        ("#BBBBBB", BLUE, ORANGE, "#CC79A7", GREEN, "#56B4E9", "#E69F00", "#444444"),
        strict=True,
    )
)
_DARK = {BLUE, ORANGE, GREEN, "#444444"}
_METHOD_COLOURS = dict(zip(METHODS, (BLUE, ORANGE, GREEN), strict=True))
_STRATEGY_COLOURS = dict(zip(STRATEGIES, (GREY, BLUE, ORANGE, GREEN), strict=True))


def groups_figure(groups: Sequence[LayerGroups], lm: str, n_tokens: int) -> Figure:
    """Draw the share of each group by layer (figures 5, 12, 18)."""
    layers = [each.layer for each in groups]
    figure = new_figure(
        max(5.6, 0.5 * len(layers) + 3.6), 3.2,
        f"Where features of {short_name(lm)} come from",
        f"share of all activations on {n_tokens:,} tokens; a matched predecessor (top-1) counts if "
        "it is active at the same token",
    )  # fmt: skip
    axes = figure.add_subplot()
    bottom = np.zeros(len(layers))
    for group, colour in _GROUP_COLOURS.items():
        share = np.array([each.shares.get(group, 0.0) for each in groups])
        if not share.any():
            continue
        axes.bar(layers, share, 0.72, bottom=bottom, color=colour, label=group)
        for x, y, value in zip(layers, bottom + share / 2, share, strict=True):
            if value >= 0.06 and len(layers) <= 14:
                axes.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=8,
                          color="white" if colour in _DARK else INK)  # fmt: skip
        bottom += share
    plain_axes(axes, "", "layer of the residual stream", "share of activations")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.set_xlim(min(layers) - 0.8, max(layers) + 0.8)
    axes.set_ylim(0, 1)
    _legend_beside(axes, reverse=True)
    return finish(figure)


def cosines_figure(groups: Sequence[LayerGroups], lm: str) -> Figure:
    """Draw the activations of each group by the cosine of their predecessors (figures 3, 4, 14)."""
    kinds = [kind for kind in SHORT if any(kind in each.histograms for each in groups)]
    figure = new_figure(
        3.3 * len(kinds) + 1.9, 2.9, f"Cosines separate the groups: {short_name(lm)}",
        "all layers; AUROC: how well the cosine alone predicts that the predecessor is active too "
        "(mean over layers)",
    )  # fmt: skip
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        own = [each for each in groups if kind in each.histograms]
        for group, colour in _GROUP_COLOURS.items():
            counts = np.sum([each.histograms[kind][group] for each in own], axis=0)
            if counts.any():
                density = counts / counts.sum() * len(counts)
                panel.stairs(density, np.linspace(0, 1, len(counts) + 1), color=colour,
                             label=group, linewidth=1.7)  # fmt: skip
        auroc = _mean([each.auroc.get(kind) for each in own])
        title = f"s({SHORT[kind][0]})" + ("" if math.isnan(auroc) else f"   AUROC {auroc:.2f}")
        label = "density of activations" if panel is panels[0] else ""
        plain_axes(panel, title, f"cosine to the {SHORT[kind]} predecessor", label)
        panel.set_xlim(0, 1)
    handles = {h.get_label(): h for p in panels for h in p.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), [str(name) for name in handles], loc="outside right upper",
                  frameon=False, fontsize=8.5, labelcolor=INK)  # fmt: skip
    return finish(figure)


def transitions_figure(transitions: Sequence[Transition], lm: str) -> Figure:
    """Draw the explained variance of transition matrices by k and weights (figures 21 to 23)."""
    kinds = [kind for kind in SHORT if any(row.kind == kind for row in transitions)]
    figure = new_figure(
        2.8 * len(kinds) + 2.4, 2.9,
        f"What a transition matrix carries over: {short_name(lm)}",
        "variance of the stream explained by the predecessor’s features (mean over layers); lines "
        "that leave the figure overshoot",
    )  # fmt: skip
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    low = 0.0
    for panel, kind in zip(panels, kinds, strict=True):
        own = [row for row in transitions if row.kind == kind]
        ks = sorted({row.k for row in own})
        for compared, colour, marker in (("decoder", BLUE, "o"), ("encoder", ORANGE, "s")):
            means = [
                _mean([r.explained_variance for r in own if (r.k, r.compared) == (k, compared)])
                for k in ks
            ]
            panel.plot(range(len(ks)), means, marker=marker, color=colour, label=f"by {compared}s")
            low = min(low, means[0])
        panel.axhline(_mean([row.own for row in own]), color=GREY, linestyle="--", linewidth=1,
                      label="the target’s own SAE")  # fmt: skip
        panel.axhline(0, color=PALE, linewidth=0.8, zorder=0)
        label = "explained variance" if panel is panels[0] else ""
        plain_axes(panel, f"from {SHORT[kind]}", "k", label)
        panel.set_xticks(range(len(ks)), [str(k) for k in ks])
    # The sum of many sources overshoots without bound; how far does not matter.
    panels[0].set_ylim(min(-0.25, max(low - 0.1, -1.0)), 1.05)
    _legend_beside(panels[-1])
    return finish(figure)


def deactivation_figure(cuts: Sequence[CutEffect], lm: str) -> Figure:
    """Draw the share of features switched off with their predecessors, and controls (figure 6)."""
    r = lowest_r(cuts)
    rows = [row for row in cuts if row.r == r and row.sources == "all"]
    groups = [group for group in ("all", *GROUPS) if any(row.group == group for row in rows)]
    methods = [method for method in METHODS if any(row.method == method for row in rows)]
    figure = new_figure(
        max(6.6, 1.35 * len(groups) + 2.6), 3.1, f"Features switched off: {short_name(lm)}",
        f"predecessors {'rescaled' if r else 'removed'} (r = {r:g}) at one token; all layers; "
        "random: as many other features active there, of the same hook points",
    )  # fmt: skip
    axes = figure.add_subplot()
    width = 0.8 / len(methods)

    def success(method: str, cut: str) -> list[float]:
        return [
            _success([row for row in rows if (row.method, row.cut, row.group)
                      == (method, cut, group)])
            for group in groups
        ]  # fmt: skip

    for i, method in enumerate(methods):
        x = np.arange(len(groups)) + (i - (len(methods) - 1) / 2) * width
        matched = success(method, "matched")
        axes.bar(x, matched, width * 0.92, color=_METHOD_COLOURS[method], label=method)
        axes.hlines(success(method, "random"), x - width * 0.46, x + width * 0.46, color=INK,
                    linewidth=2, label="" if i else "random control")  # fmt: skip
        _write_values(axes, x, matched, "{:.0%}")
    plain_axes(axes, "", "", "switched off")
    counts = [
        sum(row.n for row in rows
            if (row.method, row.cut, row.group) == (methods[0], "matched", group))
        for group in groups
    ]  # fmt: skip
    labels = [f"{group.removeprefix('From ')}\n{n:,} cases"
              for group, n in zip(groups, counts, strict=True)]  # fmt: skip
    axes.set_xticks(range(len(groups)), labels, fontsize=8.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    highest = max(bar.get_height() for bar in axes.patches)  # type: ignore[attr-defined]
    axes.set_ylim(0, min(1.08, 1.15 * highest + 0.03))
    _legend_beside(axes)
    return finish(figure)


def layers_figure(cuts: Sequence[CutEffect], lm: str) -> Figure:
    """Draw the share of features switched off with their predecessors by layer, and controls."""
    r = lowest_r(cuts)
    rows = [row for row in cuts if (row.r, row.sources, row.group) == (r, "all", "all")]
    layers = sorted({row.layer for row in rows})
    figure = new_figure(
        max(5.6, 0.35 * len(layers) + 3.8), 3.0, f"Features switched off by layer: "
        f"{short_name(lm)}",
        f"predecessors {'rescaled' if r else 'removed'} (r = {r:g}) at one token; dotted: as many "
        "other features active there",
    )  # fmt: skip
    axes = figure.add_subplot()
    for (method, colour), (cut, style) in product(
        _METHOD_COLOURS.items(), (("matched", "o-"), ("random", "o:"))
    ):
        own = {row.layer: row.success for row in rows if (row.method, row.cut) == (method, cut)}
        if own:
            values = [own.get(layer, math.nan) for layer in layers]
            label = method if cut == "matched" else f"{method}, random"
            axes.plot(layers, values, style, color=colour, markersize=4, label=label)
    plain_axes(axes, "", "layer of the residual stream", "switched off")
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(bottom=0)
    _legend_beside(axes)
    return finish(figure)


def rescaling_figure(cuts: Sequence[CutEffect], lm: str) -> Figure:
    """Draw activations and losses as predecessors are rescaled (figures 7, 8)."""
    rows = [row for row in cuts if row.group == "all" and row.sources == "all"]
    figure = new_figure(9.6, 2.8, f"Rescaled predecessors: {short_name(lm)}",
                        "mean over all cases; solid: matched, dotted: random active features of "
                        "the same hook points")  # fmt: skip
    titles = {
        "success": "switched off",
        "activation_change": "change of activation",
        "loss_change": "change of the loss",
    }
    panels = figure.subplots(1, len(titles))
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for (method, colour), (cut, style) in product(
            _METHOD_COLOURS.items(), (("matched", "o-"), ("random", "o:"))
        ):
            own = [row for row in rows if (row.method, row.cut) == (method, cut)]
            factors = sorted({row.r for row in own})
            values = [mean_over_cases([row for row in own if row.r == r], name) for r in factors]
            if factors:
                panel.plot(factors, np.array(values, float), style, color=colour, markersize=3.5,
                           label=method if cut == "matched" else None)  # fmt: skip
        panel.axhline(0, color=PALE, linewidth=0.8, zorder=0)
        plain_axes(panel, title, "r: factor of the predecessors’ activations", "")
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend_beside(panels[-1])
    return finish(figure)


def steering_figure(points: Sequence[SteeringPoint], lm: str) -> Figure:
    """Draw behaviour, coherence and their product by strength (figures 9 to 11, 16, 17)."""
    rows = mean_steering(points)
    labels = list(dict.fromkeys(point.label for point in points))
    named = ", ".join(labels[:6]) + (", …" if len(labels) > 6 else "")
    figure = new_figure(9.8, 2.8, f"Steering {short_name(lm)} along the flow",
                        f"towards {named}; mean over {len(labels)} answers; dashed line: without "
                        "steering")  # fmt: skip
    titles = {
        "behaviour": "probability of the answer",
        "coherence": "perplexity of other texts, before / after",
        "score": "score: their product",
    }
    panels = figure.subplots(1, len(titles))
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for strategy, colour in _STRATEGY_COLOURS.items():
            own = sorted((r["strength"], r[name]) for r in rows if r["strategy"] == strategy)
            if own:
                # Linear and exponential coincide if no feature is farther than a step.
                style = "o--" if strategy == "exponential" else "o-"
                panel.plot(*zip(*own, strict=True), style, color=colour, markersize=3.5,
                           label=strategy)  # fmt: skip
        unsteered = [row[name] for row in rows if row["strength"] == 0]
        if unsteered:
            panel.axhline(unsteered[0], color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        plain_axes(panel, title, "strength (in typical activations)", "")
        panel.set_ylim(-0.02, 1.04)
    _legend_beside(panels[-1])
    return finish(figure)


def relation_figure(found: RelationFlow, lm: str) -> Figure:
    """Draw the scores of a relation with and without the features that its answers share."""
    titles = {
        "fixed": "r, unchanged map", "target_only": "r, removed in the\ntarget’s prompt",
        "refitted": "r, refitted map", "recall": "target answers\nstill correct",
    }  # fmt: skip
    scores = [[getattr(cut, name) for name in titles] for cut in found.cuts]
    table = np.array(scores, float)
    known = ~np.isnan(table).all(0)
    table, names = table[:, known], [t for t, is_known in zip(titles.values(), known, strict=True)
                                     if is_known]  # fmt: skip
    figure = new_figure(
        8.6, 3.1, f"{found.relation.name} with features removed: {short_name(lm)}",
        f"{len(found.subjects) - found.n_fit:,} held-out subjects; control: other features of the "
        "same hook points, as many and about as often active",
    )  # fmt: skip
    axes = figure.add_subplot()
    labels = {"none": ("nothing removed", INK), "carriers": ("carriers of both answers", BLUE),
              "flow": ("where both flows meet", ORANGE)}  # fmt: skip
    width = 0.8 / len(found.cuts)
    for i, (cut, values) in enumerate(zip(found.cuts, table, strict=True)):
        x = np.arange(len(names)) + (i - (len(found.cuts) - 1) / 2) * width
        label, colour = labels[cut.cut]
        if cut.control:
            axes.bar(x, values, width * 0.92, facecolor="white", edgecolor=colour, linewidth=1.3,
                     hatch="///", label="control of these")  # fmt: skip
        else:
            label += f" ({cut.n_features})" if cut.n_features else ""
            axes.bar(x, values, width * 0.92, color=colour, label=label)
        _write_values(axes, x, values, "{:.2f}")
    plain_axes(axes, "", "", "")
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.axhline(0, color=GREY, linewidth=0.7)
    axes.set_ylim(min(0.0, float(np.nanmin(table, initial=0.0))) - 0.02, 1.1)
    _legend_beside(axes)
    return finish(figure)


# -- flow graphs ---------------------------------------------------------------------------------

_MAX_PER_HOOK_POINT = 3
_STEP, _ROW = 1.7, 0.95  # distance of boxes and height of a row, in inches


def flow_figure(
    graphs: Sequence[FlowGraph], title: str, names: Mapping[str, str], lm: str
) -> Figure:
    """Draw where one feature, or those of two answers, come from and go to.

    There is a row of boxes for each residual stream, the last one on top, and below each a row for
    the outputs of the layer's attention and MLP. The whole graph is in the GraphML file.
    """
    starts = {graph.start for graph in graphs}
    edges = {(e.source, e.target): e for graph in graphs for e in graph.edges}
    kept = _strongest(starts, edges.values())
    n_left_out = len({feature for graph in graphs for feature in graph.features} - kept)
    shared = {f for f in kept if sum(f in graph.features for graph in graphs) > 1}
    drawn = [edge for edge in edges.values() if {edge.source, edge.target} <= kept]
    positions = _positions(kept, drawn)
    notes = [f"features of {short_name(lm)}", "numbers: cosines of the decoders"]
    notes += ["thick frame: start", *(["shaded: in both flows"] if shared else [])]
    if n_left_out:
        notes.append(
            f"the {_MAX_PER_HOOK_POINT} most similar features of each hook point, {n_left_out:,} "
            "more left out"
        )
    right = max(x for x, _ in positions.values()) + _STEP / 2
    left = min(min(x for x, _ in positions.values()) - _STEP / 2 - 0.9, right - 6)
    top = max(y for _, y in positions.values()) + _ROW / 2
    figure = new_figure(right - left, top, title, "; ".join(notes))
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_xlim(left, right)
    axes.set_ylim(0, top)
    for y, (layer, is_stream) in {positions[f][1]: _height(f.hook_point) for f in kept}.items():
        row = f"layer {layer}\n{'residual' if is_stream else 'outputs'}"
        axes.text(left + 0.05, y, row, va="center", color=GREY, fontsize=8.5)
    for edge in drawn:
        _draw_edge(axes, edge, positions[edge.source], positions[edge.target])
    for feature, (x, y) in positions.items():
        text = f"{SHORT[feature.hook_point.kind]} {feature.index}"
        if feature.id in names:
            text += "\n" + " → ".join(legible(names[feature.id].split(" → "), 11))
        box = {"boxstyle": "round,pad=0.35", "linewidth": 2.6 if feature in starts else 1.0,
               "facecolor": "#F3EBC8" if feature in shared else "white",
               "edgecolor": _KIND_COLOURS[feature.hook_point.kind]}  # fmt: skip
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=INK, bbox=box, zorder=3)
    return finish(figure)


def _positions(
    features: Collection[Feature], edges: Sequence[Edge]
) -> dict[Feature, tuple[float, float]]:
    """Centre of each box: a column per kind, the streams in the middle, and a row per height."""
    own: dict[HookPoint, list[Feature]] = {}
    for feature in features:
        own.setdefault(feature.hook_point, []).append(feature)
    # Lines from stream to stream pass between the columns of attention and MLP.
    attention, stream, mlp = (
        max((len(row) for at, row in own.items() if at.kind == kind), default=0)
        for kind in ("attention_out", "residual", "mlp_out")
    )
    columns: dict[HookKind, float] = {
        "attention_out": -(stream + attention) / 2, "residual": 0.0, "mlp_out": (stream + mlp) / 2
    }  # fmt: skip
    heights = sorted({_height(at) for at in own})
    positions: dict[Feature, tuple[float, float]] = {}

    def order(feature: Feature) -> tuple[float, Feature]:
        targets = [positions[e.target][0] for e in edges if e.source == feature]
        return (sum(targets) / len(targets) if targets else 0.0, feature)

    for at in sorted(own, key=_height, reverse=True):
        y = (heights.index(_height(at)) + 0.5) * _ROW
        for i, feature in enumerate(sorted(own[at], key=order)):
            positions[feature] = (columns[at.kind] + i - (len(own[at]) - 1) / 2) * _STEP, y
    return positions


def _height(hook_point: HookPoint) -> tuple[int, bool]:
    """Order of rows from below."""
    return hook_point.layer, hook_point.kind == "residual"


def _strongest(starts: Collection[Feature], edges: Collection[Edge]) -> set[Feature]:
    """The starts and, outward, the features of each hook point most similar to those kept."""
    kept = set(starts)
    for backward in (True, False):
        reached = set(starts)
        ends = [
            (e.target, e.source, e.cosine) if backward else (e.source, e.target, e.cosine)
            for e in edges
        ]
        for at in sorted({far.hook_point for _, far, _ in ends}, key=_height, reverse=backward):
            best: dict[Feature, float] = {}
            for near, far, cosine in ends:
                if far.hook_point == at and near in reached:
                    best[far] = max(best.get(far, -math.inf), cosine)
            new = sorted(best.keys() - kept, key=lambda f: (-best[f], f))
            n_kept = sum(feature.hook_point == at for feature in kept)
            kept.update(new[: max(0, _MAX_PER_HOOK_POINT - n_kept)])
            reached |= kept & best.keys()
    return kept


def _draw_edge(
    axes: Axes, edge: Edge, start: tuple[float, float], end: tuple[float, float]
) -> None:
    colour = _KIND_COLOURS[edge.source.hook_point.kind]
    axes.plot(*zip(start, end, strict=True), color=colour, alpha=0.7, zorder=1,
              linewidth=0.6 + 3 * max(edge.cosine, 0) ** 2)  # fmt: skip
    # Near its source, where lines are apart.
    x, y = (a + 0.45 * (b - a) for a, b in zip(start, end, strict=True))
    axes.text(x, y, f"{edge.cosine:.2f}", fontsize=6.5, color=colour, ha="center", va="center",
              zorder=2, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip


# -- shared parts --------------------------------------------------------------------------------


def _legend_beside(axes: Axes, reverse: bool = False) -> None:
    axes.legend(reverse=reverse, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False,
                fontsize=8.5, labelcolor=INK)  # fmt: skip


def _write_values(axes: Axes, x: Iterable[float], values: Iterable[float], form: str) -> None:
    for at, value in zip(x, values, strict=True):
        if not math.isnan(value):
            axes.text(at, max(value, 0) + 0.012, form.format(value), ha="center", va="bottom",
                      fontsize=6.5, color=INK)  # fmt: skip


def _success(cuts: Sequence[CutEffect]) -> float:
    value = mean_over_cases(cuts, "success")
    return math.nan if value is None else value


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan
