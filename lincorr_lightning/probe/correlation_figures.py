"""Figures of which pairs are tied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lincorr_lightning.probe.ranking import FINDING, Composition, height, ranking
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
    from lincorr_lightning.probe.results import PairScore

_Z95 = 1.959964


def ties_figure(
    scores: Sequence[PairScore], given: Sequence[str], title: str, limit: int = 40
) -> Figure:
    """R above its control with its 95 % interval, and what is left given other knowledges.

    Args:
        scores: Of the pairs.
        given: The independent knowledges that r was told given of.
        title: It should name the LM.
        limit: How many pairs are shown.
    """
    order = ranking(scores)
    shown = order[:limit]
    notes: list[str] = []
    if len(shown) < len(order):
        notes.insert(0, f"{len(shown)} of {len(order)} pairs, the highest; all: tables/ties.csv")
    figure = new_figure(7.5, 0.23 * max(len(shown), 3) + 1.1, title, "; ".join(notes))
    axes = figure.add_subplot()
    rows = np.arange(len(shown))
    above_null = np.array([height(score) for score in shown])
    error = np.array([_Z95 * (score.excess_error or 0.0) for score in shown])
    found = np.array([score.q is not None and score.q <= FINDING for score in shown], dtype=bool)
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.hlines(rows, above_null - error, above_null + error, color=BLUE, linewidth=1.6, zorder=1)
    above = any(score.excess is not None for score in shown)
    label = "r above its control, 95 % interval" if above else "r, 95 % interval"
    axes.plot(above_null[found], rows[found], "o", color=BLUE, markersize=5.5,
              label=label if found.any() else None)  # fmt: skip
    axes.plot(above_null[~found], rows[~found], "o", color=BLUE, markerfacecolor="white",
              markersize=5.5,
              label=None if found.all() else f"{label}; adjusted p above {FINDING:g}")  # fmt: skip
    partial = np.array([_or_nan(score.partial_label_mean) for score in shown])
    if not np.isnan(partial).all():
        axes.plot(partial, rows, "D", color=GREEN, markerfacecolor="white", markersize=5,
                  label=f"r given {', '.join(given)}")  # fmt: skip
    names, _ = legible([score.name for score in shown], 50)
    _dress(axes, rows, names, min(-0.1, np.nanmin([*(above_null - error), *partial, 0.0]) - 0.04))
    axes.set_xlabel("label-wise Pearson r", color=INK)
    highest = float(np.nanmax([*(above_null + error), *partial, 1.0]))
    axes.set_xlim(right=highest + 0.04)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
    return finish(figure)


def transitivity_figure(found: Sequence[Composition], title: str, limit: int = 30) -> Figure:
    """R of maps laid end to end beside r of the pair's own map.

    Args:
        found: The compositions.
        title: It should name the LM.
        limit: How many are shown: those whose own map has the highest r.
    """
    shown = sorted(found, key=lambda one: -one.direct)[:limit]
    note = f"{len(shown)} of {len(found)}; all: tables/transitivity.csv"
    figure = new_figure(
        7.5, 0.23 * max(len(shown), 3) + 1.1, title, note if len(shown) < len(found) else ""
    )
    axes = figure.add_subplot()
    rows = np.arange(len(shown))
    direct, composed = (np.array([getattr(c, k) for c in shown]) for k in ("direct", "composed"))
    elsewhere = np.array([_or_nan(c.elsewhere) for c in shown])
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.hlines(rows, composed, direct, color=PALE, linewidth=3, zorder=1)
    axes.plot(elsewhere, rows, "x", color=GREY, markersize=5,
              label="through knowledges not tied to both, median")  # fmt: skip
    axes.plot(direct, rows, "o", color=BLUE, markersize=6, label="the pair’s own map")
    axes.plot(composed, rows, "D", color=ORANGE, markerfacecolor="white", markersize=5,
              label="two maps end to end")  # fmt: skip
    names, _ = legible([f"{c.source}->{c.via}->{c.target}" for c in shown], 60)
    low = float(np.nanmin(np.concatenate([direct, composed, elsewhere, [0.0]])))
    _dress(axes, rows, names, min(-0.1, low - 0.04))
    axes.set_xlabel("label-wise Pearson r, source → target", color=INK)
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return finish(figure)


def _dress(axes: Axes, rows: npt.NDArray[np.int_], names: Sequence[str], low: float) -> None:
    axes.set_xlim(low, 1.04)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(rows, names, fontsize=8)
    axes.tick_params(length=2, color=GREY, labelcolor=INK)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
