"""Heat maps of token geometry by layer and step of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from lincorr_lightning.results.style import GREY, INK, finish, new_figure, panels_of

_NAMES = {
    "dimension": "intrinsic dimension", "overlap": "overlap with the next layer",
    "cosine": "cosine similarity", "angle": "neighbor angle (°)",
}  # fmt: skip
_MAX_TICKS = 8


def history_figure(curves: Mapping[str, Sequence[tuple[int, float]]], note: str) -> Figure:
    """Draw a heat map per observable: layers from bottom to top, steps from left to right.

    Args:
        curves: ``(step, value)`` pairs by observable and layer, as ``dimension_n2=2/layer_1``;
            names without a layer, such as ``loss``, are left out.
        note: Subtitle: what the values are means over.
    """
    maps: dict[str, dict[tuple[int, int], float]] = {}
    for tag, points in curves.items():
        name, _, layer = tag.partition("/layer_")
        if layer:
            maps.setdefault(name, {}).update({(int(layer), s): value for s, value in points})
    n_columns = min(2, max(len(maps), 1))
    n_rows = math.ceil(len(maps) / n_columns)
    n_layers = max((len({layer for layer, _ in cells}) for cells in maps.values()), default=1)
    height = n_rows * min(max(0.22 * n_layers + 0.9, 1.7), 4.5)
    figure = new_figure(
        max(3.9 * n_columns, 5.0), height, "Token geometry in training, layer by layer",
        note,
    )  # fmt: skip
    panels = panels_of(figure, len(maps), n_columns)
    for axes, (name, cells) in zip(panels, maps.items(), strict=True):
        layers = sorted({layer for layer, _ in cells})
        steps = sorted({step for _, step in cells})
        matrix = np.array([[cells.get((y, x), math.nan) for x in steps] for y in layers])
        image = axes.imshow(
            np.ma.masked_invalid(matrix), aspect="auto", origin="lower", cmap="viridis",
            interpolation="none",
        )  # fmt: skip
        every = math.ceil(len(steps) / _MAX_TICKS)
        axes.set_xticks(range(0, len(steps), every), map(str, steps[::every]))
        every = math.ceil(len(layers) / _MAX_TICKS)
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
