"""A run's folder: chosen once per Trainer, the same on every rank."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lincorr_lightning.errors import OutputError
from lincorr_lightning.io import new_version
from lincorr_lightning.results.loggers import log_results

if TYPE_CHECKING:
    import lightning as L

    from lincorr_lightning.results.results import Results

_folders: WeakKeyDictionary[L.Trainer, Path] = WeakKeyDictionary()


def run_folder(trainer: L.Trainer) -> Path:
    """The folder this run writes to, the same on all processes.

    It is the logger's folder where the logger has one of its own for each run (TensorBoard, CSV),
    else a new ``<trainer.log_dir>/<study>/version_N``, which the first process makes. It is chosen
    once per trainer. That first call must be made by all processes together, as in ``setup``;
    later ones may be made by any.

    Args:
        trainer: The run's trainer, with its module attached.

    Raises:
        OutputError: The folder cannot be made.
    """
    if trainer not in _folders:
        _folders[trainer] = _choose_folder(trainer)
    return _folders[trainer]


def _choose_folder(trainer: L.Trainer) -> Path:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    base = Path(trainer.log_dir or trainer.default_root_dir)
    if isinstance(trainer.logger, (TensorBoardLogger, CSVLogger)):
        return base
    folder, refusal = None, None
    if trainer.is_global_zero:
        try:
            folder = new_version(base / study_name(trainer.lightning_module))
        except OutputError as error:
            refusal = str(error)
    # A process that raised alone would leave the others waiting for it.
    folder, refusal = trainer.strategy.broadcast((folder, refusal))
    if folder is None:
        raise OutputError(refusal)
    return folder


def is_dry_run(trainer: Any) -> bool:
    """Whether the run only tries the code (``--trainer.fast_dev_run``) and is to leave nothing.

    Args:
        trainer: The run's trainer.
    """
    return bool(trainer.fast_dev_run)


def study_name(module: object) -> str:
    """A study's name as its config file has it.

    Args:
        module: The study's LightningModule.

    It is the class attribute ``study``, or else the class name in snake case.

    Example:
        >>> class LinearProbe: pass
        >>> study_name(LinearProbe())
        'linear_probe'
    """
    study = getattr(module, "study", None)
    if isinstance(study, str):
        return study
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()


def write_results(trainer: L.Trainer, results: Results) -> None:
    """Write a study's results to the run's folder and show them in its loggers.

    Nothing is written by ranks other than 0 and in a dry run.

    Args:
        trainer: The run's Trainer.
        results: What the study found.

    Raises:
        OutputError: A file cannot be written.
    """
    if is_dry_run(trainer) or not trainer.is_global_zero:
        return
    results.write(run_folder(trainer))
    log_results(trainer, results, trainer.global_step)


def write_callback_results(trainer: L.Trainer, results: Results) -> None:
    """Write tables and figures of a callback, and show them in the run's loggers.

    The run's ``results.json`` is the module's; a study of this package includes what
    `collect_callback_results` finds.

    Args:
        trainer: The run's Trainer.
        results: What the callback found.

    Raises:
        OutputError: A file cannot be written.
    """
    if is_dry_run(trainer) or not trainer.is_global_zero:
        return
    results.write_parts(run_folder(trainer))
    log_results(trainer, results, trainer.global_step)


def collect_callback_results(trainer: L.Trainer) -> list[Results]:
    """Return the results of a run's callbacks, under distinct names.

    A callback has results if its attribute ``output`` is a `Results`; the second one of a name is
    numbered, as ``feature_movement_2``.

    Args:
        trainer: The run's Trainer.
    """
    from lincorr_lightning.results.results import Results

    found: list[Results] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        output = getattr(callback, "output", None)
        if isinstance(output, Results):
            n_before = sum(re.sub(r"_\d+$", "", one.study) == output.study for one in found)
            name = output.study if n_before == 0 else f"{output.study}_{n_before + 1}"
            found.append(replace(output, study=name))
    return found
