"""Refusing more processes than there is to share."""

from __future__ import annotations

from typing import Any

from lincorr_lightning.errors import InputsError


def check_processes(trainer: Any, n: int, what: str, way_out: str) -> None:
    """Refuse a run in which some process never has anything to do.

    Args:
        trainer: The run's trainer; None outside of a run.
        n: Number of things that are shared.
        what: What they are.
        way_out: The setting that gives more of them.

    Raises:
        InputsError: There are more processes than things; it names both numbers.
    """
    n_processes = 1 if trainer is None else trainer.world_size
    if n_processes > n:
        raise InputsError(
            f"{n_processes} processes cannot share {n} {what}. Set trainer.devices (times "
            f"trainer.num_nodes) to at most {n}, or {way_out}."
        )
