"""Tables of the runs of ``run.py``, a row or more for each LM."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.common import RESULTS, arrow, markdown_table, percent, read_numbers, two

REAL_LMS = RESULTS / "real_lms"
EDITED = ("city->country", "country->continent", "country->language", "ceo->company", "X+1->X+2")
BASELINES = ("constant", "unembedding", "same_prompt", "gaussian_states")
RISK_RELATION, RISK_LIMITS = "landmark->country", (None, 0.5)


def load(lm: str, run: str, results: Path) -> dict[str, Any] | None:
    """Return the results of a run, or None if it failed or was not made."""
    file = results / lm / f"{run}.json"
    content = read_numbers(file) if file.exists() else {}
    found: dict[str, Any] | None = content.get("results")
    return found


def made(lms: list[str], run: str, results: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the LMs that have a run, with its results."""
    for lm in lms:
        found = load(lm, run, results)
        if found is not None:
            yield lm, found


def edit_run(method: str, relation: str) -> str:
    """Return the name of a run of edits."""
    return f"{method}_{relation.replace('->', '_to_')}"


def risk_run(limit: float | None) -> str:
    """Return the name of a run of edits whose forecast risk is limited."""
    return "max_risk_none" if limit is None else f"max_risk_{limit:g}"


def edits_of(outcomes: str) -> tuple[str, str]:
    """Return method and relation of a run of outcomes, from its name."""
    _, method, relation = outcomes.split("_", 2)
    return method, relation.replace("_to_", "->")


def peak_of(curve: Sequence[float]) -> int:
    """Return where a curve over layers is highest."""
    return max(range(len(curve)), key=lambda i: curve[i])


def ablation_table(lms: list[str], results: Path) -> str:
    """Return what the vocabulary alone gives, for each protocol and mapping."""
    mappings = ("reference", "permuted", "letters")
    rows = []
    for protocol, pattern in (("shipped", "ablation"), ("paper", "ablation_paper_?")):
        for lm in lms:
            files = sorted((results / lm).glob(f"{pattern}.json"))
            parts = [found for file in files if (found := load(lm, file.stem, results))]
            if not parts:
                continue
            first = parts[0]
            labels = f"{first['n_source_labels']} / {first['n_target_labels']}"
            row = [protocol, lm, first["embedding"]["shape"][1], labels]
            shares: dict[str, list[float]] = defaultdict(list)
            for run in (run for found in parts for run in found["runs"] if run["composed"]):
                shares[run["mapping"]].append(run["generalized"])
            row += [len(shares["reference"]), *(spread(shares[name]) for name in mappings)]
            frequent = mean(found["mappings"][0]["majority"] for found in parts)
            rows.append([*row, percent(frequent)])
    published = ("97.7%", "22.7%", "36.7%")  # table 7
    rows.append(["paper", "Llama-3-8B, as published", 4096, "", "", *published, ""])
    columns = ("protocol", "vocabulary", "width", "labels", "seeds", *mappings, "most frequent")
    return markdown_table(columns, rows)


def spread(shares: list[float]) -> str:
    """Return the mean of shares in percent, and their standard deviation if there are several."""
    deviation = f" ± {100 * stdev(shares):.0f}" if len(shares) > 1 else ""
    return percent(mean(shares)) + deviation


def geometry_table(lms: list[str], results: Path) -> str:
    """Return the peak of the intrinsic dimension, of unshuffled and of shuffled texts."""
    rows = []
    for lm, found in made(lms, "token_geometry", results):
        layers, levels = found["layers"], found["shuffles"]
        for n2 in levels[0]["dimension"]:
            curve = levels[0]["dimension"][n2]
            peak = peak_of(curve)
            cells = [two(level["dimension"][n2][peak]) for level in levels]
            rows.append([lm, found["n_prompts"], n2, layers[0], two(curve[0]), layers[peak],
                         " / ".join(cells), layers[-1], two(curve[-1])])  # fmt: skip
    columns = ("LM", "texts", "n2", "first layer", "ID", "peak layer",
               "ID, by level of shuffling", "last layer", "ID")  # fmt: skip
    return markdown_table(columns, rows)


def shuffling_table(lms: list[str], results: Path) -> str:
    """Return what shuffling changes where the dimension of unshuffled texts peaks, and below."""
    rows = []
    for lm, found in made(lms, "token_geometry", results):
        layers, levels = found["layers"], found["shuffles"]
        curve = levels[0]["dimension"]["2"]
        peak = peak_of(curve)
        tests = {
            row["layer"]: row
            for row in found["dimension_loss"]
            if (row["n2"], row["shuffle"]) == (2, 0)
        }
        for level in levels:
            own = tests.get(layers[peak]) if level["shuffle"] == 0 else None
            r = "" if own is None else f"{two(own['pearson'])} (p {own['pearson_p']:.4f})"
            at_peak = (level["dimension"]["2"], level["overlap"]["2"], level["cosine_mean"])
            numbers = [two(observed[peak]) for observed in at_peak]
            last = two(level["cosine_mean"][-1])
            rows.append([lm, level["shuffle"], two(level["loss"]), layers[peak], *numbers, last, r])
    columns = ("LM", "S", "loss", "layer", "ID (2NN)", "overlap (k = 2)", "cosine",
               "cosine, last layer", "r of log ID and log loss")  # fmt: skip
    return markdown_table(columns, rows)


def sae_table(lms: list[str], results: Path) -> str:
    """Return the quality of the SAEs, mean and range over the layers."""
    rows = []
    for lm, found in made(lms, "sparse_autoencoders", results):
        for kind in ("residual", "mlp_out", "attention_out"):
            own = [each for each in found["hook_points"] if each["kind"] == kind]
            cells = []
            for key in ("explained_variance", "l0", "dead", "loss_recovered"):
                values = [each[key] for each in own]
                cells.append(f"{two(mean(values))} "
                             f"({two(min(values))}–{two(max(values))})")  # fmt: skip
            layers = f"{own[0]['layer']}–{own[-1]['layer']}"
            rows.append([lm, kind.replace("_", " "), layers, own[0]["n_features"], *cells])
    columns = ("LM", "hook points", "layers", "features", "explained variance", "L0",
               "dead", "loss recovered")  # fmt: skip
    return markdown_table(columns, rows)


def deactivation_table(lms: list[str], results: Path) -> str:
    """Return how often features are switched off by layer: matched, random, their ratio."""
    methods = ("top-1", "top-5", "one-to-one")
    rows = []
    for lm, found in made(lms, "feature_flow", results):
        cells: dict[int, dict[str, Any]] = {}
        for each in found["deactivation_layers"]:
            times = each["times_random"]
            cells.setdefault(each["layer"], {"cases": each["n"]})[each["method"]] = (
                f"{percent(each['matched_success'])}, {percent(each['random_success'])}"
                + ("" if times is None else f" ({times:.1f} times)")
            )
        rows += [
            [lm, layer, own["cases"], *(own.get(method, "") for method in methods)]
            for layer, own in cells.items()
        ]
    return markdown_table(("LM", "layer", "cases", *methods), rows)


def flow_cut_table(lms: list[str], results: Path) -> str:
    """Return r of a relation with the features of its answers removed, beside a control."""
    rows = []
    for lm, found in made(lms, "feature_flow_relation", results):
        for cut in found["relation"]["cuts"]:
            name = cut["cut"] + (", control" if cut["control"] else "")
            rows.append([lm, arrow(found["relation"]["relation"]), name,
                         cut["n_features"], *(two(cut[key]) for key in
                         ("fixed", "target_only", "refitted", "recall"))])  # fmt: skip
    columns = ("LM", "relation", "removed", "features", "r", "r, removed in the target alone",
               "r, refitted", "recall")  # fmt: skip
    return markdown_table(columns, rows)


def flow_pair_table(lms: list[str], results: Path) -> str:
    """Return how often the flows of two answers meet, beside pairs outside the reference."""
    rows = []
    for lm, found in made(lms, "feature_flow_relation", results):
        own = found["relation"]
        rows.append([lm, arrow(own["relation"]), own["n_reference_pairs"],
                     percent(own["shared_flow"]), own["n_other_pairs"],
                     percent(own["shared_flow_permuted"])])  # fmt: skip
    columns = ("LM", "relation", "pairs", "flows meet", "other pairs", "flows meet")
    return markdown_table(columns, rows)


def steering_table(lms: list[str], results: Path) -> str:
    """Return the best strength of each way to steer."""
    rows = []
    for lm, found in made(lms, "feature_flow_relation", results):
        for name, best in found["steering"].items():
            scores = (f"{best[key]:.4f}" for key in ("behaviour", "coherence", "score"))
            rows.append([lm, name, best["n_answers"], best["strength"], *scores])
    columns = ("LM", "steering", "answers", "best strength", "probability", "coherence", "score")
    return markdown_table(columns, rows)


def closeness_table(lms: list[str], results: Path) -> str:
    """Return rho over pairs of closeness and scores of the maps, and p by permutation."""
    shown = (("overlap", "k=10"), ("dimension_difference", "n2=8"), ("wording", ""))
    columns = (("r", None), ("r", "wording"), ("hit1", None))
    rows = []
    for lm, found in made(lms, "knowledge_geometry", results):
        for measure in shown:
            own = {
                (test["against"], test["given"]): f"{two(test['spearman'])} (p {test['p']:.3f})"
                for test in found["tests"]
                if (test["closeness"], test["setting"]) == measure
            }
            cells = (own.get(column, "") for column in columns)
            rows.append([lm, found["n_subjects"], " ".join(measure).strip(), *cells])
    heads = ("LM", "subjects", "over pairs", "ρ with r", "ρ with r, given wording", "ρ with Hit@1")
    return markdown_table(heads, rows)


def precision_table(lms: list[str], results: Path) -> str:
    """Return Hit@1 of W and of what knows the vocabulary alone, and the excess over the best."""
    rows = []
    for lm, found in made(lms, "relations", results):
        plain = {
            (one["source"], one["target"]): one["path"][0]["influenced"]["1"]
            for one in found["ridge_path"]
        }
        for pair in found["pairs"]:
            precision, excess = pair["precision"], pair["excess_over_unembedding"]
            baselines = precision["baselines"]
            best = max(one["macro_1"] for one in baselines.values())
            rows.append(
                [lm, arrow(f"{pair['source']}->{pair['target']}"), precision["influenced"]["n"],
                 two(plain[pair["source"], pair["target"]]), two(precision["influenced"]["1"]),
                 *(two(baselines[name]["1"]) for name in BASELINES),
                 f"{two(excess['mean'])} ({two(excess['low'])} to {two(excess['high'])})",
                 two(precision["macro"]["1"]), two(best)]
            )  # fmt: skip
    columns = (
        "LM", "pair", "labels", "W, ridge 0", "W, auto", "constant", "unembedding", "same prompt",
        "Gaussian states", "auto above the best (95 %)", "macro: W, auto", "macro: best baseline",
    )  # fmt: skip
    return markdown_table(columns, rows)


def random_words_table(lms: list[str], results: Path) -> str:
    """Return r of relations beside that of random words, and the excess at 20 source labels."""
    rows = []
    for lm, found in made(lms, "relations", results):
        for pair in found["pairs"]:
            baselines, excess = pair["baselines"], pair["excess_over_random_labels"]
            cells = (f"{two(one['mean'])} ({two(one['low'])} to {two(one['high'])})"
                     for one in (excess, excess["target"]))  # fmt: skip
            rows.append(
                [lm, arrow(f"{pair['source']}->{pair['target']}"), two(pair["label_mean"]),
                 two(pair["control_label_mean"]),
                 two(baselines["random_source_labels"]["mean"]),
                 two(baselines["random_target_labels"]["mean"]), *cells,
                 two(baselines["same_prompt_map"]), two(pair["decomposition"]["cosine"])]
            )  # fmt: skip
    columns = (
        "LM", "pair", "r", "control prompt", "random source words", "random target words",
        "excess, source side", "excess, target side", "r of W₀", "cosine of W, W₀",
    )  # fmt: skip
    return markdown_table(columns, rows)


TABLES = (
    precision_table, random_words_table,
    ablation_table, geometry_table, shuffling_table, sae_table, deactivation_table, flow_cut_table,
    flow_pair_table, steering_table, closeness_table,
)  # fmt: skip
