"""What holds on which pretrained LM: the tables and the figure of docs/real_lms.md.

    python -m benchmarks.real_lms.findings

reads the files of ``run.py``, writes all tables to ``benchmarks/results/real_lms/tables`` and some
of their rows between the documents' markers, and draws the findings of README.md. Each finding is a
rule on numbers, so that it can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from pandas import DataFrame

from benchmarks import common
from benchmarks.real_lms.edits import (
    Forecasts,
    Gradients,
    Outcomes,
    Ripple,
    forecasts_of,
    gradients,
    outcomes_of,
    read_edits,
    ripples,
)
from benchmarks.real_lms.run import REAL_LMS, RELATIONS
from benchmarks.real_lms.tables import LMS, Ablation, PairScores, ablations, pairs_of
from lincorr_lightning.results.table import Table


@dataclass(frozen=True)
class Numbers:
    """What is known of all LMs: the rows of every table."""

    pairs: list[PairScores]
    layers: list[PairScores]
    paper_pairs: list[PairScores]
    edits: list[Outcomes]
    forecasts: list[Forecasts]
    gradients: list[Gradients]
    ablations: list[Ablation]
    ablation_grid: DataFrame
    ripples: list[Ripple]

    def tables(self) -> list[Table]:
        """Return the tables; that of the grid has a script of its own."""
        probes = [Table.of(name, getattr(self, name), PairScores) for name in PROBES]
        return [
            *probes,
            Table.of("edits", self.edits, Outcomes),
            Table.of("forecasts", self.forecasts, Forecasts),
            Table.of("gradients", self.gradients, Gradients),
            Table.of("ablations", self.ablations, Ablation),
            Table.of("ripples", self.ripples, Ripple),
            Table.of("findings", [list(row) for row in findings_of(self)], ["", "beside", *LMS]),
        ]


PROBES = {"pairs": "probe", "layers": "layers", "paper_pairs": "paper_pairs"}
"""Tables of probes, and the runs that they are of."""

BASELINES = {
    "constant": "best constant",
    "unembedding": "nearest word, cosine",
    "same_prompt": "same prompt",
    "gaussian_states": "W₀",
}
"""Names of baselines in ``results.json``, and in the documents."""


def read_all(results: Path) -> Numbers:
    """Read the results of all LMs."""
    probes = {
        table: [scores for lm in LMS for scores in pairs_of(lm, run, results)]
        for table, run in PROBES.items()
    }
    runs = read_edits(results)
    by_kind = groupby(runs, key=lambda run: (run.sample, run.lm, run.method))
    forecasts = [row for _, group in by_kind for row in forecasts_of(list(group))]
    return Numbers(
        **probes,
        edits=[outcomes_of(run) for run in runs],
        forecasts=forecasts,
        gradients=list(gradients(results)),
        ablations=list(ablations(results)),
        ablation_grid=common.read_csv(results / "ablation_grid.csv"),
        ripples=list(ripples(results)),
    )


@dataclass(frozen=True)
class Outcome:
    """A number of an LM, that of the strongest baseline, and whether the finding holds."""

    number: float
    baseline: float
    holds: bool
    note: str = ""

    def __str__(self) -> str:
        note = self.note and f"; {self.note}"
        return f"{'yes' if self.holds else 'no'}: {self.number:.2f}, {self.baseline:.2f}{note}"


@dataclass(frozen=True)
class Finding:
    """A claim, what its number stands beside, and the rule: KeyError where a run is missing."""

    claim: str
    baseline: str
    rule: Callable[[Numbers, str], Outcome]


def one(rows: list[Any], **wanted: Any) -> Any:
    """Return the only row with some values; KeyError if there is none."""
    found = [row for row in rows if all(getattr(row, k) == value for k, value in wanted.items())]
    if not found:
        raise KeyError(f"no row has {wanted}")
    (row,) = found
    return row


def above_words(numbers: Numbers, lm: str) -> Outcome:
    """Return whether r of most pairs with a reference exceeds random words, on both sides."""
    city = one(numbers.pairs, lm=lm, pair="city→country")
    known = [row for row in numbers.pairs if row.lm == lm and row.is_known]
    others = [row for row in numbers.pairs if row.lm == lm and not row.is_known]
    n_known = sum(row.exceeds_words() for row in known)
    n_others = sum(row.exceeds_words() for row in others)
    note = f"{n_known} of {len(known)} pairs, others {n_others} of {len(others)}"
    return Outcome(city.r, city.source_words, n_known > len(known) / 2, note)


def precise(numbers: Numbers, lm: str) -> Outcome:
    """Return whether W pairs more answers right than the vocabulary, for most relations."""
    city = one(numbers.pairs, lm=lm, pair="city→country")
    rows = [
        row for row in numbers.pairs if row.lm == lm and row.pair in map(common.arrow, RELATIONS)
    ]
    n_above = sum(row.above_best.low > 0 for row in rows)
    note = f"{n_above} of {len(rows)} relations"
    return Outcome(city.by_answer, city.best_by_answer, n_above > len(rows) / 2, note)


def above_unrelated(pair: str) -> Callable[[Numbers, str], Outcome]:
    """Return the rule: r of a pair exceeds that of the unrelated prompt."""

    def rule(numbers: Numbers, lm: str) -> Outcome:
        row = one(numbers.pairs, lm=lm, pair=pair)
        return Outcome(row.r, row.unrelated, row.exceeds_unrelated())

    return rule


def carry_over(sample: str, relation: str = "city→country") -> Callable[[Numbers, str], Outcome]:
    """Return the rule: LoRA edits generalize more often than the better baseline is right."""

    def rule(numbers: Numbers, lm: str) -> Outcome:
        row = one(numbers.edits, lm=lm, relation=relation, method="lora", sample=sample)
        best = max(row.constant_by_answer, row.nearest_by_answer)
        return Outcome(row.by_answer, best, row.lead.low > 0)

    return rule


def forecast(numbers: Numbers, lm: str) -> Outcome:
    """Return whether the nearest word leads over W and the count, within a reference, too."""
    wanted = {"lm": lm, "method": "lora", "sample": "any"}
    everything = one(numbers.forecasts, **wanted, among="all edits")
    within = one(numbers.forecasts, **wanted, among="edits of one reference")
    holds = min(everything.lead.low, within.lead.low) > 0
    best = max(everything.weight, everything.count)
    return Outcome(everything.nearest_word.value, best, holds)


def vocabulary_composes(numbers: Numbers, lm: str) -> Outcome:
    """Return whether a network on the vocabulary exceeds the best baseline with each seed.

    It is the plain network, trained alone, on centered embeddings of one city per country.
    """
    cell = "lm == @lm and width == 0 and per_target == 1 and epochs_factor == 1"
    cell += " and kind == 'plain' and center and train == 'network'"
    runs = numbers.ablation_grid.query(cell, local_dict={"lm": lm}).set_index("seed")
    shares = {name: rows["generalized"] for name, rows in runs.groupby("mapping")}
    if "reference" not in shares:
        raise KeyError(lm)
    composed = shares["reference"]
    bounds = runs[runs["mapping"] == "reference"]
    baselines = [
        bounds["nearest"],
        bounds["majority"],
        *(shares[name] for name in ("permuted", "letters") if name in shares),
    ]
    best = max(baselines, key=lambda share: share.mean())
    return Outcome(composed.mean(), best.mean(), bool((composed > best).all()))


WORDS = Finding("r of city→country; of most pairs with a reference", "random words", above_words)
PRECISE = Finding("W: right country first, by country", "best of the vocabulary", precise)
FORECAST = Finding("the nearest word forecasts edits (AUROC)", "W, or the count of edits", forecast)
EDITS = Finding(
    "LoRA edits of any city, by country", "best constant, nearest word", carry_over("any")
)
VOCABULARY = Finding(
    "a network on the vocabulary alone, one city per country",
    "nearest country",
    vocabulary_composes,
)
FINDINGS = (
    WORDS,
    PRECISE,
    EDITS,
    Finding("edits, two per country", "the same", carry_over("two per country")),
    Finding("edits of X+1→X+2", "the same", carry_over("any", "X+1→X+2")),
    FORECAST,
    VOCABULARY,
    Finding("r of city→country", "unrelated prompt", above_unrelated("city→country")),
    Finding("r of city→color, which is unrelated", "the same", above_unrelated("city→color")),
)
FIGURE = {
    "Logits of countries follow from those of cities (r)": WORDS,
    "W pairs cities with their country (right first)": PRECISE,
    "The nearest word forecasts edits (AUROC)": FORECAST,
    "LoRA edits of a city, step 10, carry over to the country": EDITS,
    "Token embeddings alone: new cities compose": VOCABULARY,
}
"""The findings that README.md shows, by their titles in its figure."""


def findings_of(numbers: Numbers) -> list[list[str]]:
    """Return the rows of the findings: claim, baseline, and a cell for each LM."""
    rows = []
    for finding in FINDINGS:
        cells = []
        for lm in LMS:
            try:
                cells.append(str(finding.rule(numbers, lm)))
            except KeyError:
                cells.append("not run")
        rows.append([finding.claim, finding.baseline, *cells])
    return rows


def documented(tables: list[Table]) -> dict[str, str]:
    """Return what documents show of the tables, by their markers."""
    pairs, _, _, edits, forecasts, of_gradients, of_vocabulary, of_steps, findings = tables
    pairs = replace(pairs, frame=pairs.frame.replace({"best": BASELINES}))
    return {
        "findings": findings.markdown(),
        "real_precision": common.shown(
            pairs,
            "lm pair n plain right best above_best by_answer best_by_answer",
            "pair in ['city→country', 'country→language', 'ceo→company']",
        ),
        "real_words": common.shown(
            pairs,
            "lm pair r source_words target_words above_source_words above_target_words unrelated",
            "pair in ['city→country', 'X+1→X+2']",
        ),
        "real_edits": common.shown(
            edits,
            "lm relation sample edits answers by_answer constant_by_answer nearest_by_answer lead "
            "color",
            "method == 'lora' and relation in ['city→country', 'ceo→company']",
        ),
        "real_nearest": common.shown(
            forecasts,
            "lm among relations nearest_word weight count lead",
            "method == 'lora' and sample == 'any'",
        ),
        "real_gradients": of_gradients.markdown(),
        "real_ablation": of_vocabulary.markdown(),
        "real_ripples": of_steps.markdown(),
    }


def findings_figure(numbers: Numbers) -> Any:
    """Draw findings on each LM beside their baselines, in color where they hold."""
    figure = common.new_figure(
        8.6,
        4.0,
        "What was found: city → country, four LMs from 135M to 1.5B parameters",
        "A dot is an LM's number, a bar that of the strongest baseline; from above: SmolLM2, Gemma "
        "3, Qwen2.5-Coder 0.5B and 1.5B, if run; shares are means by country. Blue: the finding "
        "holds beyond the error, by its rule in docs/real_lms.md, which may be about all relations "
        "(r, W, forecasts). Orange: it does not.",
    )
    axes = figure.subplots()
    for row, (title, finding) in enumerate(FIGURE.items()):
        outcomes = []
        for lm in LMS:
            with suppress(KeyError):  # not run
                outcomes.append(finding.rule(numbers, lm))
        for i, outcome in enumerate(outcomes):
            y = -row + 0.24 - 0.16 * i
            color = "C0" if outcome.holds else "C1"
            axes.plot([outcome.number, outcome.baseline], [y, y], color=color, linewidth=1)
            axes.plot(outcome.baseline, y, "|", color="#444444", markersize=8, markeredgewidth=1.6)
            axes.plot(outcome.number, y, "o", color=color, markersize=4.5)
        held = f"{sum(outcome.holds for outcome in outcomes)} of {len(outcomes)} LMs"
        left = {"ha": "right", "va": "center"}
        axes.text(1.03, -row, held, va="center", fontsize=8)
        axes.text(-0.03, -row + 0.1, title, fontsize=8, **left)
        beside = f"beside: {finding.baseline}"
        axes.text(-0.03, -row - 0.17, beside, fontsize=7, color="#666666", **left)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set(xlim=(0, 1), yticks=[], xlabel="r, share or AUROC")
    return figure


def main() -> None:
    """Write the tables, put them into the documents, and draw the figure."""
    numbers = read_all(REAL_LMS)
    tables = numbers.tables()
    for table in tables:
        common.write_table(table, REAL_LMS / "tables")
    common.place_tables(documented(tables))
    findings_figure(numbers).savefig(REAL_LMS / "findings.png")


if __name__ == "__main__":
    main()
