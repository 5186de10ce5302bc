"""Callbacks of every run from the command line, for when something goes wrong in it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from time import monotonic
from typing import Any

import lightning as L
from torch import Tensor

from lincorr_lightning.lm.memory import oom_reason

# Time for a process that failed to tell its error.
_GRACE_S = 5
_LOOK_EVERY_S = 1.0
# Settings that decide how much is in a batch.
_SIZES = ("edits_per_step", "batch_size", "batch_tokens")


class AbortOnRankFailure(L.Callback):
    """Ends all processes of a run when one of them fails.

    The first process ends those that it has started: they would wait for it, over NCCL for minutes.
    If it failed because one of them did, that one is given the time to say why. Where the first
    process is killed, the others see that whoever started them is gone, and end by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        # Made in each process by itself: launchers that copy callbacks cannot copy it.
        self._over: threading.Event | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin to look whether the process that started this one is there."""
        del pl_module, stage
        if trainer.world_size > 1 and not trainer.is_global_zero:
            self._over = threading.Event()
            told = (self._over, os.getppid())
            threading.Thread(target=self._watch, args=told, daemon=True).start()

    @staticmethod
    def _watch(over: threading.Event, parent: int) -> None:
        while not over.wait(_LOOK_EVERY_S):
            if os.getppid() != parent:
                sys.stderr.write(
                    "lincorr: error: the process that started this one is gone; this one ends.\n"
                )
                sys.stderr.flush()
                # Another thread may hang in a collective that nobody answers.
                os._exit(1)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Look no more."""
        del trainer, pl_module, stage
        if self._over is not None:
            self._over.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Wait a little, and end them."""
        del pl_module, exception
        end = monotonic() + _GRACE_S
        for process in getattr(trainer.strategy.launcher, "procs", ()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(end - monotonic(), 0))
            process.kill()


class OOMHint(L.Callback):
    """Says what to lower where a training step does not fit the memory.

    It is told as a note of the exception, see `memory_note`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shape: tuple[int, int] | None = None
        self._trains = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch's size."""
        del trainer, pl_module, batch_idx
        self._shape, self._trains = _shape_of(batch), True

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """What comes then is no training step."""
        del trainer, pl_module, outputs, batch, batch_idx
        self._trains = False

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Add the note, if memory ran out in a training step."""
        why = oom_reason(exception)
        if why is None or not self._trains:
            return
        told = "a training step"
        if self._shape is not None:
            told += " of batch size {} and sequence length {}".format(*self._shape)
        parts = {"model": pl_module, "data": getattr(trainer, "datamodule", None)}
        settings = {of: dict(getattr(part, "hparams", {})) for of, part in parts.items()}
        lower = [
            f"{of}.{name} (it is {own[name]})"
            for of, own in settings.items()
            for name in _SIZES
            if isinstance(own.get(name), int)
        ]
        exception.add_note(
            f"{_MARK}{told} does not fit the memory: {why}. Lower "
            f"{' or '.join(lower) or 'the batch size'}, or use a device with more memory."
        )


_MARK = "lincorr: "


def memory_note(error: BaseException) -> str | None:
    """What `OOMHint` has to say of an exception, if it has."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_MARK)]
    return notes[0].removeprefix(_MARK) if notes else None


def _shape_of(batch: Any) -> tuple[int, int] | None:
    """Rows and length of the largest matrix of token ids or the like in a batch."""
    if is_dataclass(batch):
        parts = [getattr(batch, field.name) for field in fields(batch)]
    elif isinstance(batch, Mapping):
        parts = list(batch.values())
    else:
        parts = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    shapes = [
        (part.shape[0], part.shape[1])
        for part in parts
        if isinstance(part, Tensor) and part.dim() == 2 and not part.is_floating_point()
    ]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=None)
