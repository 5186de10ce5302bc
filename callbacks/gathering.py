"""Putting together what each process has seen."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def gather(own: T) -> list[T]:
    """What every process passes, in the order of their ranks; every process must call it.

    Args:
        own: Anything that can be pickled.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return [own]
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, own)
    return gathered
