"""Checkpoints: saved at signals, and refused in one line."""

import re
import zipfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L

from lincorr_lightning.cli import termination
from lincorr_lightning.errors import CheckpointError
from lincorr_lightning.io import regular_file
from lincorr_lightning.results.run_folder import is_dry_run, run_folder


def check_checkpoint(path: str | Path) -> None:
    """Refuse a file that is no checkpoint before the LM is loaded; raise CheckpointError.

    Its content is left to Lightning, and so are paths that only Lightning can resolve: ``last``, a
    registry, a folder of shards, and URLs.
    """
    if re.match(r"last$|registry$|\w+:", str(path)) or Path(path, "meta.pt").exists():
        return
    try:
        if zipfile.is_zipfile(regular_file(path)):
            return
        reason = "it is damaged, truncated or not a checkpoint"
    except OSError as error:
        reason = error.strerror or str(error)
    raise CheckpointError(
        f"cannot read the checkpoint {path}: {reason}. Pass a .ckpt file that `lincorr fit` wrote "
        "with this study as --ckpt_path."
    )


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

    def on_train_batch_start(self, *args: Any) -> None:
        """Delay signals until the step has ended."""
        termination.current.in_step = self._is_resumable
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
            self._save(trainer)
            raise termination.Terminated

    def on_train_epoch_end(self, *args: Any) -> None:
        """Let signals end the run at once, as no step is running."""
        termination.current.in_step = False

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Save a checkpoint, unless a step is running; if none is saved, name the last one."""
        if not isinstance(exception, termination.Terminated) or termination.current.checkpoint:
            return
        if self._progress is not None and trainer.world_size == 1:
            self._save(trainer)
        elif self._is_resumable and self._path is not None:
            folder = getattr(trainer.checkpoint_callback, "dirpath", None) or self._path.parent
            files = Path(folder).glob("[!.]*.ckpt")
            last = max(files, key=lambda file: file.stat().st_mtime, default=None)
            termination.current.checkpoint = last or trainer.ckpt_path

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
