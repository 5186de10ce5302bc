"""Tables of the runs of ``run.py``, a row or more for each LM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import gt, lt
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from pandas import DataFrame

from benchmarks.common import (
    RESULTS,
    arrow,
    markdown_table,
    mean_interval,
    percent,
    read_csv,
    read_numbers,
    two,
)
from lincorr_lightning.flow.effects import mean_steering

REAL_LMS = RESULTS / "real_lms"
EDITED = ("city->country", "country->continent", "country->language", "ceo->company", "X+1->X+2")
# Pairs with a reference, whose precision is compared with what the vocabulary gives.
RELATIONS = (
    "city->country",
    "country->continent",
    "country->language",
    "landmark->country",
    "birthplace->country",
    "ceo->company",
    "X+1->X+2",
    "city->city_es",
)
BASELINES = ("constant", "unembedding", "same_prompt", "gaussian_states")
MOST_LISTED = 12

Found = Mapping[str, Any]
Rows = Iterable[Sequence[Any]]
RowsOf = Callable[[Found], Rows]
TableOf = Callable[[list[str], Path], str]


def load(lm: str, run: str, results: Path) -> dict[str, Any] | None:
    """Return the results of a run, or None if it failed or was not made."""
    file = results / lm / f"{run}.json"
    found: dict[str, Any] = read_numbers(file) if file.exists() else {}
    return found.get("results")


def edit_run(method: str, relation: str) -> str:
    """Return the name of a run of edits."""
    return f"{method}_{relation.replace('->', '_to_')}"


def edits_of(outcomes: str) -> tuple[str, str]:
    """Return method and relation of a run of outcomes, from its name."""
    _, method, relation = outcomes.split("_", 2)
    return method, relation.replace("_to_", "->")


def peak_of(curve: Sequence[float]) -> int:
    """Return where a curve over layers is highest."""
    return max(range(len(curve)), key=lambda i: curve[i])


def ablation_table(lms: list[str], results: Path) -> str:
    """Return what the vocabulary alone gives, for each protocol and mapping."""
    mappings, keys = ["reference", "permuted", "letters"], ["uncomposed", "nearest", "majority"]
    rows = []
    for protocol, pattern in (("shipped", "ablation"), ("paper", "ablation_paper_?")):
        for lm in lms:
            files = sorted((results / lm).glob(f"{pattern}.json"))
            parts = [found for file in files if (found := load(lm, file.stem, results))]
            if not parts:
                continue
            first = parts[0]
            labels = f"{first['n_source_labels']} / {first['n_target_labels']}"
            runs = DataFrame([run for found in parts for run in found["runs"] if run["composed"]])
            shares = runs.groupby("mapping")["generalized"].agg(mean_interval)[mappings]
            said = mean_interval(runs[runs["mapping"] == "reference"]["unrestricted"])
            nulls = DataFrame([found["mappings"][0] for found in parts], columns=keys)
            size = first["embedding"]["shape"][1], labels, runs["seed"].nunique()
            limits = map(percent, nulls.astype(float).mean())
            rows.append([protocol, lm, *size, *shares, said, *limits])
    paper = ["paper", "Llama-3-8B, as published", 4096, "", "", 98, 23, 37, *[""] * 4]  # table 7
    columns = ("protocol", "vocabulary", "width", "labels", "seeds", *mappings)
    more = ("reference, of all candidates", "compose skipped", "nearest", "most frequent")
    return markdown_table([*columns, *more], [*rows, paper])


def table_of(run: str, *columns: str, key: str = "lm") -> Callable[[RowsOf], TableOf]:
    """Make a table of a run, whose rows a function yields for each LM that has it with a key."""

    def decorate(rows_of: RowsOf) -> TableOf:
        def table(lms: list[str], results: Path) -> str:
            found = {lm: load(lm, run, results) for lm in lms}
            has_key = {lm: one for lm, one in found.items() if one and key in one}
            rows = [[lm, *row] for lm, one in has_key.items() for row in rows_of(one)]
            return markdown_table(("LM", *columns), rows)

        return table

    return decorate


def geometry_rows(found: Found) -> Rows:
    """Yield the peak of the intrinsic dimension, and its correlation with the loss over texts."""
    layers, levels = found["layers"], found["shuffles"]
    tests = {(r["layer"], r["n2"]): r for r in found["dimension_loss"] if r["shuffle"] == 0}
    for n2 in levels[0]["dimension"]:
        curve = levels[0]["dimension"][n2]
        peak = peak_of(curve)
        cells = [two(level["dimension"][n2][peak]) for level in levels]
        r, low, high = (two(tests[layers[peak], int(n2)][k]) for k in ("pearson", "low", "high"))
        clear = sum(test["pearson_p"] < 0.01 for at, test in tests.items() if at[1] == int(n2))
        yield [
            found["n_prompts"],
            n2,
            layers[0],
            two(curve[0]),
            layers[peak],
            " / ".join(cells),
            layers[-1],
            two(curve[-1]),
            f"{r} ({low} to {high})",
            clear,
        ]


def shuffling_rows(found: Found) -> Rows:
    """Yield what shuffling changes where the dimension of unshuffled texts peaks, and below."""
    layers, levels = found["layers"], found["shuffles"]
    peak = peak_of(levels[0]["dimension"]["2"])
    for level in levels:
        observed = (level["dimension"]["2"], level["overlap"]["2"], level["cosine_mean"])
        pairs = [(level["dimension"][n2], curve) for n2, curve in levels[0]["dimension"].items()]
        higher = " / ".join(f"{sum(map(gt, *pair))}" for pair in pairs)
        lower = sum(map(lt, level["overlap"]["2"], levels[0]["overlap"]["2"]))
        yield [
            level["shuffle"],
            two(level["loss"]),
            layers[peak],
            *(two(x[peak]) for x in observed),
            two(observed[-1][-1]),
            higher,
            lower,
        ]


GEOMETRY_TABLES = (  # of 256 tokens; shuffled_geometry.py has those of 1,024
    table_of(
        "token_geometry",
        "texts",
        "n2",
        "first layer",
        "ID",
        "peak layer",
        "ID, by level of shuffling",
        "last layer",
        "ID",
        "r of loss at the peak",
        "p < .01 in",
    )(geometry_rows),
    table_of(
        "token_geometry",
        "S",
        "loss",
        "layer",
        "ID (2NN)",
        "overlap (k = 2)",
        "cosine",
        "cosine, last layer",
        "layers with higher ID, by n2",
        "with lower overlap",
    )(shuffling_rows),
)


@table_of(
    "sparse_autoencoders",
    "hook points",
    "layers",
    "features",
    "explained variance",
    "L0",
    "dead",
    "loss recovered",
)
def sae_table(found: Found) -> Rows:
    """Yield the quality of the SAEs, mean and range over the layers."""
    for kind in ("residual", "mlp_out", "attention_out"):
        own = [each for each in found["hook_points"] if each["kind"] == kind]
        cells = []
        for key in ("explained_variance", "l0", "dead", "loss_recovered"):
            values = [each[key] for each in own]
            cells.append(f"{two(mean(values))} ({two(min(values))}–{two(max(values))})")
        layers = f"{own[0]['layer']}–{own[-1]['layer']}"
        yield [kind.replace("_", " "), layers, own[0]["n_features"], *cells]


METHODS = ("top-1", "top-5", "one-to-one")


@table_of("feature_flow", "layer", "cases", *METHODS)
def deactivation_table(found: Found) -> Rows:
    """Yield how often features are switched off by layer: matched, random, their ratio."""
    cells: dict[int, dict[str, Any]] = {}
    for each in found["deactivation_layers"]:
        times = each["times_random"]
        cells.setdefault(each["layer"], {"cases": each["n"]})[each["method"]] = (
            f"{percent(each['matched_success'])}, {percent(each['random_success'])}"
            + ("" if times is None else f" ({times:.1f} times)")
        )
    for layer, own in cells.items():
        yield [layer, own["cases"], *(own.get(method, "") for method in METHODS)]


@table_of(
    "feature_flow",
    "relation",
    "removed",
    "features",
    "r",
    "r, removed in the target alone",
    "r, refitted",
    "recall",
)
def flow_cut_table(found: Found) -> Rows:
    """Yield r of a relation with the features of its answers removed; of controls, with a range."""
    scores = ["fixed", "target_only", "refitted", "recall"]
    cuts = DataFrame(found["relation"]["cuts"]).groupby(["cut", "control"], sort=False)
    for (name, control), draws in cuts:
        name += f", {len(draws)} controls" * control
        cells = (
            two(x.mean()) + f" ({two(x.min())}–{two(x.max())})" * control if len(x) else ""
            for x in (draws[score].dropna() for score in scores)
        )
        relation = arrow(found["relation"]["relation"])
        yield [relation, name, draws["n_features"].iloc[0], *cells]


def steering_table(lms: list[str], results: Path) -> str:
    """Return what steering does by strategy and strength, means over answers, beside a control.

    Perplexities, which differ by orders of magnitude, have a geometric mean.
    """
    rows = []
    for file in (results / lm / "feature_flow.csv" for lm in lms):
        if not file.exists():
            continue
        points = read_csv(file)
        means = mean_steering(points.assign(perplexity=np.log(points["perplexity"])))
        means["perplexity"] = np.exp(means["perplexity"])
        for (strategy, strength), own in means.groupby(["strategy", "strength"], sort=False):
            pairs = [own[key] for key in ("behaviour", "coherence", "named")]
            cells = [f"{x:.3f}" for pair in pairs for x in pair]  # without and with control
            cells += [f"{x:,.0f}" for x in own["perplexity"]]
            n = own["n_answers"].iloc[0]
            rows.append([file.parent.name, strategy, f"{strength:g}", n, *cells])
    columns = (
        "LM",
        "strategy",
        "strength",
        "answers",
        "P(answer)",
        "control",
        "coherence",
        "control",
        "texts that name it",
        "control",
        "perplexity",
        "control",
    )
    return markdown_table(columns, rows)


def pair_name(scores: Found) -> str:
    """Return the name of a pair of a probe."""
    return f"{scores['source']}->{scores['target']}"


def of_relations(found: Found) -> list[dict[str, Any]]:
    """Return the scores of `RELATIONS` in a probe of all pairs."""
    by_name = {pair_name(pair): pair for pair in found["pairs"]}
    return [by_name[name] for name in RELATIONS]


def with_interval(one: Mapping[str, float]) -> str:
    """Return a mean and its interval."""
    return f"{two(one['mean'])} ({two(one['low'])} to {two(one['high'])})"


@table_of(
    "probe",
    "pair",
    "labels",
    "W, ridge 0",
    "W, auto",
    "constant",
    "unembedding",
    "same prompt",
    "Gaussian states",
    "auto above the best (95 %)",
    "macro: W, auto",
    "macro: best baseline",
    key="ridge_path",
)
def precision_table(found: Found) -> Rows:
    """Yield Hit@1 of W and of what knows the vocabulary alone, and the excess over the best."""
    plain = {pair_name(one): one["path"][0]["influenced"]["1"] for one in found["ridge_path"]}
    for pair in of_relations(found):
        precision, name = pair["precision"], pair_name(pair)
        baselines = precision["baselines"]
        yield [
            arrow(name),
            precision["influenced"]["n"],
            two(plain[name]),
            two(precision["influenced"]["1"]),
            *(two(baselines[name]["1"]) for name in BASELINES),
            with_interval(pair["excess_over_unembedding"]),
            two(precision["macro"]["1"]),
            two(max(one["macro_1"] for one in baselines.values())),
        ]


@table_of(
    "probe",
    "pair",
    "r",
    "control prompt",
    "random source words",
    "random target words",
    "excess, source side",
    "excess, target side",
    "r of W₀",
    "cosine of W, W₀",
    key="ridge_path",
)
def random_words_table(found: Found) -> Rows:
    """Yield r of relations beside that of random words, and the excess at 20 source labels."""
    for pair in of_relations(found):
        baselines, excess = pair["baselines"], pair["excess_over_random_labels"]
        yield [
            arrow(pair_name(pair)),
            two(pair["label_mean"]),
            two(pair["control_label_mean"]),
            *(two(baselines[f"random_{side}_labels"]["mean"]) for side in ("source", "target")),
            with_interval(excess),
            with_interval(excess["target"]),
            two(baselines["same_prompt_map"]),
            two(pair["decomposition"]["cosine"]),
        ]


def exceeds_words(pair: Found) -> bool:
    """Return whether r of a pair exceeds that of random words on both sides, 95 % each."""
    excess = pair["excess_over_random_labels"]
    return bool(excess["low"] > 0 and excess["target"]["low"] > 0)


@table_of(
    "probe",
    "pairs",
    "number",
    "above the control prompt",
    "above random words",
    "which",
    key="ridge_path",
)
def remaining_table(found: Found) -> Rows:
    """Yield how many of all pairs exceed random words on both sides, and which.

    A pair with a reference is one whose answers are known to follow from each other.
    """
    for name, has_reference in (("with a reference", True), ("others", False)):
        own = [pair for pair in found["pairs"] if (pair["precision"] is not None) == has_reference]
        above = [arrow(pair_name(pair)) for pair in own if exceeds_words(pair)]
        control = [p for p in own if p["label_mean"] > p["control_label_mean"] and p["q"] < 0.05]
        listed = ", ".join(above[:MOST_LISTED]) + ", …" * (len(above) > MOST_LISTED)
        yield [name, len(own), len(control), len(above), listed]


@table_of(
    "layers",
    "pair",
    "layer",
    "r",
    "random words",
    "excess, 20 labels",
    "Hit@1",
    "best baseline",
    "Hit@1 above it",
)
def layer_table(found: Found) -> Rows:
    """Yield r and Hit@1 of the logit lens of some layers, beside the strongest baselines."""
    rows = [*found["logit_lens"], *({"layer": "all", **pair} for pair in found["pairs"])]
    for row in sorted(rows, key=pair_name):
        best = max(one["1"] for one in row["precision"]["baselines"].values())
        yield [
            arrow(pair_name(row)),
            row["layer"],
            two(row["label_mean"]),
            two(row["baselines"]["random_source_labels"]["mean"]),
            with_interval(row["excess_over_random_labels"]),
            two(row["precision"]["influenced"]["1"]),
            two(best),
            with_interval(row["excess_over_unembedding"]),
        ]


TABLES = (
    precision_table,
    random_words_table,
    remaining_table,
    layer_table,
    ablation_table,
    *GEOMETRY_TABLES,
    sae_table,
    deactivation_table,
    flow_cut_table,
    steering_table,
)
