"""Folders that no run of this version wrote: one line of error, or a page with nothing to run."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.report.page import write_report

Make = Callable[..., Path]

HTML = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
HUGE = 10**400
GONE = object()


@contextmanager
def long_integers() -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def table(**changes: Any) -> list[Any]:
    return [("tables", 0, key, value) for key, value in changes.items()]


# Keys that lead to a value of results.json, and the new value.
CHANGES: list[Any] = [
    ("study", HTML), ("study", "../../x"), ("study", ""), ("study", "x" * 5000),
    ("schema", HTML), ("schema", True), ("schema", [2]), ("schema", 1), ("schema", HUGE),
    ("lm", "name_or_path", HTML), ("lm", "name_or_path", [1]), ("lm", "name_or_path", "\ud800"),
    ("lm", "n_parameters", HUGE), ("lm", "n_parameters", -5), ("lm", [1, 2]),
    ("lm", "fingerprint", "abc"), ("lm", "fingerprint", ["a"]), ("lm", GONE),
    ("seconds", HUGE), ("seconds", 1e308), ("seconds", HTML), ("n_fit", 10**5000),
    ("n_fit", HTML), ("n_fit", nested(900)), (HTML, 1.5), ("relation", [HTML]),
    ("pairs", "abc"), ("pairs", 5), ("pairs", None), ("pairs", [1]), ("pairs", [{"target": "x"}]),
    ("pairs", 0, "source", HTML), ("pairs", 0, "precision", "x"),
    ("pairs", 0, "precision", "influenced", "1", HUGE),
    ("settings", {HTML: HTML}), ("settings", {"lm": 5}), ("settings", [[1, 2]]),
    ("versions", {HTML: HTML}), ("versions", ["a"]),
    ("tables", None), ("tables", {"a": 1}), ("figures", 0, "caption", HTML),
    ("figures", 0, "name", "../../x"), ("figures", 0, "name", "a\0"), ("figures", 0, "name", 5),
    *table(name="../../../etc/passwd"), *table(name="x" * 5000), *table(name=HTML),
    *table(caption=HTML), *table(caption=None), *table(note=[HTML]), *table(headline=HTML),
    *table(columns={"a": 1}),
    *(("tables", 0, "columns", 0, "heading", value) for value in (HTML, 5)),
    *(("tables", 0, "columns", 1, "format", value)
      for value in ("%%", "d", "c", ".9", ".999999999f", "999999999", 5)),
]  # fmt: skip

HEAD = "pair,r,excess,hit\n"
ALIASES = "".join(
    f"{new}: &{new} {{{', '.join(f'k{i}: *{old}' for i in range(9))}}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
# A file of the run, and its new content; a function changes the old one.
FILES: list[tuple[str, Any]] = [
    ("results.json", b""), ("results.json", b'{"a":' * 100_000), ("results.json", os.mkfifo),
    ("results.json", lambda text: text.encode("utf-16")),
    ("results.json", lambda text: text.replace('"n_fit": 500', '"n_fit": 500, "n_fit": 3')),
    ("results.json", lambda text: text.replace("76.4", "1e999")),
    ("results.json", lambda text: text.replace("76.4", "-Infinity")),
    ("tables/pairs.csv", f"{HEAD}a,nan,inf,1e999\n"),
    ("tables/pairs.csv", f"{HEAD}{HTML.replace(',', '')},{'9' * 4000},True,_1_\n"),
    ("tables/pairs.csv", f"{HEAD}{'x' * 200_000},1,1,1\n"),
    ("tables/pairs.csv", f"{HEAD}\0,1,1,1\n"), ("tables/pairs.csv", os.mkfifo),
    ("config.yaml", f"a: '{HTML[:25]}'\nseed: <b>\n"), ("config.yaml", "seed: [[[1]]]\n"),
    ("config.yaml", f"a: &a {{x: 1}}\n{ALIASES}"), ("config.yaml", "a: &a {b: *a}\n"),
    ("config.yaml", "[" * 100_000), ("config.yaml", "a: 2020-99-99\n"),
    ("config.yaml", f"a: 1{'0' * 5000}\n"), ("config.yaml", os.mkfifo),
    ("config.yaml", "a: !!python/object/apply:os.system ['touch pwned']\n"),
    ("figures/matrix.png", HTML), ("figures/matrix.png", os.mkfifo),
    ("figures/matrix.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 8 + b"IEND"),
]  # fmt: skip


def check(runs: list[Path], folder: Path) -> None:
    try:
        page = write_report(runs, folder / "report")
    except ReportError as error:
        message = str(error)
        assert "\n" not in message and len(message) < 1000, message
    else:
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text and "<img src=x" not in text
        assert len(text) < 1_000_000
    assert {path.name for path in folder.iterdir()} <= {"probes", "report"}


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_a_value_of_results_json(change: Any, probe: Make, tmp_path: Path) -> None:
    run = probe()
    path, (*keys, last, value) = run / "results.json", change
    content = at = json.loads(path.read_text())
    for key in keys:
        at = at[key]
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    with long_integers():
        path.write_text(json.dumps(content))
    check([run], tmp_path)
    check([run, probe()], tmp_path)


@pytest.mark.parametrize(("name", "content"), FILES, ids=range(len(FILES)))
def test_a_file_of_a_run(name: str, content: Any, probe: Make, tmp_path: Path) -> None:
    run = probe()
    path = run / name
    if content is os.mkfifo:
        path.unlink()
        os.mkfifo(path)
    else:
        content = content(path.read_text()) if callable(content) else content
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    check([run], tmp_path)
    check([run, probe()], tmp_path)
