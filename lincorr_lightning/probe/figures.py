"""The figures of a probe: W, r beside random words, and the ridge path, from its tables."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pandas import DataFrame

from lincorr_lightning.probe.significance import FINDING
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE

_MAX_ROWS = 40
_LEAST_WIDTH = 3.4  # inches of a panel of W with its title


def weights_figure(
    cells: DataFrame,
    pair: str,
    lm: str,
    ridge: float,
    right: Sequence[float | None],
    english: Mapping[str, str],
) -> Figure:
    """Draw W of a pair beside the weights of its nearest word, from the table ``weights``.

    Each column is scaled to its largest weight. Right answers are framed; `right` are the shares of
    all answers that are right first, by W and by the nearest word. `english` has other names of
    labels, for scripts that no installed font has.
    """
    cells = cells[cells["pair"] == pair]
    shares = {"W": "share", "nearest word": "nearest_share"}
    if cells["nearest_share"].isna().all():
        del shares["nearest word"]
    rows, columns = (list(dict.fromkeys(cells[side])) for side in ("target", "source"))
    names = [
        plots.legible([n if plots.has_glyphs(n) else english.get(n, n) for n in side])
        for side in (rows, columns)
    ]
    width, height = (
        0.26 * len(side) + 0.075 * max(map(len, other))
        for side, other in ((columns, names[0]), (rows, names[1]))
    )
    # Titles of narrow panels would run into each other.
    n_rows, n_columns = (1, len(shares)) if width > _LEAST_WIDTH else (len(shares), 1)
    figure = plots.new_figure(
        n_columns * max(width, _LEAST_WIDTH) + 1.0,
        n_rows * (height + 0.5),
        f"W of {pair} in {lm}, ridge {ridge:g}",
        "Each source answer (column) is scaled to its largest weight. "
        + ("Framed: right answers. " if cells["reference"].any() else "")
        + "The nearest word needs no prompt: cosine of two words in the LM's head.",
    )
    panels = figure.subplots(n_rows, n_columns, squeeze=False).ravel()
    for axes, (name, column), share in zip(panels, shares.items(), right, strict=False):
        matrix = cells.pivot(index="target", columns="source", values=column)
        matrix = matrix.reindex(index=rows, columns=columns)
        mesh = plots.draw_matrix(axes, matrix.set_axis(names[0]).set_axis(names[1], axis=1))
        total = "" if share is None else f": right first for {share:.0%} of all answers"
        axes.set_title(f"{name}{total}", loc="left", fontsize=9, color=INK)
        for cell in cells[cells["reference"]].itertuples():
            corner = columns.index(cell.source) - 0.5, rows.index(cell.target) - 0.5
            frame = Rectangle(corner, 1, 1, fill=False, edgecolor=INK, linewidth=1.4, zorder=3)
            axes.add_patch(frame)
    place = "bottom" if n_rows > 1 else "right"
    plots.add_colour_bar(figure, mesh, list(panels), "weight, as a share of the largest", place)
    return figure


def random_words_figure(frame: DataFrame, lm: str, partial_out: Sequence[str]) -> Figure:
    """Draw r of the pairs beside their nulls, and its distance from random words.

    `frame` is the table ``pairs``; the pairs with the highest r above random words are drawn, with
    95 % intervals. R without other knowledge (`partial_out`) is drawn, too.
    """
    by = "excess_over_random" if frame["excess_over_random"].notna().any() else "label_mean"
    known = frame.dropna(subset="label_mean").astype({by: float})
    rows = known.sort_values(by, ascending=False, kind="stable").head(_MAX_ROWS)
    names = plots.legible(rows["source"] + "->" + rows["target"], 50)
    subtitle = "Filled on the right: above random words, adjusted p at most " + f"{FINDING:g}"
    if len(rows) < len(known):
        subtitle += f"; {len(rows)} of {len(known)} pairs, all: tables/pairs.csv"
    figure = plots.new_figure(
        8.0, 0.2 * max(len(rows), 3) + 0.9, f"r beside random words in {lm}", subtitle
    )
    left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    places = np.arange(len(rows))
    partialled = f"without {', '.join(partial_out)}"
    dots: dict[str, tuple[str, str, str, str]] = {
        "permuted_label_mean": ("permuted targets", "x", GREY, GREY),
        "control_label_mean": ("unrelated prompt", "D", GREY, "white"),
        "partial_label_mean": (partialled, "^", ORANGE, "white"),
        "random_label_mean": ("as many random words", "s", GREEN, "white"),
        "label_mean": ("this pair", "o", BLUE, BLUE),
    }
    for column, (label, marker, colour, face) in dots.items():
        values = rows[column].astype(float)
        if values.notna().any():
            style = {"linestyle": "", "color": colour, "markerfacecolor": face}
            left.plot(values, places, label=label, marker=marker, markersize=5, **style)
    left.set_xlim(min(-0.1, *left.get_xlim()), 1.05)
    left.set_xlabel("r per answer", color=INK)
    ends = ["excess_over_random", "excess_over_random_low", "excess_over_random_high"]
    middle, low, high = rows[ends].astype(float).to_numpy().T
    right.hlines(places, low, high, color=BLUE, linewidth=1.5)
    is_finding = (rows["q"].astype(float) <= FINDING).to_numpy()
    for chosen, face in ((is_finding, BLUE), (~is_finding, "white")):
        right.plot(middle[chosen], places[chosen], "o", color=BLUE, markerfacecolor=face)
    right.set_xlabel("r above random words, 95 %", color=INK)
    for axes in (left, right):
        plots.bare_axes(axes)
        axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set_yticks(places, names, fontsize=8.5)
    plots.legend_below(figure, [left])
    return figure


# Columns of the table, what they are in the legend, and their colours.
_CURVES = {
    "label_mean": ("r", BLUE),
    "macro_1": ("right first", ORANGE),
    "best_macro_1": ("best baseline", INK),
}
_TICKS = (0.0, 0.1, 10.0, 1e3, 1e5)  # of ridges, see `HALF_DECADES`


def ridge_path_figure(frame: DataFrame, ridges: Mapping[str, float], lm: str) -> Figure:
    """Draw r and right answers along the ridge, a panel per pair, from the ``ridge_path`` table.

    `ridges` are those of the run, of the pairs to draw; 0 is the paper's map.
    """

    def add_ridge(axes: Axes, pair: str, rows: DataFrame) -> None:
        axes.axvline(ridges[pair], label="ridge of this run", color=GREY, linestyle="--")
        # Linear below the smallest strength, so that it has a 0.
        axes.set_xscale("symlog", linthresh=_TICKS[1])
        axes.set_xlim(-_TICKS[1] / 4, 2 * max(rows["ridge"].max(), ridges[pair]))
        axes.minorticks_off()
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS], fontsize=8)

    order = list(ridges)
    rows = frame[frame["pair"].isin(order)].sort_values("pair", key=lambda x: x.map(order.index))
    points = rows.melt(["pair", "ridge"], list(_CURVES), "score").astype({"value": float})
    n = frame["pair"].nunique()
    return plots.curves(
        points.assign(
            score=points["score"].map(lambda key: _CURVES[key][0]),
            is_level=points["score"] == "best_macro_1",
        ),
        "ridge",
        "value",
        "score",
        "pair",
        "is_level",
        title=f"r and right answers along the ridge in {lm}",
        subtitle=f"{len(order)} of {n} pairs; all: tables/ridge_path.csv" if len(order) < n else "",
        labels=("ridge", "r, or share of answers"),
        each=add_ridge,
        share_y=True,
        colours=dict(_CURVES.values()),
    )
