"""Errors of a run that a user can mend, with the way out."""

import errno
import os
from pathlib import Path
from pickle import UnpicklingError
from traceback import walk_tb

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lincorr_lightning.cli.option_errors import one_line
from lincorr_lightning.errors import CheckpointError, ConfigError, LanguageModelError, LincorrError
from lincorr_lightning.io import output_error
from lincorr_lightning.lm.batching import oom_reason

# Lightning's functions that restore a run.
_RESTORING = {
    "_select_ckpt_path",
    "_restore_modules_and_callbacks",
    "restore_training_state",
    "_load_combined_loader_states",
}
_LOGGERS = ("tensorboard.", "lightning.pytorch.loggers.", "lightning.fabric.loggers.")
_BATCH_SETTINGS = ("edits_per_step", "batch_size", "batch_tokens")  # how large a batch is


def run_error(
    error: Exception,
    ckpt_path: str | Path | None,
    model: L.LightningModule,
    data: L.LightningDataModule,
) -> LincorrError | None:
    """Return an error that says what to do about one that ended a run.

    It may name the checkpoint that the run began with, and settings of the study and its data. None
    if the error is none that a user can mend, or says itself what to do.
    """
    if reason := oom_reason(error):
        return _out_of_memory(reason, model, data)
    if "EADDRINUSE" in str(error):
        port = os.environ.get("MASTER_PORT")
        return ConfigError(f"port {port} is in use; unset MASTER_PORT, or name a free port in it.")
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if _RESTORING & {frame.f_code.co_name for frame in frames}:
        return _restoring_error(error, ckpt_path)
    modules = [str(frame.f_globals.get("__name__")) for frame in frames]
    raised_in = modules[-1] if modules else ""
    is_refusal = isinstance(error, (ValueError, RuntimeError, MisconfigurationException))
    is_refusal = is_refusal and not isinstance(error, NotImplementedError)
    if is_refusal and raised_in.startswith("lightning."):
        return ConfigError(one_line(error))
    by_logger = any(module.startswith(_LOGGERS) for module in modules)
    if by_logger and isinstance(error, UnicodeEncodeError):
        return output_error(error.object, "its name is not UTF-8")
    if isinstance(error, OSError) and (by_logger or error.errno in (errno.ENOSPC, errno.EDQUOT)):
        moved = by_logger and error.errno in (errno.ENOENT, errno.ENOTDIR)
        reason = f"{error.strerror}{'; its folder was moved or removed during the run' * moved}"
        return output_error(os.fsdecode(error.filename or "a file of the run"), reason)
    return None


def _restoring_error(error: Exception, path: str | Path | None) -> LincorrError | None:
    if isinstance(error, LincorrError):
        return None if str(path) in str(error) else type(error)(f"--ckpt_path {path}: {error}")
    reason = one_line(error.args[0] if error.args else "").rstrip(".")
    if isinstance(error, RuntimeError) and "loading state_dict" not in reason:
        return None  # not about the checkpoint, such as the failure of another rank
    if isinstance(error, (TypeError, AttributeError, UnpicklingError)) or " " not in reason:
        reason = "its content is incomplete or damaged"
    return CheckpointError(
        f"--ckpt_path {path}: the run cannot go on: {reason}. Use the settings of the run that "
        "wrote the checkpoint (its config.yaml), or start a new run."
    )


def _out_of_memory(
    reason: str, model: L.LightningModule, data: L.LightningDataModule
) -> LanguageModelError:
    reducible = [
        f"{part}.{name} (it is {holder.hparams[name]})"
        for part, holder in (("model", model), ("data", data))
        for name in _BATCH_SETTINGS
        if isinstance(holder.hparams.get(name), int)
    ]
    return LanguageModelError(
        f"a step of the run does not fit the memory: {reason}. Lower "
        f"{' or '.join(reducible) or 'the batch size'}, or use a device with more memory."
    )
