"""Checkpoints: written completely or not at all, and refused in one line if unusable."""

from __future__ import annotations

import errno
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch.loops.fit_loop import _FitLoop

from lincorr_lightning.errors import CheckpointError, LincorrError
from lincorr_lightning.io import atomic_write
from lincorr_lightning.lm.batching import oom_reason
from lincorr_lightning.option_errors import one_line

_WAY_OUT = "Pass a .ckpt file that `lincorr fit` wrote with this study as --ckpt_path."
_SPECIAL = ("best", "last", "hpc", "registry")
# Lightning's functions that restore a run.
_RESTORING = {
    "_select_ckpt_path", "_restore_modules_and_callbacks", "restore_training_state",
    "_load_combined_loader_states",
}  # fmt: skip


def set_up_checkpoints(trainer: L.Trainer) -> None:
    """Let a Trainer write checkpoints atomically, and finish a run that is resumed at its end.

    A `CheckpointIO` that the user passed is kept.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    # Lightning has no public way to change its fit loop.
    given = trainer.fit_loop
    trainer.fit_loop = ResumableFitLoop(trainer, given.min_epochs, given.max_epochs)
    trainer.fit_loop.epoch_loop = given.epoch_loop


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint completely or not at all, and loads only tensors and plain data.

    Lightning's own copies the file from the system's temporary folder: if the process is killed
    meanwhile or the disk is full, a truncated file is left under the final name.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Save a checkpoint."""
        if storage_options is not None or not _is_local_file_protocol(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with atomic_write(path) as part, part.open("wb") as file:
            try:
                torch.save(checkpoint, file)
            except RuntimeError as error:  # torch hides the operating system's error in its own
                raise (
                    error.__context__ if isinstance(error.__context__, OSError) else error
                ) from None

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint."""
        with _explained(path):
            content = super().load_checkpoint(path, map_location, weights_only is not False)
        return _require_checkpoint(path, content)


def check_checkpoint(path: str | Path, study: str, weights_only: bool | None = None) -> None:
    """Refuse a checkpoint that no run of a study can use, before the LM is loaded.

    Tensors are not read. Paths that only Lightning can resolve are not checked: ``best``, ``last``,
    ``hpc``, a registry, and other URLs.

    Args:
        path: The value of ``--ckpt_path``.
        study: Name of the study.
        weights_only: The value of ``--weights_only``; only if it is False may the file hold other
            objects than tensors and plain data.
    """
    if path in _SPECIAL or re.match(r"\w+:", str(path)):
        return
    path = Path(path)
    if path.is_dir() and (path / "meta.pt").is_file():
        return  # a folder of shards (save_distributed_checkpoint)
    if not path.is_file():
        reason = "is not a file" if path.exists() else "does not exist"
        raise CheckpointError(f"--ckpt_path {path} {reason}. {_WAY_OUT}")
    with _explained(path):
        if not zipfile.is_zipfile(path):
            raise EOFError
        content = torch.load(
            path, map_location="cpu", weights_only=weights_only is not False, mmap=True
        )
    writer = _require_checkpoint(path, content).get("study")
    if isinstance(writer, dict) and writer.get("name") != study:
        raise CheckpointError(
            f"the checkpoint {path} is of {writer.get('name')}, not of {study}. {_WAY_OUT}"
        )


def _require_checkpoint(path: str | Path, content: Any) -> dict[str, Any]:
    for key in ("state_dict", "pytorch-lightning_version"):
        if not isinstance(content, dict) or key not in content:
            raise CheckpointError(
                f"{path} is not the checkpoint of a run: it has no {key}. {_WAY_OUT}"
            )
    return content


@contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Turn errors of reading into a `CheckpointError`, without torch's advice to trust the file."""
    try:
        yield
    except Exception as error:
        if oom_reason(error):
            raise
        reason = "it is damaged, truncated or not a checkpoint"
        # For truncated files, torch seeks to an invalid position (EINVAL).
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            reason = error.strerror or str(error)
        elif isinstance(error, pickle.UnpicklingError):
            reason = "it holds other objects than tensors and plain data, or is damaged"
        raise CheckpointError(f"cannot read the checkpoint {path}: {reason}. {_WAY_OUT}") from error


def restoring_error(error: Exception, path: str | Path | None, study: str) -> LincorrError | None:
    """Return an error that names the checkpoint, if `error` was raised while restoring it.

    Args:
        error: The error.
        path: The checkpoint.
        study: Name of the study's class.
    """
    called = {frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__)}
    if not called & _RESTORING or oom_reason(error):
        return None
    if isinstance(error, LincorrError):
        return None if str(path) in str(error) else type(error)(f"--ckpt_path {path}: {error}")
    if path in _SPECIAL:
        missing = CheckpointError(f"--ckpt_path {path}: there is no such checkpoint. {_WAY_OUT}")
        missing.exit_status = 2
        return missing
    reason = one_line(error.args[0] if error.args else "").rstrip(".")
    if isinstance(error, RuntimeError) and "loading state_dict" not in reason:
        return None  # not about the checkpoint, such as the failure of another rank
    if isinstance(error, (TypeError, AttributeError)) or " " not in reason:
        reason = "its content is incomplete or damaged"
    return CheckpointError(
        f"the checkpoint {path} does not fit {study} as it is set up: {reason}. Use the settings "
        "of the run that wrote it (its config.yaml), or start a new run."
    )


class ResumableFitLoop(_FitLoop):
    """Lightning's fit loop, also for runs that are resumed after the last step of an epoch.

    Lightning skips the validation of that epoch and, after the last epoch, the hooks at the end of
    training, in which studies write their results.
    """

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train or to finish."""
        return super().skip and not (self.is_resuming and self.trainer.limit_train_batches)

    def on_run_start(self) -> None:
        """Call the hooks, and run the validation that follows the last step of an epoch."""
        super().on_run_start()
        steps = self.epoch_loop
        epochs: Any = self.epoch_progress.current
        is_last = 0 < (self.max_epochs or 0) <= epochs.processed
        if not steps.batch_progress.is_last_batch or not (
            steps.restarted_on_train_batch_end or (self.is_resuming and is_last)
        ):
            return
        epochs.completed -= 1  # Lightning counts the epoch as completed already
        if steps._should_check_val_epoch():
            self.trainer.validating = True
            steps.val_loop.restarting = False
            steps.val_loop.run()
            self.trainer.training = True
        epochs.completed += 1
