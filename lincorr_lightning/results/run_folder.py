"""A run's folder and its loggers: scalars go to all of them, tables and figures where they can."""

from __future__ import annotations

import inspect
import io
import math
import re
import shutil
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import (
    CSVLogger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from lincorr_lightning.errors import OutputError
from lincorr_lightning.io import as_output_error, check_writable, new_version
from lincorr_lightning.lightning_workarounds import RunLogger
from lincorr_lightning.lm import products
from lincorr_lightning.results.results import (
    MAX_FIGURES,
    Figure,
    Results,
    set_earlier_results_aside,
)
from lincorr_lightning.results.table import Table, escape_markdown

# What a folder holds before the first batch; event files have the hyper-parameters by then.
_SETTINGS = re.compile(r"config\.yaml|hparams\.yaml|events\.out\.tfevents\..*")
MAX_TEXT_ROWS = 100
"""Rows of a table in TensorBoard, which shows it as text; the CSV file has all of them."""
MAX_TABLE_ROWS = 10_000  #: Rows of a table in loggers that have tables.
MAX_NUMBERS = 50
"""Numbers of a run's end that loggers get, of which the first count most; tables have the rest."""
MAX_MEASURES = 5  #: Those of them that TensorBoard has beside the hyper-parameters.


class RunFolder(L.Callback):
    """Keeps the folder that a run writes to; `run_folder` adds one to a Trainer without any.

    Args:
        name: Folder below the Trainer's for loggers without one per run; None takes the study's.
        figures: Which figures are drawn: the ``main`` ones, at most `MAX_FIGURES`, or ``all``.
    """

    def __init__(self, name: str | None = None, figures: Literal["main", "all"] = "main") -> None:
        self.name = name
        self.path: Path | None = None
        self.is_new = False  #: Whether this run made the folder, and no logger.
        self.has_begun = False  #: Whether a batch has been read.
        self.figures_left = MAX_FIGURES if figures == "main" else None
        """How many figures may still be drawn; None if all may."""

    def _begin(self, *args: Any, **kwargs: Any) -> None:
        """Note that the run is past its preparations."""
        self.has_begun = True

    on_train_batch_start = on_validation_batch_start = _begin
    on_test_batch_start = on_predict_batch_start = _begin


def _new_version(trainer: L.Trainer, parent: Path) -> Path:
    """Return a new folder that rank 0 makes; what it raises is raised on all ranks."""
    folder: Path | OutputError | None = None
    if trainer.is_global_zero:
        try:
            folder = new_version(parent)
        except OutputError as error:
            folder = error
    # A rank that raised alone would leave the others waiting for it.
    folder = trainer.strategy.broadcast(folder)
    if isinstance(folder, OutputError):
        raise folder
    assert folder is not None
    return folder


def run_folder(trainer: L.Trainer) -> Path:
    """Return the folder that a run writes to, the same on all ranks.

    It is the logger's folder if the logger has one for each run (TensorBoard, CSV), else a new
    ``<trainer.log_dir>/<name>/version_N``, which rank 0 makes. It is chosen once per Trainer, see
    `RunFolder`. All ranks make the first call together; raises `OutputError`.
    """
    keeper = _keeper(trainer)
    if keeper.path is None:
        keeper.path = Path(trainer.log_dir or trainer.default_root_dir)
        if not isinstance(trainer.logger, (TensorBoardLogger, CSVLogger)):
            name = keeper.name or study_name(trainer.lightning_module)
            keeper.path = _new_version(trainer, keeper.path / name)
            keeper.is_new = True
    return keeper.path


def _keeper(trainer: L.Trainer) -> RunFolder:
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    keeper = next((each for each in callbacks if isinstance(each, RunFolder)), None)
    if keeper is None:
        keeper = RunFolder()
        callbacks.append(keeper)
    return keeper


def prepare_run_folder(trainer: L.Trainer) -> None:
    """Choose the run's folder and check that it can be written, unless the run is a dry one.

    All ranks call this, in ``setup``. Raises `OutputError`.
    """
    if is_dry_run(trainer):
        return
    folder = run_folder(trainer)
    if trainer.is_global_zero:
        check_writable(folder)
        # Validation and prediction do not replace the results of an earlier fit.
        if trainer.state.fn in ("fit", "test"):
            set_earlier_results_aside(folder)


def remove_if_empty(trainer: L.Trainer) -> None:
    """Remove the run's folder after a failure, if this run made it and it holds settings alone.

    It stays once a batch has begun: a checkpoint elsewhere may need the config.
    """
    loggers = [logger for logger in trainer.loggers if isinstance(logger, RunLogger)]
    keepers = [each for each in trainer.callbacks if isinstance(each, RunFolder)]  # type: ignore[attr-defined]
    folders = [Path(logger.log_dir) for logger in loggers if logger.has_folder]
    folders += [keeper.path for keeper in keepers if keeper.is_new and keeper.path is not None]
    for folder in () if any(keeper.has_begun for keeper in keepers) else folders:
        if not any(not _SETTINGS.fullmatch(path.name) for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)


def is_dry_run(trainer: Any) -> bool:
    """Return whether a run only tries the code and leaves no files (``trainer.fast_dev_run``)."""
    return bool(trainer.fast_dev_run)


def study_name(module: object) -> str:
    """Return the name of a study: its class attribute ``study``, or its class in snake case."""
    study = getattr(module, "study", None)
    if isinstance(study, str):
        return study
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(module).__name__).lower()


def run_settings(trainer: L.Trainer) -> dict[str, Any]:
    """Return a run's hyper-parameters, those of its data under ``data``, and its precision."""
    return {
        **_hparams(trainer.lightning_module),
        "data": _hparams(getattr(trainer, "datamodule", None)),
        "matmul_precision": products.precision(),
    }


def _hparams(holder: Any) -> dict[str, Any]:
    """Return hyper-parameters without those that LightningCLI and base classes add."""
    hparams = getattr(holder, "hparams", {})
    parameters = inspect.signature(type(holder)).parameters if hparams else {}
    return {key: value for key, value in hparams.items() if key in parameters}


def collect_callback_results(trainer: L.Trainer) -> list[Results]:
    """Return the results of a run's callbacks: what each has as `output`, if it is a `Results`.

    A callback with a method ``complete`` is asked first to finish what it measures.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if hasattr(callback, "output") and hasattr(callback, "complete"):
            callback.complete(trainer)
    outputs = (getattr(callback, "output", None) for callback in callbacks)
    return [output for output in outputs if isinstance(output, Results)]


def write_parts(trainer: L.Trainer, results: Results) -> None:
    """Write tables and figures to the run's folder, and log them, and scalars, with all loggers.

    All ranks call this. Rank 0 writes, except in a dry run; scalars are in
    `Trainer.callback_metrics` on all of them. A run has one of each: loggers get them as a table or
    summary, and not as curves of one point. Tables and figures go to TensorBoard, to MLflow, and
    to any logger with the ``log_table`` and ``log_image`` of `WandbLogger`. Raises `OutputError`.
    """
    numbers = _finite(results.scalars)
    # What was logged in the course of the run gets its last point.
    curves = {key: value for key, value in numbers.items() if key in trainer.callback_metrics}
    log_scalars(trainer, curves)
    numbers = {key: value for key, value in numbers.items() if key not in curves}
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in numbers.items()})
    if is_dry_run(trainer) or not trainer.is_global_zero:
        return
    keeper = _keeper(trainer)
    figures = results.figures
    if keeper.figures_left is not None:
        figures = results.main_figures(keeper.figures_left)
        keeper.figures_left -= len(figures)
    results = replace(results, figures=figures)
    results.write_parts(run_folder(trainer), None)
    first = dict(islice(numbers.items(), MAX_NUMBERS))
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            with as_output_error(Path(logger.log_dir)):
                measures = dict(islice(first.items(), MAX_MEASURES))
                if measures:
                    given = {k: v for k, v in logger.hparams.items() if k[0] != "_" and v}
                    logger.log_hyperparams(given, measures)
                _log_to_tensorboard(logger.experiment, results, first, trainer.global_step)
        elif isinstance(logger, MLFlowLogger):
            logger.log_metrics(_mlflow_names(first), step=trainer.global_step)
            _log_to_mlflow(logger, results)
        elif isinstance(logger, WandbLogger):
            logger.experiment.summary.update(first)
            _log_by_methods(logger, results, trainer.global_step)
        else:
            logger.log_metrics(first, step=trainer.global_step)
            _log_by_methods(logger, results, trainer.global_step)
        logger.save()  # CSVLogger keeps scalars until then, and the Trainer saves it earlier


def log_scalars(
    trainer: L.Trainer, scalars: Mapping[str, float | None], step: int | None = None
) -> None:
    """Send scalars of a step to `Trainer.callback_metrics`, and to every logger.

    The former makes them available to `EarlyStopping` and `ModelCheckpoint`, also without a logger;
    `LightningModule.log` is not available where callbacks and the ends of runs log. All ranks call
    this with the same numbers: monitors decide on every rank. None, NaN and infinity are left out.
    The step is by default the Trainer's global step.
    """
    finite = _finite(scalars)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in finite.items()})
    for logger in trainer.loggers if finite else ():
        named = _mlflow_names(finite) if isinstance(logger, MLFlowLogger) else finite
        logger.log_metrics(named, step=trainer.global_step if step is None else step)


def _finite(scalars: Mapping[str, float | None]) -> dict[str, float]:
    known = ((key, value) for key, value in scalars.items() if value is not None)
    return {key: float(value) for key, value in known if math.isfinite(value)}


_WORDS = {"->": "to", "+": "plus", "*": "times"}


def _mlflow_names(numbers: Mapping[str, float]) -> dict[str, float]:
    """Write signs that `MLFlowLogger` would drop as words: no kind of knowledge has spaces."""

    def word(sign: re.Match[str]) -> str:
        return f" {_WORDS.get(sign[0]) or unicodedata.name(sign[0], hex(ord(sign[0]))).lower()} "

    return {re.sub(r"->|[^a-zA-Z0-9_/. -]", word, name): x for name, x in numbers.items()}


def _log_to_tensorboard(
    writer: Any, results: Results, numbers: Mapping[str, float], step: int
) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    if results.verdict:
        writer.add_text("Verdict", "\n\n".join(map(escape_markdown, results.verdict)), step)
    rows = list(numbers.items())
    formats = {"value": ".4g"}
    single = [Table.of("numbers", rows, ("number", "value"), formats=formats)] if rows else []
    for table in (*single, *results.tables):
        first = table.first(MAX_TEXT_ROWS)
        text = "\n\n".join(filter(None, (first.caption, first.markdown(), first.note)))
        writer.add_text(f"tables/{table.name}", text, step)
    for figure in results.figures:
        # A PNG as it is: `SummaryWriter.add_image` would encode its pixels anew.
        size = dict(zip(("width", "height"), _image(figure).size, strict=True))
        image = Summary.Image(**size, colorspace=4, encoded_image_string=figure.png)
        value = Summary.Value(tag=f"figures/{figure.name}", image=image)
        writer._get_file_writer().add_summary(Summary(value=[value]), step)
    writer.flush()


def _log_to_mlflow(logger: Any, results: Results) -> None:
    client, run = logger.experiment, logger.run_id
    for table in results.tables:
        client.log_text(run, table.frame.to_csv(index=False), f"tables/{table.name}.csv")
    for figure in results.figures:
        client.log_image(run, _image(figure), f"figures/{figure.name}.png")


def _log_by_methods(logger: Any, results: Results, step: int) -> None:
    """Use ``log_table`` and ``log_image`` of `WandbLogger`, if a logger has them."""
    for table in results.tables if callable(getattr(logger, "log_table", None)) else ():
        frame = table.frame.head(MAX_TABLE_ROWS)
        frame = frame.astype(object).where(frame.notna(), None)  # W&B knows no NA of pandas
        logger.log_table(f"tables/{table.name}", dataframe=frame, step=step)
    for figure in results.figures if callable(getattr(logger, "log_image", None)) else ():
        pictures = {"images": [_image(figure)], "caption": [figure.caption]}
        logger.log_image(f"figures/{figure.name}", step=step, **pictures)


def _image(figure: Figure) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(figure.png))
