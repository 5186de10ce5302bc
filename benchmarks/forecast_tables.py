"""Tables and a figure of forecasts beside the outcomes of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import getdoc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from forecast_scores import GENERALIZED, HALLUCINATED, RISKS, ForecastRun, areas, interval, load
from matplotlib.figure import Figure

from lincorr_lightning.functional import Outcome
from lincorr_lightning.results.style import GREY, finish, new_figure, plain_axes
from lincorr_lightning.results.tables import markdown_table

LIMITS = (0.7, 0.5, 0.3)


def tables(results: Path) -> str:
    """Return all tables, each below what it shows."""
    runs = load(results)
    makers = (
        area_table, hallucination_table, relation_table, answer_table, repeated_table,
        left_out_table, cost_table, scale_table,
    )  # fmt: skip
    return "\n\n".join(f"{getdoc(make)}\n\n{make(runs)}" for make in makers)


def by_lm_and_method(runs: Sequence[ForecastRun]) -> Iterator[tuple[str, list[ForecastRun]]]:
    """Yield the runs of each LM and method under a name."""
    for lm, method in dict.fromkeys((run.lm, run.method) for run in runs):
        yield f"{lm}, {method}", [run for run in runs if (run.lm, run.method) == (lm, method)]


def area_table(runs: Sequence[ForecastRun]) -> str:
    """AUROC of each risk for edits that do not generalize: mean over relations, 95 % interval."""
    return _area_table(runs, "failed")


def hallucination_table(runs: Sequence[ForecastRun]) -> str:
    """AUROC of each risk for edits that hallucinate, likewise."""
    return _area_table(runs, "hallucinated")


def _area_table(runs: Sequence[ForecastRun], truth: str) -> str:
    columns: list[list[str]] = []
    for name, own in by_lm_and_method([run for run in runs if run.is_judged]):
        truths = [getattr(run, truth) for run in own]
        cells = [name, f"{len(own)}", f"{sum(map(len, truths))}"]
        for risk in RISKS:
            risks = [run.risk(risk) for run in own]
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
    """AUROC of each risk for edits that do not generalize, by relation."""
    rows: list[list[Any]] = []
    for run in runs:
        cells = [
            f"{areas(run.failed, run.risk(name)):.2f}"
            if run.is_judged and np.isfinite(run.risk(name)).all()
            else ""
            for name in RISKS
        ]
        share = 1 - run.failed.mean()
        rows.append([*_about(run), len(run.failed), f"{share:.0%}", *cells])
    return markdown_table(["LM", "method", "relation", "edits", "generalized", *RISKS], rows)


def answer_table(runs: Sequence[ForecastRun]) -> str:
    """Accuracy of the predicted answer, and Brier score of the probabilities by combined.

    The Brier score is ``sum (p - truth)^2`` over the three outcomes; that of the shares is of a
    forecast that knows how often each outcome occurs.
    """
    names = ("answer_before", "map_0", "map_auto", "in_context")
    rows: list[list[Any]] = []
    for run in runs:
        truth = np.eye(len(Outcome))[run.arrays["outcome"]]
        scores = [((p - truth) ** 2).sum(1).mean() for p in (run.probabilities, truth.mean(0))]
        step = run.hits("optimizer_step")
        # Of a mean of n hits, by the normal distribution.
        error = 1.96 * np.sqrt(step.mean() * (1 - step.mean()) / len(step))
        rows.append(
            [*_about(run), f"{run.most_frequent:.0%}",
             *(f"{run.hits(name).mean():.0%}" for name in names),
             f"{step.mean():.0%} ± {100 * error:.0f}",
             *("" if np.isnan(score) else f"{score:.2f}" for score in scores)]
        )  # fmt: skip
    header = ["LM", "method", "relation", "most_frequent", *names, "optimizer_step"]
    return markdown_table([*header, "Brier, combined", "Brier, shares"], rows)


def repeated_table(runs: Sequence[ForecastRun]) -> str:
    """How well a second training, from other adapters, predicts the outcome of the first."""
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
    """Hallucinated and generalized edits, and the share kept, with data.max_risk."""
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


def cost_table(runs: Sequence[ForecastRun]) -> str:
    """Time of forecasts, as shares of the training that they spare."""
    names = ("maps", "in_context", "step", "gradient_similarity", "activation_similarity")
    rows = [
        [*_about(run), len(run.failed), f"{run.training_seconds:.0f} s",
         *(f"{float(run.arrays[f'seconds/{name}']) / run.training_seconds:.2f}" for name in names)]
        for run in runs
    ]  # fmt: skip
    return markdown_table(("LM", "method", "relation", "edits", "training", *names), rows)


def scale_table(runs: Sequence[ForecastRun]) -> str:
    """AUROC and accuracy of the optimizer's step by its length."""
    names = {n for run in runs for n in run.arrays if n.startswith("predicted/step")}
    keys = sorted((n.removeprefix("predicted/") for n in names), key=lambda key: float(key[5:]))
    rows = [
        [*_about(run),
         *(f"{areas(run.failed, run.risk(key)):.2f}, {run.hits(key).mean():.0%}" for key in keys)]
        for run in runs if run.is_judged
    ]  # fmt: skip
    return markdown_table(["LM", "method", "relation", *keys], rows)


def _about(run: ForecastRun) -> list[str]:
    return [run.lm, run.method, run.relation.replace("->", "→")]


def reliability_figure(runs: Sequence[ForecastRun]) -> Figure:
    """Draw the share of edits that generalize over the probability that `combined` gives them."""
    figure = new_figure(
        6.4,
        3.2,
        "Reliability of the probability that an edit generalizes",
        "Deciles of the edits of each LM; each LM's are by a fit on other relations of other LMs.",
    )
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for name, own in by_lm_and_method(runs):
        p = np.concatenate([run.probabilities[:, GENERALIZED] for run in own])
        generalized = np.concatenate([~run.failed for run in own])[np.isfinite(p)]
        p = p[np.isfinite(p)]
        deciles = np.array_split(p.argsort(), 10)
        if len(p):
            axes.plot(
                [p[rows].mean() for rows in deciles],
                [generalized[rows].mean() for rows in deciles],
                marker="o", markersize=3, label=name,
            )  # fmt: skip
    plain_axes(axes, "", "probability", "share that generalized")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return finish(figure)
