"""Figures of token geometry: curves over layers, and what goes together over prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from lincorr_lightning.results.style import (
    BLUE,
    GREY,
    ORANGE,
    finish,
    new_figure,
    plain_axes,
)

if TYPE_CHECKING:
    from lincorr_lightning.geometry.results import Floats, GeometryReport

_PANEL = (3.4, 2.5)  # inches
_MOST_PANELS = 6
_SHOWN_KS = (1, 2, 4, 8, 16, 31)
_ALPHA = 0.01
_FEW = 12
_NAMES = {
    "dimension": "intrinsic dimension", "overlap": "neighborhood overlap",
    "cosine_mean": "cosine similarity", "angle_mean": "neighbor angle (°)",
}  # fmt: skip
_BANDS = "bands: standard deviation over prompts"


def profiles_figure(report: GeometryReport) -> Figure:
    """ID, overlap, cosine and angle by layer, a curve for each shuffling level.

    Args:
        report: What was observed.
    """
    n2, k = report.range_scalings[0], report.ks[report.paper_k]
    panels = [(f"{_NAMES['dimension']}, n2 = {n2}", report.layers, report.dimension[..., 0])]
    if report.overlap.shape[2]:
        values = report.overlap[..., report.paper_k]
        panels.append((f"{_NAMES['overlap']}, k = {k}", report.layers[:-1], values))
    for name in ("cosine_mean", "angle_mean"):
        panels.append((_NAMES[name], report.layers, report.profiles[name]))
    figure, axes = _panels(
        len(panels), 2, f"Token geometry of {report.lm}", f"{_told(report)}; {_BANDS}"
    )
    for panel, (title, layers, values) in zip(axes, panels, strict=True):
        for i, (label, colour) in enumerate(_levels(report)):
            _curve(panel, layers, values[:, i], label, colour)
        _finish(panel, title, report.layers)
    _legend(figure, axes)
    return finish(figure)


def scalings_figure(report: GeometryReport) -> Figure:
    """ID by layer, a curve for each range scaling and a panel for each shuffling level.

    Args:
        report: What was observed.
    """
    shown = report.shuffles[:_MOST_PANELS]
    figure, axes = _panels(
        len(shown), 3, f"Intrinsic dimension of {report.lm} by range scaling",
        f"{_told(report)}; {_BANDS}",
    )  # fmt: skip
    colours = _colours(len(report.range_scalings))
    for i, (panel, (label, _)) in enumerate(zip(axes, _levels(report), strict=False)):
        for j, n2 in enumerate(report.range_scalings):
            values = report.dimension[:, i, :, j]
            _curve(panel, report.layers, values, f"n2 = {n2}", colours[j])
        _finish(panel, label, report.layers)
    _alike(axes)
    _legend(figure, axes)
    return finish(figure)


def overlap_figure(report: GeometryReport) -> Figure:
    """Overlap with the next layer at many ks, a curve for each shuffling level.

    Of a deep LM there is a panel for each of some ks, and x is the layer; of one of few layers a
    panel for each two of them, and x is k.

    Args:
        report: What was observed, of two layers or more.
    """
    n_pairs = report.overlap.shape[2]
    deep = n_pairs > _MOST_PANELS
    chosen = [i for i, k in enumerate(report.ks) if k in _SHOWN_KS] or list(range(len(report.ks)))
    panels = chosen[:_MOST_PANELS] if deep else list(range(n_pairs))
    note = "; all k: tables/layers.csv" if deep else ""
    figure, axes = _panels(
        len(panels), 3, f"Neighborhood overlap of {report.lm} with the next layer",
        f"{_told(report)}; {_BANDS}{note}",
    )  # fmt: skip
    for panel, at in zip(axes, panels, strict=True):
        for i, (label, colour) in enumerate(_levels(report)):
            values = report.overlap[:, i, :, at] if deep else report.overlap[:, i, at]
            _curve(panel, report.layers[:-1] if deep else report.ks, values, label, colour)
        if deep:
            _finish(panel, f"k = {report.ks[at]}", report.layers)
        else:
            plain_axes(panel, f"layers {report.layers[at]} and {report.layers[at + 1]}", "k", "")
            panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _alike(axes)
    _legend(figure, axes)
    return finish(figure)


def dimension_loss_figure(report: GeometryReport) -> Figure:
    """Log ID against log loss: r by layer with its confidence band, and the prompts of one layer.

    Args:
        report: What was observed.
    """
    level = list(report.shuffles).index(0) if 0 in report.shuffles else 0
    ties = [report.dimension_loss(level, j, 0) for j in range(len(report.layers))]
    known = [(layer, t) for layer, t in zip(report.layers, ties, strict=True) if t is not None]
    n2 = report.range_scalings[0]
    figure, (left, right) = _panels(
        2, 2, f"Intrinsic dimension and loss over prompts, {report.lm}",
        f"{_told(report)}; S = {report.shuffles[level]}, n2 = {n2}; band: 95% confidence; "
        f"filled: p < {_ALPHA:g}",
    )  # fmt: skip
    _finish(left, "Pearson r of log ID and log loss", report.layers)
    left.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    left.set_ylim(-1.05, 1.05)
    if not known:
        _say_nothing(left)
        _say_nothing(right)
        return finish(figure)
    layers = [layer for layer, _ in known]
    left.plot(layers, [t.pearson for _, t in known], color=BLUE, linewidth=1.7)
    low, high = [t.low for _, t in known], [t.high for _, t in known]
    left.fill_between(layers, low, high, color=BLUE, alpha=0.18, linewidth=0)
    if len(layers) == 1:  # a band of one layer has no width
        left.vlines(layers, low, high, color=BLUE, alpha=0.4, linewidth=4)
    for layer, t in known:
        sure = BLUE if t.pearson_p < _ALPHA else "white"
        left.plot(layer, t.pearson, "o", color=BLUE, markerfacecolor=sure, markersize=5)
    layer, strongest = max(known, key=lambda pair: abs(pair[1].pearson))
    x = report.dimension[:, level, list(report.layers).index(layer), 0]
    _scatter(right, x, report.loss[:, level], BLUE, fitted=True)
    told = f"r = {_signed(strongest.pearson)}, {_p(strongest.pearson_p)}"
    told = f"layer {layer}, the strongest: {told}"
    plain_axes(right, told, "intrinsic dimension", "loss (nats)")
    right.set_xscale("log")
    right.set_yscale("log")
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(MaxNLocator(1))
        axis.set_minor_formatter(lambda *_: "")
    return finish(figure)


def said_figure(report: GeometryReport) -> Figure:
    """Contextual entropy, against the ID of the LM's probabilities and against its loss.

    Args:
        report: What was observed.
    """
    n2 = report.range_scalings[0]
    figure, axes = _panels(
        2, 2, f"What {report.lm} says of the next token", f"{_told(report)}; a point a prompt"
    )
    for i, (label, colour) in enumerate(_levels(report)):
        entropy = report.entropy[:, i]
        _scatter(axes[0], entropy, report.logits_dimension[:, i, 0], colour, label=label)
        _scatter(axes[1], entropy, report.loss[:, i], colour)
    plain_axes(axes[0], f"ID of the cloud of probabilities, n2 = {n2}", "mean entropy (nats)",
               "intrinsic dimension")  # fmt: skip
    plain_axes(axes[1], "loss", "mean entropy (nats)", "loss (nats)")
    _legend(figure, axes)
    return finish(figure)


# -- parts -------------------------------------------------------------------------------------


def _told(report: GeometryReport) -> str:
    n = len(report.prompts)
    return f"{n:,} prompt{'s' * (n != 1)} of {report.n_tokens:,} tokens"


def _levels(report: GeometryReport) -> list[tuple[str, str]]:
    """Label and colour of each shuffling level."""

    def label(level: int) -> str:
        if level == 0:
            return "S = 0, as written"
        n_blocks = 4**level
        what = "every token" if n_blocks == report.n_tokens else f"{n_blocks:,} blocks"
        return f"S = {level}, {what}"

    return list(zip(map(label, report.shuffles), _colours(len(report.shuffles)), strict=True))


def _colours(n: int) -> list[str]:
    """From dark to light, told apart in grey as well."""
    if n <= 2:
        return [BLUE, ORANGE][:n]
    viridis = matplotlib.colormaps["viridis"]
    return [matplotlib.colors.to_hex(viridis(x)) for x in np.linspace(0, 0.86, n)]


def _panels(n: int, n_columns: int, title: str, subtitle: str) -> tuple[Figure, list[Axes]]:
    n_columns = min(n_columns, n) if n != 4 else 2
    n_rows = math.ceil(n / n_columns)
    width = max(_PANEL[0] * n_columns + 0.2, 5.0)
    figure = new_figure(width, _PANEL[1] * n_rows + 0.5, title, subtitle)
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
    for empty in panels[n:]:
        empty.set_axis_off()
    return figure, panels[:n]


def _curve(axes: Axes, layers: Sequence[int], values: Floats, label: str, colour: str) -> None:
    """Mean over prompts, and a band of one standard deviation; x is mostly the layer."""
    known = np.ma.masked_invalid(values)
    middle, around = known.mean(0).filled(np.nan), known.std(0).filled(np.nan)
    marker = "o" if len(layers) <= _FEW else ""
    axes.plot(layers, middle, color=colour, label=label, linewidth=1.6, marker=marker, markersize=3)
    axes.fill_between(layers, middle - around, middle + around, color=colour, alpha=0.13,
                      linewidth=0)  # fmt: skip
    if len(layers) == 1:  # a band of one layer has no width
        axes.errorbar(layers, middle, around, color=colour, alpha=0.4, linewidth=1, capsize=8)


def _finish(axes: Axes, title: str, layers: Sequence[int]) -> None:
    """Layers on x, the same in all panels."""
    plain_axes(axes, title, "layer", "")
    axes.set_xlim(layers[0] - 0.5, layers[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _scatter(
    axes: Axes, x: Floats, y: Floats, colour: str, label: str = "", fitted: bool = False
) -> None:
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    axes.plot(x, y, "o", color=colour, markersize=3.5, alpha=0.6, markeredgewidth=0,
              label=label or "_")  # fmt: skip
    if fitted and len(x) > 1 and np.ptp(x) > 0:
        slope, offset = np.polyfit(np.log(x), np.log(y), 1)
        ends = np.array([x.min(), x.max()])
        axes.plot(ends, np.exp(offset) * ends**slope, color=ORANGE, linewidth=1.5)


def _alike(axes: Sequence[Axes]) -> None:
    """One scale in all panels."""
    limits = [panel.get_ylim() for panel in axes]
    for panel in axes:
        panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def _legend(figure: Figure, axes: Sequence[Axes]) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    # Four labels take some seven inches.
    ncols = min(len(labels), 4 if figure.get_figwidth() > 7.5 else 2)
    figure.legend(
        handles, labels, loc="outside lower left", ncols=ncols, frameon=False,
        fontsize=8, handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip


def _say_nothing(axes: Axes) -> None:
    axes.text(0.5, 0.5, "too few prompts", transform=axes.transAxes, ha="center", va="center",
              color=GREY, fontsize=9)  # fmt: skip


def _signed(value: float) -> str:
    return f"{value:.2f}".replace("-", "−")


def _p(value: float) -> str:
    return "p < .001" if value < 0.001 else f"p = {value:.3f}".replace("0.", ".", 1)
