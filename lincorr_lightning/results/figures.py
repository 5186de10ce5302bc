"""Figures of a comparison of runs, drawn from its tables; matplotlib is imported when one is."""

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING

from lincorr_lightning.results.table import clean

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

_MAX_ROWS = 12
_MAX_PANELS = 8


def points_figure(
    frame: "DataFrame",
    title: str,
    x: str,
    label: str,
    lines: Mapping[str, str],
    numbers: Mapping[str, str],
) -> "Figure":
    """Draw numbers over the column `x`, with their deviations, a panel for each.

    `numbers` are columns and their names. The values of the columns `lines` make lines of their
    own, named by the text before a value.
    """
    from lincorr_lightning.results.plots import curves

    if frame[x].astype(str).str.fullmatch(r"\d+").all():  # such as steps
        frame = frame.assign(**{x: frame[x].astype(int)})
    names = [before + frame[column].astype(str) for column, before in lines.items()]
    line = [clean(", ".join(row)) for row in zip(*names, strict=True)] or ""
    frame = frame.assign(_x=frame[x], _line=line)
    points = frame[["_x", "_line", *numbers]].melt(["_x", "_line"], var_name="number")
    deviations = frame.reindex(columns=[f"{key}_deviation" for key in numbers]).fillna(0.0)
    spread = deviations.to_numpy(float).ravel("F")
    points = points.assign(
        panel=points["number"].map(numbers),
        low=points["value"] - spread,
        high=points["value"] + spread,
    )
    return curves(
        points,
        "_x",
        "value",
        "_line" if points["_line"].any() else None,
        "panel",
        title=clean(title),
        band=("low", "high"),
        labels=(label, ""),
    )


def differences_figure(frame: "DataFrame", title: str) -> "Figure":
    """Draw the differences of two runs with their intervals, or without where none has any."""
    from lincorr_lightning.results.plots import BLUE, GREY, bare_axes, legible, new_figure

    frame = frame.dropna(subset=["difference"])
    frame = frame.dropna(subset=["low"]) if frame["low"].notna().any() else frame
    # Numbers of one row each share a panel.
    panel = frame["heading"].where(frame["row"] != "", "")
    frame = frame.assign(name=frame["row"].where(frame["row"] != "", frame["heading"]))
    by_panel = frame.groupby([panel, "table", "format"], sort=False)
    groups = {key: rows.head(_MAX_ROWS) for key, rows in islice(by_panel, _MAX_PANELS)}
    heights = [len(rows) for rows in groups.values()]
    height = 0.22 * sum(heights) + 0.5 * len(heights) + 0.3
    figure = new_figure(7, height, clean(title), "second minus first, with 95 % interval")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, ((heading, *_), rows) in zip(panels, groups.items(), strict=True):
        bare_axes(axes)
        axes.axvline(0, color=GREY, linewidth=0.8)
        names = legible(map(clean, rows["name"]), 40)
        ends = rows[["low", "high"]].sub(rows["difference"], axis=0).abs().to_numpy().T
        axes.errorbar(rows["difference"], range(len(rows)), xerr=ends, fmt="o", color=BLUE)
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.tick_params(labelsize=8)
        axes.set_title(heading, loc="left", fontsize=9.5)
    return figure
