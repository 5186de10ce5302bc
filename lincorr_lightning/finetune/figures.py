"""Figures of edits: what they did, W of their references, and moves of states."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, concat

from lincorr_lightning.finetune.cases import EditCase, case_statistics, weighed_cases
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.functional import Cause, Outcome, outcome_shares, reference_scores
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, GREEN, GREY, INK, ORANGE, PALE

_MAX_ENDS = 20  # bars from either end of a long order


def reference_weights_figure(cases: Sequence[EditCase], relation: str) -> Figure:
    """Draw W of the reference in generalized and in hallucinated cases (paper, figure 5)."""
    numbers = case_statistics(cases)["weight_reference"]
    notes = [
        "W in the column of the taught answer, highest of the reference labels",
        f"line: median; box: middle half; hollow: {Cause.LOW_PRIOR}",
    ]
    if numbers["rank_test_p"] is not None:
        notes.append(f"Mann-Whitney test, two-sided: p = {numbers['rank_test_p']:.2g}")
    title = f"W of the reference in edits of {relation}"
    figure = plots.new_figure(7.5, 2.6, title, "; ".join(notes))
    axes = figure.add_subplot()
    colours = {Outcome.GENERALIZED: BLUE, Outcome.HALLUCINATED: ORANGE}
    for y, (outcome, colour) in enumerate(colours.items()):
        group = weighed_cases(cases, outcome)
        if not group:
            continue
        weights = np.array([case.weight_reference for case in group], dtype=float)
        axes.boxplot(
            weights,
            positions=[y],
            widths=0.7,
            orientation="horizontal",
            showfliers=False,
            showcaps=False,
            boxprops={"color": colour},
            whiskerprops={"color": PALE},
            medianprops={"color": colour},
        )
        heights = y + np.random.default_rng(0).uniform(-0.25, 0.25, len(group))
        faces = ["white" if case.cause == Cause.LOW_PRIOR else colour for case in group]
        axes.scatter(weights, heights, 16, faces, edgecolor=colour, alpha=0.8, zorder=3)
    axes.axvline(0, color=PALE, linewidth=1, zorder=0)
    plots.plain_axes(axes, "", "W of the reference", "")
    names = [f"{outcome}\nn = {numbers[outcome]['n']}" for outcome in colours]
    axes.set_yticks(range(len(names)), names, fontsize=9.5)
    axes.set_ylim(len(names) - 0.5, -0.5)
    return figure


def outcomes_figure(
    cases: Sequence[EditCase], relation: str, random: float | None = None
) -> Figure:
    """Draw the share of all edits that have each outcome.

    Means over references, the best constant label and the nearest word are drawn, too; for a head
    without rows, a `random` label, the share of edits for which it would be right.
    """
    outcomes = [case.outcome for case in cases]
    references = [case.reference.split(SEPARATOR) if case.reference else [] for case in cases]
    scores = reference_scores(outcomes, references)
    nearest = case_statistics(cases)["nearest"]
    rows: list[dict[str, Any]] = [
        {
            "what": f"target {name}".replace("_", " "),
            "share": share,
            "macro": scores.get(f"macro_{name}"),
        }
        for name, share in outcome_shares(outcomes).items()
    ]
    rows[0]["constant"] = scores["constant"]
    marks = {
        "constant": f"the best constant label is right ({scores['constant']:.1%})",
        "macro": "mean over answers",
    }
    if nearest is not None:
        rows[0]["null"] = nearest["right"]
        marks["null"] = f"the nearest word is right ({nearest['right']:.1%})"
    elif random is not None:
        rows[0]["null"] = random
        marks["null"] = f"a random label is right ({random:.1%})"
    causes = Counter(case.cause for case in cases)
    listed = ", ".join(f"{cause} ({causes[cause]})" for cause in Cause if causes[cause])
    n_learned = sum(case.source_learned for case in cases)
    return plots.bars(
        DataFrame(rows).astype({"share": float, **dict.fromkeys(marks, float)}),
        "what",
        "share",
        title=f"Outcomes of {len(cases)} edits of {relation}, of which {n_learned} were learned",
        subtitle=f"causes of hallucination: {listed}" if listed else "",
        marks=marks if cases else {},
        label="share of edits",
    )


def by_step_figure(
    rows: Sequence[Mapping[str, Any]], relation: str, nulls: Mapping[str, float]
) -> Figure:
    """Draw what edits did after each step; `nulls` are shares that need no training."""
    lines = {
        "learned": "source_learned",
        "generalized": "macro_generalized",
        "leak: other people": "leak",
        "specific: generalized − leak": "specific",
    }
    points = [
        {
            "step": row["step"],
            "what": name,
            "share": row[key],
            **{end: row[f"{key}_{end}"] if key == "specific" else None for end in ("low", "high")},
        }
        for row in rows
        for name, key in lines.items()
    ]
    points += [
        {"step": row["step"], "what": f"{name} unchanged", "share": share}
        for row in rows
        for name, share in row["controls"].items()
    ]

    def draw_nulls(axes: Axes, *_: Any) -> None:
        for (name, share), dash in zip(nulls.items(), ("--", ":"), strict=False):
            axes.axhline(share, color=INK, linewidth=1, linestyle=dash, label=name)

    columns = ["step", "what", "share", "low", "high"]
    return plots.curves(
        DataFrame(points, columns=columns).astype(dict.fromkeys(columns[2:], float)),
        "step",
        "share",
        "what",
        title=f"Edits of {relation} by optimizer step",
        subtitle="means by answer; band: 95 % interval",
        band=("low", "high"),
        colours={
            "learned": GREY,
            "generalized": BLUE,
            "leak: other people": ORANGE,
            "specific: generalized − leak": GREEN,
        },
        labels=("optimizer step", "share of edits"),
        percent=True,
        size=(6.0, 3.2),
        each=draw_nulls,
    )


def margins_figure(answers: DataFrame, relation: str) -> Figure:
    """Draw the margin of each answer's nearest word, the least safe answer at the top.

    `answers` are the distinct rows of the table ``forecast``, the smallest margins first; some have
    none, where all labels are right.
    """
    rows = answers.dropna(subset=["margin"])
    subtitle = "nearness of the nearest right label minus that of the nearest wrong one"
    shown = rows
    if len(rows) > 2 * _MAX_ENDS:
        shown = concat([rows.head(_MAX_ENDS), rows.tail(_MAX_ENDS)])
        subtitle += (
            f"; the {_MAX_ENDS} least safe and the {_MAX_ENDS} safest of {len(rows)} answers"
        )
    title = f"Will an edit of {relation} carry over? Margin of the nearest word"
    figure = plots.new_figure(6.5, 0.19 * len(shown) + 0.9, title, subtitle)
    axes = figure.add_subplot()
    places = np.arange(len(shown))
    for is_right, colour, name in ((False, ORANGE, "wrong"), (True, BLUE, "right")):
        of_kind = (shown["right"] == is_right).to_numpy()
        margins = shown["margin"].to_numpy(float)[of_kind]
        axes.barh(places[of_kind], margins, color=colour, label=f"the nearest word is {name}")
    plots.plain_axes(axes, "", "margin", "")
    axes.set_yticks(places, plots.legible(shown["answer"]), fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    if len(shown) < len(rows):
        axes.axhline(_MAX_ENDS - 0.5, color=GREY, linewidth=1, linestyle=":")
    plots.legend_below(figure, [axes])
    return figure


def interventions_figure(doses: DataFrame, about: str) -> Figure:
    """Draw the effect of moves over their strength; bands for W and for the controls."""
    responses = doses["response"].isin(["generalized", "hallucinated", "p reference"])
    frame = doses[responses & ~doses["arm"].isin(["W, plain", "W, other labels"])]
    frame = frame.assign(panel=frame["response"] + ", " + frame["part"])
    banded = frame["arm"].isin(["W", "other answer", "random"])
    frame.loc[~banded, ["effect_low", "effect_high"]] = np.nan
    notes = (
        "own: each direction's component is removed from the change",
        "change, state: one as long as W's is",
        "only: it alone is added to the state before",
        "strength: factor of the length",
        "bands: 95 % intervals of W, other answer and random",
    )
    return plots.curves(
        frame,
        "strength",
        "effect",
        "arm",
        "panel",
        band=("effect_low", "effect_high"),
        title="Moves of the state at the target prompt: added to each response, in points",
        subtitle="; ".join((about, *notes)),
        labels=("strength", ""),
        percent=True,
        share_y=True,
    )
