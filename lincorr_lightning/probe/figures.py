"""The figures of a probe: correlations beside their nulls, W, the ridge path, and rankings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.weights import shown_labels
from lincorr_lightning.probe.significance import FINDING
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE

_FLOATS = npt.NDArray[np.floating[Any]]
# Fraction of the largest weight from which on cells show numbers; more would hide the large ones.
_MIN_SHOWN = 0.1
_MAX_ROWS = 40
_Z95 = 1.959964


def label_names(domain: Domain) -> list[str]:
    """Return the labels as `shown_labels`, in English if no installed font has their script."""
    names = shown_labels(domain.texts, domain.answer_texts)
    return [
        name if plots.has_glyphs(name) else label.answers[0].identity
        for name, label in zip(names, domain.labels, strict=True)
    ]


def interesting_part(weight: _FLOATS, n: int = 25) -> tuple[list[int], list[int]]:
    """Choose at most n rows and columns of W, ``(n_target, n_source)``.

    They are the targets with the highest maximum weight, highest first, and the sources that
    influence them most: the strongest of each target, then the second of each, and so on; ordered
    by that target: a sharp W is a diagonal.
    """
    targets = np.argsort(-weight.max(axis=1), kind="stable")[:n]
    ranked = np.argsort(-weight[targets], axis=1, kind="stable")
    sources = np.array(list(dict.fromkeys(ranked.T.ravel().tolist()))[:n])
    shown = weight[np.ix_(targets, sources)]
    order = np.lexsort((-shown.max(axis=0), shown.argmax(axis=0)))
    return targets.tolist(), sources[order].tolist()


def top_weights_figure(
    weight: _FLOATS,
    source: Domain,
    target: Domain,
    title: str,
    subtitle: str,
    reference: npt.NDArray[np.bool_] | None = None,
) -> Figure:
    """Draw an `interesting_part` of W, ``(n_target_labels, n_source_labels)``.

    Label pairs of the `reference`, a mask shaped like W, get a frame.
    """
    targets, sources = interesting_part(weight)
    cut = np.ix_(targets, sources)
    framed = np.argwhere(reference[cut]) if reference is not None else ()
    limit = float(np.abs(weight[cut]).max(initial=0.0)) or 1.0
    notes = [
        subtitle,
        f"{len(targets)} of {weight.shape[0]} targets and {len(sources)} of {weight.shape[1]} "
        "sources, the highest weights",
        *(["framed: in the reference"] if len(framed) else []),
        f"numbers from |W| = {plots.short(_MIN_SHOWN * limit)} on",
    ]
    names = [
        [label_names(domain)[i] for i in part]
        for domain, part in ((target, targets), (source, sources))
    ]
    figure = plots.correlation_heatmap(
        DataFrame(weight[cut], *names),
        title,
        "; ".join(notes),
        "weight W",
        (-limit, limit),
        axis_labels=("target label", "source label"),
        least=_MIN_SHOWN * limit,
    )
    for row, column in framed:
        frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, zorder=3)
        frame.set(linewidth=1.8, clip_on=False)
        figure.axes[0].add_patch(frame)
    return figure


# Columns of the table, what they are in the legend, and their colours.
_CURVES = {
    "label_mean": ("label-wise r", BLUE),
    "influenced_1": ("top-1 target of a source", ORANGE),
    "influencing_1": ("top-1 source of a target", GREEN),
}
_LEVELS = {
    "best_baseline_1": ("strongest baseline of the top-1 target", INK),
    "chance_influenced_1": ("top-1 target by chance", ORANGE),
    "chance_influencing_1": ("top-1 source by chance", GREEN),
}
_TICKS = (0.0, 0.1, 10.0, 1e3, 1e5)  # of ridges, see `HALF_DECADES`


def ridge_path_figure(frame: DataFrame, ridges: Mapping[str, float], lm: str) -> Figure:
    """Draw r and Hit@1 along the ridge, one panel per pair, from the ``ridge_path`` table.

    `ridges` are those of the run, of the pairs to draw. Hit@1 of the strongest baseline and of
    weights in random order are drawn beside those of W.
    """

    def add_ridges(axes: Axes, pair: str, rows: DataFrame) -> None:
        axes.axvline(0, label="ridge 0: the paper’s map", color=GREY, linestyle=":")
        axes.axvline(ridges[pair], label="ridge of this run", color=INK, linestyle="--")
        # Linear below the smallest strength, so that it has a 0.
        axes.set_xscale("symlog", linthresh=_TICKS[1])
        axes.set_xlim(-_TICKS[1] / 4, 2 * max(rows["ridge"].max(), ridges[pair]))
        axes.minorticks_off()
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], fontsize=8)

    order, lines = list(ridges), _CURVES | _LEVELS
    rows = frame[frame["pair"].isin(order)].sort_values("pair", key=lambda x: x.map(order.index))
    points = rows.melt(["pair", "ridge"], list(lines), "score").astype({"value": float})
    return plots.curves(
        points.assign(
            score=points["score"].map(lambda key: lines[key][0]),
            is_level=points["score"].isin(_LEVELS),
        ),
        "ridge",
        "value",
        "score",
        "pair",
        "is_level",
        share_y=True,
        each=add_ridges,
        title=f"Correlation and precision along the ridge in {lm}",
        subtitle=_cut_note(len(order), frame["pair"].nunique(), "pairs", "ridge_path"),
        colours=dict(lines.values()),
        labels=("ridge", "r, or share of labels"),
    )


def _dots(label: str, marker: str, colour: str, face: str = "") -> dict[str, Any]:
    return {"label": label, "marker": marker, "color": colour, "markerfacecolor": face or colour}


def _dot_plot(
    frame: DataFrame,
    dots: Mapping[str, dict[str, Any]],
    span: tuple[str, str],
    span_colour: str,
    title: str,
    note: tuple[str, str],
    shows: str = "label-wise Pearson r",
) -> Figure:
    """Draw dots by row on one scale of r, and a line from one column to another in each row.

    Each column of `dots` has a dot in the rows where it is known. Rows beyond the first are left
    out, with a `note` of what is shown and of the table with all.
    """
    shown = frame.head(_MAX_ROWS)
    subtitle = _cut_note(len(shown), len(frame), *note)
    figure = plots.new_figure(7.5, 0.23 * max(len(shown), 3) + 1.0, title, subtitle)
    axes = figure.add_subplot()
    values = shown[list({*span, *dots})].astype(float)
    rows = np.arange(len(shown))
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.hlines(rows, values[span[0]], values[span[1]], color=span_colour, linewidth=2, zorder=1)
    for column, style in dots.items():
        if values[column].notna().any():
            axes.plot(values[column], rows, linestyle="", markersize=5.5, **style)
    low, high = np.nanmin([0, *values.min()]), np.nanmax([0, *values.max()])
    axes.set_xlim(min(-0.1, low) - 0.05, max(1.0, high) + 0.04)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    names = shown["source"] + "->" + shown["target"]
    axes.set_yticks(rows, plots.legible(names, 60), fontsize=8.5)
    plots.bare_axes(axes)
    axes.set_xlabel(shows, color=INK)
    axes.set_ylabel("source->target", color=INK)
    figure.legend(reverse=True, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return figure


def nulls_figure(frame: DataFrame, lm: str) -> Figure:
    """Draw r of the pairs with the highest r beside their nulls, from the ``pairs`` table.

    Only r above all of them is evidence.
    """
    dots = {
        "permuted_label_mean": _dots("permuted baseline", "x", GREY),
        "random_label_mean": _dots("random words as source labels", "s", GREEN, "white"),
        "control_label_mean": _dots("control prompt as the source", "D", ORANGE, "white"),
        "label_mean": _dots("this pair", "o", BLUE),
    }
    known = frame.dropna(subset="label_mean")
    return _dot_plot(
        known.sort_values("label_mean", ascending=False, kind="stable"),
        dots,
        ("control_label_mean", "label_mean"),
        PALE,
        f"Correlation beside its nulls in {lm}",
        ("pairs, those with the highest r", "pairs"),
    )


def ranking_figure(frame: DataFrame, partial_out: Sequence[str], lm: str) -> Figure:
    """Draw r above its control with its 95 % interval, for the pairs with the most evidence.

    R without other knowledge (`partial_out`) is drawn beside it. `frame` is the table ``ranking``.
    """
    numbers = frame[["label_mean", "excess", "excess_error", "q"]].astype(float)
    evidence, is_finding = numbers["excess"].fillna(numbers["label_mean"]), numbers["q"] <= FINDING
    error = _Z95 * numbers["excess_error"].fillna(0)
    above = numbers["excess"].notna().any()
    minus = " minus r of the control prompt" if above else ""
    label = f"r{minus}, 95 % interval"
    partialled = f"r, {', '.join(partial_out)} partialled out"
    dots = {
        "partial_label_mean": _dots(partialled, "D", GREEN, "white"),
        "unclear": _dots(f"{label}; adjusted p above {FINDING:g}", "o", BLUE, "white"),
        "clear": _dots(label, "o", BLUE),
    }
    frame = frame.assign(
        clear=evidence.where(is_finding),
        unclear=evidence.where(~is_finding),
        low=evidence - error,
        high=evidence + error,
    )
    title = f"Correlation{' above its control' if above else ''} in {lm}"
    note = ("pairs, the highest", "ranking")
    return _dot_plot(frame, dots, ("low", "high"), BLUE, title, note, f"r{minus}")


def _cut_note(n_shown: int, n: int, what: str, table: str) -> str:
    return f"{n_shown} of {n} {what}; all: tables/{table}.csv" if n_shown < n else ""
