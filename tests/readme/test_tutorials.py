"""The cells of each tutorial show what its notebook has, which the documentation shows."""

import ast
import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from html import unescape
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure

TUTORIALS = sorted((Path(__file__).resolve().parents[2] / "docs" / "tutorials").glob("*.ipynb"))
SLOW = {"features", "vocabulary"}  # half a minute each
NUMBER = r"[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"


def cells(path: Path) -> list[dict[str, Any]]:
    """Cells of a notebook with code."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path: Path) -> Iterator[tuple[str, bool]]:
    """Run the cells; yield the text that each shows, and whether it shows a picture."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells(path):
        *body, last = ast.parse("".join(cell["source"])).body
        if isinstance(last, ast.Expr):
            last = ast.copy_location(ast.Assign([ast.Name("_", ast.Store())], last.value), last)
        code = ast.fix_missing_locations(ast.Module([*body, last], []))
        names["_"] = None
        with redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, path.name, "exec"), names)
        value = names["_"]
        text = getattr(value, "_repr_html_", value.__repr__)() if value is not None else ""
        yield printed.getvalue() + (text or ""), isinstance(value, Figure)


def stored(cell: dict[str, Any]) -> str:
    """Text that a notebook has below a cell."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        parts += output.get("text", data.get("text/html", data.get("text/plain", [])))
    return "".join(parts)


def assert_same(*texts: str) -> None:
    """Words are the same; numbers may differ in the last digit, as processors do."""
    plain = [unescape(re.sub(r"<style.*?</style>|<[^>]*>", " ", x, flags=re.S)) for x in texts]
    words, other_words = (re.sub(NUMBER, "0", text).split() for text in plain)
    assert words == other_words
    for pair in zip(*(re.findall(NUMBER, text) for text in plain), strict=True):
        number, other = (float(x.replace("−", "-").replace(",", "")) for x in pair)
        digits = len(pair[1].partition(".")[2])
        assert number == pytest.approx(other, abs=1.01 * 10**-digits), plain[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.nightly] * (path.stem in SLOW), id=path.stem)
        for path in TUTORIALS
    ],
)
def test_cells_show_what_is_stored(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not, `python -m benchmarks.docs_tables.notebooks` stores it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.setenv("COLUMNS", "110")
    for cell, (text, is_picture) in zip(cells(path), run(path), strict=True):
        assert_same(text, stored(cell))
        assert not is_picture or "image/png" in json.dumps(cell["outputs"])
    plt.close("all")
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_notebooks_are_the_same_on_any_machine() -> None:
    assert len(TUTORIALS) >= 4
    for path in TUTORIALS:
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        assert not any(cell["metadata"] for cell in notebook["cells"])
        assert len(text) < 150_000 and not re.search('/tmp/|/home/|"stderr"|"error"', text)
        assert all(cell["execution_count"] == i for i, cell in enumerate(cells(path), 1))
