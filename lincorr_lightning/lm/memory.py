"""Recognition of out-of-memory errors of any allocator."""

from __future__ import annotations

import torch

# The CPU allocator and CUDA libraries raise plain RuntimeErrors.
_SIGNS = ("DefaultCPUAllocator", "ALLOC_FAILED", "CUDA out of memory")


def oom_reason(error: BaseException) -> str | None:
    """Return a one-line reason if an error means that memory ran out, else None.

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
