"""Numbers in ``results.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping

Rates = Mapping[str, float | None]
"""Hit@N by N, as ``"1"``, ``"3"``, ``"5"``, and ``"n"``, the number of labels."""


def number(value: float | None) -> float | None:
    """Return a finite number as it is, and None for any other."""
    return float(value) if value is not None and math.isfinite(value) else None


def rates_as_json(rates: Rates) -> dict[str, float | None]:
    """Return Hit@N for JSON, with None for rates that are not finite."""
    return {key: int(rate or 0) if key == "n" else number(rate) for key, rate in rates.items()}
