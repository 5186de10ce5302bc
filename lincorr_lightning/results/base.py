"""Figures of a report: each is drawn once, for the run's folder and TensorBoard alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from lincorr_lightning.results.loggers import add_picture, tensorboard_writers
from lincorr_lightning.results.style import write_picture

if TYPE_CHECKING:
    import lightning as L
    from matplotlib.figure import Figure

    from lincorr_lightning.results.style import Picture

Drawings = Mapping[str, Callable[[], "Figure"]]
"""What makes each figure, by its name."""


class Pictured(ABC):
    """Base of a report with figures."""

    @abstractmethod
    def drawings(self) -> Drawings:
        """Every figure there are numbers for, by its file name without suffix."""

    @cached_property
    def pictures(self) -> dict[str, Picture]:
        """Every figure, drawn once, by its file name without suffix."""
        from lincorr_lightning.results.style import to_picture

        progress = tqdm(
            self.drawings().items(), desc="drawing figures", unit="figure", delay=2, leave=False,
            disable=None,
        )  # fmt: skip
        return {name: to_picture(draw()) for name, draw in progress}

    def write_pictures(self, folder: Path, suffix: str = "") -> None:
        """Write ``figures/NAME.png`` for each of them.

        Args:
            folder: The run's.
            suffix: Behind the names, where another report takes these.

        Raises:
            OutputError: They cannot be written.
        """
        for name, picture in self.pictures.items():
            write_picture(picture, folder / "figures" / f"{name}{suffix}.png")

    def show_pictures(self, trainer: L.Trainer, step: int = 0) -> None:
        """Add each of them to TensorBoard, as ``figures/NAME``.

        Args:
            trainer: The run's trainer.
            step: Global step.
        """
        for writer in tensorboard_writers(trainer):
            for name, picture in self.pictures.items():
                add_picture(writer, f"figures/{name}", picture, step)
