"""Numbers as ``results.json`` has them."""

from __future__ import annotations

import math
from collections.abc import Mapping

Rates = Mapping[str, float]
"""Hit@N by N, as ``"1"``, ``"3"``, ``"5"``, and ``"n"``, how many labels were asked."""


def number(value: float | None) -> float | None:
    """A finite number as JSON has it, or None."""
    return float(value) if value is not None and math.isfinite(value) else None


def rates_as_json(rates: Rates) -> dict[str, float | int | None]:
    """Hit@N as JSON has it."""
    return {key: int(rate) if key == "n" else number(rate) for key, rate in rates.items()}
