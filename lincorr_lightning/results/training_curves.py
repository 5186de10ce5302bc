"""Curves of a run's scalars, as TensorBoard draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    finish,
    legible,
    new_figure,
    panels_of,
    plain_axes,
)

History = Mapping[str, Sequence[tuple[int, float]]]
"""Pairs of step and value, by log key."""

_MAX_PANELS = 6
MAX_CURVES = 12
"""Curves in a panel."""
_LONGEST = 34  # characters of a name
_PANEL = 3.5  # inches
# The rest of Okabe and Ito's colours; black and yellow are left out.
_PALETTE = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", GREY)
_MEANINGS = {
    "generalized": BLUE, "hallucinated": ORANGE, "unchanged": GREY, "source_learned": GREEN,
}  # fmt: skip
_MAX_MARKERS = 30
_MANY = 120  # from here on, a curve is smoothed as TensorBoard does
_SMOOTHING = 0.6


def training_curves(
    history: History, title: str, subtitle: str = "", max_panels: int = _MAX_PANELS
) -> Figure:
    """Draw scalars over the step, with a panel for each group of log keys.

    Values that are not finite are left out. Curves of many points are smoothed as TensorBoard does,
    with the values themselves pale behind.

    Args:
        history: Pairs of step and value by log key; the key's part before its first ``/`` is its
            group.
        title: The title, with the name of the run.
        subtitle: Everything else that is needed to read the figure.
        max_panels: Number of groups at most.
    """
    curves = {tag: points for tag, found in history.items() if len(points := _points(found))}
    groups: dict[str, dict[str, npt.NDArray[np.float64]]] = {}
    for tag, points in curves.items():
        group, _, name = tag.partition("/")
        groups.setdefault(group, {})[name or group] = points
    shown = dict(list(groups.items())[:max_panels])
    smoothed = any(len(points) > _MANY for lines in shown.values() for points in lines.values())
    notes = [
        subtitle,
        "x: step" if groups else "nothing was logged",
        "pale: values; dark: smoothed (0.6)" if smoothed else "",
        f"{len(shown)} of {len(groups)} groups" if len(groups) > len(shown) else "",
    ]
    n_columns = min(max(len(shown), 1), 2 if len(shown) in (2, 4) else 3)
    n_rows = math.ceil(len(shown) / n_columns)
    keys = [_key_rows(lines) for lines in shown.values()]
    rows = [max(keys[i : i + n_columns]) for i in range(0, len(keys), n_columns)]
    width, height = max(_PANEL * n_columns + 0.2, 5.0), 2.3 * n_rows + 0.18 * sum(rows)
    figure = new_figure(width, max(height, 0.3), title, "; ".join(note for note in notes if note))
    panels = panels_of(figure, len(shown), n_columns)
    for panel, (group, lines) in zip(panels, shown.items(), strict=True):
        _panel(panel, group, lines)
    return finish(figure)


def _points(found: Sequence[tuple[int, float]]) -> npt.NDArray[np.float64]:
    """Return the finite points in the order of their steps, ``(n, 2)``."""
    points = np.array(found, dtype=float).reshape(-1, 2)
    points = points[np.isfinite(points).all(axis=1)]
    return points[np.argsort(points[:, 0], kind="stable")]


def _panel(axes: Axes, group: str, lines: Mapping[str, npt.NDArray[np.float64]]) -> None:
    kept = dict(list(lines.items())[:MAX_CURVES])
    names = legible(kept, _LONGEST)
    free = cycle([c for c in _PALETTE if c not in [_MEANINGS.get(name) for name in kept]])
    styles = cycle(["-"] * len(_PALETTE) + ["--"] * len(_PALETTE))
    for (name, points), shown in zip(kept.items(), names, strict=True):
        colour, style = _MEANINGS.get(name) or next(free), next(styles)
        steps, values = points.T
        if len(points) > _MANY:
            axes.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
            values = _smooth(values)
        axes.plot(
            steps, values, style, color=colour, label=shown, linewidth=1.7,
            marker="o" if len(points) <= _MAX_MARKERS else "", markersize=3.5,
            solid_joinstyle="round",
        )  # fmt: skip
    _limits(axes, np.concatenate(list(kept.values())))
    # The title names a single curve, as on TensorBoard's cards.
    title = group
    if len(lines) == 1:
        title = "/".join(dict.fromkeys((group, *lines)))
    elif len(kept) < len(lines):
        title = f"{group} ({len(kept)} of {len(lines)})"
    title = legible([title], 46)[0]
    plain_axes(axes, title, "", "")
    axes.set_title(title, loc="left", fontsize=min(10, 370 / len(title)))
    if len(kept) > 1:
        axes.legend(
            loc="upper left", bbox_to_anchor=(0, 0), ncols=_key_columns(kept),
            frameon=False, fontsize=7.5, handlelength=1.4, handletextpad=0.5, columnspacing=1.2,
            borderaxespad=2.2, borderpad=0, labelspacing=0.3, labelcolor=INK,
        )  # fmt: skip


def _limits(axes: Axes, points: npt.NDArray[np.float64]) -> None:
    """Set whole steps on x, and the whole scale of shares and correlations that vary much."""
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=[1, 2, 5, 10]))
    first, last = points[:, 0].min(), points[:, 0].max()
    if first == last:
        axes.set_xlim(first - 1, first + 1)
    low, high = points[:, 1].min(), points[:, 1].max()
    if low >= 0 and high <= 1 and not 0 < high - low <= 0.4:
        axes.set_ylim(-0.04, 1.04)
    elif low == high:  # matplotlib would show a rounding error as a landscape
        around = max(abs(low) * 0.1, 0.05)
        axes.set_ylim(low - around, high + around)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))


def _smooth(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return TensorBoard's moving average: exponential, corrected for the missing past."""
    smooth, last = np.empty_like(values), 0.0
    for i, value in enumerate(values):
        last = last * _SMOOTHING + (1 - _SMOOTHING) * float(value)
        smooth[i] = last / (1 - _SMOOTHING ** (i + 1))
    return smooth


def _key_columns(lines: Mapping[str, object]) -> int:
    longest = max(map(len, legible(lines, _LONGEST)))
    return max(1, min(len(lines), int((_PANEL - 0.5) / (0.068 * longest + 0.4))))


def _key_rows(lines: Mapping[str, object]) -> int:
    n = min(len(lines), MAX_CURVES)
    return math.ceil(n / _key_columns(lines)) if n > 1 else 0
