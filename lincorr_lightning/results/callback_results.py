"""What callbacks found in a training, for its ``results.json``."""

from __future__ import annotations

import re
from typing import Any

import lightning as L


def collect_callback_results(
    trainer: L.Trainer, but: tuple[type, ...] = ()
) -> dict[str, dict[str, Any]]:
    """The `results` of a run's callbacks, where they have some.

    Args:
        trainer: The run's trainer.
        but: Kinds of callbacks that are told elsewhere.

    Returns:
        A callback's name, as ``feature_movement``, numbered from the second of a kind on -> what it
        found.
    """
    told: dict[str, dict[str, Any]] = {}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        results = getattr(callback, "results", None)
        if isinstance(callback, but) or not isinstance(results, dict) or not results:
            continue
        name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(callback).__name__).lower()
        of_kind = 1 + sum(other == name or other.startswith(f"{name}_") for other in told)
        told[name if of_kind == 1 else f"{name}_{of_kind}"] = results
    return told
