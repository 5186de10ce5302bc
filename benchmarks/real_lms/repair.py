"""Repairs on pretrained LMs: tables of what they do to edits, and to everything else.

``run.py`` makes the runs, and ``findings.py`` puts the tables into docs/repair_results.md; but

    python -m benchmarks.real_lms.repair FOLDER --texts TEXTS

makes those that hold references out (``by_reference``) and edits other relations in repaired LMs.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml
from jsonargparse import auto_cli
from pandas import DataFrame, Series, concat, json_normalize

from benchmarks import common
from benchmarks.common import N_RESAMPLES, drawn, interval
from benchmarks.real_lms.run import KNOWN, OUTCOMES_ONLY, PRETRAINED, REPAIR_OF_LM, Run, execute
from benchmarks.real_lms.tables import REAL_LMS

PLAN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
RUN, KEYS = ["LM", "examples", "seed"], ["part", "stage", "reference"]
SHARES = ["learned", "right before", "unedited stays", "generalized", "hallucinated"]


def tables(results: Path) -> dict[str, str]:
    """Return ``repair``, what becomes of edits, and ``repair_price``, what else changes."""
    files: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for file in sorted(results.glob("*/repair_*.csv")):
        variant, _, seed = file.stem.removeprefix("repair_").rpartition("_")
        if seed != "0" or variant == "statements":  # 0 chose the weights
            files[file.parent.name, variant].append(file)
    rows, prices = [], []
    for (lm, variant), own in files.items():
        cases = read_cases(own)
        for part in ("shown", "held_out"):
            rows.append([lm, variant, len(own), *_outcomes(cases[cases["part"] == part])])
        runs = [common.read_numbers(file.with_suffix(".json"))["results"] for file in own]
        prices.append([lm, variant, len(own), *_prices(runs)])
    columns = ["LM", "repair set", "seeds", "edits", "generalized", "hallucinated: ratio (95 %)",
               "two most frequent references", "all others", "by reference"]  # fmt: skip
    return {
        "repair": common.markdown_table(columns, rows),
        "repair_price": common.markdown_table([*columns[:3], *PLAN["prices"]], prices),
    }


def read_cases(files: Sequence[Path]) -> DataFrame:
    """Return the cases of several seeds; without references, each answer is one."""
    cases = concat([common.read_csv(file, keep_default_na=False) for file in files])
    cases = cases.assign(reference=cases.get("reference", cases["source_answer"]))
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
    if cases["reference"].equals(cases["source_answer"]):
        yield from ("", "", "")
        return
    frequent = is_frequent(cases)
    yield from (_ratio(cases[chosen]) for chosen in (frequent, ~frequent))
    by_reference = (one.groupby("reference")["hallucinated"].mean().mean() for one in stages)
    yield " → ".join(f"{share:.0%}" for share in by_reference)


def _ratio(cases: DataFrame) -> str:
    n, before, after, low, high = before_and_after(cases)
    ratio = f": {after / before:.2f} ({low:.2f}–{high:.2f})" if before else ""
    # Of two references there is nothing to sample.
    return f"{before} → {after} of {n}" + ratio * (cases["reference"].nunique() > 2)


def _prices(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield numbers of the held-out edits, of W and of texts before and after, means over seeds."""
    means = []
    for stage, at in (("before", 0), ("after", 2)):  # where the maps of W begin
        rows = [{**run["held_out"][stage], "texts": run["perplexity"][stage],
                 "W": run["correlations"][at], "color": run["correlations"][at + 1]}
                for run in runs]  # fmt: skip
        means.append(json_normalize(rows).mean(numeric_only=True))
    for key in PLAN["prices"].values():
        pair = [float(one.get(key, np.nan)) for one in means]
        shown = [f"{one:.1f}" if one > 1 else f"{one:.2f}" for one in pair]
        yield "" if np.isnan(pair).any() else " → ".join(shown)


def by_reference(results: Path) -> dict[str, str]:
    """Return ``repair_references``: edits by the references of a seed that both stages have."""
    files = [file for x in PLAN["repairs"] for file in results.glob(f"*/by_reference/{x}.json")]
    runs = {
        (file.parts[-3], *file.stem.rsplit("_", 1)): common.read_numbers(file) for file in files
    }
    edits = [[*key, *row] for key, run in runs.items() for row in run["edits"]]
    units = DataFrame(edits, columns=[*RUN, *KEYS, "n", *SHARES])
    units[SHARES] = units[SHARES].div(units["n"], axis=0)
    units = units.groupby([*RUN, "part", "reference"]).filter(lambda one: len(one) == 2)
    rows, stages = [], ("before", "after")
    for (lm, name, part), own in units.groupby([*RUN[:2], "part"], sort=False):
        means = own.groupby("stage").agg(dict.fromkeys(SHARES, "mean") | {"n": "sum"})
        before, after = (means.loc[stage] for stage in stages)
        ratio = after["hallucinated"] / before["hallucinated"]
        counts = (own["n"] * own["hallucinated"]).groupby(own["stage"]).sum()
        answers = "|".join(own["reference"]).split("|")
        values = [run["results"] for key, run in runs.items() if key[:2] == (lm, name)]
        texts = [one["perplexity"] for one in values]
        maps = [one["map"] for one in values if part in one.get("map", {}).get("before", ())]
        right = [f"{mean(one[stage][part] for one in maps):.0%}" for stage in stages if maps]
        rows.append([
            lm, name, own["seed"].nunique(),
            f"{after['n']:.0f} {common.arrow(part).replace('_', ' ')}", own["reference"].nunique(),
            *(f"{before[x]:.0%} → {after[x]:.0%}" for x in SHARES[:2]),
            f"{after[SHARES[2]]:.0%}" if part in ("shown", "held_out") else "",
            *(f"{before[x]:.0%} → {after[x]:.0%}" for x in SHARES[3:]),
            " → ".join(f"{counts[stage]:.0f}" for stage in stages),
            "{:.2f} ({:.2f}–{:.2f})".format(ratio, *before_and_after(own)[-2:]),
            f"{max(map(answers.count, answers)) / len(own):.0%}",
            f"{mean(one['after'] / one['before'] for one in texts) - 1:+.1%}", " → ".join(right),
        ])  # fmt: skip
    columns = [*RUN[:2], "seeds", "edits", "references", *SHARES, "hallucinated edits", "ratio",
               "constant", "perplexity"]  # fmt: skip
    return {"repair_references": common.markdown_table([*columns, "W right"], rows)}


def measure(lm: Path, repair: str, texts: str) -> dict[str, Any]:
    """Repair an LM, and edit other relations in it and in the repaired one."""
    (examples, seed), edits = repair.rsplit("_", 1), PLAN["options"]["edits"]
    same = *PRETRAINED, "--matmul_precision=highest", "--trainer.accelerator=auto"
    same, keep = (*same, f"--data.seed={seed}"), ("perplexity", "example_references", "map")
    options = (*PLAN["options"]["repair"], *PLAN["examples"][examples], *same, *KNOWN,
               f"--data.texts={texts}", *REPAIR_OF_LM.get(lm.name, ()))  # fmt: skip
    runs = [(Run("repair", options, keep, tables=("cases",), model=True), "before")]
    for name in PLAN["relations"] if repair in PLAN["edited"] else ():
        options = (*edits, *same, OUTCOMES_ONLY, f"--data.relation={name}")
        runs += [(Run(name, options, (), tables=("cases",)), at) for at in ("before", "after")]
    parts, content = [], dict[str, Any]()
    with tempfile.TemporaryDirectory() as scratch:
        for run, stage in runs:
            found = execute(run, Path(scratch, "model") if stage == "after" else lm, Path(scratch))
            if "error" in found:
                raise SystemExit(f"{lm.name}, {' '.join(run.options)}: {found['error']}")
            content = content or found
            cases = read_cases([Path(scratch, f"{run.name}.csv")])
            first = cases.groupby("subject")["answer_before"].transform("first")
            cases["unedited stays"] = cases["answer_before"] == first
            parts.append(DataFrame({"part": run.name, "stage": stage, **cases}))
    cases = concat(parts).rename(columns={"source_learned": "learned"})
    pairs = zip(cases["answer_before"], cases["reference"], strict=True)
    cases["right before"] = [answer in reference.split("|") for answer, reference in pairs]
    cases = cases.assign(n=1, generalized=cases["outcome"] == "generalized")
    counts = cases.groupby(KEYS)[["n", *SHARES]].sum().reset_index()
    return {**content, "edits": counts.to_numpy().tolist()}


def main(folder: str, texts: str | None = None, output: str = str(REAL_LMS)) -> None:
    """Make the missing repairs that hold references out, and put their table into the documents.

    Args:
        folder: Folder that holds a folder for each LM.
        texts: File or folder of texts; null makes no runs.
        output: Folder of the results.
    """
    for lm, repair in product(common.lms_in(folder), PLAN["repairs"]) if texts else ():
        file = Path(output) / lm.name / "by_reference" / f"{repair}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            common.write_numbers(file, measure(lm, repair, str(texts)))
    common.place_tables(by_reference(Path(output)) if output == str(REAL_LMS) else {})


if __name__ == "__main__":
    auto_cli(main)
