"""Figures over data frames: curves, bars and heat maps; their size, fonts and colours.

Agg draws them without pyplot and its global state, so that any program can make them.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

if TYPE_CHECKING:
    from pandas import DataFrame

# Okabe and Ito's colours, which colour-blind people can tell apart; black and yellow are left out.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, GREY, PALE = "#222222", "#767676", "#DDDDDD"
PALETTE = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", GREY)
DPI = 150
_TITLE_SIZE = 10
# Where matplotlib looks for a character: its own font, then Chinese, Japanese, and the rest.
_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
    "Hiragino Sans",
    "Arial Unicode MS",
    "Unifont",
)
_MAX_MARKERS = 30
_DASHES = "--", ":", "-", (0, (3, 1, 1, 1))
_LONGEST = 40  # characters of a name in a legend


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    """Return an empty figure of a width and height in inches, with titles above that height.

    Title and subtitle are broken into as many lines as they need.
    """
    lines = [*_wrap(title, width), *_wrap(subtitle, width)]
    room = 0.2 * len(lines) + 0.2
    figure = Figure(figsize=(width, height + room), dpi=DPI, layout="compressed")
    left = 0.08 / width
    figure.suptitle("\n".join(lines), x=left, ha="left", fontsize=_TITLE_SIZE, color=INK)
    return figure


def _wrap(text: str, width: float) -> list[str]:
    """Break a text into lines that fit a width in inches, where letters are 0.62 em wide."""
    flat = " ".join(map(_flat, text.split()))
    return textwrap.wrap(flat, max(int((width - 0.16) * 72 / (0.62 * _TITLE_SIZE)), 10))


def plain_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Give a panel a title, axis labels and a pale grid behind the data."""
    axes.set_title(title, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(x, fontsize=8.5, color=INK)
    axes.set_ylabel(y, fontsize=8.5, color=INK)
    axes.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GREY)


def bare_axes(axes: Axes) -> None:
    """Leave a panel without frame and ticks, over a pale grid along x."""
    axes.grid(axis="x", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=INK)
    axes.spines[:].set_visible(False)


def use_installed_fonts(figure: Figure) -> None:
    """Let matplotlib take each character from the first font that has it; it warns without any.

    Dollar signs in texts are no formulas.
    """
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_fontfamily(_installed_fonts())


def to_png(figure: Figure) -> bytes:
    """Draw a figure; return the bytes of a PNG file."""
    # `savefig` would draw twice, for the layout first. Without transparency a file is smaller.
    canvas = FigureCanvasAgg(figure)  # type: ignore[no-untyped-call]
    canvas.draw()  # type: ignore[no-untyped-call]
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    file = io.BytesIO()
    dpi = (figure.dpi, figure.dpi)
    image.save(file, "png", dpi=dpi, compress_level=2)  # twice as fast as 6
    return file.getvalue()


def legible(labels: Iterable[str], longest: int = 24) -> list[str]:
    """Return labels in one line each, cut to a length in characters."""
    flat = map(_flat, labels)
    return [label if len(label) <= longest else f"{label[: longest - 1]}…" for label in flat]


def _flat(text: str) -> str:
    """Return a text in one line, with arrows and Python's escapes for characters without a font."""
    text = text.replace("->", "→")
    plain = "".join(sign if sign.isprintable() else " " for sign in text).strip() or "␣"
    if has_glyphs(plain):
        return plain
    return "".join(s if has_glyphs(s) else ascii(s)[1:-1] for s in plain)


def has_glyphs(text: str) -> bool:
    """Return whether the installed fonts have all characters of a text."""
    return text.isascii() or all(map(_glyphs().__contains__, map(ord, text)))


@cache
def _glyphs() -> frozenset[int]:
    files = [font_manager.findfont(family) for family in _installed_fonts()]
    return frozenset(sign for file in files for sign in font_manager.get_font(file).get_charmap())


@cache
def _installed_fonts() -> list[str]:
    names = {font.name for font in font_manager.fontManager.ttflist}
    return [family for family in _FONTS if family in names]


def _colours_of(names: Sequence[Any], colours: Mapping[Any, str] | None) -> dict[Any, Any]:
    """Return a colour for each name: the given one, or the next free one of the palette."""
    chosen = {name: colour for name, colour in (colours or {}).items() if name in names}
    free = [name for name in names if name not in chosen]
    palette: Sequence[Any] = [colour for colour in PALETTE if colour not in chosen.values()]
    if len(free) > len(palette):
        palette = [matplotlib.colormaps["tab20"](i % 20) for i in range(len(free))]
    return {**chosen, **dict(zip(free, palette, strict=False))}


def curves(
    frame: DataFrame,
    x: str,
    y: str,
    hue: str | None = None,
    panel: str | None = None,
    dashed: str | None = None,
    *,
    title: str,
    subtitle: str = "",
    band: tuple[str, str] | None = None,
    colours: Mapping[Any, str] | None = None,
    labels: tuple[str, str] = ("", ""),
    percent: bool = False,
    share_y: bool = False,
    per_row: int = 3,
    size: tuple[float, float] = (3.5, 2.5),
    each: Callable[[Axes, Any, DataFrame], object] | None = None,
) -> Figure:
    """Draw y over x: a line per value of `hue`, a panel per value of `panel`.

    A row of `frame` is a point, in any order; rows without x or y are left out. x are numbers, of
    which whole ones such as layers have whole ticks, or names, which keep their order. `dashed` is
    a column of truth values: these rows make a thin dotted line of their own. `band` are the
    columns of its lower and upper end, `colours` are by value of `hue` (others are chosen),
    `labels` name the axes (without a label the vertical one has the panel's name), and `size` is
    that of a panel in inches. `each` is called with every panel, its value of `panel` and its rows,
    to add to it.
    """
    frame = frame.dropna(subset=[x, y])
    frame = frame.assign(_line=frame[hue] if hue else "", _panel=frame[panel] if panel else "")
    if ticks := [str(name) for name in frame[x].unique() if isinstance(name, str)]:
        frame = frame.assign(**{x: frame[x].map(ticks.index)})
    names = list(frame["_panel"].unique()) or [""]
    n_columns = min(len(names), per_row)
    colour_of = _colours_of([*frame["_line"].unique()], colours)
    n_rows = math.ceil(len(names) / n_columns)
    width, height = size[0] * n_columns, size[1] * n_rows
    n_legend = math.ceil(len(colour_of) / _legend_columns(list(colour_of), width)) if hue else 0
    figure = new_figure(max(width + 0.2, 5.0), height + 0.2 * n_legend, title, subtitle)
    grid = figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_y).ravel()
    for empty in grid[len(names) :]:
        empty.set_axis_off()
    panels = list(grid[: len(names)])
    for i, (axes, name) in enumerate(zip(panels, names, strict=True)):
        in_panel = frame[frame["_panel"] == name]
        for line, colour in colour_of.items():
            rows = in_panel[in_panel["_line"] == line].sort_values(x)
            label = legible([str(line)], _LONGEST)[0] if hue else None
            _draw_line(axes, rows, (x, y, dashed, band), label, colour)
        heading = legible([str(name)], 46)[0] if panel else ""
        if labels[1]:
            plain_axes(axes, heading, labels[0], "" if i % n_columns else labels[1])
        else:  # panels are of different numbers
            plain_axes(axes, "", labels[0], "\n".join(textwrap.wrap(heading, 28)))
        if ticks:
            axes.set_xticks(range(len(ticks)), legible(ticks), fontsize=8, rotation=35, ha="right")
        elif (frame[x] % 1 == 0).all():
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if each is not None:
            each(axes, name, in_panel)
    legend_below(figure, panels)
    return figure


def _draw_line(
    axes: Axes, rows: DataFrame, columns: tuple[Any, ...], label: str | None, colour: Any
) -> None:
    x, y, dashed, band = columns
    style: dict[str, Any] = {"color": colour, "marker": "o" if len(rows) <= _MAX_MARKERS else ""}
    dotted = rows[dashed].astype(bool) if dashed else np.zeros(len(rows), dtype=bool)
    for part, dash, width, size in ((rows[~dotted], "-", 1.6, 4.0), (rows[dotted], ":", 1.0, 2.5)):
        if len(part):
            style |= {"label": label, "linewidth": width, "markersize": size}
            axes.plot(part[x], part[y], dash, **style)
            label = None
    if band:
        edge = 4 if len(rows) == 1 else 0  # a band of one point has no width
        low, high = rows[list(band)].to_numpy(float).T
        axes.fill_between(rows[x], low, high, color=colour, alpha=0.15, linewidth=edge)


def bars(
    frame: DataFrame,
    x: str,
    y: str,
    hue: str | None = None,
    *,
    title: str,
    subtitle: str = "",
    error: str | None = None,
    marks: Mapping[str, str] | None = None,
    colours: Mapping[Any, str] | None = None,
    label: str = "",
) -> Figure:
    """Draw a group of bars for each value of x, with their numbers above.

    A row of `frame` is a bar of height `y`, a share, or none if that is missing; each value of
    `hue` has a bar in every group. `error` is the column of the half length of an error bar.
    `marks` are columns drawn as a line across the bar, such as a baseline, and their names in the
    legend. `label` names the vertical axis; the other arguments are those of `curves`.
    """
    groups = list(frame[x].unique())
    frame = frame.assign(_series=frame[hue] if hue else "").dropna(subset=[y])
    colour_of = _colours_of(list(frame["_series"].unique()), colours)
    width = 0.8 / max(len(colour_of), 1)
    figure = new_figure(max(6.0, 0.36 * len(groups) / width + 2.4), 3.2, title, subtitle)
    axes = figure.add_subplot()
    for i, (name, colour) in enumerate(colour_of.items()):
        rows = frame[frame["_series"] == name]
        at = np.array([groups.index(value) for value in rows[x]], dtype=float)
        at += (i - (len(colour_of) - 1) / 2) * width
        drawn = axes.bar(
            at,
            rows[y].to_numpy(float),
            0.92 * width,
            color=colour,
            label=name,
            yerr=None if error is None else rows[error].to_numpy(float),
            error_kw={"ecolor": INK, "capsize": 3, "elinewidth": 1},
        )
        # Outlined, as a mark may cross a number.
        outline = [withStroke(linewidth=3, foreground="white")]
        axes.bar_label(
            drawn, fmt="{:.0%}", padding=3, fontsize=8, color=INK, zorder=4, path_effects=outline
        )
        for (mark, named), dash in zip((marks or {}).items(), _DASHES, strict=False):
            axes.hlines(
                rows[mark],
                at - 0.46 * width,
                at + 0.46 * width,
                color=INK,
                linewidth=1.6,
                linestyle=dash,
                label="" if i else named,
            )
    plain_axes(axes, "", "", label)
    ticks = ["\n".join(textwrap.wrap(name, 20)) for name in legible(map(str, groups), 60)]
    axes.set_xticks(range(len(groups)), ticks, fontsize=8.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.margins(y=0.12)
    legend_below(figure, [axes])
    return figure


def legend_below(figure: Figure, panels: Sequence[Axes]) -> None:
    """Add one legend for all panels below them."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if names := list(handles):
        figure.legend(
            [*handles.values()],
            names,
            loc="outside lower left",
            frameon=False,
            ncols=_legend_columns(names, figure.get_figwidth()),
            fontsize=8,
            handlelength=1.6,
            columnspacing=1.2,
            labelcolor=INK,
        )


def _legend_columns(names: Sequence[Any], width: float) -> int:
    longest = max((len(str(name)) for name in names), default=1)
    return max(1, int((width - 0.3) / (0.07 * min(longest, _LONGEST) + 0.45)))


def training_curves(history: DataFrame, title: str, subtitle: str = "") -> Figure:
    """Draw a `history_table`: scalars over the step, with a panel for each group of log keys.

    The part of a key before its first ``/`` is its group.
    """
    parts = [key.partition("/") for key in history["key"]]
    group, name = [first for first, *_ in parts], [last or first for first, _, last in parts]
    return curves(
        history.assign(group=group, name=name),
        "step",
        "value",
        "name",
        "group" if len(history) else None,
        title=title,
        subtitle=subtitle if len(history) else "nothing was logged",
        labels=("step", ""),
    )


# Below this size, in inches, the two decimals of a cell would be too small to read.
_MIN_CELL_WITH_VALUE = 0.27
_SIDES = 1.6  # colour bar and margins, in inches


def pairs_heatmap(
    frame: DataFrame,
    title: str,
    subtitle: str = "",
    value_label: str = "r per answer",
    limits: Sequence[float] = (-1.0, 1.0),
) -> Figure:
    """Draw a matrix as square cells with their values, as in the paper's figures 3 and 7.

    `frame` has the sources in its first column, ``source``, and a column per target; NaN is shown
    hatched. `value_label` is the meaning of the colours and `limits` the values of the extreme
    ones; from 0 on, there is one hue.
    """
    matrix = frame.set_index("source").astype(float)
    if matrix.isna().any(axis=None):
        subtitle = f"{subtitle}; hatched: no value".lstrip("; ")
    cells = matrix.to_numpy(dtype=float)
    n_rows, n_columns = matrix.shape
    row_labels = legible(map(str, matrix.index))
    column_labels = legible(map(str, matrix.columns))
    cell = min(max(9 / max(n_rows, n_columns), 0.14), 0.8)
    label_size = min(max(cell * 45, 7.0), 10.0)
    letter = 0.0085 * label_size  # inches
    width = max(n_columns * cell + max(map(len, row_labels)) * letter + _SIDES, 5.5)
    height = n_rows * cell + max(map(len, column_labels)) * letter + 0.6
    figure = new_figure(width, height, title, subtitle)
    axes = figure.add_subplot()
    shown = matrix.set_axis(row_labels).set_axis(column_labels, axis=1)
    mesh = draw_matrix(axes, shown, limits, label_size, min(0.7, 2 * cell))
    if cell >= _MIN_CELL_WITH_VALUE:
        for (row, column), value in np.ndenumerate(cells):
            if not math.isnan(value):
                # Outside of the layout, which would measure each of them and take long.
                axes.text(
                    column,
                    row,
                    short(float(value)),
                    ha="center",
                    va="center",
                    color="white" if abs(value) > 0.6 * limits[1] else INK,
                    fontsize=min(cell * 22, 10.0),
                    in_layout=False,
                )
    axes.set_ylabel("source", color=INK)
    axes.set_xlabel("target", color=INK)
    add_colour_bar(figure, mesh, [axes], value_label)
    return figure


def draw_matrix(
    axes: Axes,
    matrix: DataFrame,
    limits: Sequence[float] = (-1.0, 1.0),
    label_size: float = 8.0,
    line: float = 0.5,
) -> QuadMesh:
    """Draw square cells with the labels of a frame's rows and columns; NaN is hatched."""
    n_rows, n_columns = matrix.shape
    axes.patch.set(facecolor="#F2F2F2", edgecolor="#BBBBBB", hatch="////", linewidth=0)
    edges = (np.arange(n + 1) - 0.5 for n in (n_columns, n_rows))
    mesh = axes.pcolormesh(
        *edges,
        np.ma.masked_invalid(matrix.to_numpy(dtype=float)),
        cmap="Reds" if limits[0] == 0 else "RdBu_r",
        clim=tuple(limits),
        edgecolors="white",
        linewidth=line,
    )
    axes.set(aspect="equal", ylim=(n_rows - 0.5, -0.5))
    axes.set_xticks(range(n_columns), list(matrix.columns), rotation=90, fontsize=label_size)
    axes.set_yticks(range(n_rows), list(matrix.index), fontsize=label_size)
    axes.tick_params(length=0, pad=3, labelcolor=INK)
    axes.spines[:].set_visible(False)
    return mesh


def add_colour_bar(
    figure: Figure, mesh: QuadMesh, panels: list[Axes], label: str, location: str = "right"
) -> None:
    """Add the scale of a heat map's colours beside its panels."""
    ticks = [-1, -0.5, 0, 0.5, 1] if mesh.get_clim() == (-1, 1) else None
    place: Any = {"pad": 0.02, "fraction": 0.05, "aspect": 25, "location": location}
    bar = figure.colorbar(mesh, ax=panels, ticks=ticks, **place)
    bar.set_label(label, color=INK)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)


def short(value: float) -> str:
    """Return a number below 10 with two decimals and no leading zero, as ``−.14``."""
    text = f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")
    return text.replace("0.", ".", 1) if text.lstrip("−").startswith("0.") else text
