"""What holds on which pretrained LM: tables of docs/.

    python -m benchmarks.real_lms.findings

reads the files of ``run.py``, puts the tables between their markers, and draws the paper's figure
4, precision of W over the size of the LM. Each finding is a rule on numbers, so that it can fail.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
from pandas import factorize

from benchmarks import common
from benchmarks.docs_tables import feature_flow
from benchmarks.real_lms.nearest_word import (
    COUNT,
    NEAREST,
    WEIGHT,
    mean_areas,
    nearest_table,
    read_cases,
    read_edits,
    weights_figure,
)
from benchmarks.real_lms.run import PAPER_PAIRS
from benchmarks.real_lms.tables import (
    EDITED,
    REAL_LMS,
    RELATIONS,
    ablation_table,
    deactivation_table,
    edit_run,
    exceeds_words,
    flow_cut_table,
    layer_table,
    pair_name,
    peak_of,
    precision_table,
    random_words_table,
    remaining_table,
    sae_table,
    steering_table,
)
from lincorr_lightning.results.paper import paper_numbers

LMS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
SIGNIFICANT = 0.05
TIMES_RANDOM = 3
R = "city→country: r exceeds the control prompt's"
RIDGE = "a ridge raises Hit@1 of city→country"
RANDOM_WORDS = "r of most related pairs exceeds random words' (20 labels, both sides)"
PRECISE = "W, ridge auto, pairs more labels right than the strongest baseline"
EDITS = "edits of city→country, by country, generalize more often than baselines are right"
FORECAST = "the nearest word forecasts edits better than W, within a reference, too (AUROC)"
VOCABULARY = "one city per country: a network on the vocabulary alone exceeds baselines (seeds)"
PAPER_PROTOCOL = tuple(map("ablation_paper_{}".format, range(5)))
Runs = Mapping[str, Mapping[str, Any]]
LMRuns = Mapping[str, Runs]
Rule = Callable[[Runs], tuple[bool, str]]


def pair(runs: Runs, name: str, run: str = "probe") -> Mapping[str, Any]:
    """Return the scores of a pair of a probe."""
    found: Mapping[str, Any] = {pair_name(each): each for each in runs[run]["pairs"]}[name]
    return found


def exceeds_control(found: Mapping[str, Any]) -> bool:
    """Return whether r of a pair exceeds that of its control."""
    exceeds: bool = found["label_mean"] > found["control_label_mean"]
    return exceeds and found["q"] < SIGNIFICANT


def ridge_path(runs: Runs, relation: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the points of the plain map and of ``auto``."""
    paths, chosen = runs["probe"]["ridge_path"], pair(runs, relation)["ridge"]
    (path,) = (one["path"] for one in paths if pair_name(one) == relation)
    return path[0], next(point for point in path if point["ridge"] == chosen)


def above_control(name: str, wanted: bool = True) -> Rule:
    """Return the rule: r of a pair exceeds that of its control, q < .05; or does not."""

    def check(runs: Runs) -> tuple[bool, str]:
        found = pair(runs, name)
        r, control = found["label_mean"], found["control_label_mean"]
        return exceeds_control(found) is wanted, f"{r:.2f}, control {control:.2f}"

    return check


def ridge_helps(runs: Runs) -> tuple[bool, str]:
    """Return whether Hit@1 is higher at the chosen ridge than without one."""
    hits = [point["influenced"]["1"] for point in ridge_path(runs, "city->country")]
    return hits[1] > hits[0], f"{hits[0]:.2f} → {hits[1]:.2f}"


def beside_baselines(runs: Runs, relation: str) -> Mapping[str, Beside]:
    """Return how often LoRA edits generalize, beside their baselines: `against_baselines`."""
    found: Mapping[str, Beside] = runs[f"outcomes_{edit_run('lora', relation)}"]["beside"]
    return found


def gradient(runs: Runs) -> tuple[bool, str]:
    """Return whether W predicts changes of target logits better than a permuted W."""
    found = runs[edit_run("lora", "city->country")]["gradients"]["city->country"]
    r, permuted, whole = (
        found[f"{key}gradient_correlation{of}"]
        for key, of in (("", ""), ("permuted_", ""), ("", "_all_steps"))
    )
    return r > permuted, f"{r:.2f}, permuted {permuted:.2f}; over all steps {whole:.2f}"


def beats_baselines(runs: Runs) -> tuple[bool, str]:
    """Return whether more edits generalize than the stronger baseline is right, by reference."""
    by_edit, macro = beside_baselines(runs, "city->country").values()
    shown = "{:.0%}, constant {:.0%}, vocabulary {:.0%}; by edit {:.0%}, {:.0%}, {:.0%}"
    return macro.low > 0, shown.format(*macro[:3], *by_edit[:3])


def balanced(runs: Runs) -> list[Mapping[str, Any]]:
    """Return the runs of at most two edits per reference, one for each seed."""
    if not (parts := [run for name, run in runs.items() if name.startswith("balanced")]):
        raise KeyError("balanced1")
    return parts


def balanced_generalize(runs: Runs) -> tuple[bool, str]:
    """Return whether balanced edits generalize more often than baselines are right, each seed."""
    shares = [part["beside"]["edits"][:3] for part in balanced(runs)]
    holds = all(one > max(others) for one, *others in shares)
    means = map(common.mean_interval, zip(*shares, strict=True))
    return holds, "{} %, constant {}, vocabulary {}".format(*means)


class Beside(NamedTuple):
    """How often edits generalize, how often baselines are right, and the lead's 95 % interval."""

    generalized: float
    constant: float
    vocabulary: float
    low: float
    high: float


def against_baselines(*files: Path) -> dict[str, Beside]:
    """Return how often edits generalize beside the best constant answer and the vocabulary alone.

    Returns:
        Shares over ``edits``, and as means over distinct ``references``; the lead is that over the
        better baseline, its interval from samples of references.
    """
    cases = read_cases(*files)
    group, labels = factorize(cases["reference"])[0], cases["reference"].str.split("|")
    best = labels.explode().value_counts().index[0]
    n = np.bincount(group)
    near = cases["vocabulary_risk"] < 0
    hits = (cases["outcome"] == "generalized", labels.map(lambda right: best in right), near)
    shares = [np.bincount(group, one.astype(float)) / n for one in hits]
    weights = common.drawn(group, common.N_RESAMPLES, np.random.default_rng(0))
    found = {}
    for name, size in (("edits", n), ("references", np.ones(len(n)))):
        own, *others = (weights @ (one * size) / (weights @ size) for one in shares)
        lead = own - max(others, key=lambda samples: samples[0])
        all_shares = (float(one[0]) for one in (own, *others))
        found[name] = Beside(*all_shares, *common.interval(lead)[1:])
    return found


def precise(runs: Runs) -> tuple[bool, str]:
    """Return whether W pairs more labels right than the vocabulary, for most relations."""
    found = [one for one in runs["probe"]["pairs"] if pair_name(one) in RELATIONS]
    above = sum(one["excess_over_unembedding"]["low"] > 0 for one in found)
    city = pair(runs, "city->country")
    best = max(one["1"] for one in city["precision"]["baselines"].values())
    own = city["precision"]["influenced"]["1"]
    return (
        above > len(found) / 2,
        f"{above} of {len(found)} relations; city→country {own:.2f}, baseline {best:.2f}",
    )


def above_random_words(runs: Runs) -> tuple[bool, str]:
    """Return whether most pairs with a reference exceed random words on both sides."""
    related, others = (
        [one for one in runs["probe"]["pairs"] if (one["precision"] is None) == is_none]
        for is_none in (False, True)
    )
    above, above_others = (sum(map(exceeds_words, group)) for group in (related, others))
    city = pair(runs, "city->country")
    words = city["baselines"]["random_source_labels"]["mean"]
    return (
        above > len(related) / 2,
        f"{above} of {len(related)}, others {above_others} of {len(others)}; city→country "
        f"{city['label_mean']:.2f}, words {words:.2f}",
    )


def hallucinates(runs: Runs) -> tuple[bool, str]:
    """Return whether edits of an imprecise relation generalize at most like one answer for all."""
    share, constant, *_ = beside_baselines(runs, "X+1->X+2")["edits"]
    return bool(share <= constant), f"{share:.0%}, constant {constant:.0%}"


def leads(name: str, *others: str) -> Rule:
    """Return the rule: AUROC exceeds the best other's beyond the error, within a reference, too."""

    def check(runs: Runs) -> tuple[bool, str]:
        lows = []
        cells = []
        for within in (False, True):
            judged = [run for run in runs["lora_edits"] if run.is_judged(within)]
            area = mean_areas(judged, name, within)
            best = max((mean_areas(judged, one, within) for one in others), key=lambda x: x[0])
            _, low, high = common.interval(area - best)
            lows.append(low)
            cells.append(f"{area[0]:.2f}, {best[0]:.2f} ({low:+.2f}…{high:+.2f})")
        return min(lows) > 0, "; within ".join(cells).replace("-", "−")

    return check


def composed_shares(runs: Runs, *names: str) -> tuple[list[float], str, list[float]]:
    """Return how often new sources compose, the best baseline, and its shares, by seed."""
    parts = [runs[name] for name in names if name in runs]
    if not parts:
        raise KeyError(names[0])
    shares: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for run in (run for part in parts for run in part["runs"]):
        shares[run["mapping"], run["composed"]].append(run["generalized"])
    own = shares["reference", True]
    first, times = [part["mappings"][0] for part in parts], len(own) // len(parts)
    baselines = {
        "permuted": shares["permuted", True],
        "letters": shares["letters", True],
        "compose skipped": shares["reference", False],
        "most frequent": [one["majority"] for one in first] * times,
        "nearest label": [one["nearest"] for one in first if "nearest" in one] * times,
    }
    best = max(filter(baselines.get, baselines), key=lambda name: mean(baselines[name]))
    return own, best, baselines[best]


def composes(*names: str) -> Rule:
    """Return the rule: the reference mapping exceeds the best of its baselines with each seed."""

    def check(runs: Runs) -> tuple[bool, str]:
        own, best, others = composed_shares(runs, *names)
        holds = all(one > other for one, other in zip(own, others, strict=True))
        return holds, f"{mean(own):.0%}, {best} {mean(others):.0%} ({len(own)})"

    return check


def cutting(runs: Runs) -> tuple[bool, str]:
    """Return whether cutting the best match beats its control `TIMES_RANDOM` in three layers."""
    layers = [
        row for row in runs["feature_flow"]["deactivation_layers"] if row["method"] == "top-1"
    ]
    enough = [row for row in layers if row["times_random"] >= TIMES_RANDOM]
    least = min(row["times_random"] for row in layers)
    return len(enough) >= 3, f"{len(enough)} of {len(layers)} layers, at least {least:.1f} times"


def dimension_peak(runs: Runs) -> tuple[bool, str]:
    """Return whether the intrinsic dimension (2NN) peaks in the first half of the layers."""
    geometry = runs["token_geometry"]
    peak = peak_of(geometry["shuffles"][0]["dimension"]["2"])
    layers = geometry["layers"]
    return peak < len(layers) / 2, f"peak in layer {layers[peak]} of {layers[-1]}"


def shuffling(runs: Runs) -> tuple[bool, str]:
    """Return whether shuffled tokens have more dimensions than the text in most layers."""
    first, *_, last = (level["dimension"]["2"] for level in runs["token_geometry"]["shuffles"])
    higher = sum(b > a for a, b in zip(first, last, strict=True))
    return higher > len(first) / 2, f"in {higher} of {len(first)} layers"


FINDINGS: dict[str, Rule] = {
    RANDOM_WORDS: above_random_words,
    PRECISE: precise,
    EDITS: beats_baselines,
    R: above_control("city->country"),
    "ceo→company: r exceeds the control prompt's": above_control("ceo->company"),
    "X+1→X+2: r exceeds the control prompt's": above_control("X+1->X+2"),
    "city→color is no more correlated than the control": above_control("city->color", wanted=False),
    RIDGE: ridge_helps,
    "W predicts how an edit's first step changes target logits (gradient r)": gradient,
    "at most two edits per country generalize more often than baselines": balanced_generalize,
    "edits of X+1→X+2 do not": hallucinates,
    "−W of the reference forecasts better than its count": leads(WEIGHT, COUNT),
    FORECAST: leads(NEAREST, WEIGHT, COUNT),
    VOCABULARY: composes("ablation_grid"),
    "… with 20 labels and the shipped configuration": composes("ablation"),
    "… with all cities and the paper's number of epochs, too": composes(*PAPER_PROTOCOL),
    "cutting matched predecessors switches features off (3 times the control)": cutting,
    "intrinsic dimension peaks in early to middle layers": dimension_peak,
    "shuffled tokens have more dimensions (256 tokens, n2 = 2)": shuffling,
}
"""Rules by claim: do an LM's runs bear it out, by which numbers? KeyError if a run is missing."""


def read_runs(folder: Path) -> Runs:
    """Return the results of an LM's runs by name, without those that failed."""
    contents = {file.stem: common.read_numbers(file) for file in folder.glob("*.json")}
    runs = {
        name: content.get("results", content)
        for name, content in contents.items()
        if "error" not in content
    }
    for file in (*folder.glob("outcomes_*.csv"), *folder.glob("balanced*.csv")):
        if file.stem in runs:
            runs[file.stem]["beside"] = against_baselines(file)
    if files := sorted(folder.glob("balanced*.csv")):
        runs["pooled"] = against_baselines(*files)
    return runs


def of_grid(file: Path, lm: str) -> Runs:
    """Return a cell of the ablation's grid as a run: a plain network, centered, trained alone."""
    if not file.is_file():
        return {}
    where = "lm == @lm and width == 0 and per_target == 1 and epochs_factor == 1"
    where += " and kind == 'plain' and center and train == 'network'"
    rows = common.read_csv(file).query(where, local_dict={"lm": lm}).assign(composed=True)
    runs = rows.to_dict("records")
    reference = [run for run in runs if run["mapping"] == "reference"]
    return {"ablation_grid": {"runs": runs, "mappings": reference}} if runs else {}


def read_lms(results: Path) -> LMRuns:
    """Return the runs of each LM, with its LoRA edits."""
    found, grid = {}, results / "ablation_grid.csv"
    edits = read_edits(results)
    for lm in LMS:
        lora = [run for run in edits if (run.lm, run.method) == (lm, "lora")]
        of_edits = {"lora_edits": lora} if lora else {}
        found[lm] = {**read_runs(results / lm), **of_grid(grid, lm), **of_edits}
    return found


SUMMARY = (RANDOM_WORDS, PRECISE, FORECAST, EDITS, VOCABULARY)
"""Claims that README.md shows, in the order of its figure."""


def findings_table(lms: LMRuns) -> str:
    """Return what holds on which LM."""

    def cell(check: Rule, runs: Runs) -> str:
        holds, numbers = check(runs)
        return f"{'holds' if holds else 'FAILS'}: {numbers}"

    rows = [[claim, *cells(lms, partial(cell, check))] for claim, check in FINDINGS.items()]
    return common.markdown_table(["", *lms], rows)


def cells(lms: LMRuns, show: Callable[[Runs], str]) -> list[str]:
    """Return the cell of each LM, which says so if a run is missing."""
    shown = []
    for runs in lms.values():
        try:
            shown.append(show(runs))
        except KeyError:
            shown.append("not run")
    return shown


def of_paper(quantity: str, relation: str, lm: str = "llama-3.2-3b", spec: str = ".2f") -> str:
    """Return the paper's number of a relation; empty if it has none."""
    wanted = (quantity, relation, lm)
    numbers = (n for n in paper_numbers() if (n.quantity.name, n.relation, n.lm) == wanted)
    return next((f"{number.value:{spec}}" for number in numbers), "")


def lead_of(beside: Beside) -> str:
    """Return the lead over the better baseline in points, with its interval."""
    own, *others, low, high = beside
    points = (100 * one for one in (own - max(others), low, high))
    return "{:+.0f} ({:+.0f} to {:+.0f})".format(*points).replace("-", "−")


def edit_table(lms: LMRuns) -> str:
    """Return the outcomes of edits beside their baselines, over edits and references."""
    rows = []
    for method, relation, lm in product(("lora", "full"), EDITED, lms):
        found = lms[lm].get(f"outcomes_{edit_run(method, relation)}")
        if found is not None:
            name = common.arrow(relation) + (", all weights" if method == "full" else "")
            row = [
                name,
                of_paper("generalized", relation, spec=".0%"),
                lm,
                found["n_edits"],
                f"{found['hallucinated']:.0%}",
            ]
            for beside in found["beside"].values():
                row += [*(f"{share:.0%}" for share in beside[:3]), lead_of(beside)]
            rows.append(row)
    compared = ("generalized", "best constant", "vocabulary alone", "lead (95 %)")
    columns = [
        "",
        "paper, llama-3.2-3b",
        "LM",
        "edits",
        "hallucinated",
        *compared,
        *(f"macro: {name}" for name in compared),
    ]
    return common.markdown_table(columns, rows)


def balanced_table(lms: LMRuns) -> str:
    """Return generalized balanced edits beside baselines, and by reference, over seeds."""
    rows = []
    for lm, runs in lms.items():
        with suppress(KeyError):
            parts = balanced(runs)
            shares = zip(*(part["beside"]["edits"][:3] for part in parts), strict=True)
            macro = [part["macro"]["generalized"] for part in parts]
            edits = " + ".join(str(part["n_edits"]) for part in parts)
            pooled = runs["pooled"]["references"]
            own, _, near, *_ = pooled
            means = map(common.mean_interval, (*shares, macro))
            rows.append([lm, edits, *means, f"{own:.0%} / {near:.0%}", lead_of(pooled)])
    columns = [
        "LM",
        "edits",
        "generalized",
        "best constant",
        "vocabulary alone",
        "macro: generalized",
        "macro, all seeds: generalized / vocabulary",
        "macro, all seeds: lead (95 %)",
    ]
    return common.markdown_table(columns, rows)


def gradient_table(lms: LMRuns) -> str:
    """Return gradient r of the first step, beside its nulls, and of all steps."""
    rows = []
    for lm, relation in product(lms, EDITED):
        found = lms[lm].get(edit_run("lora", relation))
        if found is not None:
            own, other = (found["gradients"][name] for name in (relation, "city->color"))
            r, whole = "gradient_correlation", "gradient_correlation_all_steps"
            numbers = (own[r], own[f"permuted_{r}"], other[r], own[whole], other[whole])
            rows.append([lm, common.arrow(relation), found["n_edits"], *map(common.two, numbers)])
    columns = (
        "LM",
        "edits of",
        "edits",
        "first step",
        "permuted W",
        "city→color",
        "all ten steps",
        "city→color",
    )
    return common.markdown_table(columns, rows)


def paper_table(lms: LMRuns) -> str:
    """Return r of the pairs of the paper's tables 4 and 14: of the control, and less pet."""

    def show(runs: Runs, name: str) -> str:
        found = pair(runs, name, "paper_pairs")
        r = [found[f"{key}label_mean"] for key in ("", "control_", "partial_")]
        return f"{r[0]:.2f}, {r[1]:.2f}, {r[2]:.2f}" + ("" if exceeds_control(found) else " no")

    rows = [
        [common.arrow(name), of_paper("label_mean", name), *cells(lms, partial(show, name=name))]
        for name in PAPER_PAIRS
    ]
    return common.markdown_table(["", "paper, llama-3.2-3b", *lms], rows)


def tables(results: Path) -> dict[str, str]:
    """Return the documents' tables by their markers."""
    lms = read_lms(results)
    flow = common.read_numbers(results / LMS[0] / "feature_flow.json")["results"]
    return {
        "findings": findings_table(lms),
        "real_precision": precision_table(list(LMS), results),
        "real_words": random_words_table(list(LMS), results),
        "real_remaining": remaining_table(list(LMS), results),
        "real_layers": layer_table(list(LMS), results),
        "paper_pairs": paper_table(lms),
        "real_edits": edit_table(lms),
        "real_balanced": balanced_table(lms),
        "real_gradients": gradient_table(lms),
        "real_nearest": nearest_table(results),
        "real_ablation": ablation_table(list(LMS), results),
        "flow_saes": sae_table(list(LMS), results),
        "flow_deactivation": deactivation_table(list(LMS), results),
        "flow_cuts": flow_cut_table(list(LMS), results),
        "flow_steering": steering_table(list(LMS), results),
        "flow_groups": feature_flow.shared(flow, 18),
        "flow_cosines": feature_flow.cosines(flow),
    }


def size_figure(results: Path) -> Any:
    """Draw Hit@1, 3 and 5 of city→country over the size of the LM."""
    found = [
        (
            runs["probe"]["lm"]["n_parameters"],
            *ridge_path(runs, "city->country"),
            max(x["1"] for x in pair(runs, "city->country")["precision"]["baselines"].values()),
        )
        for runs in read_lms(results).values()
        if "probe" in runs
    ]
    figure = common.new_figure(
        6.4,
        3.2,
        "Precision of W over the size of the LM: city → country",
        "Blue: the ridge that auto takes. Orange: the plain map. From below: Hit@1, 3 and 5. "
        "Grey: Hit@1 of the strongest baseline. Fitted on 1,000 subjects, 500 for the largest LM.",
    )
    axes = figure.subplots()
    for place, color in ((2, "C0"), (1, "C1")):
        for n, style in (("1", "-"), ("3", "--"), ("5", ":")):
            hits = [lm[place]["influenced"][n] for lm in found]
            axes.plot([lm[0] for lm in found], hits, f"{style}o", color=color, markersize=3)
    axes.plot([lm[0] for lm in found], [lm[3] for lm in found], "-o", color="grey", markersize=3)
    axes.set_xscale("log")
    axes.set_xticks([lm[0] for lm in found], [f"{lm[0] / 1e6:,.0f} M" for lm in found])
    axes.minorticks_off()
    common.plain_axes(axes, "", "parameters", "Hit@N, influenced")
    axes.set_ylim(0, 1)
    return figure


def main() -> None:
    """Print the tables, put them into the documents, and draw the figures."""
    found = tables(REAL_LMS)
    print("\n\n".join(found.values()))
    common.place_tables(found)
    size_figure(REAL_LMS).savefig(REAL_LMS / "size.png")
    weights_figure(read_edits(REAL_LMS)).savefig(REAL_LMS / "weights.png")


if __name__ == "__main__":
    main()
