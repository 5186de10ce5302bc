"""Repairs on pretrained LMs: what is trained, how much of it, and what it does to edits.

    python -m benchmarks.real_lms.repair FOLDER --texts TEXTS
    python -m benchmarks.real_lms.repair FOLDER --show true

FOLDER holds a folder for each LM; the tiny world is repaired as well. Each run's numbers go to
``benchmarks/results/real_lms/LM/repair_VARIANT_SEED.json`` as soon as it ends; a run that is there
is not repeated.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from scipy.stats import binomtest

from benchmarks.common import markdown_table, place_tables, read_numbers
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
N_RESAMPLES = 5000
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
    """Return ``repair``, edits before and after, and ``repair_ratio``, counts over seeds."""
    rows: list[list[str]] = []
    for file in sorted(results.glob("*/repair_*.json")):
        content = read_numbers(file)
        if "results" in content:
            rows += _rows(file, content["results"])
    columns = [
        "LM", "repair set", "seed", "edits", "learned", "generalized", "hallucinated (95 %)",
        "new targets: hallucinated", "right before", "color unchanged", "food unchanged",
        "in context", "Hit@1 of W", "r", "r with color", "perplexity",
    ]  # fmt: skip
    return {"repair": markdown_table(columns, rows), "repair_ratio": _ratio_table(results)}


def _variant_of(file: Path) -> tuple[str, str]:
    """Return the variant and the seed of a run's file, ``repair_VARIANT_SEED``."""
    variant, _, seed = file.stem.removeprefix("repair_").rpartition("_")
    return variant, seed


def _rows(file: Path, results: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each part of the edits."""
    variant, seed = _variant_of(file)
    correlations = results["correlations"]
    # Of each stage, first the relation, then the pair that should not be correlated.
    maps = {
        stage: [one for one in correlations if one["step"] == step]
        for stage, step in (("before", 0), ("after", results["n_steps"]))
    }
    for part in ("shown", "held_out"):
        pairs = [results[part][stage] for stage in ("before", "after")]
        n = pairs[0]["n"]
        new = [one["new_targets"] for one in pairs if "new_targets" in one]
        yield [
            file.parent.name,
            variant,
            seed,
            f"{n} {part.replace('_', ' ')}",
            " → ".join(f"{one['source_learned']:.0%}" for one in pairs),
            " → ".join(f"{one['generalized']:.0%}" for one in pairs),
            " → ".join(_with_interval(one) for one in pairs),
            " → ".join(f"{one['hallucinated']:.0%}" for one in new)
            + (f" ({new[0]['n']} edits)" if new else ""),
            " → ".join(f"{one['right_before']:.0%}" for one in pairs if "right_before" in one),
            *(
                " → ".join(f"{one['controls'][name]:.0%}" for one in pairs)
                if name in pairs[0]["controls"]
                else ""
                for name in ("color", "food")
            ),
            " → ".join(f"{one['in_context']:.0%}" for one in pairs),
            " → ".join(f"{maps[stage][0]['influenced']:.2f}" for stage in maps),
            " → ".join(f"{maps[stage][0]['label_mean']:.2f}" for stage in maps),
            " → ".join(f"{maps[stage][1]['label_mean']:.2f}" for stage in maps),
            " → ".join(f"{results['perplexity'][stage]:.1f}" for stage in maps),
        ]


def _with_interval(summary: dict[str, Any]) -> str:
    n, share = summary["n"], summary["hallucinated"]
    low, high = binomtest(round(share * n), n).proportion_ci(method="wilson")
    return f"{share:.0%} ({100 * low:.0f}–{100 * high:.0f})"


def _ratio_table(results: Path) -> str:
    """Hallucinated edits before and after, and their ratio, over all seeds except `TUNED_ON`."""
    files: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in sorted(results.glob("*/repair_*.csv")):
        variant, seed = _variant_of(file)
        if seed != TUNED_ON:
            files[file.parent.name, variant].append(file)
    rows = []
    for (lm, variant), own in files.items():
        for part in ("shown", "held_out"):
            n, before, after, low, high = hallucination_ratio(own, part)
            ratio = f"{after / before:.2f} ({low:.2f}–{high:.2f})" if before else ""
            rows.append(
                [lm, variant, str(len(own)), f"{n} {part.replace('_', ' ')}",
                 f"{before} → {after}", ratio]
            )  # fmt: skip
    columns = ["LM", "repair set", "seeds", "edits", "hallucinated", "ratio (95 %)"]
    return markdown_table(columns, rows)


def hallucination_ratio(files: Sequence[Path], part: str) -> tuple[int, int, int, float, float]:
    """Count the hallucinated edits of a part before and after.

    Args:
        files: Tables of cases, one for each seed.
        part: ``shown`` or ``held_out``.

    Returns:
        Number of edits, of hallucinated ones before and after, and the 95 % interval of the ratio
        of after to before: percentiles of a bootstrap over the answers of each seed, since edits
        that share an answer are not independent.
    """
    counts: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for seed, file in enumerate(files):
        with file.open(newline="", encoding="utf-8") as lines:
            for case in csv.DictReader(lines):
                if case["part"] == part:
                    count = counts[seed, case["source_answer"]]
                    is_after = case["stage"] == "after"
                    count[0] += not is_after
                    count[1 + is_after] += case["outcome"] == "hallucinated"
    found = np.array(list(counts.values()))
    drawn = np.random.default_rng(0).integers(0, len(found), (N_RESAMPLES, len(found)))
    _, before, after = found[drawn].sum(1).T
    some = before > 0
    ratios = after[some] / before[some] if some.any() else [np.nan]
    low, high = np.quantile(ratios, [0.025, 0.975])
    n, n_before, n_after = found.sum(0).tolist()
    return n, n_before, n_after, float(low), float(high)


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
