"""Small findings of all processes, brought together."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

Item = TypeVar("Item")


def gather_lists(own: list[Item]) -> list[Item]:
    """Join the lists of all processes; every process must call this together.

    Args:
        own: Anything that can be pickled, with tensors on the CPU.

    Returns:
        All items, those of the first process first, on every process.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return own
    parts: list[list[Item]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, own)
    return [item for part in parts for item in part]
