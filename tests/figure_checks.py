"""Checks that figures are legible: nothing cut, nothing on top of another."""

import io
import re
from typing import Any

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from lincorr_lightning.results.plots import to_png, use_installed_fonts

LONG = "/home/someone/checkpoints/a-very-long-name-of-a-language-model-7b-instruct-v3-final/step-9"
"""Name of an LM that hardly fits a title."""


def texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """All texts that are drawn, and their boxes."""
    drawn: list[Text] = []
    draw = Text.draw

    def record(self: Text, renderer: Any) -> None:
        drawn.append(self)
        draw(self, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        use_installed_fonts(figure)  # as `results.Figure` does
        to_png(figure)
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    return [(text, text.get_window_extent()) for text in shown]


def assert_legible(figure: Figure, smallest: float = 6.0) -> None:
    """Nothing leaves the picture, nothing is too small, no text touches another."""
    page = figure.bbox
    drawn = texts(figure)
    for axes in figure.axes:
        if axes.axison and axes.get_lines():
            assert names_its_numbers(axes.xaxis) and names_its_numbers(axes.yaxis)
    assert drawn
    for text, box in drawn:
        said = text.get_text()
        assert text.get_fontsize() >= smallest, said
        assert box.x0 >= -0.5 and box.y0 >= -0.5, f"{said!r} leaves the picture"
        assert box.x1 <= page.x1 + 0.5 and box.y1 <= page.y1 + 0.5, f"{said!r} leaves the picture"
    boxes = [(box.padded(-0.8), text.get_text()) for text, box in drawn]
    edges = np.array([[b.x0, b.y0, b.x1, b.y1] for b, _ in boxes])
    x0, y0, x1, y1 = edges.T
    meet = (x0[:, None] < x1) & (x0 < x1[:, None]) & (y0[:, None] < y1) & (y0 < y1[:, None])
    np.fill_diagonal(meet, False)
    assert not meet.any(), [(boxes[i][1], boxes[j][1]) for i, j in np.argwhere(meet)[:5]]


def names_its_numbers(axis: Axis) -> bool:
    """Whether an axis has a label, or names in place of numbers, or shares that of a neighbour."""
    ticks = [label.get_text().replace("−", "-") for label in axis.get_ticklabels()]
    numbers = [text for text in ticks if re.fullmatch(r"[-.%\d\s]+", text)]
    hidden = not any(label.get_visible() for label in axis.get_ticklabels())
    return bool(axis.label.get_text()) or not any(numbers) or hidden


def pixels(figure: Figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(to_png(figure))).convert("RGB")) / 255
