"""The page in a real browser, on a phone and a wide screen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lincorr_lightning.results.report import write_report
from tests.results.conftest import lm_info, probe_results, save

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "microsoft-edge")

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


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with everything on it, and names that are too long for a phone."""
    hits = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    names = ["meta-llama/Meta-Llama-3-8B", "<b>東京 مدينة</b>", "path_without_a_space" * 8]
    runs = [
        save(probe_results(lm_info(name, 10**i), 0.9, hits, {"n": i}), tmp_path / f"{name[-5:]}{i}")
        for i, name in enumerate(names, start=6)
    ]
    return write_report(runs, tmp_path / "out")


@pytest.mark.slow
def test_nothing_overflows_and_every_picture_is_drawn(page: Path, tmp_path: Path) -> None:
    """Folded and unfolded."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser on this machine: install one of {', '.join(BROWSERS)}")
    widths, text = [320, 390, 1280], html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe style="border:0" width="{width}" height="800" srcdoc="{text}"></iframe>'
        for width in widths
    )
    harness = tmp_path / "harness.html"
    harness.write_text(HARNESS.format(frames=frames, measure=OVERFLOW), encoding="utf-8")
    command = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        harness.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    for width, states in zip(widths, json.loads(html.unescape(found[1])), strict=True):
        for state in states:
            assert state["width"] == width
            assert not state["scrolls"] and state["wide"] == []
            assert len(state["images"]) == 4 and all(state["images"])
