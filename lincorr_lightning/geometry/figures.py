"""Figures of token geometry and of knowledge geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, ScalarFormatter

from lincorr_lightning.geometry.closeness import KnowledgeCloseness
from lincorr_lightning.geometry.mantel import Floats, MantelResult
from lincorr_lightning.geometry.profiles import TokenProfiles
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
    panels_of,
    plain_axes,
)

_PANEL = (3.4, 2.5)  # inches
_MAX_CLOUDS = 24
_MAX_MARKED_LAYERS = 12
_ALPHA = 0.01
_MANTEL_ALPHA = 0.05
_NAMES = {
    "dimension": "intrinsic dimension", "overlap": "neighborhood overlap",
    "cosine_mean": "cosine similarity", "angle_mean": "neighbor angle (°)",
}  # fmt: skip
_SCORES = {"r": "label-wise r", "excess": "r above the control", "hit1": "Hit@1"}
_SCORE_COLOURS = {"r": BLUE, "excess": GREEN, "hit1": ORANGE}

# -- token geometry --------------------------------------------------------------------------------


def profiles_figure(profiles: TokenProfiles, lm: str) -> Figure:
    """Draw ID, overlap, cosine and angle by layer, a curve per shuffling level."""
    n2, k = profiles.range_scalings[0], profiles.ks[profiles.paper_k]
    panels = [(f"{_NAMES['dimension']}, n2 = {n2}", profiles.layers, profiles.dimension[..., 0])]
    if profiles.overlap.shape[2]:
        values = profiles.overlap[..., profiles.paper_k]
        panels.append((f"{_NAMES['overlap']}, k = {k}", profiles.layers[:-1], values))
    for name in ("cosine_mean", "angle_mean"):
        panels.append((_NAMES[name], profiles.layers, profiles.profiles[name]))
    note = f"{_prompts(profiles)}; bands: standard deviation over prompts"
    figure, axes = _panels(len(panels), f"Token geometry of {lm}", note)
    for panel, (title, layers, values) in zip(axes, panels, strict=True):
        for i, (label, colour) in enumerate(_levels(profiles)):
            _curve(panel, layers, values[:, i], label, colour)
        _finish(panel, title, profiles.layers)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", ncols=2, frameon=False,
        fontsize=8, handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip
    return finish(figure)


def dimension_loss_figure(profiles: TokenProfiles, lm: str) -> Figure:
    """Draw r of log ID and log loss by layer with its confidence band, and one layer's prompts."""
    level = list(profiles.shuffles).index(0) if 0 in profiles.shuffles else 0
    tests = [profiles.dimension_loss(level, j, 0) for j in range(len(profiles.layers))]
    known = [(layer, t) for layer, t in zip(profiles.layers, tests, strict=True) if t is not None]
    n2 = profiles.range_scalings[0]
    figure, (left, right) = _panels(
        2, f"Intrinsic dimension and loss over prompts, {lm}",
        f"{_prompts(profiles)}; S = {profiles.shuffles[level]}, n2 = {n2}; band: 95% confidence; "
        f"filled: p < {_ALPHA:g}",
    )  # fmt: skip
    _finish(left, "Pearson r of log ID and log loss", profiles.layers)
    left.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    left.set_ylim(-1.05, 1.05)
    if not known:
        for axes in (left, right):
            axes.text(0.5, 0.5, "too few prompts", transform=axes.transAxes, ha="center",
                      va="center", color=GREY, fontsize=9)  # fmt: skip
        return finish(figure)
    layers = [layer for layer, _ in known]
    left.plot(layers, [t.pearson for _, t in known], color=BLUE, linewidth=1.7)
    low, high = [t.low for _, t in known], [t.high for _, t in known]
    left.fill_between(layers, low, high, color=BLUE, alpha=0.18, linewidth=0)
    if len(layers) == 1:  # a band of one layer has no width
        left.vlines(layers, low, high, color=BLUE, alpha=0.4, linewidth=4)
    for layer, t in known:
        face = BLUE if t.pearson_p < _ALPHA else "white"
        left.plot(layer, t.pearson, "o", color=BLUE, markerfacecolor=face, markersize=5)
    layer, strongest = max(known, key=lambda pair: abs(pair[1].pearson))
    x = profiles.dimension[:, level, list(profiles.layers).index(layer), 0]
    y = profiles.loss[:, level]
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    right.plot(x, y, "o", color=BLUE, markersize=3.5, alpha=0.6, markeredgewidth=0)
    if len(x) > 1 and np.ptp(x) > 0:
        slope, offset = np.polyfit(np.log(x), np.log(y), 1)
        ends = np.array([x.min(), x.max()])
        right.plot(ends, np.exp(offset) * ends**slope, color=ORANGE, linewidth=1.5)
    numbers = f"r = {_signed(strongest.pearson)}, {_p(strongest.pearson_p)}"
    title = f"layer {layer}, the strongest: {numbers}"
    plain_axes(right, title, "intrinsic dimension", "loss (nats)")
    right.set_xscale("log")
    right.set_yscale("log")
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(MaxNLocator(1))
        axis.set_minor_formatter(lambda *_: "")
    return finish(figure)


# -- knowledge geometry ----------------------------------------------------------------------------


def closeness_figure(closeness: KnowledgeCloseness, lm: str) -> Figure:
    """Draw overlap and difference of log ID against the scores of the maps, a point per pair."""
    k, n2 = closeness.ks[closeness.middle_k], closeness.range_scalings[0]
    rows = list(closeness.score_matrices)
    wording = closeness.test("wording", "", "r")
    figure = new_figure(
        7.4, 2.6 * len(rows) + 0.2, f"Is correlated knowledge close in geometry? {lm}",
        f"a point per pair of {len(closeness.names)} kinds of knowledge, "
        f"{closeness.n_subjects:,} subjects; p by permutation; wording alone: {_rho(wording)}",
    )  # fmt: skip
    panels = figure.subplots(len(rows), 2, squeeze=False)
    columns = (
        ("overlap", f"k={k}", closeness.overlap_matrix(closeness.middle_k),
         "overlap of neighborhoods"),
        ("dimension_difference", f"n2={n2}", closeness.difference_matrix(0),
         "difference of log ID"),
    )  # fmt: skip
    for axes_row, against in zip(panels, rows, strict=True):
        for axes, (kind, setting, matrix, name) in zip(axes_row, columns, strict=True):
            _points(axes, matrix, closeness.score_matrices[against], _SCORE_COLOURS[against])
            rho = _rho(closeness.test(kind, setting, against))
            label = f"{name}, {setting.replace('=', ' = ')}"
            plain_axes(axes, rho, label, _SCORES[against])
    return finish(figure)


def overlap_matrix_figure(closeness: KnowledgeCloseness, lm: str) -> Figure:
    """Draw a heat map of the overlap of all pairs, on average over layers."""
    k = closeness.ks[closeness.middle_k]
    matrix = closeness.overlap_matrix(closeness.middle_k)
    chance = k / (closeness.n_subjects - 1)
    n_layers = len(closeness.layers)
    layers = f"mean over {n_layers} layers" if n_layers > 1 else "its one layer"
    figure = correlation_heatmap(
        matrix, closeness.names, closeness.names,
        f"Overlap of a subject’s neighborhoods under two prompts, {lm}",
        f"k = {k}, {layers}; {closeness.n_subjects:,} subjects; by chance {chance:.3f}",
        "neighborhood overlap", limit=float(np.nanmax(matrix)) or 1.0,
    )  # fmt: skip
    for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis):
        axis.label.set_text("knowledge")
    return figure


def dimension_figure(closeness: KnowledgeCloseness, lm: str) -> Figure:
    """Draw the ID of each cloud by layer and by range scaling."""
    n, names = len(closeness.names), closeness.names[:_MAX_CLOUDS]
    deep = len(closeness.layers) > 1
    note = f"; {len(names)} of {n} kinds of knowledge" if len(names) < n else ""
    figure = new_figure(
        3.7 * (1 + deep) + 2.6, 4.0, f"Intrinsic dimension of the prompts, {lm}",
        f"{closeness.n_subjects:,} subjects; a point is the last token of a prompt{note}",
    )  # fmt: skip
    panels = panels_of(figure, 1 + deep, 1 + deep)
    palette = matplotlib.colormaps["tab20"]
    shown = legible(names)
    for i, (name, label) in enumerate(zip(names, shown, strict=True)):
        values = closeness.dimension[name]
        style: dict[str, Any] = {
            "color": palette(i % 20), "linewidth": 1.3, "marker": "o" if i < 20 else "s",
        }  # fmt: skip
        panels[0].plot(closeness.range_scalings, values[-1], markersize=3, label=label, **style)
        if deep:
            marker = 3 if len(closeness.layers) <= _MAX_MARKED_LAYERS else 0
            panels[1].plot(closeness.layers, values[:, 0], markersize=marker, **style)
    title = f"layer {closeness.layers[-1]}"
    plain_axes(panels[0], title, "range scaling n2", "intrinsic dimension")
    panels[0].set_xscale("log", base=2)
    panels[0].xaxis.set_major_locator(FixedLocator(list(closeness.range_scalings)))
    panels[0].xaxis.set_minor_locator(NullLocator())
    panels[0].xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    if deep:
        plain_axes(panels[1], f"n2 = {closeness.range_scalings[0]}", "layer", "")
        panels[1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    handles, labels = panels[0].get_legend_handles_labels()
    # A legend of the figure would overlap the title.
    panels[-1].legend(
        handles, labels, loc="upper left", bbox_to_anchor=(1.02, 1), borderaxespad=0,
        frameon=False, fontsize=7.5, labelspacing=0.3,
    )  # fmt: skip
    return finish(figure)


def rho_figure(closeness: KnowledgeCloseness, lm: str) -> Figure:
    """Draw rho of closeness and the scores of the maps by layer."""
    kinds = (("overlap", f"k={closeness.ks[closeness.middle_k]}"),
             ("dimension_difference", f"n2={closeness.range_scalings[0]}"))  # fmt: skip
    figure = new_figure(
        7.4, 2.9, f"Closeness and linear correlation by layer, {lm}",
        f"Spearman over pairs; filled: p < {_MANTEL_ALPHA:g} by permutation",
    )  # fmt: skip
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (kind, setting) in zip(panels, kinds, strict=True):
        for against in closeness.score_matrices:
            found = [
                (test.layer, test.result)
                for test in closeness.tests
                if (test.closeness, test.setting, test.against) == (kind, setting, against)
                and test.given is None and test.layer is not None and test.result is not None
            ]  # fmt: skip
            colour = _SCORE_COLOURS[against]
            axes.plot([layer for layer, _ in found], [result.spearman for _, result in found],
                      color=colour, linewidth=1.5, label=_SCORES[against])  # fmt: skip
            for layer, result in found:
                face = colour if result.p < _MANTEL_ALPHA else "white"
                axes.plot(layer, result.spearman, "o", color=colour, markerfacecolor=face,
                          markersize=4.5)  # fmt: skip
        axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
        title = kind.replace("_", " of ").replace("dimension of difference", "difference of log ID")
        plain_axes(axes, f"{title}, {setting.replace('=', ' = ')}", "layer", "")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    panels[0].set_ylabel("Spearman ρ", fontsize=8.5, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return finish(figure)


# -- parts -----------------------------------------------------------------------------------------


def _prompts(profiles: TokenProfiles) -> str:
    n = len(profiles.prompts)
    return f"{n:,} prompt{'s' * (n != 1)} of {profiles.n_tokens:,} tokens"


def _levels(profiles: TokenProfiles) -> list[tuple[str, str]]:
    """Return the label and the colour of each shuffling level."""

    def label(level: int) -> str:
        if level == 0:
            return "S = 0, as written"
        n_blocks = 4**level
        what = "every token" if n_blocks == profiles.n_tokens else f"{n_blocks:,} blocks"
        return f"S = {level}, {what}"

    labels = list(map(label, profiles.shuffles))
    if len(labels) <= 2:
        return list(zip(labels, (BLUE, ORANGE), strict=False))
    # From dark to light, distinct in grey as well.
    viridis = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(labels)))
    return list(zip(labels, map(matplotlib.colors.to_hex, viridis), strict=True))


def _panels(n: int, title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    """Return a figure with n panels, two side by side."""
    height = _PANEL[1] * math.ceil(n / 2) + 0.5
    figure = new_figure(2 * _PANEL[0] + 0.2, height, title, subtitle)
    return figure, panels_of(figure, n, 2)


def _curve(axes: Axes, layers: Sequence[int], values: Floats, label: str, colour: str) -> None:
    """Draw the mean over prompts with a band of one standard deviation."""
    known = np.ma.masked_invalid(values)
    middle, around = known.mean(0).filled(np.nan), known.std(0).filled(np.nan)
    marker = "o" if len(layers) <= _MAX_MARKED_LAYERS else ""
    axes.plot(layers, middle, color=colour, label=label, linewidth=1.6, marker=marker, markersize=3)
    axes.fill_between(layers, middle - around, middle + around, color=colour, alpha=0.13,
                      linewidth=0)  # fmt: skip
    if len(layers) == 1:  # a band of one layer has no width
        axes.errorbar(layers, middle, around, color=colour, alpha=0.4, linewidth=1, capsize=8)


def _finish(axes: Axes, title: str, layers: Sequence[int]) -> None:
    """Put layers on x, with the same limits in all panels."""
    plain_axes(axes, title, "layer", "")
    axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _p(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {value:.3f}".replace("0.", ".", 1)


def _rho(test: MantelResult | None) -> str:
    if test is None:
        return "too few pairs"
    return f"ρ = {_signed(test.spearman)}, {_p(test.p)}"


def _points(axes: Axes, x: Floats, y: Floats, colour: str) -> None:
    """Draw a point per pair of which both matrices have a number."""
    upper = np.triu_indices(len(x), 1)
    x, y = x[upper], y[upper]
    known = np.isfinite(x) & np.isfinite(y)
    axes.plot(x[known], y[known], "o", color=colour, markersize=4, alpha=0.6, markeredgewidth=0)
    if not known.any():
        axes.set_ylim(0, 1)
