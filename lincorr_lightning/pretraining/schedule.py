"""The learning rate of pre-training."""

from __future__ import annotations

import math


def one_cycle(step: int, n_steps: int, warmup: float) -> float:
    """Return the learning rate of a one-cycle schedule, relative to its highest.

    It rises along a cosine from 1/25 to 1 and falls along another to nearly 0, as
    `torch.optim.lr_scheduler.OneCycleLR`.

    Args:
        step: Step, from 0.
        n_steps: Number of steps of the cycle.
        warmup: Share of the steps before the highest learning rate.

    Example:
        >>> [round(one_cycle(step, 11, 0.5), 2) for step in (0, 4, 5, 10)]
        [0.04, 0.97, 0.98, 0.0]
    """
    low, lowest = 1 / 25, 1 / 250_000
    top, last = warmup * n_steps - 1, n_steps - 1
    if step <= top:
        start, end, way = low, 1.0, step / max(top, 1e-9)
    else:
        start, end, way = 1.0, lowest, min((step - top) / max(last - top, 1e-9), 1.0)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * way))
