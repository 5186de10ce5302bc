"""Figures of token geometry."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.geometry.token_clouds import TokenProfiles
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREY, INK, ORANGE

_MAX_TICKS = 8
_ALPHA = 0.01
_NAMES = {
    "dimension": "intrinsic dimension", "overlap": "overlap with the next layer",
    "cosine_mean": "cosine similarity", "cosine": "cosine similarity",
    "angle_mean": "neighbor angle (°)", "angle": "neighbor angle (°)",
}  # fmt: skip


def profiles_figure(profiles: TokenProfiles, means: DataFrame, lm: str) -> Figure:
    """Draw ID, overlap, cosine and angle by layer, a curve per shuffling level.

    `means` are those over prompts, by ``key``, ``shuffle`` and ``layer``.
    """
    frame = means[means["key"].isin(profiles.shown)]
    frame = frame.sort_values("key", key=lambda keys: keys.map(profiles.shown.index), kind="stable")
    levels = {level: _level_name(level, profiles.n_tokens) for level in frame["shuffle"].unique()}
    # From dark to light, distinct in grey as well.
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(levels)))
    dark_to_light = [matplotlib.colors.to_hex(shade) for shade in shades]
    colours = [BLUE, ORANGE] if len(levels) <= 2 else dark_to_light
    return plots.curves(
        frame.assign(
            low=frame["mean"] - frame["std"], high=frame["mean"] + frame["std"],
            level=frame["shuffle"].map(levels), panel=frame["key"].map(_title),
        ),
        "layer", "mean", "level", "panel", band=("low", "high"), labels=("layer", ""), per_row=2,
        title=f"Token geometry of {lm}",
        subtitle=f"{_prompts(profiles)}; bands: standard deviation over prompts",
        colours=dict(zip(levels.values(), colours, strict=False)),
        each=lambda axes, _, __: axes.set_xlim(frame["layer"].min() - 0.5,
                                               frame["layer"].max() + 0.5),
    )  # fmt: skip


def dimension_loss_figure(
    profiles: TokenProfiles, tests: Sequence[Mapping[str, Any]], lm: str
) -> Figure:
    """Draw r of log ID and log loss over prompts by layer, with its confidence interval.

    `tests` are rows with ``shuffle``, ``layer``, ``n2`` and the numbers of a `CorrelationTest`.
    """
    n2, level = profiles.settings.range_scalings[0], profiles.prompts["shuffle"].min()
    frame = DataFrame(tests)
    frame = frame[(frame["shuffle"] == level) & (frame["n2"] == n2)].dropna(subset=["pearson"])
    too_few = "" if len(frame) else "; too few prompts"
    return plots.curves(
        frame.assign(clear=frame["pearson_p"] < _ALPHA), "layer", "pearson",
        title=f"Intrinsic dimension and loss over prompts, {lm}",
        subtitle=f"{_prompts(profiles)}, {_level_name(level, profiles.n_tokens)}; n2 = {n2}; "
        f"band: 95% confidence; filled: p < {_ALPHA:g}{too_few}",
        band=("low", "high"), filled="clear", labels=("layer", "r of log ID and log loss"),
        size=(7.0, 3.0), each=lambda axes, *_: axes.axhline(0, color=GREY, linewidth=0.8, zorder=0),
    )  # fmt: skip


def history_figure(frame: DataFrame, note: str) -> Figure:
    """Draw a heat map per observable: layers from bottom to top, steps from left to right.

    The frame has means by ``observable``, ``layer`` and ``step``, of which rows without a layer are
    left out; the note, a subtitle, says what they are means over.
    """
    frame = frame.dropna(subset="layer")
    names = list(frame["observable"].drop_duplicates())
    n_columns, n_layers = min(2, max(len(names), 1)), frame["layer"].nunique()
    figure = plots.new_figure(
        max(3.9 * n_columns, 5.0),
        math.ceil(len(names) / n_columns) * min(max(0.22 * n_layers + 0.9, 1.7), 4.5),
        "Token geometry in training, layer by layer", note,
    )  # fmt: skip
    for axes, name in zip(plots.panels_of(figure, len(names), n_columns), names, strict=True):
        rows = frame[frame["observable"] == name].astype({"layer": int})
        cells = rows.pivot(index="layer", columns="step", values="mean")
        image = axes.imshow(cells, aspect="auto", origin="lower", interpolation="none")
        plots.plain_axes(axes, _title(name.replace("_", " ", 1)), "step", "layer")
        axes.grid(visible=False)
        for labels, set_ticks in ((cells.columns, axes.set_xticks), (cells.index, axes.set_yticks)):
            every = math.ceil(len(labels) / _MAX_TICKS)
            set_ticks(range(0, len(labels), every), list(map(str, labels[::every])))
        bar = figure.colorbar(image, ax=axes, pad=0.02, fraction=0.06)
        bar.ax.tick_params(labelsize=7.5, length=2, color=GREY, labelcolor=INK)
    return figure


def _title(key: str) -> str:
    name, _, setting = key.partition(" ")
    return _NAMES.get(name, name) + (f", {setting.replace('=', ' = ')}" if setting else "")


def _prompts(profiles: TokenProfiles) -> str:
    n = profiles.n_prompts
    return f"{n:,} prompt{'s' * (n != 1)} of {profiles.n_tokens:,} tokens"


def _level_name(level: int, n_tokens: int) -> str:
    if level == 0:
        return "as written"
    n_blocks = 4**level
    return "every token shuffled" if n_blocks == n_tokens else f"{n_blocks:,} blocks shuffled"
