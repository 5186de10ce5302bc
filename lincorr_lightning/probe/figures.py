"""The figures of a probe: correlations beside their nulls, W, the ridge path, and rankings."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.knowledge import Domain
from lincorr_lightning.linear_map.scores import PairScore
from lincorr_lightning.linear_map.weights import Labels
from lincorr_lightning.probe.significance import FINDING
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE

_FLOATS = npt.NDArray[np.floating[Any]]
# Fraction of the largest weight from which on cells show numbers; more would hide the large ones.
_MIN_SHOWN = 0.1
_MAX_ROWS = 40
_Z95 = 1.959964
KNOWN_LABELS = (
    "Paris",
    "Tokyo",
    "Berlin",
    "Rome",
    "Madrid",
    "London",
    "Beijing",
    "Moscow",
    "Cairo",
    "Warsaw",
    "Athens",
    "Toronto",
    "Chicago",
    "Sydney",
    "Mumbai",
    "France",
    "Japan",
    "Germany",
    "Italy",
    "Spain",
    "UK",
    "China",
    "Russia",
    "Egypt",
    "Poland",
    "Greece",
    "Canada",
    "USA",
    "Australia",
    "India",
    "South Korea",
)
"""English names of the labels that figures of W show, where they are labels."""


def cluster(matrix: _FLOATS) -> tuple[list[int], _FLOATS]:
    """Cluster kinds of knowledge by average linkage at a distance of 1 - r.

    Of r, ``(n, n)``, both directions are averaged, and a pair without r counts as r = 0. Returns an
    order in which no branches cross and neighbours are as similar as the tree allows, and the tree
    of `scipy.cluster.hierarchy.linkage`, ``(n - 1, 4)``.
    """
    r = np.nan_to_num(np.asarray(matrix, dtype=float), nan=0.0)
    distance = 1.0 - (r + r.T) / 2
    np.fill_diagonal(distance, 0.0)
    flat, trees = scipy.spatial.distance.squareform(distance, checks=False), scipy.cluster.hierarchy
    links = trees.linkage(flat, "average", optimal_ordering=True)
    return [int(leaf) for leaf in trees.leaves_list(links)], links


def cluster_heatmap(matrix: DataFrame, lm: str, note: str) -> Figure:
    """Draw a matrix of r with similar kinds of knowledge side by side, and their tree."""
    order, links = cluster(matrix.to_numpy())
    note = f"{note}; average linkage of 1 − r, both directions averaged"
    title = f"Clusters of knowledge in {lm}"
    return plots.correlation_heatmap(matrix.iloc[order, order], title, note, links=links)


def label_names(domain: Domain) -> list[str]:
    """Return the labels as `Labels.shown`, in English if no installed font has their script."""
    names = Labels("", domain.texts, domain.answer_texts).shown()
    return [
        name if plots.has_glyphs(name) else label.answers[0].identity
        for name, label in zip(names, domain.labels, strict=True)
    ]


def interesting_part(
    weight: _FLOATS,
    n: int = 25,
    known: tuple[Sequence[int], Sequence[int]] = ((), ()),
    reference: npt.NDArray[np.bool_] | None = None,
) -> tuple[list[int], list[int]]:
    """Choose at most n rows and columns of W, ``(n_target, n_source)``.

    With `known` sources, the first of two lists, these, and as targets those of their reference, in
    that order, known ones, and those with their highest weights. Else the targets with the highest
    maximum weight, highest first, and the sources that influence them most: the strongest of each
    target, then the second of each, and so on; ordered by that target: a sharp W is a diagonal.
    """
    if len(known[0]):
        named = list(known[0])[:n]
        right = [] if reference is None else [np.flatnonzero(reference[:, s]) for s in named]
        strong = np.argsort(-weight[:, named].max(axis=1), kind="stable")
        ordered: list[int] = np.concatenate([*right, known[1], strong]).astype(int).tolist()
        return list(dict.fromkeys(ordered))[:n], named
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
    known: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Figure:
    """Draw an `interesting_part` of W, ``(n_target_labels, n_source_labels)``.

    Label pairs of the `reference`, a mask shaped like W, get a frame.
    """
    targets, sources = interesting_part(weight, known=known, reference=reference)
    chosen = "chosen by name, first their references" if len(known[0]) else "the highest weights"
    cut = np.ix_(targets, sources)
    shown = weight[cut]
    framed = np.argwhere(reference[cut]) if reference is not None else ()
    limit = float(np.abs(shown).max(initial=0.0)) or 1.0
    notes = [
        subtitle,
        f"{len(targets)} of {weight.shape[0]} targets and {len(sources)} of {weight.shape[1]} "
        f"sources, {chosen}",
        *(["framed: in the reference"] if len(framed) else []),
        f"numbers from |W| = {plots.short(_MIN_SHOWN * limit)} on",
    ]
    rows, columns = [target_labels[i] for i in targets], [source_labels[i] for i in sources]
    figure = plots.correlation_heatmap(
        DataFrame(shown, rows, columns),
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


# Columns of a table, what they are in the legend, and their colours.
_PATHS = {
    "label_mean": ("label-wise r", BLUE),
    "influenced_1": ("top-1 target of a source", ORANGE),
    "influencing_1": ("top-1 source of a target", GREEN),
}
_WORDS = {"label_mean": ("labels of the source", BLUE), "random_mean": ("random words", GREY)}
_WORDS_STD = {key.replace("mean", "std"): shown for key, shown in _WORDS.items()}
_BY_LAYER = {
    "label_mean": ("label-wise r", BLUE),
    "random_label_mean": ("r, random words", GREY),
    "influenced_1": ("top-1 target of a source", ORANGE),
    "best_baseline_1": ("its strongest baseline", GREEN),
}


def ridge_path_figure(frame: DataFrame, chosen: Sequence[PairScore], lm: str) -> Figure:
    """Draw r and Hit@1 along the ridge, one panel per pair, from the ``ridge_path`` table.

    `chosen` are the scores of the pairs to draw, at the ridge of the run; Hit@1 of the strongest
    baseline is drawn beside them.
    """
    scores = {score.name: score for score in chosen}
    strengths = np.sort(frame["ridge"].unique())
    exponents = np.log10(strengths[strengths > 0])
    first, last = (int(f(exponents)) for f in (np.min, np.max)) if len(exponents) else (0, 0)
    decades = range(first, last + 1, max(1, (last - first) // 3))
    ticks = [*strengths[strengths == 0], *(10.0**exponent for exponent in decades)]

    def add_lines(axes: Axes, pair: str, rows: DataFrame) -> None:
        if 0 in strengths:
            axes.axvline(0, label="ridge 0: the paper’s map", color=GREY, linestyle=":")
        ridge, baseline = scores[pair].ridge or 0.0, scores[pair].best_baseline_1
        axes.axvline(
            ridge, label="ridge of this run", color=INK, linestyle="--", linewidth=1, zorder=0
        )
        if baseline is not None:
            axes.axhline(
                baseline,
                label="strongest baseline of the top-1 target",
                color=ORANGE,
                linestyle="--",
                linewidth=1.2,
                zorder=0,
            )
        _add_chance(axes, scores[pair])
        # Linear below the smallest strength, so that it has a 0.
        axes.set_xscale("symlog", linthresh=10.0**first)
        axes.set_xlim(strengths[0] - 10.0**first / 4, 2 * max(strengths[-1], ridge))
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8)

    points, note = _points(frame, chosen, "ridge", _PATHS, "ridge_path")
    return plots.curves(
        points,
        "ridge",
        "value",
        "score",
        "pair",
        share_y=True,
        each=add_lines,
        title=f"Correlation and precision along the ridge in {lm}",
        subtitle=note,
        colours=dict(_PATHS.values()),
        labels=("ridge", "r, or share of labels"),
    )


def _add_chance(axes: Axes, score: PairScore, *ways: str) -> None:
    """Draw Hit@1 of weights in random order as dotted lines in the colours of Hit@1."""
    chance = (score.precision or {}).get("chance", {})
    for way in ways or chance:
        name, colour = _PATHS[f"{way}_1"]
        axes.axhline(
            chance[way]["1"],
            label=f"{name}, by chance",
            color=colour,
            linestyle=":",
            linewidth=1.2,
            zorder=0,
        )


def random_words_figure(frame: DataFrame, chosen: Sequence[PairScore], lm: str) -> Figure:
    """Draw r by the number of source labels, beside as many random words, one panel per pair.

    `frame` is the ``random_words`` table, `chosen` are the pairs to draw.
    """
    points, note = _points(frame, chosen, "n_source_labels", _WORDS, "random_words")
    std = _points(frame, chosen, "n_source_labels", _WORDS_STD, "random_words")[0]["value"]
    subtitle = "bands: standard deviation over draws"

    def scale_x(axes: Axes, pair: str, rows: DataFrame) -> None:
        counts = sorted(rows["n_source_labels"].unique())
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.set_xticks(counts, [f"{n}" for n in counts], fontsize=8)

    return plots.curves(
        points.assign(low=points["value"] - std, high=points["value"] + std),
        "n_source_labels",
        "value",
        "score",
        "pair",
        band=("low", "high"),
        title=f"Correlation of labels and of random words in {lm}",
        subtitle="; ".join(filter(None, [subtitle, note])),
        share_y=True,
        each=scale_x,
        colours=dict(_WORDS.values()),
        labels=("words that the map reads", "label-wise r"),
    )


def logit_lens_figure(frame: DataFrame, chosen: Sequence[PairScore], lm: str) -> Figure:
    """Draw r and Hit@1 of the logit lens by layer beside their baselines, one panel per pair.

    `frame` is the ``logit_lens`` table, `chosen` are the pairs to draw.
    """
    scores = {score.name: score for score in chosen}
    points, note = _points(frame, chosen, "layer", _BY_LAYER, "logit_lens")
    return plots.curves(
        points,
        "layer",
        "value",
        "score",
        "pair",
        share_y=True,
        title=f"Correlation and precision by layer in {lm}",
        subtitle=note,
        colours=dict(_BY_LAYER.values()),
        labels=("layer", "r, or share of labels"),
        each=lambda axes, pair, _: _add_chance(axes, scores[pair], "influenced"),
    )


def _points(
    frame: DataFrame,
    chosen: Sequence[PairScore],
    x: str,
    columns: Mapping[str, tuple[str, str]],
    table: str,
) -> tuple[DataFrame, str]:
    """Return numbers of the chosen pairs, a row each, with their name in the legend, and a note."""
    order = {score.name: i for i, score in enumerate(chosen)}
    rows = frame[frame["pair"].isin(order)]
    points = rows.melt(["pair", x], list(columns), "score").astype({"value": float})
    points["score"] = points["score"].map(lambda key: columns[key][0])
    points = points.sort_values("pair", key=lambda pairs: pairs.map(order), kind="stable")
    return points, _cut_note(len(order), frame["pair"].nunique(), "pairs", table)


class _Dots(NamedTuple):
    """A dot in each row, none where the column has no number."""

    column: str
    label: str
    marker: str
    colour: str
    face: str | None = None


def _dot_plot(
    frame: DataFrame,
    dots: Sequence[_Dots],
    span: tuple[str, str],
    span_colour: str,
    title: str,
    note: tuple[str, str],
    shows: str = "label-wise Pearson r",
) -> Figure:
    """Draw dots by row on one scale of r, and a line from one column to another in each row.

    Rows beyond the first are left out, with a `note` of what is shown and of the table with all.
    """
    shown = frame.head(_MAX_ROWS)
    subtitle = _cut_note(len(shown), len(frame), *note)
    figure = plots.new_figure(7.5, 0.23 * max(len(shown), 3) + 1.0, title, subtitle)
    axes = figure.add_subplot()
    values = shown[list({*span, *(one.column for one in dots)})].astype(float)
    rows = np.arange(len(shown))
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.hlines(rows, values[span[0]], values[span[1]], color=span_colour, linewidth=2, zorder=1)
    for column, label, marker, colour, face in dots:
        if values[column].notna().any():
            axes.plot(
                values[column],
                rows,
                marker,
                color=colour,
                label=label,
                markerfacecolor=face or colour,
                markersize=5.5,
            )
    low, high = np.nanmin([0, *values.min()]), np.nanmax([0, *values.max()])
    axes.set_xlim(min(-0.1, low) - 0.05, max(1.0, high) + 0.04)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    parts = [part for part in ("source", "via", "target") if part in shown]
    names = ("->".join(row) for row in shown[parts].itertuples(index=False))
    axes.set_yticks(rows, plots.legible(names, 60), fontsize=8.5)
    plots.bare_axes(axes)
    axes.set_xlabel(shows, color=INK)
    axes.set_ylabel("source->target" if "via" not in shown else "source->via->target", color=INK)
    figure.legend(reverse=True, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return figure


def nulls_figure(frame: DataFrame, lm: str) -> Figure:
    """Draw r of the pairs with the highest r beside their nulls, from the ``pairs`` table.

    Only r above all of them is evidence.
    """
    dots = [
        _Dots("permuted_label_mean", "permuted baseline", "x", GREY),
        _Dots("random_label_mean", "random words as source labels", "s", GREEN, "white"),
        _Dots("control_label_mean", "control prompt as the source", "D", ORANGE, "white"),
        _Dots("label_mean", "this pair", "o", BLUE),
    ]
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
    dots = [
        _Dots("partial_label_mean", partialled, "D", GREEN, "white"),
        _Dots("unclear", f"{label}; adjusted p above {FINDING:g}", "o", BLUE, "white"),
        _Dots("clear", label, "o", BLUE),
    ]
    frame = frame.assign(
        clear=evidence.where(is_finding),
        unclear=evidence.where(~is_finding),
        low=evidence - error,
        high=evidence + error,
    )
    title = f"Correlation{' above its control' if above else ''} in {lm}"
    note = ("pairs, the highest", "ranking")
    return _dot_plot(frame, dots, ("low", "high"), BLUE, title, note, f"r{minus}")


def transitivity_figure(frame: DataFrame, lm: str) -> Figure:
    """Draw r of composed maps beside r of the pair's own map, from the ``transitivity`` table."""
    dots = [
        _Dots("elsewhere", "median through knowledge without reference", "x", GREY),
        _Dots("composed", "two maps composed", "D", ORANGE, "white"),
        _Dots("direct", "the pair’s own map", "o", BLUE),
    ]
    return _dot_plot(
        frame.sort_values("direct", ascending=False, kind="stable"),
        dots,
        ("composed", "direct"),
        PALE,
        f"Composed maps in {lm}",
        ("composed maps", "transitivity"),
    )


def _cut_note(n_shown: int, n: int, what: str, table: str) -> str:
    return f"{n_shown} of {n} {what}; all: tables/{table}.csv" if n_shown < n else ""
