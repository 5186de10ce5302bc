"""Results in Lightning's loggers: scalars in all of them, tables and figures where they can."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lincorr_lightning.io import as_output_error

if TYPE_CHECKING:
    import lightning as L

    from lincorr_lightning.results.results import Figure, Results

MAX_TEXT_ROWS = 100
"""Rows of a table in TensorBoard, which shows it as text; the CSV file has all of them."""
MAX_TABLE_ROWS = 10_000
"""Rows of a table in loggers that have tables."""


def log_scalars(
    trainer: L.Trainer, scalars: Mapping[str, float | None], step: int | None = None
) -> None:
    """Send scalars to every logger and to `Trainer.callback_metrics`.

    The latter makes them available to `EarlyStopping` and `ModelCheckpoint`, also without a logger;
    `LightningModule.log` is not available where callbacks and the ends of runs log. All ranks call
    this with the same numbers: monitors decide on every rank.

    Args:
        trainer: The run's Trainer.
        scalars: Numbers by log key; None, NaN and infinity are left out.
        step: Step of the log; None for the Trainer's global step.
    """
    import torch

    finite = {
        key: float(value)
        for key, value in scalars.items()
        if value is not None and math.isfinite(value)
    }
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in finite.items()})
    if finite:
        for logger in trainer.loggers:
            logger.log_metrics(finite, step=trainer.global_step if step is None else step)


def log_results(trainer: L.Trainer, results: Results, step: int) -> None:
    """Log a study's results with every logger of a run.

    Scalars go to all loggers. Tables and figures go to TensorBoard, to MLflow, and to any logger
    with the ``log_table`` and ``log_image`` of `WandbLogger`.
    """
    log_scalars(trainer, results.scalars, step)
    if not trainer.is_global_zero:
        return
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

    add_scalar_layout(trainer, results.charts)
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            with as_output_error(Path(logger.log_dir)):
                _log_to_tensorboard(logger.experiment, results, step)
        elif isinstance(logger, MLFlowLogger):
            _log_to_mlflow(logger, results)
        else:
            _log_by_methods(logger, results, step)
        # CSVLogger keeps scalars until it is saved, and the Trainer saves it before a run's end.
        logger.save()


def _log_to_tensorboard(writer: Any, results: Results, step: int) -> None:
    for table in results.tables:
        first = table.first(MAX_TEXT_ROWS)
        text = "\n\n".join(filter(None, (first.caption, first.markdown(), first.note)))
        writer.add_text(f"tables/{table.name}", text, step)
    for figure in results.figures:
        pixels = np.asarray(_image(figure))
        writer.add_image(f"figures/{figure.name}", pixels, step, dataformats="HWC")
    writer.flush()


def _log_to_mlflow(logger: Any, results: Results) -> None:
    client, run = logger.experiment, logger.run_id
    for table in results.tables:
        client.log_text(run, table.frame.to_csv(index=False), f"tables/{table.name}.csv")
    for figure in results.figures:
        client.log_image(run, _image(figure), f"figures/{figure.name}.png")


def _log_by_methods(logger: Any, results: Results, step: int) -> None:
    """Use ``log_table`` and ``log_image`` of `WandbLogger`, if a logger has them."""
    if callable(getattr(logger, "log_table", None)):
        for table in results.tables:
            frame = table.frame.head(MAX_TABLE_ROWS)
            logger.log_table(f"tables/{table.name}", dataframe=frame, step=step)
    if callable(getattr(logger, "log_image", None)):
        for figure in results.figures:
            images, captions = [_image(figure)], [figure.caption]
            logger.log_image(f"figures/{figure.name}", images=images, step=step, caption=captions)


def _image(figure: Figure) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(figure.png))


def add_scalar_layout(
    trainer: L.Trainer, charts: Mapping[str, Mapping[str, Sequence[str]]]
) -> None:
    """Define charts that TensorBoard draws from several curves, see `Results.charts`."""
    from lightning.pytorch.loggers import TensorBoardLogger

    # TensorBoard shows only the last layout that was written: the Trainer keeps that of all.
    layout = vars(trainer).setdefault("tensorboard_layout", {})
    for group, titles in charts.items():
        layout[group] = {title: ["Multiline", list(keys)] for title, keys in titles.items()}
    for logger in trainer.loggers if trainer.is_global_zero and charts else ():
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(layout)  # type: ignore[no-untyped-call]
