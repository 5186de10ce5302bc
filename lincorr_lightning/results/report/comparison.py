"""Probes of several LMs side by side (paper, section 3.6 and figure 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from lincorr_lightning.results.report.document import Column, Part, Picture, Pictures, Table, arrow
from lincorr_lightning.results.report.lms import short_size
from lincorr_lightning.results.report.probe import MOST_PAIRS, Pair, hit, pair_name, ranked
from lincorr_lightning.results.report.runs import Run
from lincorr_lightning.results.style import (
    BLUE,
    INK,
    ORANGE,
    PALE,
    finish,
    legible,
    new_figure,
    to_picture,
)

_HITS = ("1", "3", "5")
_WAYS = {"influenced": BLUE, "influencing": ORANGE}
_LINES = {"1": "-", "3": "--", "5": ":"}
_MOST_PANELS = 6
_A_ROW = 3
# Two runs that differ in any of these differ for another reason than their LM.
_COMPARABLE = ("n_fit", "n_test", "control")
_SETTINGS = ("ridge", "solver")


def compare(runs: Sequence[Run]) -> list[Part]:
    """Tables and, of two LMs or more, the figure of what the runs have in common.

    Args:
        runs: Linear probes, by the size of their LM.

    Returns:
        Nothing if they have no pair in common.
    """
    by_run = [{pair_name(pair): pair for pair in run.results["pairs"]} for run in runs]
    common = set(by_run[0]).intersection(*by_run[1:])
    if not common:
        return []
    names = column_names(runs)
    order = [pair_name(p) for p in ranked(list(by_run[0].values())) if pair_name(p) in common]
    shown = sorted(order, key=lambda name: all(not run[name].get("precision") for run in by_run))
    note = _differences(runs)
    parts: list[Part] = []
    for key, what in (
        ("label_mean", "Label-wise r"),
        ("excess", "Label-wise r above its control"),
    ):
        rows = [[name, *(run[name].get(key) for run in by_run)] for name in shown[:MOST_PAIRS]]
        if any(cell is not None for row in rows for cell in row[1:]):
            cut = f"{MOST_PAIRS} of {len(shown)} common pairs. " if len(shown) > MOST_PAIRS else ""
            parts.append(
                Table(
                    f"{what}, by LM",
                    [Column("pair"), *(Column(name, "r") for name in names)],
                    rows,
                    cut + note,
                )
            )
    hits = [
        [name, way, f"Hit@{n}", *(hit(run[name], way, n) for run in by_run)]
        for name in shown
        if any(run[name].get("precision") for run in by_run)
        for way in _WAYS
        for n in _HITS
    ]
    if hits:
        columns = [Column("pair"), Column("labels asked"), Column("precision of W")]
        columns += [Column(name, "r") for name in names]
        parts.append(Table("Precision of W, by LM", columns, hits, note))
        if len({run.lm.key for run in runs}) > 1:
            precise = [n for n in shown if any(run[n].get("precision") for run in by_run)]
            parts.append(Pictures([_figure(runs, names, by_run, precise)]))
    return parts


def column_names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its LM's, its size, and what tells apart runs of one LM."""
    times = Counter(run.lm.key for run in runs)
    names = []
    for run in runs:
        name = run.lm.short
        if run.lm.n_parameters is not None:
            name += f" ({short_size(run.lm.n_parameters)})"
        if times[run.lm.key] > 1:
            name += f", {run.folder.name}"
        names.append(name)
    again = Counter(names)
    return [
        f"{run.lm.label}, {run.folder}" if again[name] > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _differences(runs: Sequence[Run]) -> str:
    """Say in what the runs differ besides their LM."""
    told = []
    for key in (*_COMPARABLE, *_SETTINGS):
        values = [(run.results if key in _COMPARABLE else run.settings).get(key) for run in runs]
        if len({str(value) for value in values}) > 1:
            told.append(f"{key} ({' / '.join(str(value) for value in values)})")
    return f"The runs differ also in {', '.join(told)}." if told else ""


def _figure(
    runs: Sequence[Run],
    names: Sequence[str],
    by_run: Sequence[Mapping[str, Pair]],
    precise: Sequence[str],
) -> Picture:
    """Hit@N against the LM's size, or where one is not known in the LMs' order."""
    panels = precise[:_MOST_PANELS]
    sizes = [run.lm.n_parameters for run in runs]
    known = [size for size in sizes if size is not None]
    # One LM twice, or an unknown size, has no place of its own on the axis.
    to_scale = len(set(known)) == len(runs)
    n_columns = min(len(panels), _A_ROW)
    n_rows = -(-len(panels) // n_columns)
    told = "solid Hit@1, dashed Hit@3, dotted Hit@5; " + (
        "by the number of parameters" if to_scale else "LMs in their order"
    )
    figure = new_figure(max(4.6, 3.0 * n_columns + 1.6), 2.7 * n_rows, "Precision of W by LM", told)
    axes_grid = figure.subplots(n_rows, n_columns, squeeze=False)
    xs: list[Any] = known if to_scale else list(range(len(runs)))
    shorts = [run.lm.short for run in runs]
    labels, _ = legible(
        [short_size(size) for size in known]
        if to_scale
        else shorts
        if len(set(shorts)) == len(runs)
        else list(names)
    )
    for axes, pair in zip(axes_grid.flat, panels, strict=False):
        for way, colour in _WAYS.items():
            for n in _HITS:
                ys = [hit(run[pair], way, n) for run in by_run]
                points = [(x, y) for x, y in zip(xs, ys, strict=True) if y is not None]
                axes.plot(
                    *zip(*points, strict=True) if points else ((), ()),
                    _LINES[n], color=colour, marker="o", markersize=3.5, linewidth=1.4,
                    label=way if n == "1" else None,
                )  # fmt: skip
        axes.set_title(arrow(pair), fontsize=9.5, color=INK)
        axes.set_ylim(-0.03, 1.03)
        if to_scale:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.margins(x=0.15)
        else:
            axes.set_xlim(-0.4, len(runs) - 0.6)
        axes.set_xticks(xs, labels, rotation=0 if to_scale else 35, fontsize=8,
                        ha="center" if to_scale else "right")  # fmt: skip
        axes.tick_params(labelsize=8, length=0, labelcolor=INK)
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.spines[["top", "right", "left"]].set_visible(False)
    for axes in axes_grid.flat[len(panels) :]:
        axes.set_visible(False)
    for row in axes_grid:
        row[0].set_ylabel("Hit@N", fontsize=9, color=INK)
    axes_grid.flat[n_columns - 1].legend(
        loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=8.5, labelcolor=INK
    )
    picture = to_picture(finish(figure))
    shown = ", ".join(map(arrow, panels))
    more = f"; {len(panels)} of {len(precise)} pairs" if len(panels) < len(precise) else ""
    return Picture(
        picture.png,
        picture.width,
        picture.height,
        f"Hit@1, 3 and 5 of W by LM (the paper's figure 4 in kind){more}.",
        f"Lines of Hit@N over {len(runs)} LMs, {', '.join(names)}, for {shown}; the numbers are in "
        "the table before.",
    )
