"""Probes and ablations of ``run.py`` as tables: a row for each pair, or each LM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame

from benchmarks.common import Estimate, arrow, mean_interval, read_numbers, record, scored
from benchmarks.real_lms.run import pair_name
from lincorr_lightning.results.paper import paper_numbers
from lincorr_lightning.results.table import column

LMS = ("smollm2-135m", "gemma-3-270m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")


def load(lm: str, run: str, results: Path) -> dict[str, Any]:
    """Return the results of a run; an empty mapping if it failed or was not made."""
    files = sorted((results / lm).glob(f"{run}.json*"))  # one of them, which may be compressed
    content: dict[str, Any] = read_numbers(files[0]) if files else {}
    return content.get("results", {})


def of_paper(quantity: str, relation: str) -> float | None:
    """Return the paper's number of a relation, of Llama 3.2 3B; None if it has none."""
    wanted = (quantity, relation, "llama-3.2-3b")
    numbers = (n for n in paper_numbers() if (n.quantity.name, n.relation, n.lm) == wanted)
    return next((number.value for number in numbers), None)


@dataclass(frozen=True)
class PairScores:
    """Scores of a pair, beside those of random words, the vocabulary and an unrelated prompt.

    Those of whole LMs have layer ``all``. `plain` is of the plain map, all other numbers are of the
    ridge that ``auto`` takes. `best` and `above_best` are of the strongest of the baselines that
    know the vocabulary alone, by answer, and not there in probes before version 0.3. `best_ridge`
    is of the ridge at which most source answers are right first, which is chosen on them.
    """

    lm: str = column("LM")
    pair: str = column()
    layer: str = column()
    is_known: bool = column("has a reference")
    r: float = scored("label_mean", "r")
    source_words: float = scored("baselines.random_source_labels.mean", "random source words")
    target_words: float = scored("baselines.random_target_labels.mean", "random target words")
    above_source_words: Estimate = scored("excess_over_random_labels", "above source words")
    above_target_words: Estimate = scored("excess_over_random_labels.target", "above target words")
    r_gaussian: float = scored("baselines.same_prompt_map", "r of W₀")
    cosine_gaussian: float = scored("decomposition.cosine", "cosine of W, W₀")
    n: int = scored("precision.influenced.n", "answers", "d")
    plain: float | None = column("right first: W, ridge 0", ".2f", None)
    best_ridge: float | None = column("W, best ridge", ".2f", None)
    right: float = scored("precision.influenced.1", "W, ridge auto")
    constant: float = scored("precision.baselines.constant.1", "best constant")
    cosine: float = scored("precision.baselines.unembedding.1", "nearest word, cosine")
    nearest_word: float = scored("precision.baselines.causal_inner_product.1", "nearest word")
    same_prompt: float = scored("precision.baselines.same_prompt.1", "same prompt")
    gaussian_states: float = scored("precision.baselines.gaussian_states.1", "W₀")
    best: str = scored("above_best_baseline.by_answer.baseline", "best baseline, by answer", "")
    above_best: Estimate = scored("above_best_baseline.by_answer", "W above it")
    by_answer: float = scored("precision.macro.1", "by answer: W")
    nearest_by_answer: float = scored(
        "precision.baselines.causal_inner_product.macro_1", "nearest word, by answer"
    )
    best_by_answer: float | None = column("best baseline's share", ".2f", None)
    partial: float = scored("partial_label_mean", "r given the wording")
    paper: float | None = column("paper, Llama 3.2 3B", ".2f", None)
    unrelated: float = scored("control_label_mean", "unrelated prompt")
    q: float = scored("q", "q, unrelated prompt", ".1g")

    def exceeds_words(self) -> bool:
        """Return whether r exceeds that of random words on both sides, 95 % each."""
        return self.above_source_words.low > 0 and self.above_target_words.low > 0


def pairs_of(lm: str, run: str, results: Path) -> Iterator[PairScores]:
    """Yield the scores of all pairs of a probe, those of single layers first.

    Runs of single layers are of commit cae749eb, the last one that reads the logit lens.
    """
    found = load(lm, run, results)
    paths = {pair_name(entry): entry["path"] for entry in found.get("ridge_path", ())}
    for pair in (*found.get("logit_lens", ()), *found.get("pairs", ())):
        name = pair_name(pair)
        shares = [step["influenced"]["1"] for step in paths.get(name, ())] or [None]
        precision = pair.get("precision")  # of pairs with a reference
        baselines = (precision or {}).get("baselines", {}).values()
        yield record(
            PairScores,
            pair,
            lm=lm,
            pair=arrow(name),
            layer=str(pair.get("layer", "all")),
            is_known=precision is not None,
            plain=shares[0],
            best_ridge=max(shares) if name in paths else None,
            best_by_answer=max((scores["macro_1"] for scores in baselines), default=None),
            paper=of_paper("label_mean", name),
        )


@dataclass(frozen=True)
class Paraphrases:
    """Scores of a pair over its wordings: means, and the lowest and highest of a wording."""

    lm: str = column("LM")
    pair: str = column()
    wordings: int = scored("templates.n", "wordings", "d")
    r: Estimate = scored("templates.label_mean", "r")
    above_words: Estimate = scored("templates.excess_over_random", "above random words")
    right: Estimate = scored("templates.influenced_1", "right first")
    above_best: Estimate = scored("templates.above_best_baseline", "above its best baseline")


def paraphrases(results: Path) -> Iterator[Paraphrases]:
    """Yield the scores of all pairs of all LMs that have several wordings."""
    for lm in LMS:
        for pair in load(lm, "paraphrases", results).get("pairs", ()):
            yield record(Paraphrases, pair, lm=lm, pair=arrow(pair_name(pair)))


@dataclass(frozen=True)
class Ablation:
    """Share of new sources whose target a network composes, means over seeds in percent."""

    protocol: str = column()
    lm: str = column("vocabulary")
    width: int = column(format="d")
    labels: str = column("cities / countries")
    seeds: int | None = column(format="d")
    reference: str = column()
    permuted: str = column()
    letters: str = column()
    unrestricted: str | None = column("reference, of all candidates", default=None)
    uncomposed: float | None = column("compose skipped", ".0%", None)
    nearest: float | None = column("nearest country", ".0%", None)
    majority: float | None = column("most frequent country", ".0%", None)


def ablations(results: Path) -> Iterator[Ablation]:
    """Yield what the vocabulary alone gives, by protocol and LM, and the paper's numbers."""
    for protocol, pattern in (("shipped", "ablation.json"), ("paper", "ablation_paper_?.json")):
        for lm in LMS:
            files = sorted((results / lm).glob(pattern))
            parts = [found for file in files if (found := load(lm, file.stem, results))]
            if not parts:
                continue
            first = parts[0]
            runs = DataFrame([run for part in parts for run in part["runs"]]).query("composed")
            of = dict(iter(runs.groupby("mapping")))
            nulls = DataFrame([part["mappings"][0] for part in parts])
            yield Ablation(
                protocol,
                lm,
                first["embedding"]["shape"][1],
                f"{first['n_source_labels']} / {first['n_target_labels']}",
                runs["seed"].nunique(),
                *(
                    mean_interval(of[m]["generalized"])
                    for m in ("reference", "permuted", "letters")
                ),
                mean_interval(of["reference"]["unrestricted"]),
                *(
                    nulls[key].astype(float).mean() if key in nulls else None
                    for key in ("uncomposed", "nearest", "majority")
                ),
            )
    yield Ablation("paper", "Llama-3-8B, as published", 4096, "", None, "98", "23", "37")  # table 7
