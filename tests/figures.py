"""Looking at figures as a reader does."""

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from PIL import Image

from lincorr_lightning.results.style import to_picture

LONG = "/home/someone/checkpoints/a-very-long-name-of-a-language-model-7b-instruct-v3-final/step-9"


def texts(figure: Figure) -> list[tuple[Text, Bbox]]:
    """All texts that are drawn, and their boxes."""
    drawn: list[Text] = []
    draw = Text.draw

    def record(self: Text, renderer: Any) -> None:
        drawn.append(self)
        draw(self, renderer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        figure.canvas.draw()
    shown = [text for text in drawn if text.get_visible() and text.get_text()]
    return [(text, text.get_window_extent()) for text in shown]


def assert_legible(figure: Figure, smallest: float = 6.0) -> None:
    """Nothing leaves the picture, nothing is too small, no text touches another."""
    page = figure.bbox
    drawn = texts(figure)
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


def pixels(figure: Figure) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(to_picture(figure).png)).convert("RGB")) / 255


def colour_at(figure: Figure, row: float, column: float) -> np.ndarray:
    """Colour of the picture where a heat map's cell is, off its value."""
    picture = pixels(figure)
    x, y = figure.axes[0].transData.transform((column, row))
    return picture[round(picture.shape[0] - y), round(x)]


def names(n: int) -> list[str]:
    return [f"{'knowledge' if i % 3 else 'city'}{i}_{['es', 'zh'][i % 2]}" for i in range(n)]
