"""Files of the numbers that a benchmark has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lincorr_lightning.io import atomic_write


def write_numbers(path: str | Path, content: Any) -> None:
    """Write numbers, with four significant digits, within lists and mappings as JSON."""
    with atomic_write(path) as part:
        part.write_text(json.dumps(_short(content)) + "\n", encoding="utf-8")


def read_numbers(path: Path) -> Any:
    """Return the content of a file of numbers, or of a run's results."""
    return json.loads(path.read_text(encoding="utf-8"))


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_short(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
