"""Figures of edits, from their tables: what they did, W of their references, moves of states."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pandas import DataFrame

from lincorr_lightning.functional import Cause, Outcome
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE

_MAX_LINES = 6  # in a panel
_OUTCOME_COLOURS: dict[str, str] = {Outcome.GENERALIZED: BLUE, Outcome.HALLUCINATED: ORANGE}


def reference_weights_figure(cases: DataFrame, relation: str, p: float | None) -> Figure:
    """Draw W of the reference in generalized and in hallucinated cases (paper, figure 5).

    `cases` is the table of this name, `p` that of the test between both groups.
    """
    notes = (
        "W in the column of the taught answer; line: median; box: middle half; hollow: the right "
        "answer started too low"
    )
    if p is not None:
        notes += f"; Mann-Whitney test, p = {p:.2g}"
    title = f"W of the right answer in edits of {relation}"
    figure = plots.new_figure(7.5, 2.6, title, notes)
    axes = figure.add_subplot()
    known = cases[cases["source_learned"].astype(bool) & cases["weight_reference"].notna()]
    names = []
    for y, (outcome, colour) in enumerate(_OUTCOME_COLOURS.items()):
        group = known[known["outcome"] == outcome]
        names.append(f"{outcome}\nn = {len(group)}")
        weights = group["weight_reference"].to_numpy(float)
        if not len(group):
            continue
        axes.boxplot(
            weights,
            positions=[y],
            widths=0.7,
            orientation="horizontal",
            showfliers=False,
            showcaps=False,
            **{f"{part}props": {"color": colour} for part in ("box", "whisker", "median")},  # type: ignore[arg-type]
        )
        heights = y + np.random.default_rng(0).uniform(-0.25, 0.25, len(group))
        faces = np.where(group["cause"] == Cause.LOW_PRIOR, "white", colour).tolist()
        axes.scatter(weights, heights, 16, faces, edgecolor=colour, alpha=0.8, zorder=3)
    plots.plain_axes(axes, "", "W of the right answer", "")
    axes.grid(axis="y", visible=False)
    axes.axvline(0, color=GREY, linewidth=1, zorder=0)
    axes.set_yticks(range(len(names)), names, fontsize=9.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure


def outcomes_figure(cases: DataFrame, relation: str) -> Figure:
    """Draw the share of all edits that were learned, and that have each outcome.

    `cases` is the table of this name. Bars have a part for edits whose nearest word is right.
    """
    groups = {"learned": cases["source_learned"].astype(bool)}
    groups |= {outcome: cases["outcome"] == outcome for outcome in Outcome}
    risks = cases["nearest_risk"].astype(float)
    parts = {"the nearest word is right": (risks < 0, 1.0), "it is wrong": (~(risks < 0), 0.45)}
    if risks.isna().any():
        parts = {"": (risks.isna() | True, 1.0)}
    figure = plots.new_figure(
        6.5,
        2.6,
        f"What became of {len(cases)} edits of {relation}",
        "Shares of all edits; in brackets, their means by right answer.",
    )
    axes = figure.add_subplot()
    ticks = []
    for y, (name, chosen) in enumerate(groups.items()):
        left = 0.0
        for label, (part, alpha) in parts.items():
            share = float((chosen & part).sum()) / max(len(cases), 1)
            # Mixed with white: through a transparent bar the grid would be seen.
            mixed = alpha * np.array(to_rgb(_OUTCOME_COLOURS.get(name, GREY))) + 1 - alpha
            axes.barh(y, share, left=left, color=[mixed], label=None if y else label)
            left += share
        macro = chosen[cases["reference"] != ""].groupby(cases["reference"]).mean().mean()
        ticks.append(f"{name.replace('_', ' ')}: {left:.0%} ({macro:.0%})")
    plots.plain_axes(axes, "", "share of all edits", "")
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(len(ticks)), ticks, fontsize=8.5)
    axes.set_ylim(len(ticks) - 0.4, -0.6)
    plots.legend_below(figure, [axes])
    return figure


_BY_STEP = {
    "source_learned": ("learned", GREY),
    "macro_generalized": ("generalized", BLUE),
    "leak": ("said of other people (leak)", ORANGE),
    "specific": ("specific: generalized − leak", GREEN),
}


def by_step_figure(steps: DataFrame, relation: str, nulls: Mapping[str, float]) -> Figure:
    """Draw what edits did after each step, from the table ``by_step``.

    `nulls` are shares that need no training.
    """
    names = {key: name for key, (name, _) in _BY_STEP.items()}
    controls = [key for key in steps if key.endswith("_unchanged")][: _MAX_LINES - len(names)]
    names |= {key: key.replace("_", " ") for key in controls}
    ends = ["specific_low", "specific_high"]
    points = steps.melt(["step", *ends], list(names), "line", "share").astype({"share": float})
    points.loc[points["line"] != "specific", ends] = np.nan

    def finish(axes: Axes, *_: object) -> None:
        for (name, share), dash in zip(nulls.items(), ("--", ":"), strict=False):
            axes.axhline(share, color=INK, linewidth=1, linestyle=dash, label=name)
        axes.set_ylim(min(-0.02, points["share"].min()), 1.02)

    return plots.curves(
        points.assign(line=points["line"].map(names)),
        "step",
        "share",
        "line",
        title=f"Edits of {relation} by optimizer step",
        subtitle="means by right answer; band: 95 % interval",
        band=(ends[0], ends[1]),
        colours=dict(_BY_STEP.values()),
        labels=("optimizer step", "share of edits"),
        percent=True,
        size=(6.0, 3.2),
        each=finish,
    )


# Log keys of means that ``results.json`` has, and where they stand in a figure's panels.
_NOT_DRAWN = r"macro_|_of_learned|constant|right_before"
_PANELS = (
    (r"^edit_step/|generalization/", ""),
    (r"^(\w*correlation)/(.*)", r"r of \2/\1"),
    (r"^control_unchanged/(.*)", r"share or probability/\1 unchanged"),
    (r"^(?:probability|neighbours)/", "share or probability/"),
    (r"^([^/]*)$", r"share of edits/\1"),
)


def training_figure(history: DataFrame, relation: str, subtitle: str) -> Figure:
    """Draw what was logged in the course of training, from the table ``training``."""
    of_number = history.groupby("number")["step"].transform("size")
    drawn = history[(of_number > 1) & ~history["number"].str.contains(_NOT_DRAWN)]
    # Other relations than that of the edits are named before their numbers.
    keys = drawn["number"].str.extract(r"^(?:([^/]+)->([^/]+)/)?(.*)$")
    lines = keys[2]
    for pattern, panel in _PANELS:
        lines = lines.str.replace(pattern, panel, regex=True)
    parts = lines.str.extract(r"^([^/]*)/?(.*)$")
    others = (", " + keys[0] + "→" + keys[1]).fillna("")

    def set_limits(axes: Axes, panel: str, rows: DataFrame) -> None:
        if panel.startswith(("share", "r of")):
            axes.set_ylim(-0.02 if panel.startswith("share") else -1.02, 1.02)

    return plots.curves(
        drawn.assign(panel=parts[0] + others, line=parts[1].str.replace("_", " ")),
        "step",
        "value",
        "line",
        "panel",
        title=f"Training on edits of {relation}",
        subtitle=subtitle,
        labels=("optimizer step", ""),
        per_row=2,
        size=(4.2, 2.6),
        each=set_limits,
    )


# Arms that are drawn, and what they are called.
_ARMS = {
    "W": ("W", BLUE),
    "W0": ("W₀, the vocabulary's map", ORANGE),
    "W - W0": ("W beyond W₀", GREEN),
    "reference's row": ("right answer's row of the head", INK),
    "other answer": ("W of another answer", "#CC79A7"),
    "random": ("random", GREY),
}
_PARTS = {"own": "taken out of what the edit changed", "only": "added to the state before the edit"}


def interventions_figure(doses: DataFrame, relation: str, n: int) -> Figure:
    """Draw the share of generalized edits after moves along directions, from the table of doses.

    `n` is the number of edits. Bands, for W and W₀, are 95 % intervals of what a move adds.
    """
    frame = doses[doses["part"].isin(_PARTS) & doses["arm"].isin(_ARMS)]
    ends = ["effect_low", "effect_high"]
    bands = frame[ends].add(frame["mean"] - frame["effect"], axis=0).clip(0, 1)
    bands[~frame["arm"].isin(["W", "W0"])] = np.nan
    return plots.curves(
        frame.assign(
            **bands,
            line=frame["arm"].map(lambda arm: _ARMS[arm][0]),
            panel=frame["part"].map(_PARTS),
        ),
        "strength",
        "mean",
        "line",
        "panel",
        band=(ends[0], ends[1]),
        title=f"What {n} edits of {relation} go through: directions of the state at the target",
        subtitle="means by right answer; bands: 95 % intervals for W and W₀",
        colours=dict(_ARMS.values()),
        labels=("how much of it (1: all)", "share of generalized edits"),
        percent=True,
        share_y=True,
        size=(4.2, 3.0),
        each=lambda axes, *_: axes.set_ylim(-0.02, 1.02),
    )
