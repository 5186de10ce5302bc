"""Figures of token geometry and of knowledge geometry."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.geometry.closeness import SCORES, ClosenessTest, KnowledgeCloseness
from lincorr_lightning.geometry.token_clouds import TokenProfiles
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE

_MAX_TICKS = 8
_ALPHA = 0.01
_MANTEL_ALPHA = 0.05
_NAMES = {
    "dimension": "intrinsic dimension", "overlap": "overlap with the next layer",
    "cosine_mean": "cosine similarity", "cosine": "cosine similarity",
    "angle_mean": "neighbor angle (°)", "angle": "neighbor angle (°)",
}  # fmt: skip
_SCORE_COLOURS = {"r": BLUE, "excess": GREEN, "excess_over_random": INK, "hit1": ORANGE}
_BASELINES = {"r": "random_label_mean", "hit1": "best_baseline_1"}


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


def closeness_figure(closeness: KnowledgeCloseness, lm: str) -> Figure:
    """Draw overlap and difference of log ID against the scores of the maps, a point per pair.

    Baselines are small grey points.
    """
    k, n2 = closeness.ks[closeness.middle_k], closeness.range_scalings[0]
    known = closeness.score_matrices
    scores = {name: known[name] for name in _SCORE_COLOURS if name in known}
    figure = plots.new_figure(
        7.4, 2.6 * len(scores) + 0.2, f"Is correlated knowledge close in geometry? {lm}",
        f"a point per pair of {len(closeness.names)} kinds of knowledge, "
        f"{closeness.n_subjects:,} subjects; p by permutation; grey: random words, and the "
        "strongest pairing by the vocabulary; dotted: chance; "
        f"wording alone: {_rho(closeness.test('wording', '', 'r'))}",
    )  # fmt: skip
    measures = (
        ("overlap", f"k={k}", closeness.overlap_matrix(closeness.middle_k),
         "overlap of neighborhoods"),
        ("dimension_difference", f"n2={n2}", closeness.difference_matrix(0),
         "difference of log ID"),
    )  # fmt: skip
    upper = np.triu_indices(len(closeness.names), 1)
    known_chance = [(one.precision or {}).get("chance") for one in closeness.scores]
    chance = [one["influenced"]["1"] for one in known_chance if one]
    panels = iter(plots.panels_of(figure, 2 * len(scores), 2))
    for against, matrix in scores.items():
        for kind, setting, close, name in measures:
            axes, x, y = next(panels), close[upper], matrix[upper]
            if (baseline := known.get(_BASELINES.get(against, ""))) is not None:
                axes.plot(x, baseline[upper], ".", color=GREY, markersize=3)
            axes.plot(x, y, "o", color=_SCORE_COLOURS[against], markersize=4, alpha=0.6,
                      markeredgewidth=0)  # fmt: skip
            if against == "hit1" and chance:
                axes.axhline(sum(chance) / len(chance), color=GREY, linestyle=":")
            rho = _rho(closeness.test(kind, setting, against))
            plots.plain_axes(axes, rho, f"{name}, {setting.replace('=', ' = ')}", SCORES[against])
    return figure


def rho_figure(closeness: KnowledgeCloseness, lm: str) -> Figure:
    """Draw rho of closeness and the scores of the maps by layer."""
    k, n2 = closeness.ks[closeness.middle_k], closeness.range_scalings[0]
    frame = DataFrame(closeness.tests)
    frame = frame[(frame["layer"] != "all") & frame["given"].isna()]
    frame = frame[frame["setting"].isin((f"k={k}", f"n2={n2}"))].astype({"layer": int})
    names = {"overlap": "overlap of neighborhoods", "dimension_difference": "difference of log ID"}
    scored = {baseline: name for name, baseline in _BASELINES.items()}
    return plots.curves(
        frame.assign(
            panel=frame["closeness"].map(names) + ", " + frame["setting"],
            score=frame["against"].replace(scored).map(SCORES),
            baseline=frame["against"].isin(scored), clear=frame["p"] < _MANTEL_ALPHA,
        ),
        "layer", "spearman", "score", "panel", "baseline", filled="clear",
        labels=("layer", "Spearman ρ"),
        title=f"Closeness and linear correlation by layer, {lm}",
        subtitle=f"Spearman over pairs; filled: p < {_MANTEL_ALPHA:g} by permutation; dotted: "
        "random words, and the strongest pairing by the vocabulary",
        colours={SCORES[name]: colour for name, colour in _SCORE_COLOURS.items()}, share_y=True,
        each=lambda axes, _, __: axes.axhline(0, color=GREY, linewidth=0.8, zorder=0),
    )  # fmt: skip


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


def _rho(test: ClosenessTest) -> str:
    if test.spearman is None:
        return "too few pairs"
    return f"ρ = {plots.short(test.spearman)}, {plots.p_text(test.p)}"
