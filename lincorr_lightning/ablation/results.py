"""Results of the vocabulary ablation (paper, table 7): numbers, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from pandas import DataFrame, concat

from lincorr_lightning.ablation.datamodule import PairedCorpus
from lincorr_lightning.ablation.networks import Shares
from lincorr_lightning.ablation.token_embedding import TokenEmbedding
from lincorr_lightning.results.paper import paper_numbers
from lincorr_lightning.results.plots import BLUE, History, bars, training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Mean, Table, column, number, short_name


@dataclass(frozen=True)
class MappingScores:
    """Shares of the new subjects under a mapping, means over seeds."""

    mapping: str
    n_seeds: int = column("seeds")
    source_learned: float = column("learned", ".0%")
    generalized: float = column(format=".0%")
    macro_generalized: float = column("macro", ".0%")  #: Mean over the answers that are taught.
    std: float | None = column("std", ".0%")
    """Standard deviation of `generalized` over seeds; None of one seed."""
    uncomposed: float | None = column("without paired texts", ".0%")
    """`generalized` without the compose phase; None if it was not measured."""
    gain: float | None = column(format="+.0%")  #: `generalized` minus `uncomposed`.
    unrestricted: float = column("best of all candidates", ".0%")
    says_source: float = column("answers the source", ".0%")
    random: float = column("chance", ".0%")
    majority: float = column("most frequent answer", ".0%")
    nearest: float = column("nearest word, cosine", ".0%")
    macro_nearest: float = column("the same, macro", ".0%")
    causal_inner_product: float = column("nearest word", ".0%")
    macro_causal_inner_product: float = column("nearest word, macro", ".0%")
    upper_bound: float = column("upper bound", ".0%")
    """The most that can be right for who knows the source answer only."""
    paper: float | None = column(format=".0%")  #: `generalized` with the vocabulary of Llama-3.


def ablation_results(
    corpus: PairedCorpus,
    embedding: TokenEmbedding,
    *,
    scores: Mapping[str, Shares],
    baselines: Mapping[str, Sequence[float]],
    history: History,
    cases: Iterable[Mapping[str, str | bool]],
    seconds: float | None,
) -> Results:
    """Build the results of a run.

    `scores` are those after the phase ``learn`` and, if that was measured, ``uncomposed``. The log
    keys of `history` are ``val/phase/quantity/mapping``.
    """
    plan = corpus.plan
    runs = DataFrame(
        {"mapping": mapping, "seed": seed, "composed": phase == "learn"}
        | {name: by_seed[s][m] for name, by_seed in shares.items()}
        for phase, shares in sorted(scores.items())
        for s, seed in enumerate(plan.seeds)
        for m, mapping in enumerate(plan.mappings)
    )
    relation, lm = corpus.labels.relation.name, short_name(embedding.stored.info["name_or_path"])
    summary = [
        _summarize(relation, mapping, runs, {name: shares[m] for name, shares in baselines.items()})
        for m, mapping in enumerate(plan.mappings)
    ]
    table_only = ("n_seeds", "std", "says_source", "paper")
    curves = {}
    for key, points in history.items():
        _, phase, quantity, mapping = key.split("/")
        curves[f"{phase}: {quantity.replace('_', ' ')}/{mapping}"] = points
    return Results(
        "vocabulary_ablation",
        values={
            **{k: v for k, v in asdict(summary[0]).items() if k not in table_only},
            "n": corpus.n_new,
            "n_paired": corpus.n_paired,
            "relation": relation,
            "mappings": list(map(asdict, summary)),
            "runs": runs.to_dict("records"),
            "n_source_labels": len(corpus.labels),
            "seconds": seconds,
            "n_target_labels": len(corpus.labels.target_domain),
            "embedding": {"key": embedding.stored.key, "shape": list(embedding.weight.shape)},
        },
        tables=list(_tables(corpus, lm, summary, runs, cases)),
        figures=list(_figures(relation, lm, corpus.n_new, DataFrame(summary), curves)),
        lm=embedding.stored.info,
    )


def _tables(
    corpus: PairedCorpus,
    lm: str,
    summary: Sequence[MappingScores],
    runs: DataFrame,
    cases: Iterable[Mapping[str, str | bool]],
) -> Iterator[Table]:
    yield Table.of(
        "summary",
        summary,
        headline=True,
        caption=f"{corpus.labels.relation.name}: generalized from the vocabulary of {lm} alone, "
        "means over seeds",
        note="Macro: mean over answers. Std: over seeds. Most frequent answer: the right answer of "
        "most new subjects. Upper bound: the most that can follow from the source answer. Paper: "
        "vocabulary of Llama-3.",
    )
    formats = dict.fromkeys(runs.columns[3:], ".1%")
    yield Table("runs", runs, "Shares of the new subjects, by network", formats=formats).sampled(
        "seed", **{share: Mean(share, where={"composed": True}) for share in formats}
    )
    yield Table.of("cases", cases, caption="New subjects of the first seed").sampled(
        "subject", "source_answer", generalized="generalized"
    )


def _summarize(
    relation: str, mapping: str, runs: DataFrame, baselines: Mapping[str, float]
) -> MappingScores:
    runs = runs[runs["mapping"] == mapping]
    table_7 = (n for n in paper_numbers() if n.place == "Table 7" and n.relation == relation)
    paper = {number.quantity.name: number.value for number in table_7}
    composed, uncomposed = runs[runs["composed"]], runs[~runs["composed"]]
    means = composed.drop(columns=["mapping", "seed", "composed"]).mean().to_dict()
    before = number(uncomposed["generalized"].mean())
    return MappingScores(
        mapping,
        len(composed),
        **means,
        std=number(composed["generalized"].std()),
        uncomposed=before,
        gain=None if before is None else means["generalized"] - before,
        **baselines,
        paper=paper.get(f"mapping_{mapping}"),
    )


def _figures(
    relation: str, lm: str, n_new: int, summary: DataFrame, curves: History
) -> Iterator[Figure]:
    n_seeds = summary["n_seeds"][0]
    spread = f"mean and std of {n_seeds} seeds" if n_seeds > 1 else "one seed"
    composed = summary.assign(share=summary["generalized"], phase="after paired texts")
    without = summary.assign(share=summary["uncomposed"], phase="without paired texts")
    frame = concat([composed, without.assign(std=None, paper=None)]).dropna(subset=["share"])
    draw_bars = partial(
        bars,
        frame,
        "mapping",
        "share",
        "phase",
        title=f"{relation}: generalized",
        subtitle=f"vocabulary of {lm}; {n_new} new subjects; right answer within the domain; "
        f"{spread}",
        error="std",
        marks={
            "majority": "most frequent answer",
            "random": "chance",
            "paper": "paper (Llama-3)",
            "causal_inner_product": "nearest word",
        },
        colours={"after paired texts": BLUE, "without paired texts": "#9DC3E6"},
    )
    draw_curves = partial(
        training_curves,
        curves,
        f"{relation}: composed from the vocabulary of {lm}",
        "share of the new subjects (compose: of the paired texts)",
    )
    caption = f"{relation}: share of the new subjects that are generalized, by mapping"
    yield Figure("generalization", caption, draw_bars)
    if curves:
        caption = f"{relation}: shares during training, by phase and mapping"
        yield Figure("training", caption, draw_curves)
