"""Parts of the documentation that are made from the code at each build.

A page has a marker such as ``<!-- generated: studies -->`` in the place of each.
"""

from __future__ import annotations

import ast
import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from functools import cache
from html import escape
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lincorr_lightning"
MARKER = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)


def fill(text: str) -> str:
    """Replace the markers of a page."""
    return MARKER.sub(lambda marker: PARTS[marker[1]](), text)


# -- configs ---------------------------------------------------------------------------------------


def studies() -> str:
    """Return a section for each study's config: its head comment, and its options."""
    return "\n".join(map(_config_section, sorted((ROOT / "configs").glob("*.yaml"))))


def overlays() -> str:
    """Return a section for each config of ``configs/trainer/``."""
    return "\n".join(map(_config_section, sorted((ROOT / "configs" / "trainer").glob("*.yaml"))))


def lms() -> str:
    """Return a table of the configs of ``configs/lm/``, and the options of the first one."""
    files = sorted((ROOT / "configs" / "lm").glob("*.yaml"))
    rows = ["| config | LM |", "| --- | --- |"]
    rows += [f"| `lm/{file.name}` | {' '.join(_lm_comment(file))} |" for file in files]
    return "\n".join([*rows, "", f"`lm/{files[0].name}`:", "", _options(files[0])])


def _config_section(file: Path) -> str:
    names = re.findall(r"class_path: (\w+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    classes = ", ".join(f"{{py:obj}}`{name}`" for name in dict.fromkeys(names))
    links = f"Options of {classes}:\n" if classes else ""
    return "\n".join([f"### {file.stem}", "", *_head(file), "", links, _options(file)])


def _lm_comment(file: Path) -> Iterator[str]:
    """Yield the sentences of a head comment, without the command."""
    for line in _head_lines(file):
        if line and not line.startswith("  "):
            yield _prose(line.removesuffix(" Use with a study:"))


def _head_lines(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:end]]


def _head(file: Path) -> Iterator[str]:
    """Yield the head comment as Markdown: indented lines are commands."""
    in_code = False
    for line in _head_lines(file):
        is_code = line.startswith("  ")
        if is_code != in_code:
            yield "```bash" if is_code else "```"
            in_code = is_code
        yield line[2:] if in_code else _prose(line)
    if in_code:
        yield "```"


def _prose(line: str) -> str:
    """Return a line with its options as code: Sphinx would make one dash of two."""
    return re.sub(r"(?<![\w`/])(--[\w.]+)", r"`\1`", line)


def _options(file: Path) -> str:
    first = len(_head_lines(file)) + 2  # lines count from 1, and one is empty
    path = file.relative_to(ROOT).as_posix()
    return f"```{{literalinclude}} ../{path}\n:language: yaml\n:lines: {first}-\n```\n"


# -- command line ----------------------------------------------------------------------------------


def commands() -> str:
    """Return a table of the commands of `lincorr`, and the command of each study."""
    from lincorr_lightning.cli import COMMANDS, TRAINER_COMMANDS, study_commands

    texts = TRAINER_COMMANDS | COMMANDS
    rows = ["| command | what it does |", "| --- | --- |"]
    rows += [f"| `lincorr {name}` | {text} |" for name, text in texts.items()]
    return "\n".join([*rows, "", "```bash", *study_commands(), "```"])


def options() -> str:
    """Return the help of the commands with parsers of their own."""
    from lincorr_lightning.cli import COMMANDS, main

    parts = []
    for name in COMMANDS:
        out = io.StringIO()
        with redirect_stdout(out), suppress(SystemExit), patch.dict(os.environ, COLUMNS="86"):
            main([name, "--help"])
        text = out.getvalue().replace(" \b", "").strip()  # jsonargparse joins words so
        parts.append(f"### lincorr {name}\n\n```text\n{text}\n```\n")
    return "\n".join(parts)


# -- architecture ----------------------------------------------------------------------------------


@cache
def layers() -> list[list[str]]:
    """Return the parts of the package by layer, from the ground up, as the test has them."""
    test = ROOT / "tests" / "test_architecture.py"
    for node in ast.parse(test.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            found: list[list[str]] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{test} has no LAYERS")


def _home(part: str) -> Path:
    """Return the file or folder of a part."""
    folder = ROOT / part if part == "callbacks" else ROOT / PACKAGE / part
    return folder if folder.is_dir() else folder.with_suffix(".py")


@cache
def imports(part: str) -> set[str]:
    """Return the parts that a part imports."""
    home = _home(part)
    found = set()
    for file in sorted(home.rglob("*.py")) if home.is_dir() else [home]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            found |= {n.split(".")[1] for n in names if n.startswith(f"{PACKAGE}.")}
    return found & {name for row in layers() for name in row} - {part}


_WIDTH, _STEP, _HEIGHT, _GAP = 760, 40, 26, 14


def layer_figure() -> str:
    """Return an SVG of the parts, with a band for each layer."""
    rows = layers()[::-1]
    marks = []
    for i, row in enumerate(rows):
        top = i * _STEP
        marks.append(f'<rect class="band" y="{top}" width="{_WIDTH}" height="{_STEP - 4}" rx="4"/>')
        widths = [7.4 * len(name) + 18 for name in row]
        x = (_WIDTH - sum(widths) - _GAP * (len(row) - 1)) / 2
        for name, width in zip(row, widths, strict=True):
            marks.append(
                f'<g><title>{escape(_summary(name))}</title><rect x="{x:.0f}" y="{top + 5}" '
                f'width="{width:.0f}" height="{_HEIGHT}" rx="4"/>'
                f'<text x="{x + width / 2:.0f}" y="{top + 22}">{name}</text></g>'
            )
            x += width + _GAP
    return (
        f'<svg class="layers" viewBox="0 0 {_WIDTH} {len(rows) * _STEP}" role="img" '
        f'aria-label="Parts of the package by layer">\n<style>{_STYLE}</style>\n'
        + "\n".join(marks)
        + "\n</svg>\n"
    )


_STYLE = (
    ".layers{width:100%;max-width:760px;font:12.5px monospace}"
    ".layers rect{fill:var(--color-background-primary);stroke:var(--color-brand-primary)}"
    ".layers .band{fill:var(--color-background-secondary);stroke:none}"
    ".layers text{fill:var(--color-foreground-primary);text-anchor:middle}"
)


def parts() -> str:
    """Return a table of the parts, the highest layer first."""
    rows = ["| part | what it is | imports |", "| --- | --- | --- |"]
    for row in reversed(layers()):
        for part in row:
            names = " ".join(f"`{name}`" for name in sorted(imports(part)))
            rows.append(f"| `{part}` | {_summary(part)} | {names} |")
    return "\n".join(rows)


def _summary(part: str) -> str:
    """Return the first line of a part's docstring."""
    home = _home(part)
    file = home / "__init__.py" if home.is_dir() else home
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.splitlines()[0]


PARTS = {
    "studies": studies,
    "overlays": overlays,
    "lms": lms,
    "commands": commands,
    "options": options,
    "layers": layer_figure,
    "parts": parts,
}
