"""Figures of the feature flow, in kind those of Laptev et al., 2025 (arXiv 2502.03032)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import PercentFormatter

from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    finish,
    new_figure,
    short_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lincorr_lightning.flow.results import (
        CutEffect,
        FeatureFlowReport,
        RelationFlow,
    )

_KINDS = {"residual": ("RES", BLUE), "mlp_out": ("MLP", ORANGE), "attention_out": ("ATT", GREEN)}
_GROUP_COLOURS = {
    "From nowhere": "#BBBBBB", "From RES": BLUE, "From MLP": ORANGE, "From ATT": GREEN,
    "From RES & MLP": "#CC79A7", "From RES & ATT": "#56B4E9", "From MLP & ATT": "#E69F00",
    "From RES & MLP & ATT": "#444444",
}  # fmt: skip
_METHOD_COLOURS = {"top-1": BLUE, "top-5": ORANGE, "one-to-one": GREEN}
_STRATEGY_COLOURS = {
    "single": GREY, "constant": BLUE, "linear": ORANGE, "exponential": GREEN
}  # fmt: skip


def groups_figure(report: FeatureFlowReport) -> Figure:
    """Share of each group by layer (figures 5, 12, 18)."""
    layers = [each.layer for each in report.groups]
    figure = new_figure(
        max(5.6, 0.5 * len(layers) + 3.6), 3.2,
        f"Where features of {short_name(report.lm)} come from",
        f"share of all activations on {report.n_tokens:,} tokens; a matched predecessor (top-1) "
        "counts if it is active at the same token",
    )  # fmt: skip
    axes = figure.add_subplot()
    bottom = np.zeros(len(layers))
    for group, colour in _GROUP_COLOURS.items():
        share = np.array([each.shares.get(group, 0.0) for each in report.groups])
        if not share.any():
            continue
        axes.bar(layers, share, 0.72, bottom=bottom, color=colour, label=group)
        for x, y, value in zip(layers, bottom + share / 2, share, strict=True):
            if value >= 0.06 and len(layers) <= 14:
                dark = group in ("From RES", "From MLP", "From ATT", "From RES & MLP & ATT")
                axes.text(x, y, f"{value:.0%}", ha="center", va="center", fontsize=8,
                          color="white" if dark else INK)  # fmt: skip
        bottom += share
    axes.set_xlabel("layer of the residual stream", color=INK)
    axes.set_ylabel("share of activations", color=INK)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xticks(layers[:: -(-len(layers) // 16)])
    axes.set_xlim(min(layers) - 0.8, max(layers) + 0.8)
    axes.set_ylim(0, 1)
    _plain(axes)
    axes.legend(reverse=True, loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False,
                fontsize=8.5, labelcolor=INK)  # fmt: skip
    return finish(figure)


def cosines_figure(report: FeatureFlowReport) -> Figure:
    """Activations of each group by the cosine of their predecessors (figures 3, 4, 14)."""
    kinds = [k for k in _KINDS if any(k in each.histograms for each in report.groups)]
    figure = new_figure(
        3.3 * len(kinds) + 1.9, 2.9, f"Cosines tell the groups apart: {short_name(report.lm)}",
        "all layers; AUROC: how well the cosine alone tells whether that predecessor is active too "
        "(mean over layers)",
    )  # fmt: skip
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        own = [each for each in report.groups if kind in each.histograms]
        for group, colour in _GROUP_COLOURS.items():
            counts = np.sum([each.histograms[kind][group] for each in own], axis=0)
            if not counts.any():
                continue
            edges = np.linspace(0, 1, len(counts) + 1)
            panel.stairs(counts / counts.sum() * len(counts), edges, color=colour, label=group,
                         linewidth=1.7)  # fmt: skip
        known = [each.auroc[kind] for each in own if each.auroc.get(kind) is not None]
        area = f"   AUROC {np.mean(known):.2f}" if known else ""  # type: ignore[arg-type]
        name = f"s({_KINDS[kind][0][0]})"
        panel.set_title(name + area, loc="left", fontsize=10, color=INK)
        panel.set_xlabel(f"cosine to the {_KINDS[kind][0]} predecessor", color=INK, fontsize=9)
        panel.set_xlim(0, 1)
        _plain(panel)
    panels[0].set_ylabel("density of activations", color=INK, fontsize=9)
    handles = {h.get_label(): h for p in panels for h in p.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), [str(name) for name in handles], loc="outside right upper",
                  frameon=False, fontsize=8.5, labelcolor=INK)  # fmt: skip
    return finish(figure)


def joint_activation_figure(report: FeatureFlowReport) -> Figure:
    """How often the predecessor is active with the feature, by their cosine."""
    figure = new_figure(
        5.6, 3.1, f"Cosine stands in for joint activation: {short_name(report.lm)}",
        "share of a feature’s activations at which its predecessor (top-1) is active too",
    )  # fmt: skip
    axes = figure.add_subplot()
    for kind, (short, colour) in _KINDS.items():
        own = [np.array(each.joint[kind], float) for each in report.groups if kind in each.joint]
        if not own:
            continue
        table = np.array(own)
        middle = (np.arange(table.shape[1]) + 0.5) / table.shape[1]
        known = ~np.isnan(table).all(0)
        mean = np.full(table.shape[1], math.nan)
        mean[known] = np.nanmean(table[:, known], 0)
        axes.plot(middle, mean, "o-", color=colour, label=f"from {short}", markersize=4)
        if len(own) > 1:
            for row in own:
                axes.plot(middle, row, color=colour, alpha=0.18, linewidth=0.8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("cosine of the decoders", color=INK)
    axes.set_ylabel("active together", color=INK)
    _plain(axes)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return finish(figure)


def transitions_figure(report: FeatureFlowReport) -> Figure:
    """Explained variance of transition matrices by k and weights (figures 21 to 23)."""
    kinds = [k for k in _KINDS if any(row.kind == k for row in report.transitions)]
    figure = new_figure(
        2.8 * len(kinds) + 2.4, 2.9,
        f"What a transition matrix carries over: {short_name(report.lm)}",
        "variance of the stream explained by the predecessor’s features (mean over layers); lines "
        "that leave the figure overshoot",
    )  # fmt: skip
    panels = figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        own = [row for row in report.transitions if row.kind == kind]
        ks = sorted({row.k for row in own})
        for compared, colour, marker in (("decoder", BLUE, "o"), ("encoder", ORANGE, "s")):
            means = [
                _mean_of([r.explained_variance for r in own if (r.k, r.compared) == (k, compared)])
                for k in ks
            ]
            panel.plot(range(len(ks)), means, marker=marker, color=colour, label=f"by {compared}s")
        ceiling = _mean_of([row.own for row in own])
        panel.axhline(
            ceiling, color=GREY, linestyle="--", linewidth=1, label="the target’s own SAE"
        )
        panel.axhline(0, color=PALE, linewidth=0.8, zorder=0)
        panel.set_xticks(range(len(ks)), [str(k) for k in ks])
        panel.set_xlabel("k", color=INK)
        panel.set_title(f"from {_KINDS[kind][0]}", loc="left", fontsize=10, color=INK)
        _plain(panel)
    # Many sources added up overshoot without bound, which is all there is to say of them.
    low = min(line.get_ydata()[0] for p in panels for line in p.get_lines()[:2])  # type: ignore[index]
    panels[0].set_ylim(min(-0.25, max(low - 0.1, -1.0)), 1.05)
    panels[0].set_ylabel("explained variance", color=INK)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5,
                      labelcolor=INK)  # fmt: skip
    return finish(figure)


def deactivation_figure(report: FeatureFlowReport) -> Figure:
    """Share of features switched off with their predecessors, beside the control (figure 6)."""
    least = report.least_r
    rows = [row for row in report.cuts if row.r == least and row.sources == "all"]
    groups = [g for g in ("all", *_GROUP_COLOURS) if any(row.group == g for row in rows)]
    methods = [m for m in _METHOD_COLOURS if any(row.method == m for row in rows)]
    figure = new_figure(
        max(6.6, 1.35 * len(groups) + 2.6), 3.1, f"Features switched off: {short_name(report.lm)}",
        f"predecessors {'removed' if least == 0 else 'rescaled'} (r = {least:g}) at one token; all "
        "layers; random: as many other features "
        "active there, of the same places",
    )  # fmt: skip
    axes = figure.add_subplot()
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        x = np.arange(len(groups)) + (i - (len(methods) - 1) / 2) * width
        matched = [_pooled(rows, method, "matched", group) for group in groups]
        random = [_pooled(rows, method, "random", group) for group in groups]
        axes.bar(x, matched, width * 0.92, color=_METHOD_COLOURS[method], label=method)
        label = "" if i else "random control"
        axes.hlines(random, x - width * 0.46, x + width * 0.46, color=INK, linewidth=2, label=label)
        for at, value in zip(x, matched, strict=True):
            if not math.isnan(value):
                axes.text(at, value + 0.01, f"{value:.0%}", ha="center", va="bottom", fontsize=7.5,
                          color=INK)  # fmt: skip
    counts = [sum(r.n for r in rows if (r.method, r.cut, r.group) == (methods[0], "matched", g))
              for g in groups]  # fmt: skip
    names = [g.removeprefix("From ") for g in groups]
    axes.set_xticks(range(len(groups)), [f"{g}\n{n:,} cases" for g, n in zip(names, counts,
                    strict=True)], fontsize=8.5)  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("switched off", color=INK)
    axes.set_ylim(0, min(1.08, 1.15 * max(bar.get_height() for bar in axes.patches) + 0.03))  # type: ignore[attr-defined]
    _plain(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5,
                labelcolor=INK)  # fmt: skip
    return finish(figure)


def rescaling_figure(report: FeatureFlowReport) -> Figure:
    """What becomes of features and losses as predecessors are rescaled (figures 7, 8)."""
    rows = [row for row in report.cuts if row.group == "all" and row.sources == "all"]
    whats = {
        "success": "switched off",
        "activation_change": "change of activation",
        "loss_change": "change of the loss",
    }
    figure = new_figure(9.6, 2.8, f"Rescaled predecessors: {short_name(report.lm)}",
                        "mean over all cases; solid: matched, dotted: random active features of "
                        "the same places")  # fmt: skip
    panels = figure.subplots(1, 3)
    for panel, (what, name) in zip(panels, whats.items(), strict=True):
        for method, colour in _METHOD_COLOURS.items():
            for cut, style in (("matched", "o-"), ("random", "o:")):
                strengths = sorted({row.r for row in rows if row.method == method})
                values = [_pooled_of([row for row in rows if (row.method, row.cut, row.r)
                                      == (method, cut, r)], what) for r in strengths]  # fmt: skip
                if strengths:
                    panel.plot(strengths, values, style, color=colour, markersize=3.5,
                               label=method if cut == "matched" else None)  # fmt: skip
        panel.axhline(0, color=PALE, linewidth=0.8, zorder=0)
        panel.set_xlabel("r: what is left of the predecessors", fontsize=8.5, color=INK)
        panel.set_title(name, loc="left", fontsize=10, color=INK)
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        _plain(panel)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5,
                      labelcolor=INK)  # fmt: skip
    return finish(figure)


def steering_figure(report: FeatureFlowReport) -> Figure:
    """Behaviour, coherence and their product over the strength (figures 9 to 11, 16, 17)."""
    rows = report.mean_steering()
    labels = list(dict.fromkeys(point.label for point in report.steering))
    named = ", ".join(labels[:6]) + (", …" if len(labels) > 6 else "")
    figure = new_figure(9.8, 2.8, f"Steering {short_name(report.lm)} along the flow",
                        f"towards {named}; mean over {len(labels)} answers; dashed line: not "
                        "steered")  # fmt: skip
    panels = figure.subplots(1, 3)
    whats = {
        "behaviour": "probability of the answer",
        "coherence": "perplexity of other texts, before / after",
        "score": "score: their product",
    }
    for panel, (what, name) in zip(panels, whats.items(), strict=True):
        for strategy, colour in _STRATEGY_COLOURS.items():
            own = sorted((r["strength"], r[what]) for r in rows if r["strategy"] == strategy)
            if own:
                # Where no feature is farther than a step, two strategies may be one line.
                style = "o--" if strategy == "exponential" else "o-"
                panel.plot(*zip(*own, strict=True), style, color=colour, markersize=3.5,
                           label=strategy)  # fmt: skip
        unsteered = [row[what] for row in rows if row["strength"] == 0]
        if unsteered:
            panel.axhline(unsteered[0], color=GREY, linewidth=0.9, linestyle="--", zorder=0)
        panel.set_xlabel("strength (in typical activations)", fontsize=8.5, color=INK)
        panel.set_title(name, loc="left", fontsize=9.5, color=INK)
        panel.set_ylim(-0.02, 1.04)
        _plain(panel)
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5,
                      labelcolor=INK)  # fmt: skip
    return finish(figure)


def relation_figure(relation: RelationFlow, lm: str) -> Figure:
    """A relation's tie with and without the features that its answers share."""
    whats = {
        "fixed": "r, old map", "target_only": "r, cut in the\ntarget’s prompt",
        "refitted": "r, map fitted\nto the cut LM", "recall": "target answers\nstill right",
    }  # fmt: skip
    whats = {k: v for k, v in whats.items() if any(row[k] is not None for row in relation.cuts)}
    figure = new_figure(8.6, 3.1, f"{relation.relation} with its features cut: {short_name(lm)}",
                        f"{relation.n_test:,} held-out X’s; control: other features of the same "
                        "places, as many and as often active")  # fmt: skip
    axes = figure.add_subplot()
    names = {"none": "nothing cut", "carriers": "carriers of both answers",
             "flow": "where both flows meet"}  # fmt: skip
    colours = {"none": INK, "carriers": BLUE, "flow": ORANGE}
    width = 0.8 / len(relation.cuts)
    for i, row in enumerate(relation.cuts):
        x = np.arange(len(whats)) + (i - (len(relation.cuts) - 1) / 2) * width
        values = [math.nan if row[what] is None else row[what] for what in whats]
        name = names[row["cut"]] + (f" ({row['n_features']})" if row["n_features"] else "")
        if row["control"]:
            axes.bar(x, values, width * 0.92, facecolor="white", edgecolor=colours[row["cut"]],
                     linewidth=1.3, hatch="///", label="control of these")  # fmt: skip
        else:
            axes.bar(x, values, width * 0.92, color=colours[row["cut"]], label=name)
        for at, value in zip(x, values, strict=True):
            if not math.isnan(value):
                axes.text(at, max(value, 0) + 0.012, f"{value:.2f}".lstrip("0") or "0",
                          ha="center", va="bottom", fontsize=7.5, color=INK)  # fmt: skip
    axes.set_xticks(range(len(whats)), list(whats.values()), fontsize=9)
    axes.axhline(0, color=GREY, linewidth=0.7)
    axes.set_ylim(min(0, *(row[w] or 0 for row in relation.cuts for w in whats)) - 0.02, 1.1)
    _plain(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5,
                labelcolor=INK)  # fmt: skip
    return finish(figure)


# -- what they share -----------------------------------------------------------------------------


def _plain(axes: Axes) -> None:
    axes.tick_params(labelsize=8.5, length=2, color=GREY, labelcolor=INK)
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _pooled(rows: Sequence[CutEffect], method: str, cut: str, group: str) -> float:
    own = [row for row in rows if (row.method, row.cut, row.group) == (method, cut, group)]
    return _pooled_of(own, "success")


def _pooled_of(rows: Sequence[CutEffect], what: str) -> float:
    """Mean over the cases of all layers."""
    known = [(row.n, getattr(row, what)) for row in rows if getattr(row, what) is not None]
    n = sum(count for count, _ in known)
    return sum(count * value for count, value in known) / n if n else math.nan


def _mean_of(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan
