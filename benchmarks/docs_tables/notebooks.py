"""The outputs of the tutorials, docs/tutorials/*.ipynb.

    pip install -e ".[docs]"
    python -m benchmarks.docs_tables.notebooks

runs the cells of each notebook in a new process and a temporary folder, and writes what they show
into it: texts, tables and small pictures, but no log lines, and nothing that differs by machine
or time. `--only TEXT` runs those whose name holds the text.
"""

from __future__ import annotations

import base64
import os
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from jsonargparse import auto_cli
from nbclient import NotebookClient
from PIL import Image

from benchmarks.common import ROOT, write_text

FOLDER = ROOT / "docs" / "tutorials"
_WIDEST = 900
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, folder: str) -> Any:
    """Run the cells of a notebook in a folder, and return it with what they show."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(
        notebook, kernel_name="python3", timeout=600, resources=resources, record_timing=False
    )
    client.execute()
    notebook.metadata = _METADATA
    for i, cell in enumerate(notebook.cells):
        cell.metadata, cell.id = {}, f"cell-{i}"
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
            for output in cell.outputs:
                output.get("metadata", {}).clear()
                _reduce(output.get("data", {}))
    return notebook


def _reduce(data: dict[str, str]) -> None:
    """Make a picture small; what is shown as a picture or as HTML needs no text beside it."""
    if "image/png" in data:
        with Image.open(BytesIO(base64.b64decode(data["image/png"]))) as image:
            picture = image.convert("RGB")
        picture.thumbnail((_WIDEST, 10 * _WIDEST), Image.Resampling.LANCZOS)
        few = picture.quantize(64, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        png = BytesIO()
        few.save(png, "PNG", optimize=True)
        data["image/png"] = base64.b64encode(png.getvalue()).decode()
    if {"image/png", "text/html"} & data.keys():
        data.pop("text/plain", None)


def main(only: str = "") -> None:
    """Run the tutorials, and keep what they show.

    Args:
        only: A part of the names of the notebooks to run; empty runs all.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "110"}
    for path in sorted(path for path in FOLDER.glob("*.ipynb") if only in path.stem):
        with tempfile.TemporaryDirectory() as folder:
            text = nbformat.writes(executed(path, folder))
            if named := [each for each in (folder, str(ROOT), str(Path.home())) if each in text]:
                raise SystemExit(f"{path} shows the folder {named[0]}. Print no such path.")
        write_text(path, text + "\n")
        print(f"{path} ({len(text) // 1024} KiB)")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
