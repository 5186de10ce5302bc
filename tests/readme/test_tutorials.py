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


def run(path: Path) -> Iterator[tuple[str, Any]]:
    """Run the cells; yield what each prints, and the value of a last expression."""
    names: dict[str, Any] = {"__name__": "notebook"}
    for cell in cells(path):
        code = "".join(cell["source"])
        *body, last = ast.parse(code).body
        shown = isinstance(last, ast.Expr) and not code.endswith(";")
        value = None
        with redirect_stdout(io.StringIO()) as printed:
            statements = body if shown else [*body, last]
            exec(compile(ast.Module(statements, []), path.name, "exec"), names)
            if shown:
                value = eval(compile(ast.Expression(last.value), path.name, "eval"), names)  # type: ignore[attr-defined]
        yield printed.getvalue(), value


def text_of(value: Any) -> str:
    """What a notebook shows of a value, but pictures."""
    if value is None or isinstance(value, Figure):
        return ""
    html = getattr(value, "_repr_html_", None)
    return html() if html else repr(value)


def stored(cell: dict[str, Any]) -> str:
    """Text that a notebook has below a cell."""
    parts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        parts += output.get("text", data.get("text/html", data.get("text/plain", [])))
    return "".join(parts)


def assert_same(now: str, before: str) -> None:
    """Words are the same; numbers may differ in the last digit, as processors do."""
    texts = [
        " ".join(unescape(re.sub(r"<style.*?</style>|<[^>]*>", " ", text, flags=re.S)).split())
        for text in (now, before)
    ]
    words, other_words = (re.sub(NUMBER, "0", text) for text in texts)
    assert words == other_words
    for ours, theirs in zip(*(re.findall(NUMBER, text) for text in texts), strict=True):
        digits = len(theirs.partition(".")[2])
        number, other = (float(x.replace("−", "-").replace(",", "")) for x in (ours, theirs))
        assert number == pytest.approx(other, abs=1.01 * 10**-digits), texts[0]


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
    for cell, (printed, value) in zip(cells(path), run(path), strict=True):
        assert_same(printed + text_of(value), stored(cell))
        assert not isinstance(value, Figure) or "image/png" in json.dumps(cell["outputs"])
    plt.close("all")
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_notebooks_are_the_same_on_any_machine() -> None:
    assert len(TUTORIALS) >= 4
    for path in TUTORIALS:
        text = path.read_text(encoding="utf-8")
        notebook = json.loads(text)
        assert notebook["metadata"]["kernelspec"]["name"] == "python3"
        assert len(text) < 150_000 and "/tmp/" not in text and "/home/" not in text
        assert not any(cell["metadata"] for cell in notebook["cells"])
        assert [cell["execution_count"] for cell in cells(path)] == [
            *range(1, len(cells(path)) + 1)
        ]
        outputs = [output for cell in cells(path) for output in cell["outputs"]]
        assert {"error", "stderr"}.isdisjoint(
            kind for output in outputs for kind in (output["output_type"], output.get("name"))
        )
