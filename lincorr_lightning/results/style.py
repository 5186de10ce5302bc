"""Size, fonts and colours of all figures.

Figures are drawn by Agg without pyplot and its global state, so that they can be made inside any
program.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable
from functools import cache
from typing import cast

import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text
from PIL import Image

# Okabe and Ito's colours, which colour-blind people can tell apart.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, GREY, PALE = "#222222", "#767676", "#DDDDDD"
DPI = 150
# In the order in which matplotlib looks for a character: its own font, then Chinese, Japanese, and
# the rest.
_FONTS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP",
    "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Microsoft YaHei",
    "PingFang SC", "Hiragino Sans GB", "Hiragino Sans", "Yu Gothic", "IPAGothic", "SimHei",
    "Arial Unicode MS", "Droid Sans Fallback", "Noto Sans", "Noto Sans Arabic",
    "Noto Sans Hebrew", "Noto Sans Devanagari", "Unifont",
)  # fmt: skip


def new_figure(width: float, height: float, title: str, subtitle: str = "") -> Figure:
    """Return an empty figure of a width and height in inches, with titles above that height.

    Title and subtitle are broken into as many lines as they need.
    """
    figure = Figure(figsize=(width, height), dpi=DPI, layout="compressed")
    FigureCanvasAgg(figure)
    head, below = _wrap(title, width, 12), _wrap(subtitle, width, 9)
    # A line takes a third more than its letters; then some air.
    room = (12 * len(head) + 9 * len(below)) * 1.35 / 72 + 0.2
    figure.set_size_inches(width, height + room)
    layout = cast(ConstrainedLayoutEngine, figure.get_layout_engine())
    layout.set(rect=(0, 0, 1, height / (height + room)))
    top = 1 - 0.08 / (height + room)
    under = top - 12 * 1.35 * len(head) / 72 / (height + room)
    left = 0.08 / width
    for y, lines, size, weight, colour in (
        (top, head, 12, "bold", INK),
        (under, below, 9, "normal", GREY),
    ):
        figure.text(left, y, "\n".join(lines), fontsize=size, fontweight=weight, color=colour,
                    va="top", linespacing=1.2, in_layout=False)  # fmt: skip
    return figure


def _wrap(text: str, width: float, size: float) -> list[str]:
    """Break a text into lines that fit a width in inches, where letters are 0.62 em wide."""
    flat = " ".join(map(_flat, text.split()))
    return textwrap.wrap(flat, max(int((width - 0.16) * 72 / (0.62 * size)), 10))


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


def panels_of(figure: Figure, n: int, n_columns: int) -> list[Axes]:
    """Return n panels in rows of `n_columns`, filled from the left."""
    panels = figure.subplots(max(-(-n // n_columns), 1), n_columns, squeeze=False).ravel()
    for empty in panels[n:]:
        empty.set_axis_off()
    return list(panels[:n])


def finish(figure: Figure) -> Figure:
    """Set the fonts of all texts, in which a dollar sign is no formula, and return the figure.

    Matplotlib takes each character from the first font that has it, and warns if none has.
    """
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_fontfamily(_installed_fonts())
    return figure


def to_png(figure: Figure) -> bytes:
    """Draw a figure; return the bytes of a PNG file."""
    # `savefig` would do the layout twice.
    canvas = FigureCanvasAgg(figure)  # type: ignore[no-untyped-call]
    canvas.draw()  # type: ignore[no-untyped-call]
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")  # type: ignore[no-untyped-call]
    file = io.BytesIO()
    image.save(file, "png", dpi=(figure.dpi, figure.dpi))
    return file.getvalue()


def legible(labels: Iterable[str], longest: int = 24) -> list[str]:
    """Return labels in one line each, cut to a length in characters."""
    flat = map(_flat, labels)
    return [label if len(label) <= longest else f"{label[: longest - 1]}…" for label in flat]


def short_name(lm: str) -> str:
    """Return the name of an LM for titles: the last part of its hub id or path.

    Example:
        >>> short_name("/data/lms/some-lm/"), short_name("org/some-lm"), short_name("some-lm")
        ('some-lm', 'some-lm', 'some-lm')
        >>> short_name("/cache/models--org--some-lm/snapshots/0a1b")
        'some-lm'
    """
    # The hub's cache has the name in the middle of the path.
    cached = re.search(r"models--[^/\\]+?--([^/\\]+)", lm)
    if cached:
        return cached[1]
    parts = [part for part in re.split(r"[/\\]", lm) if part]
    return parts[-1] if parts else lm


def _flat(text: str) -> str:
    """Return a text in one line, without characters that are not drawn."""
    return "".join(sign if sign.isprintable() else " " for sign in text).strip() or "␣"


@cache
def _installed_fonts() -> list[str]:
    names = {font.name for font in font_manager.fontManager.ttflist}
    return [family for family in _FONTS if family in names]
