"""The page in a real browser: on a phone and a wide screen, by day and by night, and on paper."""

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.results.report import write_report

Browse = Callable[..., str]

# Each frame is a window of its own size with the page in it; the page itself runs no script.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">{frames}
<pre id="found"></pre>
<script>
addEventListener('load', () => {{
  const measure = {measure};
  const found = [...document.querySelectorAll('iframe')].map(frame => {{
    const page = frame.contentDocument;
    const folded = measure(frame.contentWindow, page);
    page.querySelectorAll('details').forEach(part => {{ part.open = true; }});
    return [folded, measure(frame.contentWindow, page)];
  }});
  document.getElementById('found').textContent = JSON.stringify(found);
}});
</script>"""

# Everything that reaches beyond the window, unless one can scroll to it where it stands, and texts
# wider than the box they stand in.
OVERFLOW = """(view, page) => {
  const wide = [...page.body.querySelectorAll('*')].filter(e => {
    if (e.closest('.scroll') && !e.matches('.scroll')) return false;
    if (e.closest('.skip, .hidden')) return false;
    const box = e.getBoundingClientRect(), style = view.getComputedStyle(e);
    const cut = style.overflowX === 'visible' && style.display === 'block'
      && e.scrollWidth > e.clientWidth + 1;
    return box.width > 0 && (box.right > view.innerWidth + 0.5 || box.left < -0.5 || cut);
  });
  return {
    width: view.innerWidth,
    scrolls: page.documentElement.scrollWidth > view.innerWidth,
    wide: wide.map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60)),
    images: [...page.images].map(i => i.complete && i.naturalWidth > 0),
  };
}"""

# WCAG AA asks for 4.5 between a text and what it stands on.
CONTRAST = """(view, page) => {
  const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = e => { for (; e; e = e.parentElement) {
    const c = view.getComputedStyle(e).backgroundColor;
    if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
  const texts = ['p', 'dt', 'dd', 'nav a', 'thead th', 'td', 'figcaption', '.note', 'code'];
  return {
    ground: ground(page.body),
    contrast: Math.min(...texts.map(s => page.querySelector(s)).map(e => {
      const [a, b] = [light(view.getComputedStyle(e).color), light(ground(e))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })),
  };
}"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with everything on it, and names that are too long for a phone."""
    from tests.results.conftest import lm_info, probe_results, save

    folder = tmp_path_factory.mktemp("page")
    hits = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    names = ["meta-llama/Meta-Llama-3-8B", "<b>東京 مدينة</b>", "path_without_a_space" * 8]
    runs = [
        save(probe_results(lm_info(name, 10**i), 0.9, hits, {"n": i}), folder / f"{name[-5:]}{i}")
        for i, name in enumerate(names, start=6)
    ]
    return write_report(runs, folder / "out")


def measure(browse: Browse, page: Path, function: str, widths: list[int], *options: str) -> Any:
    """Return what a JavaScript function finds in the page at some widths, folded and unfolded."""
    text = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe style="border:0" width="{width}" height="800" srcdoc="{text}"></iframe>'
        for width in widths
    )
    harness = page.with_name("harness.html")
    harness.write_text(HARNESS.format(frames=frames, measure=function), encoding="utf-8")
    dom = browse("--dump-dom", *options, harness.resolve().as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.mark.slow
def test_nothing_overflows_and_every_picture_is_drawn(browse: Browse, page: Path) -> None:
    widths = [320, 390, 1280]
    for width, states in zip(widths, measure(browse, page, OVERFLOW, widths), strict=True):
        for found in states:
            assert found["width"] == width
            assert not found["scrolls"] and found["wide"] == []
            assert len(found["images"]) == 4 and all(found["images"])


@pytest.mark.slow
def test_day_and_night_can_be_read(browse: Browse, page: Path) -> None:
    grounds = set()
    for scheme in "1", "0":
        ((found, _),) = measure(
            browse, page, CONTRAST, [1280], f"--blink-settings=preferredColorScheme={scheme}"
        )
        assert found["contrast"] >= 4.5
        grounds.add(found["ground"])
    assert len(grounds) == 2
