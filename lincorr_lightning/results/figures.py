"""Figures of a comparison of runs, drawn from its tables; matplotlib is imported when one is."""

from typing import TYPE_CHECKING

from lincorr_lightning.results.table import clean, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_MAX_ROWS = 12
_MAX_PANELS = 8


def points_figure(frame: "DataFrame", title: str, x: str) -> "Figure":
    """Draw points: a panel for each number, a line for each `line`, over what is named `x`."""
    from lincorr_lightning.results.plots import curves

    frame = frame.assign(line=frame["line"].map(clean))
    names = "x", "value", "line" if frame["line"].any() else None, "number"
    return curves(frame, *names, title=clean(title), band=("low", "high"), labels=(x, ""))


def differences_figure(frame: "DataFrame", title: str) -> "Figure":
    """Draw the differences of two runs that have an interval, a panel for each number."""
    from lincorr_lightning.results.plots import BLUE, GREY, bare_axes, legible, new_figure

    frame = frame.dropna(subset=["low"])
    frame = frame[~frame["row"].str.endswith(", in both")]
    by_number = list(frame.groupby(["table", "number"], sort=False))
    if all(len(rows) == 1 for _, rows in by_number):  # a panel for all of a format
        by_number = list(frame.assign(row=frame["heading"], heading="").groupby("format"))
    groups = [rows for _, rows in by_number[:_MAX_PANELS]]
    heights = [min(len(rows), _MAX_ROWS) for rows in groups]
    figure = new_figure(
        7,
        0.22 * sum(heights) + 0.5 * len(heights) + 0.3,
        clean(title),
        "second minus first, with 95 % interval; filled: it excludes 0; right: first → second",
    )
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, n, rows in zip(panels, heights, groups, strict=True):
        bare_axes(axes)
        axes.axvline(0, color=GREY, linewidth=0.8)
        for y, row in zip(range(n, 0, -1), rows.itertuples(), strict=False):
            axes.plot((row.low, row.high), (y, y), color=BLUE, linewidth=1.5)
            fill = BLUE if row.low > 0 or row.high < 0 else "white"
            axes.plot(row.difference, y, "o", color=BLUE, markerfacecolor=fill)
            values = " → ".join(show(value, row.format) for value in (row.first, row.second))
            axes.text(1.02, y, values, transform=axes.get_yaxis_transform(), va="center", size=8)
        axes.set_yticks(range(n, 0, -1), legible(map(clean, rows["row"][:n]), 40))
        axes.tick_params(labelsize=8)
        axes.set_title(rows["heading"].iloc[0], loc="left", fontsize=9.5)
    return figure
