"""README.md and the pages of docs/, and the tables between their markers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from lincorr_lightning.io import atomic_write

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def documents() -> list[Path]:
    """Return README.md and the pages, in the order in which they are read."""
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"```\{toctree\}\n(.*?)```", index, re.DOTALL)
    lines = [line for tree in trees for line in tree.splitlines()]
    names = [line for line in lines if line and not line.startswith(":")]
    pages = [ROOT / "docs" / f"{name}.md" for name in names]
    return [README, *pages]


def all_text() -> str:
    """Return the text of all documents."""
    return "\n".join(path.read_text(encoding="utf-8") for path in documents())


def placed(text: str, tables: Mapping[str, str]) -> str:
    """Return a text with each of some tables between its markers, if it has them."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in text:
            before, _, rest = text.partition(begin)
            _, _, after = rest.partition(end)
            text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def place_tables(tables: Mapping[str, str]) -> None:
    """Put tables between their markers in whichever documents have them.

    Raises:
        ValueError: No document has the markers of a table.
    """
    text = all_text()
    lacking = [name for name in tables if f"<!-- {name}: begin -->" not in text]
    if lacking:
        raise ValueError(f"no document has the marker <!-- {lacking[0]}: begin -->")
    for path in documents():
        before = path.read_text(encoding="utf-8")
        after = placed(before, tables)
        if after != before:
            with atomic_write(path) as new:
                new.write_text(after, encoding="utf-8")
