"""Callbacks of every run from the command line, for runs that fail."""

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

# Time for a process that failed to write its error.
_GRACE_S = 5
_CHECK_EVERY_S = 1.0
# Settings that decide how large a batch is.
_BATCH_SETTINGS = ("edits_per_step", "batch_size", "batch_tokens")


class AbortOnRankFailure(L.Callback):
    """Ends all ranks of a run when one of them fails.

    If rank 0 fails, it ends the processes that it started, which would wait for it, with NCCL for
    minutes; one whose failure is the cause has time to write its error before. If rank 0 is killed,
    the others notice that their parent process is gone, and exit.
    """

    def __init__(self) -> None:
        super().__init__()
        # Made in `setup`: launchers that copy callbacks to other processes cannot copy it.
        self._finished: threading.Event | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Watch the parent process, on ranks other than 0."""
        del pl_module, stage
        if trainer.world_size > 1 and not trainer.is_global_zero:
            self._finished = threading.Event()
            args = (self._finished, os.getppid())
            threading.Thread(target=self._watch_parent, args=args, daemon=True).start()

    @staticmethod
    def _watch_parent(finished: threading.Event, parent: int) -> None:
        while not finished.wait(_CHECK_EVERY_S):
            if os.getppid() != parent:
                sys.stderr.write(
                    "lincorr: error: the process that started this rank is gone; it exits.\n"
                )
                sys.stderr.flush()
                # Another thread may hang in a collective operation.
                os._exit(1)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop watching."""
        del trainer, pl_module, stage
        if self._finished is not None:
            self._finished.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """End the processes that this one started, after some seconds."""
        del pl_module, exception
        end = monotonic() + _GRACE_S
        for process in getattr(trainer.strategy.launcher, "procs", ()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(end - monotonic(), 0))
            process.kill()


class OOMHint(L.Callback):
    """Reports the batch size, the length and the setting to reduce when memory runs out.

    The report is a note of the exception, see `memory_note`. It covers training steps.
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
        """Leave the training step."""
        del trainer, pl_module, outputs, batch, batch_idx
        self._trains = False

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Add the note, if memory ran out in a training step."""
        why = oom_reason(exception)
        if why is None or not self._trains:
            return
        step = "a training step"
        if self._shape is not None:
            step += " of batch size {} and sequence length {}".format(*self._shape)
        parts = {"model": pl_module, "data": getattr(trainer, "datamodule", None)}
        settings = {name: dict(getattr(part, "hparams", {})) for name, part in parts.items()}
        reducible = [
            f"{part}.{name} (it is {own[name]})"
            for part, own in settings.items()
            for name in _BATCH_SETTINGS
            if isinstance(own.get(name), int)
        ]
        exception.add_note(
            f"{_MARK}{step} does not fit the memory: {why}. Lower "
            f"{' or '.join(reducible) or 'the batch size'}, or use a device with more memory."
        )


_MARK = "lincorr: "


def memory_note(error: BaseException) -> str | None:
    """Return the note that `OOMHint` added to an exception, if there is one."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_MARK)]
    return notes[0].removeprefix(_MARK) if notes else None


def _shape_of(batch: Any) -> tuple[int, int] | None:
    """Return rows and length of the largest integer matrix in a batch, such as its token ids."""
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
