"""Callbacks of every run from the command line, for runs that fail."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L
from torch import Tensor

from lincorr_lightning import termination
from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.lm.batching import oom_reason
from lincorr_lightning.results.run_folder import is_dry_run, run_folder
from lincorr_lightning.termination import Terminated

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
        if trainer.world_size > 1 and not trainer.is_global_zero:
            self._finished = threading.Event()
            args = (self._finished, os.getppid())
            threading.Thread(target=self._watch_parent, args=args, daemon=True).start()

    @staticmethod
    def _watch_parent(finished: threading.Event, parent: int) -> None:
        while not finished.wait(_CHECK_EVERY_S):
            if os.getppid() != parent:
                line = "lincorr: error: the process that started this rank is gone; it exits.\n"
                os.write(2, line.encode())
                os._exit(1)  # another thread may hang in a collective operation

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop watching."""
        if self._finished is not None:
            self._finished.set()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """End the processes that this one started; after an error, let them exit first."""
        end = monotonic() + _GRACE_S
        for process in getattr(trainer.strategy.launcher, "procs", ()):
            if not isinstance(exception, Terminated):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=max(end - monotonic(), 0))
            process.kill()


class SignalCheckpoint(L.Callback):
    """Saves a checkpoint when a signal ends a run that can be resumed in the middle of an epoch.

    The current step is finished first, see `Termination`. All ranks stop after the same step.
    """

    def __init__(self) -> None:
        super().__init__()
        self._path: Path | None = None
        self._is_resumable = False
        self._n_steps = 0
        # Lightning's counters after the last step; None while a step is running.
        self._progress: dict[str, Any] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Choose the checkpoint's path, on all ranks."""
        termination.current.launcher = trainer.strategy.launcher
        if stage == "fit" and not is_dry_run(trainer):
            self._path = run_folder(trainer) / "checkpoints" / "interrupted.ckpt"

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals again: the Trainer has replaced the handlers."""
        termination.current.handle_signals()

    def on_test_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals again."""
        termination.current.handle_signals()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals again."""
        termination.current.handle_signals()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine whether the run can be resumed in the middle of an epoch."""
        termination.current.handle_signals()
        self._is_resumable = (
            self._path is not None
            and hasattr(trainer.train_dataloader, "load_state_dict")
            and getattr(pl_module, "is_resumable", True)
        )
        self._n_steps = trainer.global_step

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Delay signals until the step has ended."""
        if self._is_resumable:
            if trainer.world_size == 1:
                self._leave_step()
            termination.current.in_step = True
            self._progress = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Save a checkpoint and end the run if any rank has received a signal."""
        # With accumulated gradients, not every batch ends with an optimizer step.
        if not self._is_resumable or trainer.global_step == self._n_steps:
            return
        self._n_steps = trainer.global_step
        self._progress = deepcopy(trainer.fit_loop.state_dict())
        is_signalled = termination.current.signum is not None
        if trainer.strategy.reduce_boolean_decision(is_signalled, all=False):
            termination.current.accept()
            self._save(trainer)
            raise Terminated

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End the run if a signal has been received."""
        self._leave_step()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Handle signals again, and end the run if one has been received."""
        termination.current.handle_signals()
        self._leave_step()

    def _leave_step(self) -> None:
        """Let signals end the run from now on, including one that has been received."""
        if self._progress is not None:
            termination.current.in_step = False
            termination.current.raise_pending()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save a checkpoint, unless a step is running; if none is saved, name the last one."""
        if not self._is_resumable or termination.current.signum is None:
            return
        assert self._path is not None
        try:
            if isinstance(exception, Terminated) and trainer.world_size == 1 and self._progress:
                self._save(trainer)
        finally:
            if termination.current.checkpoint is None:
                folder = Path(
                    getattr(trainer.checkpoint_callback, "dirpath", None) or self._path.parent
                )
                files = sorted(folder.glob("[!.]*.ckpt"), key=lambda file: file.stat().st_mtime)
                termination.current.checkpoint = files[-1] if files else trainer.ckpt_path

    def _save(self, trainer: L.Trainer) -> None:
        assert self._path is not None
        if termination.current.checkpoint is None:
            trainer.save_checkpoint(self._path)
            termination.current.checkpoint = self._path

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the counters as they were after the last step."""
        # Lightning's own would skip the rest of validation, and the hooks at the end of training.
        if termination.current.signum is not None and self._progress is not None:
            checkpoint["loops"]["fit_loop"] = self._progress


class OOMHint(L.Callback):
    """Knows the batch of the current training step, for the report of memory that runs out."""

    def __init__(self) -> None:
        super().__init__()
        self._batch: Any = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the batch."""
        self._batch = batch

    def on_train_batch_end(self, *args: Any) -> None:
        """Leave the training step."""
        self._batch = None

    def explain(
        self, error: Exception, model: L.LightningModule, data: L.LightningDataModule
    ) -> LanguageModelError | None:
        """Return an error with the batch's size and the setting to lower.

        Args:
            error: The error that ended the run.
            model: The study, whose settings may be named.
            data: Its data, likewise.

        Returns:
            None if memory did not run out, or not in a training step.
        """
        reason = oom_reason(error)
        if reason is None or self._batch is None:
            return None
        shape = _shape_of(self._batch)
        size = "" if shape is None else f" of batch size {shape[0]} and sequence length {shape[1]}"
        reducible = [
            f"{part}.{name} (it is {holder.hparams[name]})"
            for part, holder in (("model", model), ("data", data))
            for name in _BATCH_SETTINGS
            if isinstance(holder.hparams.get(name), int)
        ]
        return LanguageModelError(
            f"a training step{size} does not fit the memory: {reason}. Lower "
            f"{' or '.join(reducible) or 'the batch size'}, or use a device with more memory."
        )


def _shape_of(batch: Any) -> tuple[int, int] | None:
    """Return rows and length of the largest integer matrix in a batch, such as its token ids."""
    if is_dataclass(batch):
        batch = {field.name: getattr(batch, field.name) for field in fields(batch)}
    parts = batch.values() if isinstance(batch, Mapping) else batch
    shapes = [
        (part.shape[0], part.shape[1])
        for part in (parts if isinstance(parts, Iterable) else [parts])
        if isinstance(part, Tensor) and part.dim() == 2 and not part.is_floating_point()
    ]
    return max(shapes, key=lambda shape: shape[0] * shape[1], default=None)
