"""A reader of pages, and a real browser."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSERS = (
    "chromium", "chromium-browser", "chromium-headless-shell", "google-chrome",
    "google-chrome-stable", "chrome", "microsoft-edge",
)  # fmt: skip
VOID = {"meta", "img", "br", "wbr", "link", "hr", "input"}


class Page(HTMLParser):
    """A page's tables, figures and texts; fails on tags that are not closed in their order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.text = ""
        self._caption: str | None = None
        self._rows: list[list[str]] = []
        self._cell: list[str] | None = None
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th", "caption"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "th", "caption"):
            text = "".join(self._cell or ())
            self._cell = None
            if tag == "caption":
                self._caption = text
            else:
                self._rows[-1].append(text)
        elif tag == "table":
            assert self._caption is not None
            self.tables.setdefault(self._caption, self._rows)

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if self._cell is not None:
            self._cell.append(data)

    def all(self, tag: str) -> list[dict[str, Any]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture
def read_page() -> Callable[[Path], Page]:
    """Reads a page."""
    return lambda path: Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def browse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs a headless Chromium with some options; returns its output."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"no browser on this machine: install one of {', '.join(BROWSERS[:4])}")
    profile = tmp_path_factory.mktemp("profile")

    def run(*options: str) -> str:
        fixed: Sequence[str] = [
            program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", f"--user-data-dir={profile}", "--virtual-time-budget=10000",
        ]  # fmt: skip
        done = subprocess.run(
            [*fixed, *options], capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    return run
