"""Figures of token geometry."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.results import plots

_NAMES = {
    "dimension": "intrinsic dimension",
    "overlap": "overlap with the next layer",
    "cosine_mean": "cosine similarity",
    "angle_mean": "neighbor angle (°)",
}


def profiles_figure(
    layers: DataFrame, shown: Sequence[str], n_prompts: int, n_tokens: int, lm: str
) -> Figure:
    """Draw ID, overlap, cosine and angle by layer, a curve per shuffling level.

    `layers` is the table of that name; `shown` are the keys of the panels, such as ``overlap k=2``.
    """
    keys = (layers["observable"] + " " + layers["setting"].fillna("")).str.strip()
    frame = layers.assign(key=keys)[keys.isin(shown)]
    frame = frame.sort_values("key", key=lambda key: key.map(list(shown).index), kind="stable")
    frame = frame.assign(
        low=frame["mean"] - frame["std"],
        high=frame["mean"] + frame["std"],
        level=[_level_name(level, n_tokens) for level in frame["shuffle"]],
        panel=[_title(key) for key in frame["key"]],
    )
    levels = frame["level"].unique()
    # From dark to light, distinct in grey as well.
    shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.86, len(levels)))
    prompts = f"{n_prompts:,} prompt{'s' if n_prompts != 1 else ''} of {n_tokens:,} tokens"
    return plots.curves(
        frame,
        "layer",
        "mean",
        "level",
        "panel",
        title=f"Token geometry of {lm}",
        subtitle=f"{prompts}; bands: standard deviation over prompts",
        band=("low", "high"),
        colours=dict(zip(levels, map(matplotlib.colors.to_hex, shades), strict=True)),
        labels=("layer", ""),
        per_row=2,
        each=lambda axes, *_: axes.set_xlim(frame["layer"].min() - 0.5, frame["layer"].max() + 0.5),
    )


def _title(key: str) -> str:
    name, _, setting = key.partition(" ")
    title = _NAMES[name]
    return f"{title}, {setting.replace('=', ' = ')}" if setting else title


def _level_name(level: int, n_tokens: int) -> str:
    if level == 0:
        return "as written"
    n_blocks = 4**level
    return "every token shuffled" if n_blocks == n_tokens else f"{n_blocks:,} blocks shuffled"
