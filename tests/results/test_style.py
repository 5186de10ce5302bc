"""Fonts, sizes and PNGs of figures."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from lincorr_lightning.results import style
from lincorr_lightning.results.heat_maps import correlation_heatmap
from lincorr_lightning.results.style import legible, new_figure, save_figure, to_picture
from tests.figure_checks import assert_legible, texts


@pytest.fixture
def own_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with matplotlib's own fonts alone."""
    monkeypatch.setattr(style, "_FONTS", ("DejaVu Sans", "no such font"))
    caches = (style._installed_fonts, style._characters)
    for one in caches:
        one.cache_clear()
    yield
    for one in caches:
        one.cache_clear()


@pytest.mark.filterwarnings("error:Glyph", "error:findfont")
def test_characters_without_a_font_are_written_as_code_points(own_fonts: None) -> None:
    shown, note = legible(["Paris", "上海", "東"])
    assert shown == ["Paris", "U+4E0A U+6D77", "U+6771"]
    figure = correlation_heatmap(np.eye(2), ["上海", "Paris"], ["a", "b"], "t")
    to_picture(figure)
    assert note in " ".join(text.get_text() for text, _ in texts(figure))
    assert legible(["Paris", "São Paulo", "Москва"]) == (["Paris", "São Paulo", "Москва"], "")


def test_fonts_follow_one_another_character_by_character(
    own_fonts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that the first font lacks is drawn in a later one."""
    monkeypatch.setattr(style, "_FONTS", ("STIXSizeOneSym", "DejaVu Sans"))
    first = font_manager.get_font(font_manager.findfont("STIXSizeOneSym")).get_charmap()
    assert ord("a") not in first
    assert legible(["abc"]) == (["abc"], "")
    figure = correlation_heatmap(np.eye(2), ["abc", "b"], ["a", "b"], "t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda message, *args, **more: pytest.fail(str(message)))
        to_picture(figure)


def test_labels_of_all_kinds() -> None:
    labels = ["$\\frac{$", "a\nb\tc", "", "w" * 60, "_^{}\\"]
    figure = correlation_heatmap(np.zeros((5, 5)), labels, labels, "100% of $W$ in a_b^c")
    assert_legible(figure)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:3] == ["$\\frac{$", "a b c", "␣"]
    assert shown[3].startswith("wwww") and shown[3].endswith("…")


def test_picture_is_the_figure() -> None:
    picture = to_picture(new_figure(4, 2, "title"))
    image = Image.open(io.BytesIO(picture.png))
    assert image.size == (picture.width, picture.height)
    assert image.format == "PNG"
    corner = np.asarray(image.convert("RGB"))[0, 0] / 255
    assert corner.tolist() == list(to_rgb("white"))


def test_a_figure_is_saved_as_png(tmp_path: Path) -> None:
    save_figure(Figure(figsize=(1, 1), dpi=50), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_global_is_touched_and_nothing_is_imported_early() -> None:
    code = """
import sys
import lincorr_lightning.results
assert "matplotlib" not in sys.modules, "matplotlib is imported before anything is drawn"
import matplotlib
def settings():  # looking at the backend alone would choose one
    return {key: matplotlib.rcParams[key] for key in matplotlib.rcParams if key != "backend"}
before = settings()
import numpy as np
from lincorr_lightning.results import style, heat_maps as figures
style.to_picture(figures.correlation_heatmap(np.eye(2), ["a", "b"], ["a", "b"], "t"))
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_oracle_for_overlap_can_fail() -> None:
    figure = Figure(figsize=(2, 1))
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    figure.text(0.1, 0.5, "one text")
    figure.text(0.15, 0.5, "another")
    with pytest.raises(AssertionError, match="one text"):
        assert_legible(figure)
