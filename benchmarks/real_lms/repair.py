"""Repairs on pretrained LMs: what is trained, how much of it, and what it does to edits.

    python -m benchmarks.real_lms.repair FOLDER --texts TEXTS
    python -m benchmarks.real_lms.repair FOLDER --show true

FOLDER holds a folder for each LM; the tiny world is repaired as well. Each run's numbers go to
``benchmarks/results/real_lms/LM/repair_VARIANT_SEED.json`` as soon as it ends; a run that is there
is not repeated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from pandas import DataFrame, Series, concat, read_csv

from benchmarks.common import markdown_table, place_tables, read_numbers
from benchmarks.real_lms.forecast_scores import N_RESAMPLES, drawn, interval
from benchmarks.real_lms.run import Run, execute
from benchmarks.real_lms.tables import REAL_LMS

TINY_WORLD = "tiny-world"
VARIANTS: dict[str, tuple[str, ...]] = {
    "edits": (),
    "language": ("--data.relation=country->language",),
    "company": ("--data.relation=ceo->company",),
    "statements": ("--data.examples=statements", "--model.text_weight=1"),
    "source": ("--data.examples=source", "--model.text_weight=1"),
    "target": ("--data.examples=target", "--model.text_weight=1"),
}
TUNED_ON = "0"  # the seed that chose the weights
# 150 edits of each part; all others measure 75.
LARGE = ("smollm2-135m", "edits")
# Gemma's knowledge diverges by ten times as many nats under an edit.
OF_LM: dict[str, tuple[str, ...]] = {
    "gemma-3-270m": ("--model.preserve_weight=1", "--model.text_weight=25",
                     "--model.learning_rate=2e-4", "--data.texts_per_step=6"),
}  # fmt: skip
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
KEPT = ("shown", "held_out", "perplexity", "n_steps", "correlations")


def plan(lm: str, texts: str, seeds: tuple[int, ...]) -> Iterator[Run]:
    """Yield the runs on one LM."""
    # The tiny world has texts of its own, and food depends on the country there.
    of_pretrained = () if lm == TINY_WORLD else (
        f"--data.texts={texts}", "--model.lm.attn_implementation=eager",
        "--matmul_precision=medium", "--data.n_tokens=128", "--data.preserve=[pet,music,job]",
        "--data.controls=[color,food]", "--data.n_examples=400",
    )  # fmt: skip
    for seed in seeds:
        for variant, options in VARIANTS.items():
            yield Run(
                f"repair_{variant}_{seed}",
                ("fit", "--config", "configs/repair.yaml", *of_pretrained,
                 f"--data.n_edits={150 if (lm, variant) == LARGE else 75}",
                 f"--data.seed={seed}", *OF_LM.get(lm, ()), *options),
                KEPT,
                tables=("cases",),
            )  # fmt: skip


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


def main(
    folder: str,
    texts: str = "",
    only: tuple[str, ...] = (),
    seeds: tuple[int, ...] = (0,),
    show: bool = False,
    output: str = str(REAL_LMS),
) -> None:
    """Make the missing runs, print the tables, and put them into docs/repair.md.

    Runs are made on each LM of the folder, and on the tiny world.

    Args:
        folder: Folder that holds a folder for each LM.
        texts: File or folder of texts, some of which are measured and others kept.
        only: Names of runs, such as repair_edits_0; empty makes all.
        seeds: Seeds of subjects, answers and split.
        show: Whether to print the tables of the runs that there are, and make none.
        output: Folder of the results.
    """
    results = Path(output)
    found = sorted(config.parent for config in Path(folder).glob("**/config.json"))
    for lm in [*found, Path(TINY_WORLD)] if not show else ():
        for run in plan(lm.name, texts, seeds):
            if only and run.name not in only:
                continue
            if not (results / lm.name / f"{run.name}.json").exists():
                print(f"{lm.name}: {run.name}", flush=True)
                execute(run, lm, results / lm.name)
    made = tables(results)
    print("\n".join(made.values()))
    if results == REAL_LMS:
        place_tables(made)


if __name__ == "__main__":
    auto_cli(main)
