"""Token geometry in training: a table, and heat maps of layer and step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from lincorr_lightning.io import write_csv
from lincorr_lightning.results.loggers import add_picture, tensorboard_writers
from lincorr_lightning.results.style import (
    GREY,
    INK,
    Picture,
    finish,
    new_figure,
    to_picture,
    write_picture,
)

if TYPE_CHECKING:
    import lightning as L

_NAMES = {
    "dimension": "intrinsic dimension", "overlap": "overlap with the next layer",
    "cosine": "cosine similarity", "angle": "neighbor angle (°)",
}  # fmt: skip
_MOST_TICKS = 8


@dataclass(frozen=True)
class GeometryHistory:
    """What was observed step by step.

    Attributes:
        curves: ``(step, value)`` by tag, as ``dimension_n2=2/layer_1`` or ``loss``.
        told: What else one must know to read the figure.
    """

    curves: Mapping[str, Sequence[tuple[int, float]]]
    told: str

    def write(self, folder: Path, name: str) -> None:
        """Write the table and the figure.

        Args:
            folder: The run's.
            name: Of the files.

        Raises:
            OutputError: They cannot be written.
        """
        rows = [
            [*(part.removeprefix("layer_") for part in tag.partition("/")[::2]), step, value]
            for tag, points in self.curves.items()
            for step, value in points
        ]
        columns = ("observable", "layer", "step", "mean")
        write_csv(folder / "tables" / f"{name}.csv", columns, rows)
        write_picture(self.picture, folder / "figures" / f"{name}.png")

    def show(self, trainer: L.Trainer, name: str) -> None:
        """Add the figure to TensorBoard.

        Args:
            trainer: The run's trainer; its global step is the figure's.
            name: Of the figure.
        """
        for writer in tensorboard_writers(trainer):
            add_picture(writer, f"figures/{name}", self.picture, trainer.global_step)

    @cached_property
    def picture(self) -> Picture:
        """The figure, drawn once."""
        return to_picture(self.figure())

    def figure(self) -> Figure:
        """A heat map for each observable, layers from bottom to top, steps from left to right."""
        maps: dict[str, dict[tuple[int, int], float]] = {}
        for tag, points in self.curves.items():
            name, _, layer = tag.partition("/layer_")
            if layer:
                maps.setdefault(name, {}).update({(int(layer), s): value for s, value in points})
        n_columns = min(2, max(len(maps), 1))
        n_rows = math.ceil(len(maps) / n_columns)
        n_layers = max((len({layer for layer, _ in cells}) for cells in maps.values()), default=1)
        height = n_rows * min(max(0.22 * n_layers + 0.9, 1.7), 4.5)
        figure = new_figure(
            max(3.9 * n_columns, 5.0), height, "Token geometry in training, layer by layer",
            self.told,
        )  # fmt: skip
        panels = figure.subplots(max(n_rows, 1), n_columns, squeeze=False)
        for panel in panels.flat[len(maps) :]:
            panel.set_axis_off()
        for axes, (name, cells) in zip(panels.flat, maps.items(), strict=False):
            layers = sorted({layer for layer, _ in cells})
            steps = sorted({step for _, step in cells})
            matrix = np.array([[cells.get((y, x), math.nan) for x in steps] for y in layers])
            image = axes.imshow(
                np.ma.masked_invalid(matrix), aspect="auto", origin="lower", cmap="viridis",
                interpolation="none",
            )  # fmt: skip
            every = math.ceil(len(steps) / _MOST_TICKS)
            axes.set_xticks(range(0, len(steps), every), map(str, steps[::every]))
            every = math.ceil(len(layers) / _MOST_TICKS)
            axes.set_yticks(range(0, len(layers), every), map(str, layers[::every]))
            kind, _, setting = name.partition("_")
            title = _NAMES.get(kind, kind) + (f", {setting.replace('=', ' = ')}" if setting else "")
            axes.set_title(title, loc="left", fontsize=9.5, color=INK)
            axes.set_xlabel("step", fontsize=8.5, color=INK)
            axes.set_ylabel("layer", fontsize=8.5, color=INK)
            axes.tick_params(labelsize=8, length=2, color=GREY, labelcolor=INK)
            axes.spines[:].set_visible(False)
            bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
            bar.outline.set_visible(False)  # type: ignore[operator]
            bar.ax.tick_params(labelsize=7.5, length=2, color=GREY, labelcolor=INK)
        return finish(figure)
