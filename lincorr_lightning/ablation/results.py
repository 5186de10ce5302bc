"""Results of the vocabulary ablation (paper, table 7): numbers, tables and figures.

Imported at the end of a run only, since it takes pandas and matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from matplotlib.figure import Figure as MatplotlibFigure
from pandas import DataFrame, concat

from lincorr_lightning.ablation.batches import PairedCorpus
from lincorr_lightning.ablation.paired_texts import COLUMNS
from lincorr_lightning.ablation.scores import Case, RunScores
from lincorr_lightning.ablation.token_embedding import TokenEmbedding
from lincorr_lightning.results.plots import History, bars, training_curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import BLUE, short_name
from lincorr_lightning.results.table import Table, column

PAPER: Mapping[str, Mapping[str, float]] = {
    "city->country": {"reference": 0.9766, "permuted": 0.2266, "letters": 0.3672},
    "country->continent": {"reference": 0.7812},
    "ceo->company": {"reference": 0.5859},
    "X+1->X+2": {"reference": 0.0938},
}
"""Table 7 of the paper: generalized shares with the vocabulary of Llama-3."""

_PANELS = {
    "uncomposed": ("source_learned", "generalized"),
    "compose": ("source_learned", "target_learned"),
    "learn": ("source_learned", "generalized"),
}


@dataclass(frozen=True)
class MappingScores:
    """Shares of the new subjects under a mapping, means over seeds."""

    mapping: str
    n_seeds: int = column("seeds")
    source_learned: float = column("learned", ".0%")
    generalized: float = column(format=".0%")
    std: float | None = column("std", ".0%")
    """Standard deviation of `generalized` over seeds; None of one seed."""

    uncomposed: float | None = column("without paired texts", ".0%")
    """`generalized` without the compose phase; None if it was not measured."""

    gain: float | None = column(format="+.0%")
    """`generalized` minus `uncomposed`."""

    unrestricted: float = column("best of all candidates", ".0%")
    says_source: float = column("answers the source", ".0%")
    random: float = column("chance", ".0%")
    majority: float = column("most frequent answer", ".0%")
    paper: float | None = column(format=".0%")
    """`generalized` with the vocabulary of Llama-3."""


def ablation_results(
    corpus: PairedCorpus,
    embedding: TokenEmbedding,
    *,
    composed: Sequence[RunScores],
    uncomposed: Sequence[RunScores],
    baselines: Mapping[str, Sequence[float]],
    history: History,
    cases: Iterable[Case],
    seconds: float,
) -> Results:
    """Build the results of a run.

    Args:
        corpus: The texts.
        embedding: The token embedding.
        composed: Scores of each network after both phases.
        uncomposed: Scores without the compose phase; empty if it was not measured.
        baselines: Shares that are right without a network, by name and mapping.
        history: (step, share) pairs by log key, ``val/phase/quantity/mapping``.
        cases: What the networks answer.
        seconds: Duration of the training.
    """
    relation = corpus.labels.relation.name
    lm, n_seeds = short_name(embedding.name_or_path), len(corpus.seeds)
    runs = [*composed, *uncomposed]
    summary = [
        _summarize(relation, mapping, composed, uncomposed,
                   {name: shares[m] for name, shares in baselines.items()})
        for m, mapping in enumerate(corpus.mappings)
    ]  # fmt: skip
    table = Table.of(
        "summary",
        summary,
        caption=f"{relation}: generalized from the vocabulary of {lm} alone, means over seeds",
        note="Std: over seeds. Most frequent answer: the right answer of most new subjects. Paper: "
        "vocabulary of Llama-3.",
        headline=True,
    )
    panels = {
        f"{phase}: {quantity.replace('_', ' ')}": [
            f"val/{phase}/{quantity}/{mapping}" for mapping in corpus.mappings
        ]
        for phase, quantities in _PANELS.items()
        for quantity in quantities
        if f"val/{phase}/{quantity}/{corpus.mappings[0]}" in history
    }
    figures = [
        Figure(
            "generalization",
            f"{relation}: share of the new subjects that are generalized, by mapping",
            partial(
                _generalization_bars, table.frame, f"{relation}: generalized",
                f"vocabulary of {lm}; {corpus.n_new} new subjects; right answer within the domain; "
                + (f"mean and std of {n_seeds} seeds" if n_seeds > 1 else "one seed"),
            ),
        )
    ]  # fmt: skip
    if panels:
        curves = {
            f"{title}/{mapping}": history[key]
            for title, keys in panels.items()
            for mapping, key in zip(corpus.mappings, keys, strict=True)
        }
        figures.append(
            Figure(
                "training",
                f"{relation}: shares during training, by phase and mapping",
                partial(
                    training_curves, curves, f"{relation}: composed from the vocabulary of {lm}",
                    "share of the new subjects (compose: of the paired texts)",
                ),
            )
        )  # fmt: skip
    first = asdict(summary[0])
    for key in ("n_seeds", "std", "says_source", "paper"):
        del first[key]  # of the table only
    return Results(
        "vocabulary_ablation",
        values={
            **first,
            "n": corpus.n_new,
            "mappings": list(map(asdict, summary)),
            "runs": list(map(asdict, runs)),
            "relation": relation,
            "n_paired": corpus.n_paired,
            "n_source_labels": len(corpus.labels),
            "n_target_labels": len(corpus.labels.target_domain),
            "seconds": round(seconds, 2),
            "embedding": {"key": embedding.key, "shape": list(embedding.weight.shape)},
        },
        tables=[
            table,
            Table.of("runs", runs, caption="Shares of the new subjects, by network"),
            Table.of("cases", cases, Case, caption="New subjects of the first seed"),
            Table.of(
                "texts",
                corpus.texts[0].rows(corpus.labels),
                COLUMNS,
                caption="Texts of the first seed, a valid data.texts_file",
            ),
        ],
        figures=figures,
        lm=embedding.info,
        charts={relation: panels},
    )


def _summarize(
    relation: str,
    mapping: str,
    composed: Sequence[RunScores],
    uncomposed: Sequence[RunScores],
    baselines: Mapping[str, float],
) -> MappingScores:
    """Return means and standard deviation over seeds."""
    own = [asdict(scores) for scores in composed if scores.mapping == mapping]
    without = [scores.generalized for scores in uncomposed if scores.mapping == mapping]
    shares = {
        name: float(np.mean([scores[name] for scores in own]))
        for name in ("source_learned", "generalized", "unrestricted", "says_source")
    }
    before = float(np.mean(without)) if without else None
    return MappingScores(
        mapping,
        len(own),
        **shares,
        std=float(np.std([s["generalized"] for s in own], ddof=1)) if len(own) > 1 else None,
        uncomposed=before,
        gain=None if before is None else shares["generalized"] - before,
        random=baselines["random"],
        majority=baselines["majority"],
        paper=PAPER.get(relation, {}).get(mapping),
    )


def _generalization_bars(summary: DataFrame, title: str, subtitle: str) -> MatplotlibFigure:
    """Draw a bar for each mapping, with and without the compose phase, beside the baselines."""
    composed = summary.assign(share=summary["generalized"], phase="after paired texts")
    without = summary.assign(share=summary["uncomposed"], phase="without paired texts").assign(
        std=None, paper=None
    )
    return bars(
        concat([composed, without]).dropna(subset=["share"]), "mapping", "share", "phase",
        title=title, subtitle=subtitle, error="std",
        marks={"majority": "most frequent answer", "random": "chance", "paper": "paper (Llama-3)"},
        colours={"after paired texts": BLUE, "without paired texts": "#9DC3E6"},
    )  # fmt: skip
