"""Results in Lightning's loggers: scalars in all of them, tables and figures where they can."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    import lightning as L
    from lightning.pytorch.loggers import Logger
    from torch.utils.tensorboard import SummaryWriter

    from lincorr_lightning.results.results import Results
    from lincorr_lightning.results.style import Picture

Charts = Mapping[str, Mapping[str, Sequence[str]]]
"""Group -> chart -> log keys, see `Results.charts`."""

_layouts: WeakKeyDictionary[SummaryWriter, dict[str, dict[str, list[Any]]]] = WeakKeyDictionary()

MAX_TABLE_ROWS = 100
"""Rows of a table that a logger shows; the CSV file has all of them."""


def log_scalars(trainer: L.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """Send scalars to every logger and to `Trainer.callback_metrics`.

    The latter makes them available to `EarlyStopping` and `ModelCheckpoint`, also without a logger;
    `LightningModule.log` is not available where callbacks and the ends of runs log.

    Args:
        trainer: The run's Trainer.
        scalars: Numbers by log key; NaN is left out.
        step: Global step.
    """
    import torch

    finite = {key: float(value) for key, value in scalars.items() if value == value}
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in finite.items()})
    if finite:
        for logger in trainer.loggers:
            logger.log_metrics(finite, step=step)


def log_results(trainer: L.Trainer, results: Results, step: int) -> None:
    """Show a study's results in every logger of a run.

    Scalars go to all loggers. Tables and figures go to TensorBoard, to any logger with Weights &
    Biases' ``log_table`` and ``log_image``, and to MLflow.

    Args:
        trainer: The run's Trainer.
        results: What to show.
        step: Global step.
    """
    log_scalars(trainer, results.scalars, step)
    if not trainer.is_global_zero:
        return
    for logger in trainer.loggers:
        _log_parts(logger, results, step)


def _log_parts(logger: Logger, results: Results, step: int) -> None:
    from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger

    if isinstance(logger, TensorBoardLogger):
        writer = logger.experiment
        if results.charts:
            _add_charts(writer, results.charts)
        for table in results.tables:
            text = f"{table.caption}\n\n{table.markdown(MAX_TABLE_ROWS)}"
            writer.add_text(f"tables/{table.name}", text, step)
        for figure in results.figures:
            add_picture(writer, f"figures/{figure.name}", figure.picture, step)
    elif isinstance(logger, MLFlowLogger):
        for table in results.tables:
            columns = dict(zip(table.keys, zip(*table.rows, strict=True), strict=False))
            logger.experiment.log_table(
                logger.run_id,
                {key: list(cells) for key, cells in columns.items()},
                f"{table.name}.json",
            )
        for figure in results.figures:
            logger.experiment.log_image(
                logger.run_id, _pixels(figure.picture), artifact_file=f"figures/{figure.name}.png"
            )
    else:
        _log_by_methods(logger, results, step)


def add_scalar_layout(trainer: L.Trainer, charts: Charts) -> None:
    """Define charts that TensorBoard draws from several curves, under "Custom Scalars".

    Args:
        trainer: The run's Trainer.
        charts: See `Results.charts`; groups that the run has already are replaced, others stay.
    """
    for writer in tensorboard_writers(trainer):
        _add_charts(writer, charts)


def _add_charts(writer: SummaryWriter, charts: Charts) -> None:
    # TensorBoard shows only the last layout that was written.
    layout = _layouts.setdefault(writer, {})
    for group, titles in charts.items():
        layout[group] = {title: ["Multiline", list(keys)] for title, keys in titles.items()}
    writer.add_custom_scalars(layout)  # type: ignore[no-untyped-call]


def _log_by_methods(logger: Any, results: Results, step: int) -> None:
    """Use ``log_table`` and ``log_image`` of `WandbLogger`, if a logger has them."""
    if callable(getattr(logger, "log_table", None)):
        for table in results.tables:
            rows = [list(row) for row in table.rows[:MAX_TABLE_ROWS]]
            logger.log_table(f"tables/{table.name}", columns=table.keys, data=rows, step=step)
    if callable(getattr(logger, "log_image", None)):
        for figure in results.figures:
            images = [_pixels(figure.picture)]
            logger.log_image(
                f"figures/{figure.name}", images=images, step=step, caption=[figure.caption]
            )


def _pixels(picture: Picture) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(picture.png))


def tensorboard_writers(trainer: L.Trainer) -> Iterable[SummaryWriter]:
    """Yield the writer of every TensorBoard logger of a run; none on ranks other than 0.

    Args:
        trainer: The run's Trainer.
    """
    from lightning.pytorch.loggers import TensorBoardLogger

    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, TensorBoardLogger):
            yield logger.experiment


def add_picture(writer: SummaryWriter, tag: str, picture: Picture, step: int) -> None:
    """Add a figure that is a PNG already; `SummaryWriter.add_image` would encode pixels anew.

    Args:
        writer: The log's writer.
        tag: Name of the picture.
        picture: The figure.
        step: Global step.
    """
    from tensorboard.compat.proto.summary_pb2 import Summary

    image = Summary.Image(
        height=picture.height,
        width=picture.width,
        colorspace=3,
        encoded_image_string=picture.png,
    )
    file_writer = writer._get_file_writer()  # type: ignore[no-untyped-call]
    file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)
