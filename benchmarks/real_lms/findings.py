"""What holds on which pretrained LM: tables of README.md and docs/.

    python -m benchmarks.real_lms.findings

reads the files of ``run.py``, puts the tables between their markers, and draws the paper's figure
4, precision of W over the size of the LM. Each finding is a rule on numbers, so that it can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from pandas import read_csv
from scipy.stats import binomtest

from benchmarks.common import (
    arrow,
    markdown_table,
    new_figure,
    place_tables,
    plain_axes,
    read_numbers,
)
from benchmarks.real_lms import forecast_tables
from benchmarks.real_lms.forecast_scores import ForecastRun, compare, interval, load
from benchmarks.real_lms.run import PAPER_PAIRS
from benchmarks.real_lms.tables import (
    EDITED,
    REAL_LMS,
    RISK_LIMITS,
    ablation_table,
    edit_run,
    peak_of,
    precision_table,
    random_words_table,
    risk_run,
)
from lincorr_lightning.results.paper import paper_numbers

LMS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
SIGNIFICANT = 0.05
TIMES_RANDOM = 3
ROUNDING = 2e-4
R = "city→country: r exceeds the control prompt's"
FEW_PAIRS = "most pairs, which are unrelated, do not exceed the control"
RIDGE = "a ridge raises Hit@1 of city→country"
RANDOM_WORDS = "r of related knowledge exceeds that of random words at the same prompts (20 labels)"
PRECISE = "W, ridge auto, pairs more labels right than the vocabulary alone does"
CONSTANT = "edits of city→country generalize more often than one answer for all, by country, too"
GENERALIZES = "edits of city→country generalize more often than random labels"
FORECAST = "a fit on other LMs and relations forecasts which edits generalize"
IN_CONTEXT = "edits whose reference the LM gives in context generalize twice as often"
REPAIR = "a repair halves hallucinated edits of answers not shown, and changes nothing else"
VOCABULARY = "from the vocabulary alone, cities compose to countries above permuted pairs"
N_SUBJECTS = 1000  # that every LM's ridge path has
RIDGE_ROWS = ("city->country", "country->continent", "country->language", "city->city_es",
              "ceo->company", "X+1->X+2")  # fmt: skip
Runs = Mapping[str, Mapping[str, Any]]
LMRuns = Mapping[str, Runs]


@dataclass(frozen=True)
class Finding:
    """A claim about LMs, and its rule.

    The rule returns whether an LM's runs bear the claim out, and the numbers that say so; it raises
    KeyError if a run is missing.
    """

    claim: str
    check: Callable[[Runs], tuple[bool, str]]


def pair(runs: Runs, name: str, run: str = "probe") -> Mapping[str, Any]:
    """Return the scores of a pair of a probe."""
    by_name = {f"{each['source']}->{each['target']}": each for each in runs[run]["pairs"]}
    scores: Mapping[str, Any] = by_name[name]
    return scores


def exceeds_control(scores: Mapping[str, Any]) -> bool:
    """Return whether r of a pair exceeds that of its control."""
    exceeds: bool = scores["label_mean"] > scores["control_label_mean"]
    return exceeds and scores["q"] < SIGNIFICANT


def ridge_path(runs: Runs, relation: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the points of the plain map and of ``auto`` at the most subjects.

    ``error`` is half the width of the 95 % interval of Hit@1 over samples of the subjects.
    """
    found = next(r for r in runs["ridge"]["relations"] if r["relation"] == relation)
    at = list(found["sizes"].values())[-1]
    # Samples repeat subjects, which costs precision: the interval's width is right, its place low.
    points = [
        {**point, "error": (interval["influenced"][1] - interval["influenced"][0]) / 2}
        for point, interval in zip(at["path"], found["intervals"], strict=True)
    ]
    return points[0], next(point for point in points if point["ridge"] == at["auto"])


def above_control(name: str) -> Callable[[Runs], tuple[bool, str]]:
    """Return the rule: r of a pair exceeds that of its control, q < .05."""

    def check(runs: Runs) -> tuple[bool, str]:
        found = pair(runs, name)
        r, control = found["label_mean"], found["control_label_mean"]
        return exceeds_control(found), f"{r:.2f}, control {control:.2f}"

    return check


def at_control(name: str) -> Callable[[Runs], tuple[bool, str]]:
    """Return the rule: r of an unrelated pair does not exceed that of its control."""

    def check(runs: Runs) -> tuple[bool, str]:
        holds, numbers = above_control(name)(runs)
        return not holds, numbers

    return check


def few_above_control(runs: Runs) -> tuple[bool, str]:
    """Return whether less than half of all pairs, most of them unrelated, exceed their control."""
    pairs = runs["probe"]["pairs"]
    above = sum(map(exceeds_control, pairs))
    return above < len(pairs) / 2, f"{above} of {len(pairs)} do"


def ridge_helps(runs: Runs) -> tuple[bool, str]:
    """Return whether the intervals of Hit@1 without a ridge and at the chosen one are apart."""
    plain, auto = ridge_path(runs, "city->country")
    hits = [point["influenced"]["1"] for point in (plain, auto)]
    apart = hits[1] - hits[0] > plain["error"] + auto["error"]
    return apart, f"{hits[0]:.2f} → {hits[1]:.2f} ± {auto['error']:.2f}"


def edits(runs: Runs, relation: str = "city->country", method: str = "lora") -> Mapping[str, Any]:
    """Return the outcomes of edits, of the run with the most of them."""
    name = edit_run(method, relation)
    return runs.get(f"outcomes_{name}") or runs[name]


def gradient(runs: Runs) -> tuple[bool, str]:
    """Return whether W predicts changes of target logits better than a permuted W."""
    found = runs[edit_run("lora", "city->country")]
    r = found["gradient_correlation"]
    permuted = found["gradients"]["city->country"]["permuted_gradient_correlation"]
    return r > permuted, f"{r:.2f}, permuted {permuted:.2f}"


def generalizes(runs: Runs) -> tuple[bool, str]:
    """Return whether more edits generalize than a random answer would."""
    found = edits(runs)
    return (
        found["generalized"] > 5 * found["random"],
        f"{found['generalized']:.0%}, random {found['random']:.0%}",
    )


def beats_constant(runs: Runs) -> tuple[bool, str]:
    """Return whether more edits generalize than one answer for all would, by reference, too."""
    found = edits(runs)["by_reference"]
    (share, constant), (macro, constant_macro) = (found[k] for k in ("shares", "macro"))
    return (
        bool(share > constant and macro > constant_macro),
        f"{share:.0%}, constant {constant:.0%}; by country {macro:.0%}, {constant_macro:.0%}",
    )


def by_reference(file: Path) -> dict[str, tuple[float, float]]:
    """Return the share of edits that generalized, and that of the best constant answer.

    ``macro``: as means over distinct sets of right answers, whose best constant is right for one.
    """
    cases = read_csv(file, keep_default_na=False, dtype={"reference": str})
    hits = cases["outcome"] == "generalized"
    references = cases["reference"].str.split("|")
    macro = hits.groupby(cases["reference"]).mean()
    answers = references.explode().value_counts()
    right = references.map(lambda labels: answers.index[0] in labels)
    return {
        "shares": (hits.mean(), right.mean()),
        "macro": (macro.mean(), right.groupby(cases["reference"]).mean().mean()),
    }


def precise(runs: Runs) -> tuple[bool, str]:
    """Return whether W pairs more labels right than the vocabulary, for most relations."""
    found = runs["relations"]["pairs"]
    above = sum(one["excess_over_unembedding"]["low"] > 0 for one in found)
    city = pair(runs, "city->country", "relations")
    best = max(one["1"] for one in city["precision"]["baselines"].values())
    own = city["precision"]["influenced"]["1"]
    return (
        above > len(found) / 2,
        f"{above} of {len(found)} relations; city→country {own:.2f}, baseline {best:.2f}",
    )


def above_random_words(runs: Runs) -> tuple[bool, str]:
    """Return whether r of 20 labels exceeds that of 20 random words, for most relations."""
    found = runs["relations"]["pairs"]
    above = sum(one["excess_over_random_labels"]["low"] > 0 for one in found)
    city = pair(runs, "city->country", "relations")
    words = city["baselines"]["random_source_labels"]["mean"]
    return (
        above > len(found) / 2,
        f"{above} of {len(found)} relations; city→country, all labels: {city['label_mean']:.2f}, "
        f"random words {words:.2f}",
    )


def hallucinates(runs: Runs) -> tuple[bool, str]:
    """Return whether edits of an imprecise relation generalize at most like a random answer."""
    found = edits(runs, "X+1->X+2")
    return (
        found["generalized"] <= 2 * found["random"],
        f"{found['generalized']:.0%}, random {found['random']:.0%}",
    )


def forecasts_better(name: str, than: str) -> Callable[[Runs], tuple[bool, str]]:
    """Return the rule: a forecaster's AUROC is higher, the interval of the difference above 0."""

    def check(runs: Runs) -> tuple[bool, str]:
        mean, other, low = compare(runs["lora_forecasts"], name, than)
        return low > 0, f"AUROC {mean:.2f}, {other:.2f}"

    return check


def forecasts_well(runs: Runs) -> tuple[bool, str]:
    """Return whether the probability's AUROC is .80 or more, its interval's low end .75."""
    own = runs["lora_forecasts"]
    area, low, high = interval([r.failed for r in own], [r.risk("probability") for r in own])
    right = np.mean([run.hits("optimizer_step").mean() for run in own])
    named = f"answer right {right:.0%}"
    return area >= 0.8 and low >= 0.75, f"AUROC {area:.2f} ({low:.2f}–{high:.2f}), {named}"


def known_generalize(runs: Runs) -> tuple[bool, str]:
    """Twice as many edits generalize where the LM gives the reference in context."""
    shares = []
    for run in runs["lora_forecasts"]:
        leading = run.logits("in_context").argmax(1)
        known = run.arrays["reference"][np.arange(len(leading)), leading]
        shares.append([1 - run.failed[known].mean(), 1 - run.failed[~known].mean()])
    known_share, unknown_share = np.mean(shares, 0)
    return known_share >= 2 * unknown_share, f"{known_share:.0%}, {unknown_share:.0%} otherwise"


def repair_halves(runs: Runs) -> tuple[bool, str]:
    """A repair by edits halves hallucinations of held-out answers, and changes nothing else.

    As many edits are learned (within 2 points), 5 % at most are right without being trained, as
    many other answers stay (within 5 points), and the perplexity rises by 3 % at most.
    """
    # Seed 0 chose the weights.
    repairs = [runs[name] for name in map("repair_edits_{}".format, (1, 2, 3)) if name in runs]
    if not repairs:
        raise KeyError("repair_edits_1")
    stages = [(run["held_out"]["before"], run["held_out"]["after"]) for run in repairs]
    # Stored shares are rounded: one on the border is within it.
    halved = all(
        2 * after["hallucinated"] <= before["hallucinated"] + ROUNDING for before, after in stages
    )
    as_before = all(
        abs(after["source_learned"] - before["source_learned"]) <= 0.02 + ROUNDING
        and all(
            after["controls"][name] >= x - 0.05 - ROUNDING for name, x in before["controls"].items()
        )
        for before, after in stages
    )
    right = max(after["right_before"] for _, after in stages)
    texts = max(run["perplexity"]["after"] / run["perplexity"]["before"] for run in repairs)
    shares = ", ".join(f"{a['hallucinated']:.0%} → {b['hallucinated']:.0%}" for a, b in stages)
    found = f"{shares}; right without an edit {right:.0%}; perplexity {texts - 1:+.1%}"
    holds = halved and as_before and right <= 0.05 and texts <= 1.03
    return holds, found.replace("-", "−")


def vocabulary(lower: str) -> Callable[[Runs], tuple[bool, str]]:
    """Return the rule: the reference mapping generalizes better than another one."""

    def check(runs: Runs) -> tuple[bool, str]:
        shares = {one["mapping"]: one for one in runs["ablation"]["mappings"]}
        (a, a_std), (b, b_std) = (
            (shares[name]["generalized"], shares[name]["std"]) for name in ("reference", lower)
        )
        return a - b > a_std + b_std, f"{a:.0%}, {lower} {b:.0%}"

    return check


def letters_above_permuted(runs: Runs) -> tuple[bool, str]:
    """Return whether permuted pairs are the worst mapping, as in the paper."""
    shares = {one["mapping"]: one["generalized"] for one in runs["ablation"]["mappings"]}
    letters, permuted = shares["letters"], shares["permuted"]
    return letters > permuted, f"letters {letters:.0%}, permuted {permuted:.0%}"


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


def closeness(runs: Runs) -> tuple[bool, str]:
    """Return whether subjects have the same neighbors under the prompts of correlated pairs."""
    test = next(
        test
        for test in runs["knowledge_geometry"]["tests"]
        if (test["closeness"], test["setting"]) == ("overlap", "k=10")
        and (test["against"], test["given"]) == ("r", "wording")
    )
    rho, p = test["spearman"], test["p"]
    return rho > 0 and p < SIGNIFICANT, f"ρ {rho:.2f}, p {p:.4f}"


FINDINGS = (
    Finding(RANDOM_WORDS, above_random_words),
    Finding(PRECISE, precise),
    Finding(CONSTANT, beats_constant),
    Finding(R, above_control("city->country")),
    Finding("ceo→company: r exceeds the control prompt's", above_control("ceo->company")),
    Finding("X+1→X+2: r exceeds the control prompt's", above_control("X+1->X+2")),
    Finding("city→color is no more correlated than the control", at_control("city->color")),
    Finding(FEW_PAIRS, few_above_control),
    Finding(RIDGE, ridge_helps),
    Finding("W predicts how an edit's first step changes target logits (gradient r)", gradient),
    Finding(GENERALIZES, generalizes),
    Finding("edits of X+1→X+2 do not", hallucinates),
    Finding(
        "W of ridge auto forecasts outcomes better than the plain W",
        forecasts_better("map_auto", "map_0"),
    ),
    Finding(
        "a step of the optimizer forecasts them better than GradSim",
        forecasts_better("optimizer_step", "gradient_similarity"),
    ),
    Finding(FORECAST, forecasts_well),
    Finding(IN_CONTEXT, known_generalize),
    Finding(REPAIR, repair_halves),
    Finding(VOCABULARY, vocabulary("permuted")),
    Finding("… and above letters", vocabulary("letters")),
    Finding("permuted pairs are the worst mapping, as in the paper", letters_above_permuted),
    Finding("correlated prompts have the same 10 neighbors, wording partialled out", closeness),
    Finding("cutting matched predecessors switches features off (3 times the control)", cutting),
    Finding("intrinsic dimension peaks in early to middle layers", dimension_peak),
    Finding("shuffled tokens have more dimensions", shuffling),
)


def read_runs(folder: Path) -> Runs:
    """Return the results of an LM's runs by name, without those that failed."""
    contents = {file.stem: read_numbers(file) for file in folder.glob("*.json")}
    runs = {
        name: content.get("results", content)
        for name, content in contents.items()
        if "error" not in content
    }
    for file in folder.glob("outcomes_*.csv"):
        if file.stem in runs:
            runs[file.stem]["by_reference"] = by_reference(file)
    return runs


def read_lms(results: Path, forecast_runs: Sequence[ForecastRun] = ()) -> LMRuns:
    """Return the runs of each LM, with the forecasts of its LoRA edits."""
    found = {}
    for lm in LMS:
        about = [r for r in forecast_runs if (r.lm, r.method) == (lm, "lora") and r.is_judged]
        found[lm] = {**read_runs(results / lm), **({"lora_forecasts": about} if about else {})}
    return found


SUMMARY = (RANDOM_WORDS, PRECISE, CONSTANT, FORECAST, REPAIR, VOCABULARY)
"""Claims that README.md shows."""


def findings_table(lms: LMRuns, claims: Sequence[str] = ()) -> str:
    """Return what holds on which LM; of some claims, or of all."""

    def cell(finding: Finding) -> Callable[[Runs], str]:
        def show(runs: Runs) -> str:
            holds, numbers = finding.check(runs)
            return f"{'holds' if holds else 'FAILS'}: {numbers}"

        return show

    rows = [
        [finding.claim, *cells(lms, cell(finding))]
        for finding in FINDINGS
        if not claims or finding.claim in claims
    ]
    return markdown_table(["", *lms], rows)


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


def ridge_table(lms: LMRuns) -> str:
    """Return Hit@1 of W without a ridge, and with the one that ``auto`` takes."""

    def show(runs: Runs, relation: str) -> str:
        plain, auto = ridge_path(runs, relation)
        hits = [point["influenced"]["1"] for point in (plain, auto, auto["permuted"])]
        return f"{hits[0]:.2f} → {hits[1]:.2f} ± {auto['error']:.2f}, {hits[2]:.2f}"

    rows = [
        [arrow(relation), of_paper("influenced_1", relation, "llama-3-8b"),
         *cells(lms, partial(show, relation=relation))]
        for relation in RIDGE_ROWS
    ]  # fmt: skip
    sizes = cells(lms, lambda runs: f"{int(list(runs['ridge']['relations'][0]['sizes'])[-1]):,}")
    return markdown_table(["", "paper, llama-3-8b", *lms], [["subjects", "10,000", *sizes], *rows])


def edit_table(lms: LMRuns) -> str:
    """Return the outcomes of edits: generalized, hallucinated, a random answer."""

    def show(runs: Runs, relation: str, method: str) -> str:
        found = edits(runs, relation, method)
        shares = [found[name] for name in ("generalized", "hallucinated", "random")]
        return f"{', '.join(f'{share:.0%}' for share in shares)} ({found['n_edits']} edits)"

    rows = [
        [arrow(relation) + what, of_paper("generalized", relation, spec=".0%"),
         *cells(lms, partial(show, relation=relation, method=method))]
        for method, what in (("lora", ""), ("full", ", all weights"))
        for relation in EDITED
        if any(f"outcomes_{edit_run(method, relation)}" in runs for runs in lms.values())
    ]  # fmt: skip
    return markdown_table(["", "paper, llama-3.2-3b", *lms], rows)


def paper_table(lms: LMRuns) -> str:
    """Return r of the pairs of the paper's tables 4 and 14: of the control, and less pet."""

    def show(runs: Runs, name: str) -> str:
        found = pair(runs, name, "paper_pairs")
        r = [found[f"{key}label_mean"] for key in ("", "control_", "partial_")]
        return f"{r[0]:.2f}, {r[1]:.2f}, {r[2]:.2f}" + ("" if exceeds_control(found) else " no")

    rows = [
        [arrow(name), of_paper("label_mean", name),
         *cells(lms, partial(show, name=name))]
        for name in PAPER_PAIRS
    ]  # fmt: skip
    return markdown_table(["", "paper, llama-3.2-3b", *lms], rows)


def risk_table(lms: LMRuns) -> str:
    """Return outcomes of trainings with and without the edits above a risk.

    Intervals are Wilson's, of 95 %.
    """
    rows = []
    for lm, runs in lms.items():
        for limit in RISK_LIMITS:
            found = runs.get(risk_run(limit))
            if found is None:
                continue
            n = found["n_edits"]
            counts = [round(found[x] * n) for x in ("source_learned", "generalized",
                                                    "hallucinated")]  # fmt: skip
            cells = [f"{counts[0] / n:.0%}"]
            for count in counts[1:]:
                low, high = binomtest(count, n).proportion_ci(method="wilson")
                cells.append(f"{count}: {count / n:.0%} ({low:.0%}–{high:.0%})")
            name = "none" if limit is None else f"{limit:g}"
            rows.append([lm, name, n, *cells])
    columns = ("LM", "max_risk", "edits", "learned", "generalized", "hallucinated")
    return markdown_table(columns, rows)


def tables(results: Path, forecast_runs: Sequence[ForecastRun]) -> dict[str, str]:
    """Return the documents' tables by their markers."""
    lms = read_lms(results, forecast_runs)
    return {
        "summary": findings_table(lms, SUMMARY),
        "findings": findings_table(lms),
        "real_precision": precision_table(list(LMS), results),
        "real_words": random_words_table(list(LMS), results),
        "paper_pairs": paper_table(lms),
        "real_ridge": ridge_table(lms),
        "real_edits": edit_table(lms),
        **forecast_tables.tables(forecast_runs, results),
        "real_risk": risk_table(lms),
        "real_ablation": ablation_table(list(LMS), results),
    }


def size_figure(results: Path) -> Any:
    """Draw Hit@1, 3 and 5 of city→country over the size of the LM, from as many subjects each."""
    found = []
    for runs in read_lms(results).values():
        if "ridge" in runs and "probe" in runs:
            relation = next(r for r in runs["ridge"]["relations"] if r["relation"] == RIDGE_ROWS[0])
            at = relation["sizes"][str(N_SUBJECTS)]
            auto = next(point for point in at["path"] if point["ridge"] == at["auto"])
            found.append((runs["probe"]["lm"]["n_parameters"], at["path"][0], auto))
    figure = new_figure(
        6.4,
        3.2,
        "Precision of W over the size of the LM: city → country",
        "Blue: the ridge that auto takes. Orange: the plain map. From below: Hit@1, 3 and 5. "
        f"{N_SUBJECTS:,} subjects of each LM.",
    )
    axes = figure.subplots()
    for place, color, label in ((2, "C0", "auto"), (1, "C1", "plain")):
        for n, style in (("1", "-"), ("3", "--"), ("5", ":")):
            axes.plot(
                [lm[0] for lm in found],
                [lm[place]["influenced"][n] for lm in found],
                color=color, linestyle=style, marker="o", markersize=3, label=f"{label}, Hit@{n}",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xticks([lm[0] for lm in found], [f"{lm[0] / 1e6:,.0f} M" for lm in found])
    axes.minorticks_off()
    plain_axes(axes, "", "parameters", "Hit@N, influenced")
    axes.set_ylim(0, 1)
    return figure


def main(output: str = str(REAL_LMS)) -> None:
    """Print the tables, put them into the documents, and draw the figures.

    Args:
        output: Folder of the results.
    """
    forecast_runs = load(Path(output))  # fits the probabilities
    found = tables(Path(output), forecast_runs)
    print("\n\n".join(found.values()))
    place_tables(found)
    size_figure(Path(output)).savefig(Path(output) / "size.png")
    forecast_tables.reliability_figure(forecast_runs).savefig(Path(output) / "reliability.png")


if __name__ == "__main__":
    auto_cli(main)
