"""Looking at a module without leaving a trace on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode for a while; each submodule gets its own mode back.

    ``module.train()`` afterwards would not do: parts that were meant to stay in eval mode, such as
    a frozen LM in a LightningModule, would be switched.
    """
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
