"""Figures of the geometry of knowledges' prompts, beside the ties between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from lincorr_lightning.results.heat_maps import correlation_heatmap
from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    finish,
    legible,
    new_figure,
    plain_axes,
)

if TYPE_CHECKING:
    from lincorr_lightning.geometry.knowledge_results import (
        Floats,
        KnowledgeGeometryReport,
    )

_MOST_NAMES = 24
_ALPHA = 0.05
_WHAT = {"r": "label-wise r", "excess": "r above the control", "hit1": "Hit@1"}
_COLOURS = {"r": BLUE, "excess": GREEN, "hit1": ORANGE}


def closeness_figure(report: KnowledgeGeometryReport) -> Figure:
    """Overlap and difference of ID against what maps reach, a point for each two knowledges.

    Args:
        report: What was found.
    """
    k, n2 = report.ks[report.middle_k], report.range_scalings[0]
    rows = list(report.score_matrices)
    worded = report.test("wording", "", "r")
    figure = new_figure(
        7.4, 2.6 * len(rows) + 0.2, f"Are tied knowledges close in geometry? {report.lm}",
        f"a point for each two of {len(report.names)} knowledges, {report.n_subjects:,} X’s; "
        f"p: permuted knowledges; wording alone: {_found(worded)}",
    )  # fmt: skip
    panels = figure.subplots(len(rows), 2, squeeze=False)
    columns = (
        ("overlap", f"k={k}", report.overlap_matrix(report.middle_k), "overlap of neighborhoods"),
        ("dimension_difference", f"n2={n2}", report.difference_matrix(0),
         "difference of log ID"),
    )  # fmt: skip
    for axes_row, against in zip(panels, rows, strict=True):
        for axes, (kind, setting, matrix, name) in zip(axes_row, columns, strict=True):
            _points(axes, matrix, report.score_matrices[against], _COLOURS[against])
            rho = _found(report.test(kind, setting, against))
            label = f"{name}, {setting.replace('=', ' = ')}"
            plain_axes(axes, rho, label, _WHAT[against])
    return finish(figure)


def overlap_figure(report: KnowledgeGeometryReport) -> Figure:
    """Heat map of the overlap of all pairs, on average over layers.

    Args:
        report: What was found.
    """
    k = report.ks[report.middle_k]
    matrix = report.overlap_matrix(report.middle_k)
    chance = k / (report.n_subjects - 1)
    layers = f"mean over {len(report.layers)} layers" if len(report.layers) > 1 else "its one layer"
    figure = correlation_heatmap(
        matrix, report.names, report.names,
        f"Overlap of the neighborhoods of X under two prompts, {report.lm}",
        f"k = {k}, {layers}; {report.n_subjects:,} X’s; by chance {chance:.3f}",
        "neighborhood overlap", limit=float(np.nanmax(matrix)) or 1.0,
    )  # fmt: skip
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        axis.label.set_text("knowledge")
    return figure


def dimension_figure(report: KnowledgeGeometryReport) -> Figure:
    """ID of each knowledge's cloud, by layer and by range scaling.

    Args:
        report: What was found.
    """
    names = report.names[:_MOST_NAMES]
    deep = len(report.layers) > 1
    left_out = len(report.names) - len(names)
    note = f"; {len(names)} of {len(report.names)} knowledges" if left_out else ""
    columns = 1 + deep
    figure = new_figure(
        3.7 * columns + 2.6, 4.0, f"Intrinsic dimension of each knowledge’s prompts, {report.lm}",
        f"{report.n_subjects:,} X’s; a point is the last token of a prompt{note}",
    )  # fmt: skip
    panels = figure.subplots(1, columns, squeeze=False)[0]
    palette = matplotlib.colormaps["tab20"]
    shown, _ = legible(names)
    for i, (name, label) in enumerate(zip(names, shown, strict=True)):
        values = report.dimension[name]
        style = {"color": palette(i % 20), "linewidth": 1.3, "marker": "o" if i < 20 else "s"}
        panels[0].plot(report.range_scalings, values[-1], markersize=3, label=label, **style)
        if deep:
            marker = 3 if len(report.layers) <= 12 else 0
            panels[1].plot(report.layers, values[:, 0], markersize=marker, **style)
    plain_axes(panels[0], f"layer {report.layers[-1]}", "range scaling n2", "intrinsic dimension")
    panels[0].set_xscale("log", base=2)
    panels[0].xaxis.set_major_locator(FixedLocator(list(report.range_scalings)))
    panels[0].xaxis.set_minor_locator(NullLocator())
    panels[0].xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if deep:
        plain_axes(panels[1], f"n2 = {report.range_scalings[0]}", "layer", "")
        panels[1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    handles, labels = panels[0].get_legend_handles_labels()
    # Of the figure it would reach into the title.
    panels[-1].legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0,
        frameon=False, fontsize=7.5, labelspacing=0.3,
    )  # fmt: skip
    return finish(figure)


def rho_figure(report: KnowledgeGeometryReport) -> Figure:
    """Rho of closeness and what maps reach, layer by layer.

    Args:
        report: What was found, of two layers or more.
    """
    kinds = (("overlap", f"k={report.ks[report.middle_k]}"),
             ("dimension_difference", f"n2={report.range_scalings[0]}"))  # fmt: skip
    figure = new_figure(
        7.4, 2.9, f"Closeness and ties layer by layer, {report.lm}",
        f"Spearman over pairs of knowledges; filled: p < {_ALPHA:g} by permutation",
    )  # fmt: skip
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (kind, setting) in zip(panels, kinds, strict=True):
        for against in report.score_matrices:
            rows = [r for r in report.tests if r[:2] == [kind, setting] and r[2] != "all"]
            rows = [r for r in rows if r[3:5] == [against, None] and r[5] is not None]
            known = [(int(r[2]), r[5], r[6]) for r in rows]
            colour = _COLOURS[against]
            axes.plot([layer for layer, _, _ in known], [rho for _, rho, _ in known],
                      color=colour, linewidth=1.5, label=_WHAT[against])  # fmt: skip
            for layer, rho, p in known:
                face = colour if p < _ALPHA else "white"
                axes.plot(layer, rho, "o", color=colour, markerfacecolor=face, markersize=4.5)
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        title = kind.replace("_", " of ").replace("dimension of difference", "difference of log ID")
        plain_axes(axes, f"{title}, {setting.replace('=', ' = ')}", "layer", "")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_ylabel("Spearman ρ", fontsize=8.5, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return finish(figure)


def _found(test: dict[str, Any]) -> str:
    if test["spearman"] is None:
        return "too few pairs"
    p = "p < 0.001" if test["p"] < 0.001 else f"p = {test['p']:.3f}"
    return f"ρ = {test['spearman']:.2f}, {p}".replace("-", "−")


def _points(axes: Axes, x: Floats, y: Floats, colour: str) -> None:
    upper = np.triu_indices(len(x), 1)
    known = np.isfinite(x[upper]) & np.isfinite(y[upper])
    axes.plot(x[upper][known], y[upper][known], "o", color=colour, markersize=4, alpha=0.6,
              markeredgewidth=0)  # fmt: skip
    if not known.any():
        axes.set_ylim(0, 1)
