"""Fonts, sizes and PNGs of figures."""

import io
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from matplotlib import font_manager
from matplotlib.colors import to_rgb
from pandas import DataFrame
from PIL import Image

from lincorr_lightning.results import style
from lincorr_lightning.results.heat_maps import correlation_heatmap
from lincorr_lightning.results.style import new_figure, to_png
from tests.figure_checks import assert_legible


@pytest.fixture
def own_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with matplotlib's own fonts alone."""
    monkeypatch.setattr(style, "_FONTS", ("DejaVu Sans", "no such font"))
    style._installed_fonts.cache_clear()
    yield
    style._installed_fonts.cache_clear()


@pytest.mark.filterwarnings("error:findfont")
def test_a_character_without_a_font_is_reported(own_fonts: None) -> None:
    figure = correlation_heatmap(DataFrame(np.eye(2), ["São Paulo", "Москва"], ["上海", "b"]), "t")
    with pytest.warns(UserWarning, match="Glyph 19978 .*missing from font"):
        to_png(figure)


def test_fonts_follow_one_another_character_by_character(
    own_fonts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that the first font lacks is drawn in a later one."""
    monkeypatch.setattr(style, "_FONTS", ("STIXSizeOneSym", "DejaVu Sans"))
    first = font_manager.get_font(font_manager.findfont("STIXSizeOneSym")).get_charmap()
    assert ord("a") not in first
    figure = correlation_heatmap(DataFrame(np.eye(2), ["abc", "b"], ["a", "b"]), "t")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda message, *args, **more: pytest.fail(str(message)))
        to_png(figure)


def test_labels_of_all_kinds() -> None:
    labels = ["$\\frac{$", "a\nb\tc", "", "w" * 60, "_^{}\\"]
    figure = correlation_heatmap(
        DataFrame(np.zeros((5, 5)), labels, labels), "100% of $W$ in a_b^c"
    )
    assert_legible(figure)
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert shown[:3] == ["$\\frac{$", "a b c", "␣"]
    assert shown[3].startswith("wwww") and shown[3].endswith("…")


def test_picture_is_the_figure() -> None:
    image = Image.open(io.BytesIO(to_png(new_figure(4, 2, "title"))))
    assert image.width == 4 * 150 and image.format == "PNG"
    corner = np.asarray(image.convert("RGB"))[0, 0] / 255
    assert corner.tolist() == list(to_rgb("white"))


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
from pandas import DataFrame
from lincorr_lightning.results import style, heat_maps as figures
style.to_png(figures.correlation_heatmap(DataFrame(np.eye(2), list("ab"), list("ab")), "t"))
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
