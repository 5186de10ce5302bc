"""Figures of the vocabulary ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from lincorr_lightning.results.style import (
    BLUE,
    GREY,
    HALO,
    INK,
    ORANGE,
    bare_axes,
    finish,
    new_figure,
)

_PALE_BLUE = "#9DC3E6"


def generalization_bars(rows: Sequence[Mapping[str, Any]], title: str, subtitle: str) -> Figure:
    """Draw a bar for each mapping, with and without the compose phase, beside the baselines.

    Args:
        rows: A row for each mapping: ``mapping``, ``generalized`` and its ``std`` over seeds (or
            None), ``uncomposed`` (or None), ``random``, ``majority``, ``paper`` (or None).
        title: Title of the figure.
        subtitle: What one must know to read it.
    """
    figure = new_figure(max(4.6, 1.7 * len(rows) + 2.4), 3.4, title, subtitle)
    axes = figure.add_subplot()
    for x, row in enumerate(rows):
        _draw_mapping(axes, x, row)
    axes.set_xticks(range(len(rows)), [row["mapping"] for row in rows], fontsize=9.5)
    axes.set_xlim(-0.62, len(rows) - 0.38)
    axes.set_ylim(0, 1.08)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(labelsize=8.5)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    bare_axes(axes, "y")
    axes.spines["bottom"].set_visible(True)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        list(handles.values()), list(handles), loc="upper left", bbox_to_anchor=(1.01, 1.0),
        frameon=False, fontsize=8.5, labelcolor=INK,
    )  # fmt: skip
    return finish(figure)


def _draw_mapping(axes: Axes, x: float, row: Mapping[str, Any]) -> None:
    skipped = row["uncomposed"]
    center, std = (x if skipped is None else x - 0.2), row["std"]
    axes.bar(center, row["generalized"], 0.36, color=BLUE, label="composed")
    if std is not None:
        axes.errorbar(center, row["generalized"], std, color=INK, capsize=3, linewidth=1)
    _annotate(axes, center, row["generalized"] + (std or 0.0), row["generalized"])
    if skipped is not None:
        axes.bar(x + 0.2, skipped, 0.36, color=_PALE_BLUE, label="compose phase skipped")
        _annotate(axes, x + 0.2, skipped, skipped)
    ends = (x - 0.42, x + 0.42)
    axes.plot(ends, [row["random"]] * 2, ":", color=GREY, linewidth=1.4, label="chance")
    axes.plot(
        ends, [row["majority"]] * 2, "--", color=GREY, linewidth=1.4, label="most frequent answer"
    )
    if row["paper"] is not None:
        axes.plot(
            x - 0.42, row["paper"], marker=">", color=ORANGE, markersize=8, linestyle="",
            label="paper (Llama-3)", clip_on=False, zorder=4,
        )  # fmt: skip


def _annotate(axes: Axes, x: float, y: float, value: float) -> None:
    axes.annotate(
        f"{value:.0%}", (x, y), xytext=(0, 3), textcoords="offset points",
        ha="center", va="bottom", fontsize=8.5, color=INK, zorder=5,
        bbox=HALO,
    )  # fmt: skip
