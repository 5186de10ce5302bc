"""Checkpoints: saved at signals, and refused in one line."""

import pickle
import re
import zipfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch

from lincorr_lightning.cli import termination
from lincorr_lightning.errors import CheckpointError
from lincorr_lightning.io import regular_file
from lincorr_lightning.results.run_folder import is_dry_run, run_folder

_WAY_OUT = "Pass a .ckpt file that `lincorr fit` wrote with this study as --ckpt_path."


def check_checkpoint(path: str | Path, weights_only: bool | None = None) -> None:
    """Refuse a checkpoint that no run can use, before the LM is loaded.

    Paths that only Lightning can resolve are not checked: ``last``, a registry, and other URLs.
    Only if `weights_only` is False may it hold other objects than tensors and plain data.
    """
    if re.match(r"(last|registry)$|\w+:", str(path)):
        return
    try:
        if (Path(path) / "meta.pt").is_file():
            return  # a folder of shards (save_distributed_checkpoint)
        if not zipfile.is_zipfile(regular_file(path)):
            raise EOFError
        # Tensors are not read.
        safe = weights_only is not False
        content = torch.load(path, map_location="cpu", weights_only=safe, mmap=True)
    except Exception as error:
        # Without torch's advice to trust the file.
        reason = "it is damaged, truncated or not a checkpoint"
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        elif isinstance(error, pickle.UnpicklingError):
            reason = "it holds other objects than tensors and plain data, or is damaged"
        raise CheckpointError(f"cannot read the checkpoint {path}: {reason}. {_WAY_OUT}") from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise CheckpointError(f"{path} is not the checkpoint of a run. {_WAY_OUT}")


class SignalCheckpoint(L.Callback):
    """Saves a checkpoint when a signal ends a run that can be resumed in the middle of an epoch.

    The current step is finished first, see `Termination`. All ranks stop after the same step.
    """

    _path: Path | None = None
    _is_resumable = False
    _n_steps = 0
    _progress: dict[str, Any] | None = None  #: Lightning's counters after the last step.

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not is_dry_run(trainer):
            self._path = run_folder(trainer) / "checkpoints" / "interrupted.ckpt"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Determine whether the run can be resumed in the middle of an epoch."""
        self._is_resumable = (
            self._path is not None
            and hasattr(trainer.train_dataloader, "load_state_dict")
            and getattr(pl_module, "is_resumable", True)
        )
        self._n_steps = trainer.global_step
        # Behind the others, whose state it saves with what they have measured in a step.
        others = [each for each in trainer.callbacks if each is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Delay signals until the step has ended."""
        if self._is_resumable:
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
            raise termination.Terminated

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let signals end the run at once, as no step is running."""
        termination.current.in_step = False

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save a checkpoint, unless a step is running; if none is saved, name the last one."""
        if not self._is_resumable or termination.current.signum is None:
            return
        if termination.current.checkpoint is None:
            assert self._path is not None
            folder = getattr(trainer.checkpoint_callback, "dirpath", None)
            files = Path(folder or self._path.parent).glob("[!.]*.ckpt")
            last = max(files, key=lambda file: file.stat().st_mtime, default=None)
            termination.current.checkpoint = last or trainer.ckpt_path
            ended_by_signal = isinstance(exception, termination.Terminated)
            if ended_by_signal and trainer.world_size == 1 and self._progress:
                self._save(trainer)

    def _save(self, trainer: L.Trainer) -> None:
        assert self._path is not None
        trainer.save_checkpoint(self._path)
        termination.current.checkpoint = self._path

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Store the counters as they were after the last step."""
        # Lightning's own would skip the rest of validation, and the hooks at the end of training.
        if termination.current.signum is not None and self._progress is not None:
            checkpoint["loops"]["fit_loop"] = self._progress
