"""Results of the vocabulary ablation (paper, table 7): numbers, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from pandas import DataFrame

from lincorr_lightning.ablation.datamodule import PairedCorpus
from lincorr_lightning.ablation.figures import mappings_figure
from lincorr_lightning.ablation.networks import Shares
from lincorr_lightning.ablation.token_embedding import TokenEmbedding
from lincorr_lightning.results.paper import paper_numbers
from lincorr_lightning.results.plots import training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import (
    History,
    Mean,
    Table,
    clean,
    column,
    history_table,
    number,
    percent,
    short_name,
)

_SUMMARY = (
    "mapping",
    "source_learned",
    "generalized",
    "macro_generalized",
    "macro_causal_inner_product",
    "majority",
    "uncomposed",
    "paper",
)


@dataclass(frozen=True)
class MappingScores:
    """Shares of the new subjects under a mapping, means over seeds."""

    mapping: str
    n_seeds: int = column("seeds")
    source_learned: float = column("learned", ".0%")
    generalized: float = column(format=".0%")
    macro_generalized: float = column("by answer", ".0%")  #: Mean over the answers that are taught.
    std: float | None = column("std", ".0%")
    """Standard deviation of `generalized` over seeds; None of one seed."""
    uncomposed: float | None = column("without paired texts", ".0%")
    """`generalized` without the compose phase; None if it was not measured."""
    gain: float | None = column(format="+.0%")  #: `generalized` minus `uncomposed`.
    unrestricted: float = column("best of all candidates", ".0%")
    says_source: float = column("answers the source", ".0%")
    random: float = column("chance", ".0%")
    majority: float = column("constant answer", ".0%")
    nearest: float = column("nearest word, cosine", ".0%")
    macro_nearest: float = column("the same, by answer", ".0%")
    causal_inner_product: float = column("nearest word, all", ".0%")
    macro_causal_inner_product: float = column("nearest word", ".0%")
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
    tables = {table.name: table for table in _tables(corpus, lm, summary, runs, cases, curves)}
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
        tables=list(tables.values()),
        figures=list(_figures(relation, lm, corpus.n_new, tables)),
        lm=embedding.stored.info,
        verdict=[_sentence(relation, scores) for scores in summary],
    )


def _sentence(relation: str, scores: MappingScores) -> str:
    nulls = {
        "the nearest word": scores.macro_causal_inner_product,
        "one constant answer": scores.majority,
    }
    best = max(nulls, key=lambda name: nulls[name])
    seeds = f"mean of {scores.n_seeds} seeds" if scores.n_seeds > 1 else "one seed"
    without = ""
    if scores.uncomposed is not None:
        without = f"; without paired texts it gives {percent(scores.uncomposed)} of all"
    return clean(
        f"{relation}, {scores.mapping}: the network gives the right answer for "
        f"{percent(scores.macro_generalized)} of new subjects (by answer, {seeds}), {best} for "
        f"{percent(nulls[best])}{without}."
    )


def _tables(
    corpus: PairedCorpus,
    lm: str,
    summary: Sequence[MappingScores],
    runs: DataFrame,
    cases: Iterable[Mapping[str, str | bool]],
    history: History,
) -> Iterator[Table]:
    yield Table.of(
        "summary",
        summary,
        _SUMMARY,
        f"{corpus.labels.relation.name}: generalized from the vocabulary of {lm} alone, means over "
        "seeds",
        "By answer: mean over answers, as that of the nearest word in the head. Constant answer: "
        "the right one of most new subjects. Paper: vocabulary of Llama-3.",
        headline=True,
    )
    yield Table.of("mappings", summary, MappingScores, "Every score of every mapping")
    if history:
        yield history_table(history)
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


def _figures(relation: str, lm: str, n_new: int, tables: Mapping[str, Table]) -> Iterator[Figure]:
    caption = f"{relation}: share of the new subjects that are generalized, by mapping"
    options = {"relation": relation, "lm": lm, "n_new": n_new}
    mappings = [tables["mappings"]]
    yield Figure("generalization", caption, mappings_figure, mappings, options)
    if "history" in tables:
        options = {
            "title": f"{relation}: composed from the vocabulary of {lm}",
            "subtitle": "share of the new subjects (compose: of the paired texts)",
        }
        caption = f"{relation}: shares during training, by phase and mapping"
        yield Figure("training", caption, training_curves, [tables["history"]], options)
