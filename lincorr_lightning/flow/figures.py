"""Figures of the feature flow, after those of Laptev et al., 2025 (arXiv 2502.03032)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import PercentFormatter

from lincorr_lightning.flow.deactivation import METHODS, case_means, compare_cuts
from lincorr_lightning.flow.graph import GROUP_NAMES, GROUPS, SHORT, Edge, FlowGraph
from lincorr_lightning.flow.steering import STRATEGIES, mean_steering
from lincorr_lightning.results.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    bars,
    curves,
    legend_below,
    legible,
    new_figure,
    plain_axes,
)
from lincorr_lightning.results.table import short_name
from lincorr_lightning.sae.hook_points import KIND_NAMES, Feature, HookKind, HookPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

_KIND_COLOURS: dict[HookKind, str] = {
    "residual": BLUE, "mlp_out": ORANGE, "attention_out": GREEN
}  # fmt: skip
_GROUP_COLOURS = ("#BBBBBB", BLUE, ORANGE, "#CC79A7", GREEN, "#56B4E9", "#E69F00", "#444444")
_CUT_COLOURS: dict[Any, Any] = {
    ("none", False): INK, ("carriers", False): BLUE, ("carriers", True): "#9CCBE6",
    ("flow", False): ORANGE, ("flow", True): "#F0BC96",
}  # fmt: skip
_DARK = {BLUE, ORANGE, GREEN, "#444444"}
_METHOD_COLOURS = dict(zip(METHODS, (BLUE, ORANGE, GREEN), strict=True))
_STRATEGY_COLOURS = dict(zip(STRATEGIES, (GREY, BLUE, ORANGE, GREEN), strict=True))


def groups_figure(groups: DataFrame, lm: str, n_tokens: int) -> Figure:
    """Draw the share of each group by layer (figures 5, 12, 18)."""
    layers = groups["layer"].to_numpy()
    figure = new_figure(
        max(6.6, 0.5 * len(layers) + 2.0), 3.6,
        f"Where features of {short_name(lm)} come from",
        f"share of all activations on {n_tokens:,} tokens, by the hook points at which the most "
        "similar feature is active at the same token",
    )  # fmt: skip
    axes = figure.add_subplot()
    bottom = np.zeros(len(layers))
    for group, colour in zip(GROUPS, _GROUP_COLOURS, strict=True):
        share = np.nan_to_num(groups[group].to_numpy(float))
        if share.any():
            name, ink = GROUP_NAMES[group], "white" if colour in _DARK else INK
            drawn = axes.bar(layers, share, 0.72, bottom=bottom, color=colour, label=name)
            if len(layers) <= 14:
                texts = [f"{value:.0%}" if value >= 0.06 else "" for value in share]
                axes.bar_label(drawn, texts, label_type="center", fontsize=8, color=ink)
        bottom += share
    plain_axes(axes, "", "layer of the residual stream", "share of activations")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.set_xlim(min(layers) - 0.8, max(layers) + 0.8)
    axes.set_ylim(0, 1)
    legend_below(figure, [axes])
    return figure


def transitions_figure(transitions: DataFrame, lm: str) -> Figure:
    """Draw the explained variance of transition matrices by k and weights (figures 21 to 23)."""
    from pandas import concat

    keys = ["kind", "k", "compared"]
    means = transitions.groupby(keys, sort=False)[["explained_variance", "own"]].mean()
    means = means.reset_index()
    own_sae = means.drop_duplicates(["kind", "k"]).assign(
        compared="the target’s own SAE", explained_variance=lambda rows: rows["own"]
    )
    weights = {name: f"matched by {name}s" for name in ("decoder", "encoder")}
    points = concat([means, own_sae])
    points = points.assign(
        compared=points["compared"].replace(weights),
        kind=points["kind"].map(lambda kind: f"from {KIND_NAMES[kind]}"),
        # The sum of many sources overshoots without bound; how far does not matter.
        explained_variance=points["explained_variance"].clip(lower=-1),
    )
    return curves(
        points, "k", "explained_variance", "compared", "kind", share_y=True,
        title=f"What a transition matrix carries over: {short_name(lm)}",
        subtitle="variance of the stream explained by features of the named hook point (mean over "
        "layers; at least −1); k: features of it that are added up for each of the stream",
        colours={"the target’s own SAE": GREY}, labels=("k", "explained variance"),
    )  # fmt: skip


def deactivation_figure(cuts: DataFrame, lm: str) -> Figure:
    """Draw the share of features switched off with their predecessors, and controls (figure 6)."""
    order = ["all", *GROUPS]
    rows = compare_cuts(cuts, "group", "method").sort_values(
        "group", key=lambda names: names.map(order.index), kind="stable"
    )
    n = rows.groupby("group", sort=False)["n"].first()
    names = [GROUP_NAMES.get(group, "all").replace(", ", ",\n") for group in n.index]
    r = rows["r"].min()
    cut = f"predecessors {'rescaled' if r else 'removed'} (r = {r:g}) at one token"
    figure = bars(
        rows, "group", "matched_success", "method",
        title=f"Features switched off: {short_name(lm)}",
        subtitle=f"{cut}; all layers, by the hook points at which predecessors are active; "
        "random: as many other features active there",
        marks={"random_success": "random control"}, colours=_METHOD_COLOURS, label="switched off",
    )  # fmt: skip
    labels = [f"{name}\n{count:,} cases" for name, count in zip(names, n, strict=True)]
    figure.axes[0].set_xticks(range(len(n)), labels)
    return figure


def rescaling_figure(cuts: DataFrame, lm: str) -> Figure:
    """Draw activations and losses as predecessors are rescaled (figures 7, 8)."""
    rows = cuts[(cuts["group"] == "all") & (cuts["sources"] == "all")]
    effects = {
        "success": "switched off",
        "activation_change": "change of activation",
        "loss_change": "change of the loss",
    }
    means = case_means(rows, ["r", "method", "cut"]).rename(columns=effects)
    means = means.assign(random=means["cut"] == "random")
    points = means.melt(["r", "method", "random"], list(effects.values()), "effect", "share")
    return curves(
        points, "r", "share", "method", "effect", "random",
        title=f"Rescaled predecessors: {short_name(lm)}",
        subtitle="mean over all cases; solid: matched predecessors, dotted: as many random active "
        "features of the same hook points",
        colours=_METHOD_COLOURS, labels=("r: factor of their activations", ""), percent=True,
        whole_x=False, each=lambda axes, *_: axes.axhline(0, color=PALE, linewidth=0.8, zorder=0),
    )  # fmt: skip


def steering_figure(points: DataFrame, lm: str) -> Figure:
    """Draw behaviour, coherence and their product by strength (figures 9 to 11, 16, 17)."""
    titles = {
        "behaviour": "probability of the answer",
        "coherence": "perplexity of other texts, before / after",
        "score": "their product",
    }
    labels = list(dict.fromkeys(points["label"]))
    named = ", ".join(labels[:6]) + (", …" if len(labels) > 6 else "")
    means = mean_steering(points).rename(columns=titles)
    rows = means.melt(["strategy", "strength"], list(titles.values()), "measure", "value")

    def unsteered(axes: Axes, measure: Any, panel: DataFrame) -> None:
        del measure
        for value in panel[panel["strength"] == 0]["value"].head(1):
            axes.axhline(value, color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        axes.set_ylim(-0.02, 1.04)

    return curves(
        rows, "strength", "value", "strategy", "measure",
        title=f"Steering {short_name(lm)} along the flow",
        subtitle=f"towards {named}; mean over {len(labels)} answers; dashed line: without steering",
        colours=_STRATEGY_COLOURS, labels=("strength (in typical activations)", ""),
        whole_x=False, each=unsteered,
    )  # fmt: skip


def relation_figure(cuts: DataFrame, lm: str, name: str, n_subjects: int) -> Figure:
    """Draw the scores of a relation with and without the features that its answers share."""
    scores = {
        "fixed": "r, unchanged map", "target_only": "r, removed for the target",
        "refitted": "r, refitted map", "recall": "target answers still correct",
    }  # fmt: skip
    titles = {"none": "nothing removed", "carriers": "carriers of both answers",
              "flow": "where both flows meet"}  # fmt: skip
    title = cuts["cut"].map(titles)
    number = cuts["n_features"].map(lambda n: f" ({n})" if n else "")
    removed = (title + number).where(~cuts["control"], "control of " + title)
    keys = zip(cuts["cut"], cuts["control"], strict=True)
    colours = dict(zip(removed, map(_CUT_COLOURS.get, keys), strict=True))
    rows = cuts.assign(removed=removed).rename(columns=scores)
    points = rows.melt(["removed"], list(scores.values()), "score", "value").dropna()
    return bars(
        points.astype({"value": float}), "score", "value", "removed",
        title=f"{name} with features removed: {short_name(lm)}",
        subtitle=f"{n_subjects:,} held-out subjects; control: other features of the same hook "
        "points, as many and about as often active",
        colours=colours, percent=False,
    )  # fmt: skip


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
    edges = {(edge.source, edge.target): edge for graph in graphs for edge in graph.edges}
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
        colour = _KIND_COLOURS[edge.source.hook_point.kind]
        (x, y), (far_x, far_y) = positions[edge.source], positions[edge.target]
        axes.plot((x, far_x), (y, far_y), color=colour, alpha=0.7, zorder=1,
                  linewidth=0.6 + 3 * max(edge.cosine, 0) ** 2)  # fmt: skip
        # Near its source, where lines are apart.
        axes.text(x + 0.45 * (far_x - x), y + 0.45 * (far_y - y), f"{edge.cosine:.2f}",
                  fontsize=6.5, color=colour, ha="center", va="center", zorder=2,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    for feature, (x, y) in positions.items():
        text = f"{SHORT[feature.hook_point.kind]} {feature.index}"
        if feature.id in names:
            text += "\n" + " → ".join(legible(names[feature.id].split(" → "), 11))
        box = {"boxstyle": "round,pad=0.35", "linewidth": 2.6 if feature in starts else 1.0,
               "facecolor": "#F3EBC8" if feature in shared else "white",
               "edgecolor": _KIND_COLOURS[feature.hook_point.kind]}  # fmt: skip
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color=INK, bbox=box, zorder=3)
    return figure


def _positions(
    features: Collection[Feature], edges: Sequence[Edge]
) -> dict[Feature, tuple[float, float]]:
    """Centre of each box: a column per kind, the streams in the middle, and a row per height."""
    rows: dict[HookPoint, list[Feature]] = {}
    for feature in features:
        rows.setdefault(feature.hook_point, []).append(feature)
    # Lines from stream to stream pass between the columns of attention and MLP.
    attention, stream, mlp = (
        max((len(row) for at, row in rows.items() if at.kind == kind), default=0)
        for kind in ("attention_out", "residual", "mlp_out")
    )
    columns: dict[HookKind, float] = {
        "attention_out": -(stream + attention) / 2, "residual": 0.0, "mlp_out": (stream + mlp) / 2
    }  # fmt: skip
    heights = sorted({_height(at) for at in rows})
    positions: dict[Feature, tuple[float, float]] = {}

    def order(feature: Feature) -> tuple[float, Feature]:
        targets = [positions[edge.target][0] for edge in edges if edge.source == feature]
        return (sum(targets) / len(targets) if targets else 0.0, feature)

    for at in sorted(rows, key=_height, reverse=True):
        y = (heights.index(_height(at)) + 0.5) * _ROW
        for i, feature in enumerate(sorted(rows[at], key=order)):
            positions[feature] = (columns[at.kind] + i - (len(rows[at]) - 1) / 2) * _STEP, y
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
