"""Tables and a figure of forecasts beside the outcomes of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import arrow, markdown_table, new_figure, plain_axes, read_numbers
from benchmarks.real_lms.forecast_scores import (
    BASELINES,
    GENERALIZED,
    HALLUCINATED,
    RISKS,
    ForecastRun,
    areas,
    compare,
    interval,
    mean_interval,
)
from lincorr_lightning.functional import Outcome

LIMITS = (0.7, 0.5, 0.3)
Costs = Mapping[tuple[str, str], Mapping[str, float]]
FORECASTER = "probability"
N_EDITS = 150  # that maps are fitted for once


def tables(runs: Sequence[ForecastRun], results: Path) -> dict[str, str]:
    """Return all tables by their markers in the documents."""
    costs = read_costs(results)
    return {
        "real_forecasts": area_table(runs, "failed"),
        "real_hallucinated": area_table(runs, "hallucinated"),
        "real_relations": relation_table(runs),
        "real_goals": goal_table(runs, costs),
        "real_answers": answer_table(runs),
        "real_left_out": left_out_table(runs),
        "real_repeated": repeated_table(runs),
        "real_costs": cost_table(costs),
    }


def read_costs(results: Path) -> Costs:
    """Return the times that ``forecast.py --costs`` measured, by LM and method."""
    return {
        (file.parent.name, method): times
        for file in sorted(results.glob("*/forecast_costs.json"))
        for method, times in read_numbers(file).items()
    }


def by_lm_and_method(runs: Sequence[ForecastRun]) -> Iterator[tuple[str, list[ForecastRun]]]:
    """Yield the runs of each LM and method under a name."""
    for lm, method in dict.fromkeys((run.lm, run.method) for run in runs):
        yield f"{lm}, {method}", [run for run in runs if (run.lm, run.method) == (lm, method)]


def area_table(runs: Sequence[ForecastRun], truth: str) -> str:
    """Return the AUROC of each risk for edits that failed, or hallucinated.

    It is the mean over relations, with its 95 % interval.
    """
    columns: list[list[str]] = []
    for name, own in by_lm_and_method([run for run in runs if run.is_judged]):
        truths = [getattr(run, truth) for run in own]
        cells = [name, f"{len(own)}", f"{sum(map(len, truths))}"]
        for risk in RISKS:
            risks = [run.risk(risk, truth) for run in own]
            if all(np.isfinite(each).all() for each in risks):
                mean, low, high = interval(truths, risks)
                cells.append(f"{mean:.2f} ({low:.2f}–{high:.2f})")
            else:
                cells.append("")
        columns.append(cells)
    rows = zip(["", "relations", "edits", *RISKS], *columns, strict=True)
    header, *body = (list(row) for row in rows)
    return markdown_table(header, body)


def relation_table(runs: Sequence[ForecastRun]) -> str:
    """Return the AUROC of each risk for edits that do not generalize, by relation.

    The last column is of the probability for edits that hallucinate.
    """
    rows: list[list[Any]] = []
    for run in runs:
        pairs = [(run.failed, run.risk(name)) for name in RISKS]
        pairs.append((run.hallucinated, run.risk(FORECASTER, "hallucinated")))
        cells = [
            f"{areas(truth, risk):.2f}" if run.is_judged and np.isfinite(risk).all() else ""
            for truth, risk in pairs
        ]
        share = 1 - run.failed.mean()
        rows.append([*_about(run), len(run.failed), f"{share:.0%}", *cells])
    header = ["LM", "method", "relation", "edits", "generalized", *RISKS, "hallucinates"]
    return markdown_table(header, rows)


def answer_table(runs: Sequence[ForecastRun]) -> str:
    """Return accuracy of the predicted answer and Brier score of the probabilities.

    The Brier score is ``sum (p - truth)^2`` over the three outcomes; that of the shares is of a
    forecast that knows how often each outcome occurs.
    """
    names = ("answer_before", "map_0", "map_auto", "in_context")
    rows: list[list[Any]] = []
    for run in runs:
        shares = np.bincount(run.arrays["outcome"], minlength=len(Outcome)) / len(run.failed)
        step = mean_interval(run.hits("optimizer_step").astype(float))
        brier = mean_interval(run.brier)
        rows.append(
            [*_about(run), f"{run.most_frequent:.0%}",
             *(f"{run.hits(name).mean():.0%}" for name in names),
             "{:.0%} ({:.0%}–{:.0%})".format(*step),
             "" if np.isnan(brier[0]) else "{:.2f} ({:.2f}–{:.2f})".format(*brier),
             f"{1 - (shares**2).sum():.2f}"]
        )  # fmt: skip
    header = ["LM", "method", "relation", "most_frequent", *names, "optimizer_step"]
    return markdown_table([*header, "Brier, probabilities", "Brier, shares"], rows)


def repeated_table(runs: Sequence[ForecastRun]) -> str:
    """Return how well a second training, from other adapters, predicts the outcome of the first."""
    rows: list[list[Any]] = []
    for run in runs:
        if run.repeated is None or not run.is_judged:
            continue
        log_odds, outcomes = run.repeated
        same = np.mean(outcomes == run.arrays["outcome"])
        found = [areas(run.failed, each) for each in (-log_odds, run.risk("optimizer_step"))]
        rows.append(
            [*_about(run), len(run.failed), f"{same:.0%}", *(f"{area:.2f}" for area in found)]
        )
    return markdown_table(
        ["LM", "method", "relation", "edits", "same outcome", "AUROC of the second training",
         "of optimizer_step"],
        rows,
    )  # fmt: skip


def left_out_table(runs: Sequence[ForecastRun]) -> str:
    """Return hallucinated and generalized edits, and the share kept, with data.max_risk."""
    rows: list[list[Any]] = []
    for name, own in by_lm_and_method(runs):
        p = np.concatenate([run.probabilities[:, HALLUCINATED] for run in own])
        known = np.isfinite(p)
        outcomes = np.concatenate([run.arrays["outcome"] for run in own])[known]
        if not known.any():
            continue
        kept = (np.full(len(outcomes), True), *(p[known] <= limit for limit in LIMITS))
        rows.append([name, len(outcomes), *(_shares(outcomes[which], which) for which in kept)])
    return markdown_table(["", "edits", "all", *(f"max_risk {x:g}" for x in LIMITS)], rows)


def _shares(outcomes: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]) -> str:
    if not len(outcomes):
        return "none kept"
    shares = [np.mean(outcomes == code) for code in (HALLUCINATED, GENERALIZED)]
    return f"{shares[0]:.0%}, {shares[1]:.0%}" + (
        "" if kept.all() else f" of {kept.mean():.0%} kept"
    )


def cost_table(costs: Costs) -> str:
    """Return the time of forecasts of city->country, as shares of the training that they spare.

    Maps are fitted once; their share is that of 150 edits.
    """
    names = ("optimizer_step", "in_context", "gradient_similarity", "activation_similarity")
    rows = [
        [lm, method, f"{times['n_edits']:.0f}", f"{times['training'] / times['n_edits']:.1f} s",
         *(f"{times[name] / times['training']:.2f}" for name in names),
         f"{times['maps'] / (times['training'] / times['n_edits'] * N_EDITS):.2f}"]
        for (lm, method), times in costs.items()
    ]  # fmt: skip
    header = ("LM", "method", "edits timed", "training of an edit", *names, "maps, 150 edits")
    return markdown_table(header, rows)


def goal_table(runs: Sequence[ForecastRun], costs: Costs) -> str:
    """Return the AUROC of the probability that an edit generalizes, and its lead over baselines.

    The named answer is that of the step, beside the most frequent answer after training, over all
    relations; an AUROC needs enough edits of both outcomes.
    """
    rows = []
    for name, edited in by_lm_and_method(runs):
        own = [run for run in edited if run.is_judged]
        if not own or not all(np.isfinite(run.probabilities).all() for run in own):
            continue
        area = interval([run.failed for run in own], [run.risk(FORECASTER) for run in own])
        scored = {
            baseline: compare(own, FORECASTER, baseline)
            for baseline in ("answer_before", *BASELINES)
        }
        best = max(scored, key=lambda baseline: scored[baseline][1])
        mean, other, low = scored[best]
        answers = [(run.hits("optimizer_step").mean(), run.most_frequent) for run in edited]
        hits, most = np.mean(answers, 0)
        times = costs.get((own[0].lm, own[0].method))
        rows.append(
            [name, len(own), "{:.2f} ({:.2f}–{:.2f})".format(*area), f"{best} {other:.2f}",
             f"{mean - other:+.2f} (from {low:+.2f})".replace("-", "−"),
             f"{hits:.0%}, {most:.0%}",
             f"{sum(hit >= 2 * one for hit, one in answers)} of {len(edited)}",
             "" if times is None else f"{times['optimizer_step'] / times['training']:.2f}"]
        )  # fmt: skip
    header = ["", "relations", "AUROC", "best baseline", "lead",
              "accuracy of the predicted, of the most frequent answer",
              "at least twice as accurate in", "cost"]  # fmt: skip
    return markdown_table(header, rows)


def _about(run: ForecastRun) -> list[str]:
    return [run.lm, run.method, arrow(run.relation)]


def reliability_figure(runs: Sequence[ForecastRun]) -> Any:
    """Draw the share of each outcome over the probability that is forecast."""
    figure = new_figure(
        8.4,
        3.6,
        "Reliability of the probabilities of an edit's outcome",
        "Deciles of the edits of each LM; each LM's are by a fit on other relations of other LMs.",
    )
    panels = figure.subplots(1, 2)
    for axes, code, what in (
        (panels[0], GENERALIZED, "generalized"), (panels[1], HALLUCINATED, "hallucinated"),
    ):  # fmt: skip
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for name, own in by_lm_and_method(runs):
            p = np.concatenate([run.probabilities[:, code] for run in own])
            occurred = np.concatenate([run.arrays["outcome"] == code for run in own])
            occurred, p = occurred[np.isfinite(p)], p[np.isfinite(p)]
            deciles = np.array_split(p.argsort(), 10)
            if len(p):
                axes.plot(
                    [p[rows].mean() for rows in deciles],
                    [occurred[rows].mean() for rows in deciles],
                    marker="o", markersize=3, label=name,
                )  # fmt: skip
        plain_axes(axes, "", f"probability: {what}", f"share that {what}")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1)
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    return figure
