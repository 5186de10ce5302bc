"""Figures of a comparison of runs, drawn from its tables; matplotlib is imported here alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from lincorr_lightning.results.table import clean, show

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_MAX_ROWS = 12
_MAX_PANELS = 8


class _Dot(NamedTuple):
    """A row of a panel: a value within an interval, and a text beside it."""

    label: str
    low: float
    value: float
    high: float
    text: str
    is_filled: bool = True


def differences_figure(frame: "DataFrame", title: str) -> "Figure":
    """Draw the differences of two runs that have an interval, a panel for each number."""
    frame = frame.dropna(subset=["low"])
    frame = frame[~frame["row"].str.endswith(", in both")]
    by_number = [rows for _, rows in frame.groupby(["table", "number"], sort=False)]
    if all(len(rows) == 1 for rows in by_number):  # a panel for all of a format
        frame = frame.assign(row=frame["heading"], heading="")
        by_number = [rows for _, rows in frame.groupby("format")]
    panels = {}
    for i, rows in enumerate(by_number):
        panels[i, rows["heading"].iloc[0]] = [
            _Dot(
                row.row,
                row.low,
                row.difference,
                row.high,
                " → ".join(show(value, row.format) for value in (row.first, row.second)),
                row.low > 0 or row.high < 0,
            )
            for row in rows.itertuples()
        ]
    note = "second minus first, with 95 % interval; filled: it excludes 0; right: first → second"
    return _dots(panels, title, note, zero=True)


def runs_figure(
    frame: "DataFrame", title: str, labels: Mapping[str, str], numbers: Mapping[str, Sequence[str]]
) -> "Figure":
    """Draw the numbers of runs, a panel for each, with the deviation over seeds.

    `labels` are the columns that name a row, with headings, and `numbers` those of the numbers,
    with heading and format.
    """
    names = [
        ", ".join(f"{labels[key]} {value}".strip() for key, value in row.items())
        for row in frame[list(labels)].to_dict("records")
    ]
    panels = {}
    for number, (heading, form) in numbers.items():
        values = frame[number].to_numpy(float)
        deviations = frame.get(f"{number}_deviation", frame[number] * 0).fillna(0.0).to_numpy(float)
        panels[number, heading] = [
            _Dot(name, value - std, value, value + std, show(value, form))
            for name, value, std in zip(names, values, deviations, strict=True)
            if value == value
        ]
    note = "line: standard deviation over seeds" if "n" in frame else ""
    return _dots({name: dots for name, dots in panels.items() if dots}, title, note)


def _dots(
    panels: Mapping[Any, Sequence[_Dot]], title: str, subtitle: str, zero: bool = False
) -> "Figure":
    from lincorr_lightning.results.plots import BLUE, GREY, bare_axes, legible, new_figure

    shown = {name: dots[:_MAX_ROWS] for name, dots in list(panels.items())[:_MAX_PANELS]}
    heights = [len(dots) for dots in shown.values()]
    height = 0.22 * sum(heights) + 0.5 * len(heights) + 0.3
    figure = new_figure(7, height, clean(title), subtitle)
    grid = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, n, ((_, heading), dots) in zip(grid, heights, shown.items(), strict=True):
        bare_axes(axes)
        if zero:
            axes.axvline(0, color=GREY, linewidth=0.8)
        for y, dot in zip(range(n, 0, -1), dots, strict=True):
            axes.plot((dot.low, dot.high), (y, y), color=BLUE, linewidth=1.5)
            axes.plot(
                dot.value, y, "o", color=BLUE, markerfacecolor=BLUE if dot.is_filled else "white"
            )
            axes.text(1.02, y, dot.text, transform=axes.get_yaxis_transform(), va="center", size=8)
        axes.set_yticks(range(n, 0, -1), legible((clean(dot.label) for dot in dots), 40))
        axes.tick_params(labelsize=8)
        axes.set_title(clean(heading), loc="left", fontsize=9.5)
    return figure
