"""The figures of a probe: what is tied to what, how precisely, and against which nulls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

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
    from lincorr_lightning.probe.ridge_path import RidgePoint

_FLOATS = npt.NDArray[np.floating[Any]]
_COLOURS = "RdBu_r"
# Below this a cell's two decimals would be too small to read.
_SMALLEST_CELL_WITH_VALUE = 0.27
# Of the largest weight; numbers in all other cells would hide those that matter.
_LEAST_TOLD = 0.1
_SIDES = 1.1  # colour bar and margins, in inches
_MOST_PANELS = 12


def correlation_heatmap(
    matrix: _FLOATS,
    sources: Sequence[str],
    targets: Sequence[str],
    title: str,
    subtitle: str = "",
    value_label: str = "label-wise Pearson r",
    limit: float | None = None,
    links: _FLOATS | None = None,
) -> Figure:
    """Heat map of r, as in the paper's figures 3 and 7.

    Args:
        matrix: r, ``(n_source, n_target)``; NaN where there is none, shown hatched.
        sources: Names of the rows.
        targets: Names of the columns.
        title: It should name the LM.
        subtitle: Anything else one must know to read it.
        value_label: What the colours mean.
        limit: Value of the darkest colour where none can be negative; None: from -1 to 1.
        links: A tree over the columns in their order (`Clusters.links`), drawn above them.
    """
    if np.isnan(matrix).any():
        subtitle = f"{subtitle}; hatched: no value".lstrip("; ")
    figure, axes, image, cell = _heatmap(
        matrix, sources, targets, title, subtitle, limit=limit or 1.0
    )
    if limit is not None:
        image.set(cmap="Reds", clim=(0, limit))
    if links is not None:
        _tree(figure, axes, links, cell)
    axes.set_ylabel("source", color=INK)
    axes.set_xlabel("target", color=INK)
    _colour_bar(figure, axes, image, value_label)
    return finish(figure)


def weight_heatmap(
    weight: _FLOATS,
    source_labels: Sequence[str],
    target_labels: Sequence[str],
    title: str,
    subtitle: str = "",
    right: npt.NDArray[np.bool_] | None = None,
) -> Figure:
    """Heat map of a part of W, small enough to be read; `interesting_part` chooses one.

    Args:
        weight: ``(n_target_labels, n_source_labels)``.
        source_labels: Its columns.
        target_labels: Its rows.
        title: It should name the pair and the LM.
        subtitle: Anything else one must know to read it.
        right: Which pairs belong together in the world, shaped like `weight`: they get a frame.
    """
    limit = float(np.abs(weight).max(initial=0.0)) or 1.0
    if right is not None and right.any():
        subtitle = f"{subtitle}; framed: right in the world".lstrip("; ")
    subtitle = f"{subtitle}; numbers from |W| = {short(_LEAST_TOLD * limit)} on".lstrip("; ")
    figure, axes, image, cell = _heatmap(
        weight, target_labels, source_labels, title, subtitle, limit, least=_LEAST_TOLD * limit
    )
    for row, column in np.argwhere(right) if right is not None else ():
        frame = Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=INK, zorder=3)
        frame.set_linewidth(min(2.0, 5 * cell))
        frame.set_clip_on(False)
        axes.add_patch(frame)
    axes.set_ylabel("target label", color=INK)
    axes.set_xlabel("source label", color=INK)
    _colour_bar(figure, axes, image, "weight W")
    return finish(figure)


class Part(NamedTuple):
    """Rows and columns of W, in the order in which they are best shown."""

    targets: list[int]
    sources: list[int]


def interesting_part(weight: _FLOATS, n: int = 25) -> Part:
    """Choose the part of W that is worth a look.

    Args:
        weight: W, ``(n_target_labels, n_source_labels)``.
        n: How many rows, and how many columns, at most.

    Returns:
        The targets with the highest maximum weight, highest first; and the sources that influence
        them most: first the strongest of each target, then each one's second, and so on. Sources
        stand in the order of the target they influence most, so that a sharp W shows a diagonal.
    """
    targets = np.argsort(-weight.max(axis=1), kind="stable")[:n]
    ranked = np.argsort(-weight[targets], axis=1, kind="stable")
    sources = np.array(list(dict.fromkeys(ranked.T.ravel().tolist()))[:n])
    shown = weight[np.ix_(targets, sources)]
    order = np.lexsort((-shown.max(axis=0), shown.argmax(axis=0)))
    return Part(targets.tolist(), sources[order].tolist())


def _heatmap(
    matrix: _FLOATS,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    subtitle: str,
    limit: float,
    least: float = 0.0,
) -> tuple[Figure, Axes, AxesImage, float]:
    """Square cells with values where they fit; returns the cell's size in inches too.

    Values nearer to 0 than `least` are told by their colour alone.
    """
    n_rows, n_columns = matrix.shape
    row_labels, row_note = legible(rows)
    column_labels, column_note = legible(columns)
    subtitle = "; ".join(text for text in (subtitle, row_note or column_note) if text)
    cell = min(max(9 / max(n_rows, n_columns), 0.14), 0.8)
    label_size = min(max(cell * 45, 7.0), 10.0)
    room = 0.0085 * label_size  # inches a letter of a label takes
    width = max(n_columns * cell + max(map(len, row_labels)) * room + _SIDES + 0.5, 5.5)
    height = n_rows * cell + max(map(len, column_labels)) * room + 0.6
    figure = new_figure(width, height, title, subtitle)
    axes = figure.add_subplot()
    # What lies under a missing value shows through it.
    axes.patch.set(facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="////", linewidth=0)
    image = axes.imshow(
        np.ma.masked_invalid(matrix), cmap=_COLOURS, vmin=-limit, vmax=limit, interpolation="none"
    )
    axes.set_xticks(range(n_columns), column_labels, rotation=90, fontsize=label_size)
    axes.set_yticks(range(n_rows), row_labels, fontsize=label_size)
    axes.tick_params(length=0, pad=3, labelcolor=INK)
    # Two collections; as minor ticks, each line would be an object with a label of its own.
    between = {"colors": "white", "linewidth": min(1.0, 3 * cell), "zorder": 1.5}
    axes.vlines(np.arange(n_columns + 1) - 0.5, -0.5, n_rows - 0.5, **between)
    axes.hlines(np.arange(n_rows + 1) - 0.5, -0.5, n_columns - 0.5, **between)
    axes.spines[:].set_visible(False)
    if cell >= _SMALLEST_CELL_WITH_VALUE:
        size = min(cell * 22, 10.0)
        for (row, column), value in np.ndenumerate(matrix):
            if not math.isnan(value) and abs(value) >= least:
                ink = "white" if abs(value) > 0.6 * limit else INK
                # Inside its cell a value takes no room; asking each one would take long.
                axes.text(column, row, short(float(value)), ha="center", va="center",
                          fontsize=size, color=ink, in_layout=False)  # fmt: skip
    return figure, axes, image, cell


def _tree(figure: Figure, axes: Axes, links: _FLOATS, cell: float) -> None:
    """Draw a dendrogram above the columns."""
    from scipy.cluster.hierarchy import dendrogram

    height = 1.1  # inches
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + height)
    inset = axes.inset_axes((0, 1.01, 1, height / (cell * (len(links) + 1))))
    drawn = dendrogram(links, no_plot=True)
    for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        # scipy sets leaves at 5, 15, 25, ...
        inset.plot((np.array(x) - 5) / 10, y, color=GREY, linewidth=1.1)
    inset.set_xlim(axes.get_xlim())
    inset.set_ylim(0, max(float(links[:, 2].max()), 1e-6) * 1.05)
    inset.set_xticks([])
    inset.set_ylabel("1 − r", fontsize=8, color=INK)
    inset.tick_params(labelsize=7.5, length=2, color=GREY, labelcolor=INK)
    inset.spines[["top", "right", "bottom"]].set_visible(False)
    inset.spines["left"].set_color(GREY)


def short(value: float) -> str:
    """A number below 10 in as few signs as two decimals take.

    Example:
        >>> [short(value) for value in (0.98, -0.141, -0.001, 1.0)]
        ['.98', '−.14', '.00', '1.00']
    """
    text = f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
    return text.replace("0.", ".", 1) if text.lstrip("−").startswith("0.") else text


def _colour_bar(figure: Figure, axes: Axes, image: AxesImage, label: str) -> None:
    shown = image.get_clim()[1]
    bar = figure.colorbar(
        image, ax=axes, pad=0.02, fraction=0.05, aspect=25,
        ticks=[-1, -0.5, 0, 0.5, 1] if shown == 1 else None,
    )  # fmt: skip
    bar.set_label(label, color=INK)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)


# -- the ridge path --------------------------------------------------------------------------


def ridge_path_figure(
    paths: Mapping[str, Sequence[RidgePoint]],
    chosen: Mapping[str, float],
    title: str,
    n_pairs: int | None = None,
) -> Figure:
    """How r and Hit@1 change with the ridge, a panel a pair.

    Args:
        paths: Path of each pair; at most twelve are shown.
        chosen: Ridge the pair's map was fitted with.
        title: It should name the LM.
        n_pairs: How many pairs there are, if more than `paths` has.
    """
    shown = list(paths)[:_MOST_PANELS]
    n_columns = min(len(shown), 3)
    n_rows = math.ceil(len(shown) / n_columns)
    width, height = max(3.4 * n_columns + 0.4, 6.4), 2.7 * n_rows + 0.7
    n_pairs = n_pairs or len(paths)
    left_out = n_pairs - len(shown)
    note = f"{len(shown)} of {n_pairs} pairs; all: tables/ridge_path.csv" if left_out else ""
    figure = new_figure(width, height, title, note)
    panels = figure.subplots(n_rows, n_columns, squeeze=False)
    for panel, pair in zip(panels.flat, shown, strict=False):
        _ridge_panel(panel, pair, paths[pair], chosen.get(pair))
    for empty in panels.flat[len(shown) :]:
        empty.set_axis_off()
    for row in panels[:, 1:]:
        for panel in row:
            panel.tick_params(labelleft=False)
    bottom, top = _common_limits(list(panels.flat)[: len(shown)])
    for panel in panels.flat[: len(shown)]:
        panel.set_ylim(bottom, top)
    handles = {line.get_label(): line for p in panels.flat for line in p.get_lines()}
    named = {str(label): line for label, line in handles.items() if not str(label).startswith("_")}
    figure.legend(
        named.values(), named.keys(), loc="outside lower left", ncols=5 if n_columns == 3 else 3,
        frameon=False, fontsize=8, handlelength=1.8, columnspacing=1.2,
    )  # fmt: skip
    return finish(figure)


def _common_limits(panels: Sequence[Axes]) -> tuple[float, float]:
    lows = [np.nanmin(line.get_ydata(), initial=0.0) for p in panels for line in p.get_lines()]
    return min(-0.03, float(min(lows)) - 0.05), 1.04


def _ridge_panel(axes: Axes, pair: str, path: Sequence[RidgePoint], chosen: float | None) -> None:
    strengths = np.array([point.ridge for point in path], dtype=float)
    positive = strengths[strengths > 0]
    # A logarithmic axis has no place for 0: it stands a decade left of the smallest strength.
    zero = math.floor(math.log10(positive.min())) - 1 if len(positive) else 0
    at = np.full(len(strengths), float(zero))
    at[strengths > 0] = np.log10(positive)

    def draw(values: Sequence[float | None], label: str, colour: str, marker: str) -> None:
        y = [math.nan if value is None else value for value in values]
        if not all(map(math.isnan, y)):
            axes.plot(at, y, label=label, color=colour, marker=marker, markersize=4, linewidth=1.6)

    draw([p.label_mean for p in path], "label-wise r", BLUE, "o")
    draw([_hit1(p.influenced) for p in path], "Hit@1 influenced target", ORANGE, "s")
    draw([_hit1(p.influencing) for p in path], "Hit@1 influencing source", GREEN, "^")
    if 0 in strengths:
        axes.axvline(zero, label="ridge 0: the paper’s map", color=GREY, linestyle=":", zorder=0)
    if chosen is not None:
        place = math.log10(chosen) if chosen > 0 else zero
        axes.axvline(place, label="ridge of this run", color=INK, linestyle="--", zorder=0,
                     linewidth=1)  # fmt: skip
    last = math.ceil(at.max())
    step = max(1, math.ceil((last - zero) / 6))
    decades = list(range(zero + 1, last + 1, step))
    ticks = ([zero] if 0 in strengths else []) + decades
    names = (["0"] if 0 in strengths else []) + [_power(decade) for decade in decades]
    axes.set_xticks(ticks, names, fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.tick_params(length=2, color=GREY, labelcolor=INK)
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(legible([pair], 50)[0][0], loc="left", fontsize=10, color=INK)
    axes.set_xlabel("ridge", fontsize=8, color=INK)


def _hit1(rates: Mapping[str, float] | None) -> float | None:
    return None if rates is None else rates["1"]


def _power(exponent: int) -> str:
    if -2 <= exponent <= 2:
        return f"{10.0**exponent:g}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


# -- nulls -----------------------------------------------------------------------------------


def nulls_figure(scores: Sequence[PairScore], title: str, limit: int = 40) -> Figure:
    """Every pair's r beside what needs no knowledge: r above the control is evidence, r alone not.

    Args:
        scores: Scores of the pairs.
        title: It should name the LM.
        limit: How many pairs are shown: those with the highest r.
    """
    known = [score for score in scores if not math.isnan(_or_nan(score.label_mean))]
    shown = sorted(known, key=lambda score: -score.label_mean)[:limit]
    names, _ = legible([f"{score.source}->{score.target}" for score in shown], 50)
    note = f"{len(shown)} of {len(scores)} pairs, those with the highest r; all: tables/pairs.csv"
    height = 0.23 * max(len(shown), 3) + 0.9
    figure = new_figure(7.5, height, title, note if len(shown) < len(scores) else "")
    axes = figure.add_subplot()
    rows = np.arange(len(shown))
    r = np.array([score.label_mean for score in shown], dtype=float)
    control = np.array([_or_nan(score.control_label_mean) for score in shown], dtype=float)
    permuted = np.array([_or_nan(score.permuted_label_mean) for score in shown], dtype=float)
    axes.hlines(rows, control, r, color=PALE, linewidth=3, zorder=1)
    axes.axvline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.plot(permuted, rows, "x", color=GREY, markersize=5, label="targets permuted")
    axes.plot(control, rows, "D", color=ORANGE, markersize=5, markerfacecolor="white",
              label="unrelated prompt as the source")  # fmt: skip
    axes.plot(r, rows, "o", color=BLUE, markersize=6, label="this pair")
    lowest = np.nanmin(np.concatenate([r, control, permuted, [0.0]]))
    axes.set_xlim(min(-0.15, float(lowest) - 0.05), 1.04)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_yticks(rows, names, fontsize=9)
    axes.tick_params(length=0, labelcolor=INK)
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("label-wise Pearson r", color=INK)
    figure.legend(reverse=True, loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return finish(figure)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
