"""The cells of each tutorial run in one namespace, as the build of the documentation runs them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorials").glob("*.md"))
SLOW = {"features", "vocabulary"}  # half a minute each; the build of the documentation runs them


def cells(path: Path) -> list[str]:
    """Code of each cell of a notebook in MyST Markdown."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^```{code-cell} ipython3\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run(path: Path) -> Iterator[Any]:
    """Run the cells, and yield the last expression's value of those that end in one."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells(path):
        *body, last = ast.parse(cell).body
        shown = isinstance(last, ast.Expr) and not cell.rstrip().endswith(";")
        statements = body if shown else [*body, last]
        exec(compile(ast.Module(statements, []), path.name, "exec"), names)
        if shown:
            yield eval(compile(ast.Expression(last.value), path.name, "eval"), names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.nightly] * (path.stem in SLOW), id=path.stem)
        for path in TUTORIALS
    ],
)
def test_cells_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what they show can be shown."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    n_shown = 0
    for value in run(path):
        names = ("_repr_html_", "_repr_markdown_", "_repr_png_")
        show = [getattr(value, name, None) for name in names]
        n_shown += any(method and method() for method in show)
    plt.close("all")
    assert n_shown >= 3
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_every_tutorial_is_a_notebook() -> None:
    """Else the build of the documentation would show its code without running it."""
    assert len(TUTORIALS) >= 4
    for path in TUTORIALS:
        head = path.read_text(encoding="utf-8").split("---")[1]
        assert "format_name: myst" in head and "kernelspec" in head
        assert len(cells(path)) == path.read_text(encoding="utf-8").count("{code-cell}") > 0
