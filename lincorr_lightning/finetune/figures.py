"""Figures of edits: what they did, W of their references, and the risks that were forecast."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from lincorr_lightning.finetune.cases import EditCase, case_statistics, weighed_cases
from lincorr_lightning.finetune.forecasts import Forecasts
from lincorr_lightning.functional.outcomes import Cause, Outcome
from lincorr_lightning.results.heat_maps import short
from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    GREY,
    HALO,
    INK,
    ORANGE,
    PALE,
    bare_axes,
    finish,
    legible,
    new_figure,
    panels_of,
)

_FLOATS = npt.NDArray[np.floating[Any]]
_PALE_ORANGE = "#F2B183"
_CAUSES = {
    Cause.IMPRECISE: ORANGE, Cause.LOW_PRIOR: _PALE_ORANGE, Cause.NOT_LEARNED: "#FBE3D6",
}  # fmt: skip
_WIDTH = 7.5  # inches
_COLOURS = {
    Outcome.GENERALIZED: BLUE, Outcome.HALLUCINATED: ORANGE, Outcome.UNCHANGED: "#B0B0B0",
}  # fmt: skip


def reference_weights_figure(
    cases: Sequence[EditCase], relation: str, taught: bool = True
) -> Figure:
    """Draw W of the reference in generalized and in hallucinated cases (paper, figure 5)."""
    numbers = case_statistics(cases)["weight_reference"]
    rows = ((Outcome.GENERALIZED, BLUE), (Outcome.HALLUCINATED, ORANGE))
    p = numbers["rank_test_p"]
    subtitle = (
        f"W in the column of the {'taught' if taught else 'source'} answer, highest of the "
        "reference labels; line: median; box: middle half"
    )
    subtitle += "" if p is None else f"; Mann-Whitney test, two-sided: {_p(p)}"
    figure = new_figure(_WIDTH, 3.1, f"W of the reference in edits of {relation}", subtitle)
    axes = figure.add_subplot()
    axes.axvline(0, color=PALE, linewidth=1, zorder=0)
    groups = [weighed_cases(cases, outcome) for outcome, _ in rows]
    everything = np.array([c.weight_reference for group in groups for c in group], dtype=float)
    low, high = (everything.min(), everything.max()) if len(everything) else (0.0, 1.0)
    for y, ((outcome, colour), group) in enumerate(zip(rows, groups, strict=True)):
        values = np.array([case.weight_reference for case in group], dtype=float)
        dark = np.array([case.cause != Cause.LOW_PRIOR for case in group], dtype=bool)
        _strip(axes, y, values, colour, dark, (high - low) or 1.0)
        median = numbers[outcome]["median"]
        if median is not None:
            axes.annotate(
                f"median {short(median)}", (median, y - 0.42), ha="center", va="bottom",
                fontsize=8.5, fontweight="bold", color=colour,
            )  # fmt: skip
    names = [f"{outcome}\nn = {numbers[outcome]['n']}" for outcome, _ in rows]
    axes.set_yticks(range(2), names, fontsize=9.5)
    axes.set_ylim(1.52, -0.68)
    margin = 0.07 * ((high - low) or 1.0)
    axes.set_xlim(min(low, 0) - margin, max(high, 0) + margin)
    bare_axes(axes)
    axes.set_xlabel("W of the reference", color=INK)
    causes = [case.cause for case in groups[1]]
    if any(causes):
        for cause, face in ((Cause.IMPRECISE, ORANGE), (Cause.LOW_PRIOR, "white")):
            axes.plot([], [], "o", color=ORANGE, markerfacecolor=face, markersize=5,
                      label=f"{cause} ({causes.count(cause)})")  # fmt: skip
        figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8,
                      handletextpad=0.1, title="causes of hallucination:", title_fontsize=8,
                      alignment="left")  # fmt: skip
    return finish(figure)


def _strip(
    axes: Axes, y: int, values: _FLOATS, colour: str, dark: npt.NDArray[np.bool_], span: float
) -> None:
    """Draw a point per case, side by side where they are close, over a box of the middle half."""
    if not len(values):
        return
    at = y + _spread(values, span / 70)
    size, alpha = (26, 0.85) if len(values) <= 200 else (9, 0.6)
    for chosen, face in ((dark, colour), (~dark, "white")):
        axes.scatter(values[chosen], at[chosen], s=size, facecolor=face, alpha=alpha,
                     edgecolor=colour if face == "white" else "white",
                     linewidth=1.0 if face == "white" else 0.4, zorder=2)  # fmt: skip
    low, median, high = np.percentile(values, (25, 50, 75))
    axes.barh(y, high - low, left=low, height=0.84, color=colour, alpha=0.13, zorder=1)
    axes.vlines(median, y - 0.42, y + 0.42, color=colour, linewidth=2.2, zorder=3)


def _spread(values: _FLOATS, width: float) -> _FLOATS:
    """Return heights around 0 that keep points of one bin apart."""
    bins = np.floor(values / width).astype(np.int64)
    heights = np.zeros(len(values))
    for found in np.unique(bins):
        (members,) = np.nonzero(bins == found)
        members = members[np.argsort(values[members], kind="stable")]
        k = np.arange(1, len(members) + 1)
        heights[members] = k // 2 * np.where(k % 2, -1, 1)
    return heights * min(0.075, 0.38 / max(1.0, np.abs(heights).max()))


def outcomes_figure(
    cases: Sequence[EditCase], relation: str, random: float | None = None, taught: bool = True
) -> Figure:
    """Draw the share of each outcome, beside `random`: how often a random label would be right."""
    n = max(len(cases), 1)
    counts = Counter(case.outcome for case in cases)
    causes = Counter(case.cause for case in cases if case.cause)
    bars: list[tuple[str, list[tuple[int, str]]]] = []
    if taught:
        bars.append(("source learned", [(sum(case.source_learned for case in cases), GREEN)]))
    bars += [
        ("target generalized", [(counts[Outcome.GENERALIZED], BLUE)]),
        ("target hallucinated", [(causes[cause], face) for cause, face in _CAUSES.items()]),
        ("target unchanged", [(counts[Outcome.UNCHANGED], GREY)]),
    ]
    title = f"Outcomes of {len(cases)} {'edits' if taught else 'watched subjects'} of {relation}"
    notes = [] if random is None else [f"dashed: a random label is right ({random:.1%})"]
    if causes:
        shades = zip(_CAUSES, ("dark", "pale", "palest"), strict=True)
        listed = [
            f"{cause} ({causes[cause]}, {shade})"
            for cause, shade in shades
            if causes[cause] or cause is not Cause.NOT_LEARNED
        ]
        notes.append(f"causes of hallucination: {', '.join(listed)}")
    figure = new_figure(_WIDTH, 0.5 * len(bars) + 0.5, title, "; ".join(notes))
    axes = figure.add_subplot()
    for y, (_, parts) in enumerate(bars):
        left = 0
        for count, colour in parts:
            axes.barh(y, count / n, left=left / n, height=0.62, color=colour, zorder=2)
            left += count
        axes.text(left / n + 0.008, y, f"{left / n:.1%}", va="center", fontsize=9.5,
                  fontweight="bold", color=INK, bbox=HALO, zorder=4)  # fmt: skip
    if random is not None:
        row = len(bars) - 3
        axes.vlines(random, row - 0.47, row + 0.47, color=INK, linestyle=(0, (3, 2)),
                    linewidth=1.4, zorder=5)  # fmt: skip
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=9.5)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, 1.09)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    bare_axes(axes)
    return finish(figure)


# -- forecasts ---------------------------------------------------------------------------------


def risk_figure(forecasts: Forecasts) -> Figure:
    """Draw a histogram of each forecaster's risks."""
    names = list(forecasts.predicted)
    title = f"Forecast of {len(forecasts.subjects)} edits of {forecasts.relation}"
    subtitle = (
        "risk: how far the best wrong target label is predicted ahead of the reference; "
        "prediction: blue generalizes, orange hallucinates, grey stays unchanged"
    )
    n_columns = 1 if len(names) <= 4 else 2
    n_rows = max(math.ceil(len(names) / n_columns), 1)
    figure = new_figure(_WIDTH * (1 + n_columns) / 2, 1.55 * n_rows + 0.5, title, subtitle)
    panels = panels_of(figure, len(names), n_columns)
    for i, name in enumerate(names):
        outcomes = forecasts.outcomes(name)
        _risk_panel(panels[i], forecasts.risks(name), outcomes)
        panels[i].set_title(legible([name])[0], loc="left", fontsize=10, color=INK)
        if outcomes:
            share = outcomes.count(Outcome.HALLUCINATED) / len(outcomes)
            panels[i].set_title(f"predicted hallucinations: {share:.0%}", loc="right", fontsize=9,
                                color=ORANGE, fontweight="bold")  # fmt: skip
        if i + n_columns >= len(names):
            panels[i].set_xlabel("risk, in logits", fontsize=9, color=INK)
    return finish(figure)


def _risk_panel(axes: Axes, risks: Sequence[float], outcomes: Sequence[Outcome]) -> None:
    at = np.array(risks, dtype=float)
    known = np.isfinite(at)
    if known.any():
        # 0 is an edge, so that no bar lies on both sides of it.
        low, high = at[known].min(), at[known].max()
        width = ((high - low) or 1.0) / 30
        edges = width * np.arange(np.floor(low / width), np.floor(high / width) + 2)
        parts = [at[known & (np.array(outcomes) == outcome)] for outcome in _COLOURS]
        axes.hist(parts, bins=edges.tolist(), color=list(_COLOURS.values()), stacked=True,
                  rwidth=0.9, zorder=2)  # fmt: skip
    axes.axvline(0, color=INK, linewidth=1, zorder=3)
    bare_axes(axes, "y")
    axes.spines["bottom"].set(visible=True, color=GREY)
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.tick_params(labelsize=8)
    axes.set_ylabel("edits", fontsize=8, color=INK)


def _p(p: float) -> str:
    return "p < .001" if p < 0.001 else f"p = {p:.3f}".replace("0.", ".", 1)
