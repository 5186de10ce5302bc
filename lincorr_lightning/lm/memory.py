"""Knowing that memory ran out, whatever ran out of it."""

from __future__ import annotations

import torch

# The CPU's allocator and CUDA's libraries have no exception of their own.
_SIGNS = ("DefaultCPUAllocator", "ALLOC_FAILED", "CUDA out of memory")


def oom_reason(error: BaseException) -> str | None:
    """What went wrong, in one line, if memory ran out; None if something else did.

    Example:
        >>> oom_reason(MemoryError("no room. And more"))
        'no room'
        >>> oom_reason(ValueError("no room"))
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return str(error).split(". ")[0] or type(error).__name__
    if isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS):
        return "the allocator is out of memory"
    return None
