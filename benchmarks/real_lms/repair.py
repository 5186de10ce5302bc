"""Repairs on pretrained LMs: tables of what they do to edits, and to everything else.

``run.py`` makes the runs, and ``findings.py`` puts the tables into docs/repair.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from pandas import DataFrame, Series, concat, read_csv

from benchmarks.common import markdown_table, read_numbers
from benchmarks.real_lms.forecast_scores import N_RESAMPLES, drawn, interval

TUNED_ON = "0"  # the seed that chose the weights
Score = Callable[[dict[str, Any], dict[str, Any], int], float]
# Of a run, its held-out edits and 0 or 2 before or after the repair, where its maps begin: first
# that of the relation, then that of a pair that should not be correlated.
PRICES: dict[str, Score] = {
    "learned": lambda run, edits, at: edits["source_learned"],
    "right before": lambda run, edits, at: edits["right_before"],
    "in context": lambda run, edits, at: edits["in_context"],
    "new targets: hallucinated": lambda run, edits, at: edits["new_targets"]["hallucinated"],
    "color unchanged": lambda run, edits, at: edits["controls"]["color"],
    "food unchanged": lambda run, edits, at: edits["controls"]["food"],
    "Hit@1 of W": lambda run, edits, at: run["correlations"][at]["influenced"],
    "r": lambda run, edits, at: run["correlations"][at]["label_mean"],
    "r with color": lambda run, edits, at: run["correlations"][at + 1]["label_mean"],
    "perplexity": lambda run, edits, at: run["perplexity"]["after" if at else "before"],
}


def tables(results: Path) -> dict[str, str]:
    """Return ``repair``, what becomes of edits, and ``repair_price``, what else changes."""
    files: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in sorted(results.glob("*/repair_*.csv")):
        variant, _, seed = file.stem.removeprefix("repair_").rpartition("_")
        if seed != TUNED_ON or variant == "statements":  # of which there is no other seed
            files[file.parent.name, variant].append(file)
    rows, prices = [], []
    for (lm, variant), own in files.items():
        cases = read_cases(own)
        for part in ("shown", "held_out"):
            rows.append([lm, variant, len(own), *_outcomes(cases[cases["part"] == part])])
        runs = [read_numbers(file.with_suffix(".json"))["results"] for file in own]
        prices.append([lm, variant, *(_price(runs, score) for score in PRICES.values())])
    columns = ["LM", "repair set", "seeds", "edits", "generalized", "hallucinated: ratio (95 %)",
               "two most frequent references", "all others", "by reference"]  # fmt: skip
    return {
        "repair": markdown_table(columns, rows),
        "repair_price": markdown_table(["LM", "repair set", *PRICES], prices),
    }


def read_cases(files: Sequence[Path]) -> DataFrame:
    """Return the cases of several seeds; without references, each answer is one."""
    cases = concat([read_csv(file, keep_default_na=False) for file in files])
    cases["known"] = "reference" in cases
    cases["reference"] = cases["reference" if cases["known"].all() else "source_answer"]
    return cases.assign(hallucinated=cases["outcome"] == "hallucinated")


def is_frequent(cases: DataFrame) -> Series:
    """Return which cases have one of the two most frequent references."""
    return cases["reference"].isin(cases["reference"].value_counts().index[:2])


def before_and_after(cases: DataFrame) -> tuple[int, int, int, float, float]:
    """Count the hallucinated edits before and after.

    Returns:
        Number of edits, of hallucinated ones before and after, and the 95 % interval of the ratio
        of after to before over samples of references.
    """
    stages = [cases[cases["stage"] == stage] for stage in ("before", "after")]
    names = cases["reference"].unique()
    counts = [one.groupby("reference")["hallucinated"].sum().reindex(names) for one in stages]
    group = np.arange(len(names))
    before, after = (drawn(group, N_RESAMPLES, np.random.default_rng(0)) @ one for one in counts)
    with np.errstate(invalid="ignore", divide="ignore"):
        low, high = interval(np.where(before > 0, after / before, np.nan))[1:]
    return len(stages[0]), int(before[0]), int(after[0]), low, high


def _outcomes(cases: DataFrame) -> Iterator[str]:
    """Yield the cells of the edits of one part: all, of frequent references, of the others."""
    stages = [cases[cases["stage"] == stage] for stage in ("before", "after")]
    yield f"{len(stages[0])} {cases['part'].iloc[0].replace('_', ' ')}"
    yield " → ".join(f"{(one['outcome'] == 'generalized').mean():.0%}" for one in stages)
    yield _ratio(cases)
    if not cases["known"].all():
        yield from ("", "", "")
        return
    frequent = is_frequent(cases)
    yield from (_ratio(cases[chosen]) for chosen in (frequent, ~frequent))
    by_reference = (one.groupby("reference")["hallucinated"].mean().mean() for one in stages)
    yield " → ".join(f"{share:.0%}" for share in by_reference)


def _ratio(cases: DataFrame) -> str:
    n, before, after, low, high = before_and_after(cases)
    # Of two references there is nothing to sample.
    shown = before and cases["reference"].nunique() > 2
    return f"{before} → {after} of {n}" + (
        f": {after / before:.2f} ({low:.2f}–{high:.2f})" if shown else ""
    )


def _price(runs: Sequence[dict[str, Any]], score: Score) -> str:
    """Return a score before and after, the mean over seeds; empty if it was not measured."""
    try:
        means = [
            mean(score(run, run["held_out"][stage], at) for run in runs)
            for stage, at in (("before", 0), ("after", 2))
        ]
    except KeyError:
        return ""
    return " → ".join(f"{one:.1f}" if one > 1 else f"{one:.2f}" for one in means)
