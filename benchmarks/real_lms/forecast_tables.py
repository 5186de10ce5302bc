"""Tables and a figure of forecasts beside the outcomes of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import arrow, markdown_table, new_figure, plain_axes, read_numbers
from benchmarks.real_lms.forecast_scores import (
    BOTH,
    CHEAP,
    COUNT,
    FEWER,
    GENERALIZED,
    HALLUCINATED,
    N_RESAMPLES,
    OTHER_TRAININGS,
    PROBABILITY,
    RISKS,
    SINGLE,
    VOCABULARY,
    WEIGHT,
    ForecastRun,
    area,
    drawn,
    interval,
    known_effect,
    load_balanced,
    mean_areas,
)

LIMITS = (0.7, 0.5, 0.3)


def tables(runs: Sequence[ForecastRun], results: Path) -> dict[str, str]:
    """Return all tables by their markers in the documents."""
    return {
        "real_leads": lead_table(runs), "real_forecasts": area_table(runs),
        "real_within": area_table(runs, within=True), "real_relations": relation_table(runs),
        "real_steps": step_table(runs), "real_left_out": left_out_table(runs),
        "real_costs": cost_table(results),
        "real_balanced_forecasts": relation_table(load_balanced(results, runs)),
    }  # fmt: skip


def by_lm_and_method(runs: Sequence[ForecastRun]) -> Iterator[tuple[str, list[ForecastRun]]]:
    """Yield the runs of each LM and method under a name."""
    for lm, method in dict.fromkeys((run.lm, run.method) for run in runs):
        yield f"{lm}, {method}", [run for run in runs if (run.lm, run.method) == (lm, method)]


def lead_table(runs: Sequence[ForecastRun]) -> str:
    """Return the mean AUROC of the probabilities beside that of all baselines together."""
    rows = []
    for within in (False, True):
        judged = [run for run in runs if run.is_judged(within) and run.fitted]
        for name, own in by_lm_and_method(judged):
            found = {risk: mean_areas(own, risk, within) for risk in RISKS}
            best = max(SINGLE, key=lambda risk: found[risk][0])
            cheap = VOCABULARY, FEWER, CHEAP
            compared = (*((PROBABILITY, other) for other in cheap), (BOTH, CHEAP))
            leads = [signed(interval(found[one] - found[other])) for one, other in compared]
            rows.append(
                ["within a reference" if within else "all", name, len(own),
                 f"{best} {found[best][0]:.2f}",
                 *(f"{found[risk][0]:.2f}" for risk in (FEWER, CHEAP, PROBABILITY, BOTH)), *leads]
            )  # fmt: skip
    header = ["edits", "", "relations", "best baseline", FEWER, CHEAP, PROBABILITY, BOTH,
              f"lead over {VOCABULARY}", f"lead over {FEWER}", f"lead over {CHEAP}",
              "lead of the step"]  # fmt: skip
    return markdown_table(header, rows)


def signed(difference: tuple[float, float, float]) -> str:
    """Return a difference with its interval."""
    return "{:+.2f} ({:+.2f}…{:+.2f})".format(*difference).replace("-", "−")


def area_table(runs: Sequence[ForecastRun], within: bool = False) -> str:
    """Return the AUROC of each risk for edits that do not generalize, and its interval.

    Means over relations; with `within`, over pairs of edits with one reference.
    """
    columns: list[list[str]] = []
    risks = [risk for risk in RISKS if not (within and risk in (COUNT, "popularity"))]
    judged = [run for run in runs if run.is_judged(within) and run.fitted]
    for name, own in by_lm_and_method(judged):
        found = (interval(mean_areas(own, risk, within)) for risk in risks)
        areas = ("{:.2f} ({:.2f}–{:.2f})".format(*one) for one in found)
        columns.append([name, f"{len(own)}", *areas])
    header, *body = (list(row) for row in zip(["", "relations", *risks], *columns, strict=True))
    return markdown_table(header, body)


def both(run: ForecastRun, score: Callable[[bool], str]) -> str:
    """Return a cell of a score over all edits, and within a reference; empty without it."""
    try:
        found = [score(within) for within in (False, True) if run.is_judged(within)]
    except KeyError:
        return ""
    return ", ".join(found).replace("-", "−") if run.is_judged() else ""


def both_areas(run: ForecastRun, risk: str, truth: str = "failed") -> str:
    """Return a cell of the AUROC of a risk."""
    return both(run, lambda within: f"{area(run, risk, within, truth):.2f}")


def both_leads(run: ForecastRun, baseline: str) -> str:
    """Return a cell of the interval of the probability's lead over a baseline."""

    def bounds(within: bool) -> str:
        own, other = (mean_areas([run], risk, within) for risk in (PROBABILITY, baseline))
        return "{1:+.2f}…{2:+.2f}".format(*interval(own - other))

    return both(run, bounds)


def relation_table(runs: Sequence[ForecastRun]) -> str:
    """Return the AUROC of some risks by relation, over all edits and within a reference.

    Then the interval of the probability's lead, its AUROC for edits that hallucinate, the effect of
    what is known in context, and the shares of predicted answers.
    """
    risks = (COUNT, WEIGHT, VOCABULARY, "gradient_similarity", "in_context", BOTH, CHEAP,
             PROBABILITY)  # fmt: skip
    rows = [
        [*_about(run), len(run.failed), f"{1 - run.failed.mean():.0%}",
         *(both_areas(run, risk) for risk in risks),
         *(both_leads(run, baseline) for baseline in (VOCABULARY, CHEAP)),
         both_areas(run, PROBABILITY, "hallucinated"),
         both(run, lambda within, run=run: f"{known_effect(run, within=within)[0]:+.2f}"),
         f"{run.most_frequent:.0%}",
         *(f"{run.hits(name).mean():.0%}" for name in ("in_context", "optimizer_step"))]
        for run in runs
    ]  # fmt: skip
    names = "over vocabulary (95 %)|over baselines (95 %)|hallucinates|known in context|"
    names += "most frequent|in_context|optimizer_step"
    header = ["LM", "method", "relation", "edits", "generalized", *risks, *names.split("|")]
    return markdown_table(header, rows)


def step_table(runs: Sequence[ForecastRun]) -> str:
    """Return the AUROC of the first real steps, and of a second training from other adapters."""
    rows = []
    for run in runs:
        found = [both_areas(run, name) for name in OTHER_TRAININGS]
        if any(found):
            rows.append([*_about(run), both_areas(run, CHEAP), both_areas(run, "optimizer_step"),
                         *found])  # fmt: skip
    header = ["LM", "method", "relation", CHEAP, "optimizer_step", "1 real step (cost 0.1)",
              "2 (0.2)", "3 (0.3)", "second training (1.0)"]  # fmt: skip
    return markdown_table(header, rows)


def left_out_table(runs: Sequence[ForecastRun]) -> str:
    """Return hallucinated and generalized edits, and the share kept, with data.max_risk.

    Beside them those of as many edits, of the least risk by the baselines together, and how many
    points less of the former hallucinate, with its interval over samples of references.
    """
    rows: list[list[Any]] = []
    for name, own in by_lm_and_method([run for run in runs if run.fitted]):
        p, rival = (
            np.concatenate([run.fitted[each][:, HALLUCINATED] for run in own])
            for each in (PROBABILITY, CHEAP)
        )
        outcomes = np.concatenate([run.arrays["outcome"] for run in own])
        names = [(i, x) for i, run in enumerate(own) for x in run.arrays["group"].tolist()]
        group = np.unique(names, axis=0, return_inverse=True)[1]
        weights = drawn(group, N_RESAMPLES, np.random.default_rng(0))[:, group]  # of each edit
        cells, hallucinated = [_shares(outcomes)], outcomes == HALLUCINATED
        for limit in LIMITS:
            kept = p <= limit
            as_many = rival.argsort(kind="stable").argsort() < kept.sum()
            with np.errstate(invalid="ignore"):
                other, by_risk = (
                    weights[:, x] @ hallucinated[x] / weights[:, x].sum(1) for x in (as_many, kept)
                )
            lead = "{:z.0f} ({:z.0f} to {:z.0f})".format(*interval(100 * (other - by_risk)))
            cells.append(f"{_shares(outcomes[kept])} of {kept.mean():.0%} kept; "
                         f"{_shares(outcomes[as_many])}; {lead}".replace("-", "−"))  # fmt: skip
        rows.append([name, len(outcomes), *cells])
    limits = (f"max_risk {limit:g}; {CHEAP}; lead" for limit in LIMITS)
    return markdown_table(["", "edits", "all", *limits], rows)


def _shares(outcomes: npt.NDArray[np.int64]) -> str:
    shares = (np.mean(outcomes == code) for code in (HALLUCINATED, GENERALIZED))
    return ", ".join(f"{one:.0%}" for one in shares) if len(outcomes) else "none"


def cost_table(results: Path) -> str:
    """Return the time of forecasts of city->country, as shares of the training that they spare.

    As ``forecast.py --costs`` measured it. Maps are fitted once; their share is of 150 edits.
    """
    names = ("optimizer_step", "in_context", "gradient_similarity")
    rows = [
        [file.parent.name, method, f"{times['n_edits']:.0f}",
         f"{times['training'] / times['n_edits']:.1f} s",
         *(f"{times[name] / times['training']:.2f}" for name in names),
         f"{times['maps'] / (times['training'] / times['n_edits'] * 150):.2f}"]
        for file in sorted(results.glob("*/forecast_costs.json"))
        for method, times in read_numbers(file).items()
    ]  # fmt: skip
    header = ("LM", "method", "edits timed", "training of an edit", *names, "maps, 150 edits")
    return markdown_table(header, rows)


def _about(run: ForecastRun) -> list[str]:
    return [run.lm, run.method, arrow(run.relation)]


def reliability_figure(runs: Sequence[ForecastRun]) -> Any:
    """Draw the share of each outcome over the probability that is forecast."""
    about = "Deciles of the edits of each LM, by a fit on other relations of other LMs."
    figure = new_figure(8.4, 3.6, "Reliability of the probabilities of an edit's outcome", about)
    panels = figure.subplots(1, 2)
    for axes, code, what in (
        (panels[0], GENERALIZED, "generalized"), (panels[1], HALLUCINATED, "hallucinated"),
    ):  # fmt: skip
        axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        for name, own in by_lm_and_method([run for run in runs if run.fitted]):
            p = np.concatenate([run.fitted[PROBABILITY][:, code] for run in own])
            occurred = np.concatenate([run.arrays["outcome"] == code for run in own])
            deciles = np.array_split(p.argsort(), 10)
            axes.plot(
                [p[rows].mean() for rows in deciles],
                [occurred[rows].mean() for rows in deciles],
                marker="o", markersize=3, label=name,
            )  # fmt: skip
        plain_axes(axes, "", f"probability: {what}", f"share that {what}")
        axes.set(xlim=(0, 1), ylim=(0, 1))
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def weights_figure(runs: Sequence[ForecastRun]) -> Any:
    """Draw W of the reference by outcome (the paper's figure 5), with the AUROC of minus W."""
    about = (
        "Blue: generalized. Orange: not. Boxes hold half of the edits. Numbers: AUROC of −W for "
        "edits that do not generalize, over all edits, and within a reference."
    )
    figure = new_figure(10, 3.8, "W of the reference, by outcome of the edit (LoRA)", about)
    by_lm = list(by_lm_and_method([r for r in runs if r.method == "lora" and r.is_judged()]))
    panels = figure.subplots(1, len(by_lm), width_ratios=[len(own) + 0.5 for _, own in by_lm])
    for axes, (_, own) in zip(np.atleast_1d(panels), by_lm, strict=True):
        for place, run in enumerate(own):
            for failed, color, side in ((False, "C0", -0.2), (True, "C1", 0.2)):
                axes.boxplot(
                    -run.risk(WEIGHT)[run.failed == failed], positions=[place + side], widths=0.32,
                    patch_artist=True, boxprops={"facecolor": color, "alpha": 0.6},
                    medianprops={"color": "black"}, flierprops={"markersize": 2},
                )  # fmt: skip
        names = [f"{run.relation}, {both_areas(run, WEIGHT)}" for run in own]
        names = [name.replace("->", "→\n").replace(", ", "\n") for name in names]
        axes.set_xticks(range(len(own)), names, fontsize=7)
        plain_axes(axes, own[0].lm, "", "W of the reference")
        axes.title.set_fontsize(8)
    return figure
