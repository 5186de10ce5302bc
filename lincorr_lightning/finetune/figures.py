"""Figures of edits: what they did, W of their references, and the risks that were forecast."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from lincorr_lightning.finetune.cases import EditCase, case_statistics, weighed_cases
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.forecasts import Forecasts
from lincorr_lightning.functional import Cause, Outcome, outcome_shares, reference_scores
from lincorr_lightning.results import plots
from lincorr_lightning.results.plots import BLUE, INK, ORANGE, PALE

FORECASTERS = {
    "map": "W", "in_context": "new answer stated before", "optimizer_step": "one optimizer step",
}  # fmt: skip
_N_POINTS = 5


def forecaster_words(names: Iterable[str]) -> dict[str, str]:
    """Return what screens and figures call forecasters."""
    return {n: f"W, ridge {n[4:]}" for n in names if n.startswith("map_")} | FORECASTERS


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
            axes.boxplot(weights, positions=[y], widths=0.7, orientation="horizontal",
                         showfliers=False, showcaps=False, boxprops={"color": colour},
                         whiskerprops={"color": PALE}, medianprops={"color": colour})  # fmt: skip
            heights = y + np.random.default_rng(0).uniform(-0.25, 0.25, len(group))
            faces = ["white" if case.cause == Cause.LOW_PRIOR else colour for case in group]
            axes.scatter(weights, heights, 16, faces, edgecolor=colour, linewidth=0.8, alpha=0.8,
                         zorder=3)  # fmt: skip
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
        "what", "share",
        title=f"Outcomes of {len(cases)} {'edits' if taught else 'watched subjects'} of {relation}",
        subtitle=f"causes of hallucination: {listed}" if listed else "",
        marks=marks, label="share of edits",
    )  # fmt: skip


def risk_figure(forecasts: Forecasts, outcomes: Sequence[str] = ()) -> Figure:
    """Draw the distribution of each forecaster's risks; with `outcomes`, these against the risk.

    Then a point is a fifth of the edits by risk, at their mean risk and the share of them that did
    not generalize, and a line is horizontal if the forecast says nothing.
    """
    failed = np.array([outcome != Outcome.GENERALIZED for outcome in outcomes], dtype=float)
    parts, words = [], forecaster_words(forecasts.predicted)
    for name in forecasts.predicted:
        risks = np.array(forecasts.risks(name), dtype=float)
        order = np.argsort(risks, kind="stable")
        label = words.get(name, name)
        if outcomes:
            fifths = np.array_split(order, min(_N_POINTS, len(order)))
            parts += [(label, risks[one].mean(), failed[one].mean()) for one in fifths]
        else:
            at_most = np.arange(1, len(risks) + 1) / max(len(risks), 1)
            share = outcome_shares(forecasts.outcomes(name))[Outcome.HALLUCINATED] or 0.0
            label += f": {share:.0%} wrong"
            parts += [(label, x, y) for x, y in zip(risks[order], at_most, strict=True)]
    risk = "risk: how far the best wrong target label is predicted ahead of the reference"
    lines = "a point: a fifth of the edits by risk; dashed: all edits" if outcomes else (
        "above 0, the edit is predicted not to generalize; wrong: predicted hallucinations"
    )  # fmt: skip

    def add_lines(axes: Axes, _: object, __: object) -> None:
        axes.axvline(0, color=INK, linewidth=1)
        if outcomes:
            axes.axhline(failed.mean(), color=INK, linewidth=1, linestyle="--")
            axes.set_ylim(-0.03, 1.03)

    frame = DataFrame(parts, columns=["forecaster", "risk", "share"])
    return plots.curves(
        frame[np.isfinite(frame["risk"])], "risk", "share", "forecaster",
        title=f"Forecast of {len(forecasts.subjects)} edits of {forecasts.relation}"
        + " against their outcome" * bool(outcomes),
        subtitle=f"{risk}; {lines}",
        labels=("forecast: risk, in logits", "outcome: share not generalized" if outcomes
                else "share of edits with at most this risk"),
        percent=True, size=(7.0, 3.2), each=add_lines,
    )  # fmt: skip


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
        frame, "strength", "effect", "arm", "panel", band=("effect_low", "effect_high"),
        title=title, subtitle=about, labels=("strength", ""), percent=True, share_y=True,
    )  # fmt: skip
