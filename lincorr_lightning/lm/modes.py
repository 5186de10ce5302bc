"""Temporary eval mode that restores each submodule's own mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module in eval mode inside a ``with`` block and restore each submodule's mode after it.

    ``module.train()`` afterwards would also switch submodules that are meant to stay in eval mode,
    such as a frozen LM in a LightningModule.
    """
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
