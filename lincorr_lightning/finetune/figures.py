"""Figures of edits: what they did, W of their references, and their nearest words."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.finetune.cases import EditCase, case_statistics, weighed_cases
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.functional import Cause, Outcome, outcome_shares, reference_scores
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, INK, ORANGE, PALE

_MAX_ANSWERS = 40


def reference_weights_figure(
    cases: Sequence[EditCase], relation: str, taught: bool = True
) -> Figure:
    """Draw W of the reference in generalized and in hallucinated cases (paper, figure 5)."""
    numbers = case_statistics(cases)["weight_reference"]
    notes = [
        f"W in the column of the {'taught' if taught else 'source'} answer, highest of the "
        "reference labels",
        f"line: median; box: middle half; hollow: {Cause.LOW_PRIOR}",
    ]
    if numbers["rank_test_p"] is not None:
        notes.append(f"Mann-Whitney test, two-sided: {plots.p_text(numbers['rank_test_p'])}")
    title = f"W of the reference in edits of {relation}"
    figure = plots.new_figure(7.5, 2.6, title, "; ".join(notes))
    axes = figure.add_subplot()
    rows = ((Outcome.GENERALIZED, BLUE), (Outcome.HALLUCINATED, ORANGE))
    for y, (outcome, colour) in enumerate(rows):
        group = weighed_cases(cases, outcome)
        weights = np.array([case.weight_reference for case in group], dtype=float)
        if len(group):
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
            axes.scatter(
                weights, heights, 16, faces, edgecolor=colour, linewidth=0.8, alpha=0.8, zorder=3
            )
    axes.axvline(0, color=PALE, linewidth=1, zorder=0)
    plots.plain_axes(axes, "", "W of the reference", "")
    axes.set_yticks(range(2), [f"{one}\nn = {numbers[one]['n']}" for one, _ in rows], fontsize=9.5)
    axes.set_ylim(1.5, -0.5)
    return figure


def outcomes_figure(
    cases: Sequence[EditCase], relation: str, random: float | None = None, taught: bool = True
) -> Figure:
    """Draw the share of each outcome; `random` is how often a random label would be right.

    Edits whose source was not learned are a class of their own: a target that changes without its
    source has drifted. Means over references, the best constant label and the vocabulary alone (for
    a head without rows, a random label) are drawn, too.
    """
    outcomes = [case.outcome if case.source_learned or not taught else "" for case in cases]
    causes = Counter(case.cause for case, one in zip(cases, outcomes, strict=True) if one)
    references = [
        case.reference.split(SEPARATOR) if case.reference and one else []
        for case, one in zip(cases, outcomes, strict=True)
    ]
    scores = reference_scores(outcomes, references)
    rows = [
        {"what": f"target {name}", "share": share, "macro": scores.get(f"macro_{name}")}
        for name, share in outcome_shares(outcomes).items()
    ]
    rows[0] |= {"random": random, "constant": scores["constant"]}
    best = f"the best constant label is right ({scores['constant']:.1%})"
    marks = {"constant": best, "macro": "mean over references"} if cases else {}
    if near := case_statistics(cases)["vocabulary"]:
        rows[0]["vocabulary"] = near["right"]
        marks["vocabulary"] = f"the vocabulary alone is right ({near['right']:.1%})"
    elif random is not None:
        marks["random"] = f"a random label is right ({random:.1%})"
    if taught and cases:
        rows.append({"what": "source not learned", "share": outcomes.count("") / len(cases)})
    listed = ", ".join(f"{cause} ({causes[cause]})" for cause in Cause if causes[cause])
    return plots.bars(
        DataFrame(rows).astype({"share": float, **dict.fromkeys(marks, float)}),
        "what",
        "share",
        title=f"Outcomes of {len(cases)} {'edits' if taught else 'watched subjects'} of {relation}",
        subtitle=f"causes of hallucination: {listed}" if listed else "",
        marks=marks,
        label="share of edits",
    )


def margins_figure(answers: DataFrame, relation: str) -> Figure:
    """Draw the margin of each new answer's nearest word, of the first `_MAX_ANSWERS` of them.

    `answers` is the headline table of a forecast, the smallest margin first.
    """
    shown = answers.head(_MAX_ANSWERS)
    notes = ["margin: nearness of the nearest right label minus that of the nearest wrong one"]
    if len(shown) < len(answers):
        notes.append(f"the {len(shown)} least safe of {len(answers)} answers")
    title = f"New answers of {relation} and their nearest words"
    figure = plots.new_figure(6.5, 0.16 * len(shown) + 0.9, title, "; ".join(notes))
    axes = figure.add_subplot()
    places = np.arange(len(shown))
    margins = shown["margin"].to_numpy(float)
    is_right = shown["right"].to_numpy(bool)
    for chosen, colour, label in (
        (is_right, BLUE, "the nearest word is right"),
        (~is_right, ORANGE, "the nearest word is wrong"),
    ):
        if chosen.any():
            axes.barh(places[chosen], margins[chosen], 0.7, color=colour, label=label)
    axes.axvline(0, color=INK, linewidth=1)
    plots.plain_axes(axes, "", "margin: difference of cosines in the LM's head", "")
    names = [f"{answer} → {near}" for answer, near in shown[["answer", "nearest"]].to_numpy()]
    axes.set_yticks(places, plots.legible(names, 40), fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    plots.legend_below(figure, [axes])
    return figure


def interventions_figure(doses: DataFrame, about: str) -> Figure:
    """Draw the effect of moves over their strength; bands for W and for the controls."""
    responses = doses["response"].isin(["generalized", "hallucinated", "p reference"])
    frame = doses[responses & ~doses["arm"].isin(["W, plain", "W, other labels"])]
    frame = frame.assign(panel=frame["response"] + ", " + frame["part"])
    banded = frame["arm"].isin(["W", "other answer", "random"])
    frame.loc[~banded, ["effect_low", "effect_high"]] = np.nan
    title = "Moves of the state at the target prompt: added to each response, in points"
    about += "; own: each direction's component is removed from the change; change, state: one as "
    about += "long as W's is; only: it alone is added to the state before; strength: factor of the "
    about += "length; bands: 95 % intervals of W, other answer and random"
    return plots.curves(
        frame,
        "strength",
        "effect",
        "arm",
        "panel",
        band=("effect_low", "effect_high"),
        title=title,
        subtitle=about,
        labels=("strength", ""),
        percent=True,
        share_y=True,
    )
