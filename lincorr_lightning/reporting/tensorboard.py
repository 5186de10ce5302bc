"""What all studies share of TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import lightning as L
    from torch.utils.tensorboard import SummaryWriter

    from lincorr_lightning.reporting.canvas import Picture


def writers(trainer: L.Trainer) -> Iterator[SummaryWriter]:
    """Every TensorBoard log of a run; none on processes other than the first.

    Args:
        trainer: The run's trainer.
    """
    from lightning.pytorch.loggers import TensorBoardLogger

    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, TensorBoardLogger):
            yield logger.experiment


def add_picture(writer: SummaryWriter, tag: str, picture: Picture, step: int) -> None:
    """Add a figure that is drawn already; `add_image` would ask for pixels and encode them again.

    Args:
        writer: Of the log.
        tag: The figure's.
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
