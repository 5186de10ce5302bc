"""The page as a real browser shows it, on a phone, on a cache, at night and on paper."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.results.report import write_report

Make = Callable[..., Path]

# Everything that reaches beyond the window, unless one can scroll to it where it stands, and
# texts wider than the box they stand in.
OVERFLOWING = """
[...document.body.querySelectorAll('*')].filter(e => {
  if (e.closest('.scroll') && !e.matches('.scroll')) return false;
  if (e.closest('.skip, .hidden')) return false;
  const box = e.getBoundingClientRect();
  const clipped = getComputedStyle(e).overflowX === 'visible' && e.scrollWidth > e.clientWidth + 1
    && getComputedStyle(e).display === 'block';
  return box.width > 0 && (box.right > innerWidth + 0.5 || box.left < -0.5 || clipped);
}).map(e => e.tagName + '.' + e.className + ': ' + e.textContent.slice(0, 60))
"""


@pytest.fixture
def page(
    probe: Make, finetune: Make, ablation: Make, small_runs: list[Path], tmp_path: Path
) -> Path:
    """A page with everything on it, and names that are too long for a phone."""
    long = "/very/long/" + "path_without_a_space" * 8
    runs = [
        probe(), probe("meta-llama/Llama-3.2-3B", r=0.7), probe(long, weights="l"),
        finetune(), finetune("<b>東京 مدينة</b>"), ablation(), *small_runs,
    ]  # fmt: skip
    return write_report(runs, tmp_path / "out")


@pytest.mark.parametrize(("width", "height"), [(390, 844), (320, 568), (1280, 900)])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_overflows(
    browser: Any, page: Path, tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    browser.open(page, width, height, dark)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(OVERFLOWING) == []
    # Folded parts too.
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate(OVERFLOWING) == []
    png = browser.screenshot(tmp_path / "page.png")
    assert png.startswith(b"\x89PNG") and len(png) > 20_000


def test_nothing_is_fetched_and_every_picture_is_drawn(browser: Any, page: Path) -> None:
    browser.open(page, 1280, 900)
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert [url for url in asked if not url.startswith("data:")] == [page.resolve().as_uri()]
    complaints = [e for e in browser.events if e.get("method") == "Log.entryAdded"]
    assert complaints == []
    drawn = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
    assert browser.evaluate("document.images.length") > 5
    assert browser.evaluate(drawn)


def test_day_and_night_can_be_read(browser: Any, page: Path) -> None:
    # WCAG AA asks for 4.5 between a text and what it stands on.
    script = """(() => {
      const light = c => { const [r, g, b] = c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const ground = e => { for (; e; e = e.parentElement) {
        const c = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$/.test(c)) return c; } return 'rgb(255, 255, 255)'; };
      return Math.min(...['p', 'dt', 'dd', 'nav a', 'thead th', 'td', 'figcaption', '.note', 'code']
        .map(s => document.querySelector(s)).map(e => {
          const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }));
    })()"""
    grounds = set()
    for dark in False, True:
        browser.open(page, 1280, 900, dark)
        assert browser.evaluate(script) >= 4.5
        grounds.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_on_paper_nothing_is_cut(browser: Any, page: Path, tmp_path: Path) -> None:
    browser.open(page, 680, 960)  # what is left of A4 between its margins
    browser.send("Emulation.setEmulatedMedia", media="print")
    short = "e => ![...e.rows].some(r => r.textContent.includes('path_without_a_space'))"
    wide = f"[...document.querySelectorAll('table')].filter({short}).filter(e => "
    wide += "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.caption.textContent)"
    assert browser.evaluate(wide) == []
    browser.print_to_pdf(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    browser.send("Emulation.setEmulatedMedia", media="")
