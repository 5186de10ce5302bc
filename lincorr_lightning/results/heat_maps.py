"""Heat maps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lincorr_lightning.results.style import GREY, INK, finish, legible, new_figure

if TYPE_CHECKING:
    from pandas import DataFrame

_FLOATS = npt.NDArray[np.floating[Any]]
# Below this size, in inches, the two decimals of a cell would be too small to read.
_MIN_CELL_WITH_VALUE = 0.27
_SIDES = 1.6  # colour bar and margins, in inches


def correlation_heatmap(
    matrix: DataFrame,
    title: str,
    subtitle: str = "",
    value_label: str = "label-wise Pearson r",
    limits: tuple[float, float] = (-1.0, 1.0),
    links: _FLOATS | None = None,
    axis_labels: tuple[str, str] = ("source", "target"),
    least: float = 0.0,
) -> Figure:
    """Draw a matrix as square cells with their values, as in the paper's figures 3 and 7.

    Args:
        matrix: The values, a row per source and a column per target; NaN where there is none, shown
            hatched.
        title: The title, with the name of the LM.
        subtitle: Everything else that is needed to read the figure.
        value_label: Meaning of the colours.
        limits: Values of the extreme colours; from 0 on, there is one hue.
        links: A tree over the columns in their order, as `scipy.cluster.hierarchy.linkage` returns
            it, drawn above them.
        axis_labels: What rows and columns are.
        least: Cells below this absolute value show their colour alone.
    """
    if matrix.isna().any(axis=None):
        subtitle = f"{subtitle}; hatched: no value".lstrip("; ")
    cells = matrix.to_numpy(dtype=float)
    n_rows, n_columns = cells.shape
    row_labels, column_labels = legible(map(str, matrix.index)), legible(map(str, matrix.columns))
    cell = min(max(9 / max(n_rows, n_columns), 0.14), 0.8)
    label_size = min(max(cell * 45, 7.0), 10.0)
    letter = 0.0085 * label_size  # inches
    width = max(n_columns * cell + max(map(len, row_labels)) * letter + _SIDES, 5.5)
    height = n_rows * cell + max(map(len, column_labels)) * letter + 0.6
    figure = new_figure(width, height, title, subtitle)
    axes = figure.add_subplot()
    # Shows where a value is missing.
    axes.patch.set(facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="////", linewidth=0)
    image = axes.imshow(
        np.ma.masked_invalid(cells), cmap="Reds" if limits[0] == 0 else "RdBu_r",
        vmin=limits[0], vmax=limits[1], interpolation="none",
    )  # fmt: skip
    axes.set_xticks(range(n_columns), column_labels, rotation=90, fontsize=label_size)
    axes.set_yticks(range(n_rows), row_labels, fontsize=label_size)
    axes.tick_params(length=0, pad=3, labelcolor=INK)
    # Two collections are faster than minor ticks, each of which is an object with a label.
    between: dict[str, Any] = {"colors": "white", "linewidth": min(1.0, 3 * cell), "zorder": 1.5}
    axes.vlines(np.arange(n_columns + 1) - 0.5, -0.5, n_rows - 0.5, **between)
    axes.hlines(np.arange(n_rows + 1) - 0.5, -0.5, n_columns - 0.5, **between)
    axes.spines[:].set_visible(False)
    if cell >= _MIN_CELL_WITH_VALUE:
        _write_values(axes, cells, min(cell * 22, 10.0), least, 0.6 * limits[1])
    if links is not None:
        _draw_tree(figure, axes, links, cell)
    axes.set_ylabel(axis_labels[0], color=INK)
    axes.set_xlabel(axis_labels[1], color=INK)
    ticks = [-1, -0.5, 0, 0.5, 1] if limits == (-1, 1) else None
    bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.05, aspect=25, ticks=ticks)
    bar.set_label(value_label, color=INK)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)
    return finish(figure)


def _write_values(axes: Axes, cells: _FLOATS, size: float, least: float, dark: float) -> None:
    """Write values into their cells; from `dark` on, they are white."""
    for (row, column), value in np.ndenumerate(cells):
        if not math.isnan(value) and abs(value) >= least:
            # Outside of the layout, which would measure each of them and take long.
            axes.text(column, row, short(float(value)), ha="center", va="center", fontsize=size,
                      color="white" if abs(value) > dark else INK, in_layout=False)  # fmt: skip


def _draw_tree(figure: Figure, axes: Axes, links: _FLOATS, cell: float) -> None:
    """Draw a dendrogram above the columns."""
    from scipy.cluster.hierarchy import dendrogram

    height = 1.1  # inches
    figure.set_size_inches(figure.get_figwidth(), figure.get_figheight() + height)
    inset = axes.inset_axes((0, 1.01, 1, height / (cell * (len(links) + 1))))
    drawn = dendrogram(links, no_plot=True)
    for x, y in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        # scipy sets leaves at 5, 15, 25, ...
        inset.plot((np.array(x) - 5) / 10, y, color=GREY, linewidth=1.1)
    inset.set(xlim=axes.get_xlim(), ylim=(0, max(float(links[:, 2].max()), 1e-6) * 1.05), xticks=[])
    inset.set_ylabel("1 − r", fontsize=8, color=INK)
    inset.tick_params(labelsize=7.5, length=2, color=GREY, labelcolor=INK)
    inset.spines[["top", "right", "bottom"]].set_visible(False)
    inset.spines["left"].set_color(GREY)


def short(value: float) -> str:
    """Return a number below 10 with two decimals and no leading zero.

    Example:
        >>> [short(value) for value in (0.98, -0.141, -0.001, 1.0)]
        ['.98', '−.14', '.00', '1.00']
    """
    text = f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
    return text.replace("0.", ".", 1) if text.lstrip("−").startswith("0.") else text
