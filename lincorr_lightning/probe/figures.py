"""The figures of a probe: correlations beside their nulls, W, the ridge path, and rankings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.probe.scores import PairScore, RidgePoint, rank_pairs
from lincorr_lightning.probe.significance import FINDING, Composition
from lincorr_lightning.results.heat_maps import (
    add_colour_bar,
    correlation_heatmap,
    draw_heatmap,
    short,
)
from lincorr_lightning.results.plots import curves
from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    bare_axes,
    finish,
    legible,
    new_figure,
)

_FLOATS = npt.NDArray[np.floating[Any]]
# Fraction of the largest weight from which on cells show numbers; more would hide the large ones.
_MIN_SHOWN = 0.1
_MAX_PANELS = 12
_MAX_ROWS = 40
_Z95 = 1.959964


# -- clusters --------------------------------------------------------------------------------


def cluster(matrix: _FLOATS) -> tuple[list[int], _FLOATS]:
    """Cluster kinds of knowledge by average linkage at a distance of 1 - r.

    The two directions of a pair are averaged. A pair without r (its labels never vary) is as far
    apart as one with r = 0.

    Args:
        matrix: r, ``(n, n)``, source row, target column; the diagonal is ignored.

    Returns:
        Indices in an order in which no branches cross and neighbours are as similar as the tree
        allows, and the tree as `scipy.cluster.hierarchy.linkage` returns it, ``(n - 1, 4)``.

    Raises:
        ValueError: The matrix is not square, or has fewer than two rows.
    """
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    n = len(matrix)
    if matrix.shape != (n, n) or n < 2:
        raise ValueError(f"a square matrix of two rows or more is needed, not {matrix.shape}")
    r = np.nan_to_num(np.asarray(matrix, dtype=float), nan=0.0)
    distance = 1.0 - (r + r.T) / 2
    np.fill_diagonal(distance, 0.0)
    links = linkage(squareform(distance, checks=False), "average", optimal_ordering=True)
    return [int(leaf) for leaf in leaves_list(links)], links


def cluster_heatmap(matrix: DataFrame, title: str, subtitle: str) -> Figure:
    """Draw a matrix of r with similar kinds of knowledge side by side, and their tree."""
    order, links = cluster(matrix.to_numpy())
    subtitle = f"{subtitle}; average linkage of 1 − r, both directions averaged"
    return correlation_heatmap(matrix.iloc[order, order], title, subtitle, links=links)


# -- W ---------------------------------------------------------------------------------------


def interesting_part(weight: _FLOATS, n: int = 25) -> tuple[list[int], list[int]]:
    """Choose the part of W with the highest weights.

    Args:
        weight: W, ``(n_target_labels, n_source_labels)``.
        n: Number of rows, and of columns, at most.

    Returns:
        The targets with the highest maximum weight, highest first; and the sources that influence
        them most: the strongest of each target, then the second of each, and so on. Sources are
        ordered by the target they influence most, so that a sharp W shows a diagonal.
    """
    targets = np.argsort(-weight.max(axis=1), kind="stable")[:n]
    ranked = np.argsort(-weight[targets], axis=1, kind="stable")
    sources = np.array(list(dict.fromkeys(ranked.T.ravel().tolist()))[:n])
    shown = weight[np.ix_(targets, sources)]
    order = np.lexsort((-shown.max(axis=0), shown.argmax(axis=0)))
    return targets.tolist(), sources[order].tolist()


def top_weights_figure(
    weight: _FLOATS,
    source_labels: Sequence[str],
    target_labels: Sequence[str],
    title: str,
    subtitle: str,
    reference: npt.NDArray[np.bool_] | None = None,
) -> Figure:
    """Draw the part of W, ``(n_target_labels, n_source_labels)``, with the highest weights.

    Label pairs of the `reference`, a mask shaped like W, get a frame.
    """
    targets, sources = interesting_part(weight)
    cut = np.ix_(targets, sources)
    shown = weight[cut]
    framed = np.argwhere(reference[cut]) if reference is not None else ()
    limit = float(np.abs(shown).max(initial=0.0)) or 1.0
    notes = [
        subtitle,
        f"{len(targets)} of {weight.shape[0]} targets, those with the highest weights, and "
        f"{len(sources)} of {weight.shape[1]} sources",
        *(["framed: in the reference"] if len(framed) else []),
        f"numbers from |W| = {short(_MIN_SHOWN * limit)} on",
    ]
    rows, columns = [target_labels[i] for i in targets], [source_labels[i] for i in sources]
    figure, axes, image, cell = draw_heatmap(
        DataFrame(shown, rows, columns), title, "; ".join(notes), limit, _MIN_SHOWN * limit
    )
    for row, column in framed:
        frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, zorder=3)
        frame.set_linewidth(min(2.0, 5 * cell))
        frame.set_clip_on(False)
        axes.add_patch(frame)
    axes.set_ylabel("target label", color=INK)
    axes.set_xlabel("source label", color=INK)
    add_colour_bar(figure, axes, image, "weight W")
    return finish(figure)


# -- the ridge path --------------------------------------------------------------------------


_PATH_COLOURS = {
    "label-wise r": BLUE, "top-1 target of a source": ORANGE, "top-1 source of a target": GREEN,
}  # fmt: skip


def ridge_path_figure(
    paths: Sequence[tuple[PairScore, Sequence[RidgePoint]]], title: str, n_pairs: int
) -> Figure:
    """Draw r and Hit@1 along the ridge, one panel per pair.

    Args:
        paths: The pairs, and the ridge path of each; at most twelve are shown.
        title: The title.
        n_pairs: Number of pairs of the run.
    """
    shown = paths[:_MAX_PANELS]
    strengths = np.array([point.ridge for point in shown[0][1]])
    positive = strengths[strengths > 0]
    # A logarithmic axis has no 0: it is drawn a decade left of the smallest strength.
    zero = math.floor(math.log10(positive.min())) - 1 if len(positive) else 0

    def at(ridge: float) -> float:
        return math.log10(ridge) if ridge > 0 else zero

    chosen = {score.name: score.ridge or 0.0 for score, _ in shown}
    frame = DataFrame(
        [
            {"pair": score.name, "ridge": at(point.ridge), "score": name, "value": value}
            for score, path in shown
            for point in path
            for name, value in zip(
                _PATH_COLOURS,
                (point.label_mean, _hit1(point.influenced), _hit1(point.influencing)),
                strict=True,
            )
        ]
    ).astype({"value": float})

    def add_lines(axes: Axes, pair: str, rows: DataFrame) -> None:
        del rows
        if 0 in strengths:
            axes.axvline(zero, label="ridge 0: the paper’s map", color=GREY, linestyle=":")
        axes.axvline(at(chosen[pair]), label="ridge of this run", color=INK, linestyle="--",
                     linewidth=1, zorder=0)  # fmt: skip
        last = math.ceil(max(map(at, strengths)))
        decades = list(range(zero + 1, last + 1, max(1, math.ceil((last - zero) / 6))))
        ticks, names = ([zero], ["0"]) if 0 in strengths else ([], [])
        axes.set_xticks([*ticks, *decades], [*names, *map(_power, decades)], fontsize=8)

    note = _cut_note(len(shown), n_pairs, "pairs", "ridge_path")
    return curves(
        frame, "ridge", "value", "score", "pair", title=title, subtitle=note, share_y=True,
        colours=_PATH_COLOURS, labels=("ridge", ""), whole_x=False, each=add_lines,
    )  # fmt: skip


def _hit1(rates: Mapping[str, float | None] | None) -> float | None:
    return None if rates is None else rates["1"]


def _power(exponent: int) -> str:
    if -2 <= exponent <= 2:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# -- nulls and rankings ----------------------------------------------------------------------


class _Dots(NamedTuple):
    """A dot in each row; NaN where a row has none."""

    label: str
    values: _FLOATS
    marker: str
    colour: str
    face: str | None = None


def _dot_plot(
    names: Sequence[str],
    dots: Sequence[_Dots],
    spans: tuple[_FLOATS, _FLOATS],
    span_colour: str,
    title: str,
    subtitle: str,
) -> Figure:
    """Draw dots by row on one scale of r, and a line from one number to another in each row."""
    figure = new_figure(7.5, 0.23 * max(len(names), 3) + 1.0, title, subtitle)
    axes = figure.add_subplot()
    rows = np.arange(len(names))
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.hlines(rows, *spans, color=span_colour, linewidth=2, zorder=1)
    for one in dots:
        if not np.isnan(one.values).all():
            axes.plot(one.values, rows, one.marker, color=one.colour, label=one.label,
                      markerfacecolor=one.face or one.colour, markersize=5.5)  # fmt: skip
    drawn = np.concatenate([*spans, *(one.values for one in dots), [0.0]])
    low, high = float(np.nanmin(drawn)), float(np.nanmax(drawn))
    axes.set_xlim(min(-0.1, low) - 0.05, max(1.0, high) + 0.04)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(rows, legible(names, 60), fontsize=8.5)
    bare_axes(axes)
    axes.set_xlabel("label-wise Pearson r", color=INK)
    figure.legend(reverse=True, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return finish(figure)


def nulls_figure(scores: Sequence[PairScore], title: str) -> Figure:
    """Draw r of the pairs with the highest r beside their nulls.

    Only r above the control is evidence.
    """
    known = [score for score in scores if score.label_mean is not None]
    shown = sorted(known, key=lambda score: -(score.label_mean or 0.0))[:_MAX_ROWS]
    note = _cut_note(len(shown), len(scores), "pairs, those with the highest r", "pairs")
    r, control, permuted = (
        _column(shown, key) for key in ("label_mean", "control_label_mean", "permuted_label_mean")
    )
    dots = [
        _Dots("permuted baseline", permuted, "x", GREY),
        _Dots("control prompt as the source", control, "D", ORANGE, "white"),
        _Dots("this pair", r, "o", BLUE),
    ]
    return _dot_plot([score.name for score in shown], dots, (control, r), PALE, title, note)


def ranking_figure(scores: Sequence[PairScore], partial_out: Sequence[str], title: str) -> Figure:
    """Draw r above its control with its 95 % interval, for the pairs with the most evidence.

    R with other knowledge (`partial_out`) partialled out is drawn beside it.
    """
    order = rank_pairs(scores)
    shown = order[:_MAX_ROWS]
    note = _cut_note(len(shown), len(order), "pairs, the highest", "ranking")
    evidence, partial = _column(shown, "evidence"), _column(shown, "partial_label_mean")
    error = _Z95 * np.nan_to_num(_column(shown, "excess_error"))
    found = _column(shown, "q") <= FINDING
    above = any(score.excess is not None for score in shown)
    label = "r above its control, 95 % interval" if above else "r, 95 % interval"
    dots = [
        _Dots(f"r, {', '.join(partial_out)} partialled out", partial, "D", GREEN, "white"),
        _Dots(f"{label}; adjusted p above {FINDING:g}", np.where(found, np.nan, evidence), "o",
              BLUE, "white"),
        _Dots(label, np.where(found, evidence, np.nan), "o", BLUE),
    ]  # fmt: skip
    spans = evidence - error, evidence + error
    return _dot_plot([score.name for score in shown], dots, spans, BLUE, title, note)


def transitivity_figure(found: Sequence[Composition], title: str) -> Figure:
    """Draw r of composed maps beside r of the pair's own map, those with the highest r."""
    shown = sorted(found, key=lambda one: -(one.direct or 0.0))[:_MAX_ROWS]
    note = _cut_note(len(shown), len(found), "composed maps", "transitivity")
    direct, composed, elsewhere = (
        _column(shown, key) for key in ("direct", "composed", "elsewhere")
    )
    dots = [
        _Dots("median through knowledge without reference", elsewhere, "x", GREY),
        _Dots("two maps composed", composed, "D", ORANGE, "white"),
        _Dots("the pair’s own map", direct, "o", BLUE),
    ]
    names = [f"{one.source}->{one.via}->{one.target}" for one in shown]
    return _dot_plot(names, dots, (composed, direct), PALE, title, note)


def _cut_note(n_shown: int, n: int, what: str, table: str) -> str:
    """Return the note of a figure that shows a part of its rows; empty if it shows all."""
    return f"{n_shown} of {n} {what}; all: tables/{table}.csv" if n_shown < n else ""


def _column(rows: Sequence[Any], key: str) -> _FLOATS:
    """Return one number of each row, NaN where it is None."""
    return np.array([getattr(row, key) for row in rows], dtype=float)
