"""What all figures share: size, type, colours, and text that is legible whatever the labels hold.

Figures are made object by object and drawn by Agg: nothing here touches pyplot or its global state,
so that a figure can be made inside anybody's program.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

# Okabe and Ito's colours, which people who see fewer colours tell apart too.
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
INK, GREY, PALE = "#222222", "#767676", "#DDDDDD"
DPI = 150
_LONGEST_LABEL = 24
# Tried in this order for signs that matplotlib's own font lacks: Chinese, Japanese, and the rest.
_OTHER_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Source Han Sans SC",
    "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Microsoft YaHei", "PingFang SC", "Hiragino Sans GB",
    "Hiragino Sans", "Yu Gothic", "IPAGothic", "SimHei", "Arial Unicode MS", "Droid Sans Fallback",
    "Noto Sans", "Noto Sans Arabic", "Noto Sans Hebrew", "Noto Sans Devanagari", "Unifont",
)  # fmt: skip


def new_figure(width: float, height: float, title: str) -> Figure:
    """An empty figure with its title.

    Args:
        width: In inches.
        height: In inches, the title's lines not counted.
        title: In bold over everything, broken into as many lines as it needs.
    """
    # Twelve points bold are about a tenth of an inch a letter.
    lines = textwrap.wrap(_flat(title), max(int(width / 0.115), 20), break_on_hyphens=False)
    figure = Figure(figsize=(width, height + 0.25 * len(lines)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=12, fontweight="bold", color=INK)
    return figure


def set_subtitle(axes: Axes, text: str, width: float) -> None:
    """Put grey lines between the title and the axes.

    Args:
        axes: What they are about.
        text: Any length.
        width: Of the figure, in inches.
    """
    lines = textwrap.wrap(_flat(text), max(int((width - 1) / 0.078), 24))
    axes.set_title("\n".join(lines), loc="left", fontsize=9, color=GREY, pad=8)


def finish(figure: Figure) -> Figure:
    """Give all texts fonts that have their signs, and take dollars for dollars, not for formulas."""
    texts = figure.findobj(Text)
    signs = "".join(text.get_text() for text in texts if isinstance(text, Text))
    families = _families(signs)
    for text in texts:
        assert isinstance(text, Text)
        text.set_parse_math(False)
        text.set_fontfamily(families)
    return figure


def to_image(figure: Figure) -> npt.NDArray[np.uint8]:
    """Draw a figure.

    Returns:
        ``(height, width, 3)`` in pixels.
    """
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def legible(labels: Sequence[str]) -> tuple[list[str], str]:
    """Labels as a figure can show them.

    Long ones are cut. One that no font here can draw is shown as its number, which is better than a
    row of boxes.

    Args:
        labels: Labels of rows or columns.

    Returns:
        The labels, and a note on the numbers: empty if there are none.
    """
    shown, numbered = [], 0
    for number, label in enumerate(map(_flat, labels), start=1):
        if not _drawable(label):
            label, numbered = f"no. {number}", numbered + 1
        elif len(label) > _LONGEST_LABEL:
            label = f"{label[: _LONGEST_LABEL - 1]}…"
        shown.append(label)
    note = f"{numbered} labels are shown by number: no font found here has their signs."
    return shown, note if numbered else ""


def _flat(text: str) -> str:
    """One line, without signs that are not drawn."""
    return "".join(sign if sign.isprintable() else " " for sign in text).strip() or "␣"


def _families(signs: str) -> list[str]:
    """Font families that together draw as many of these signs as can be drawn."""
    missing = {sign for sign in signs if sign.isprintable() and not _has("DejaVu Sans", sign)}
    families = ["DejaVu Sans"]
    for family in _installed() if missing else ():
        found = {sign for sign in missing if _has(family, sign)}
        if found:
            families.append(family)
            missing -= found
    return families


def _drawable(label: str) -> bool:
    families = _families(label)
    return all(any(_has(family, sign) for family in families) for sign in label)


@cache
def _installed() -> tuple[str, ...]:
    names = {font.name for font in font_manager.fontManager.ttflist}
    return tuple(family for family in _OTHER_FONTS if family in names)


@cache
def _has(family: str, sign: str) -> bool:
    path = Path(font_manager.findfont(family))
    return bool(font_manager.get_font(str(path)).get_char_index(ord(sign)))
