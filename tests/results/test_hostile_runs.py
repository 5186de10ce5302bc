"""Folders that no run of this version wrote: one line of error, or a page with nothing to run."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from lincorr_lightning.cli import console, main
from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.report import write_report

Make = Callable[..., Path]

HTML = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"

# Keys that lead to a value of results.json, and the new value.
CHANGES: list[Any] = [
    ("study", HTML),
    ("lm", "name_or_path", HTML),
    ("lm", "name_or_path", "\ud800"),
    (HTML, 1.5),
    ("settings", {HTML: HTML}),
    ("figures", 0, "name", "../../x"),
    ("tables", 0, "name", "../../../etc/passwd"),
    ("tables", 0, "note", [HTML]),
    ("tables", 0, "columns", {"a": 1}),
    ("tables", 0, "columns", 1, "format", ".999999999f"),
    ("tables", 0, "unit", [["pair"]]),
    ("tables", 0, "means", {"r": {"column": "r", "where": [HTML]}}),
    ("n_test", 10**400),
    ("lm", "n_parameters", 10**400),
]

HEAD = "pair,r,excess,hit\n"
ALIASES = "".join(
    f"{new}: &{new} {{{', '.join(f'k{i}: *{old}' for i in range(9))}}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
# A file of the run, and its new content; a function changes the old one.
FILES: list[tuple[str, Any]] = [
    ("results.json", b'{"a":' * 100_000),
    ("results.json", os.mkfifo),
    ("tables/pairs.csv", f"{HEAD}{HTML.replace(',', '')},1,1,1\n"),
    ("config.yaml", f"a: &a {{x: 1}}\n{ALIASES}"),
    ("config.yaml", "a: !!python/object/apply:os.system ['touch pwned']\n"),
    ("figures/matrix.png", os.mkfifo),
    ("figures/matrix.png", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 8 + b"IEND"),
]


def check(runs: list[Path], folder: Path) -> None:
    out = folder / "report"
    commands = [lambda: write_report(runs, out)]
    if len(runs) == 2:
        commands += [lambda: main(["compare", *map(str, runs), "--output", str(out)])]
    for command in commands:
        try:
            command()
        except ReportError as error:
            message = str(error)
            assert "\n" not in message and len(message) < 1000, message
        else:
            text = (out / "report.html").read_text(encoding="utf-8")
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
    at[last] = value
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


@pytest.mark.parametrize("command", ["report", "compare", "weights"])
def test_a_path_that_the_system_refuses(command: str, tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"cannot read xxx.*File name too long"):
        main([command, "x" * 300, "a->b", "c"][: 4 if command == "weights" else 3])


def test_a_console_in_ascii_keeps_signs(
    probe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = BytesIO()
    monkeypatch.setattr("sys.stdout", TextIOWrapper(written, "ascii"))
    monkeypatch.setattr("sys.argv", ["lincorr", "compare", *(str(probe(r=r)) for r in (0.9, 0.2))])
    monkeypatch.setattr("lincorr_lightning.cli.program.exit_at_signals", nullcontext)
    for name in ("MPLBACKEND", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "")  # restored after the program has set it
    console()
    assert rb"\u22120.70" in written.getvalue()
