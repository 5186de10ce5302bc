"""Tables as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    r"""Return a Markdown table; numbers get three decimals, None an empty cell.

    Example:
        >>> print(markdown_table(["pair", "r"], [["city->country", 0.98765], ["a|b", None]]))
        | pair | r |
        | --- | --- |
        | city-\>country | 0.988 |
        | a\|b |  |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (float, np.floating)):
        return f"{value:.3f}"
    return escape(str(value))


def escape(text: str) -> str:
    r"""Return text with Markdown's special characters escaped.

    Example:
        >>> escape("*a_b*")
        '\\*a\\_b\\*'
    """
    return re.sub(r"([\\`*_\[\]<>|~#$])", r"\\\1", re.sub(r"\s+", " ", text))
