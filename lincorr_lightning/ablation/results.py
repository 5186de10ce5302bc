"""Results of the vocabulary ablation (paper, table 7)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from lincorr_lightning.ablation.batches import PairedCorpus
from lincorr_lightning.ablation.figures import generalization_bars
from lincorr_lightning.ablation.paired_texts import COLUMNS
from lincorr_lightning.ablation.scores import CASE_COLUMNS, Baselines, RunScores
from lincorr_lightning.ablation.token_embedding import TokenEmbedding
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.table import Column, Table
from lincorr_lightning.results.training_curves import History, training_curves

PAPER: Mapping[str, Mapping[str, float]] = {
    "city->country": {"reference": 0.9766, "permuted": 0.2266, "letters": 0.3672},
    "country->continent": {"reference": 0.7812},
    "ceo->company": {"reference": 0.5859},
    "X+1->X+2": {"reference": 0.0938},
}
"""Table 7 of the paper: generalized shares with the vocabulary of Llama-3."""

# Of the first mapping, at the top level of results.json.
_VALUES = (
    "mapping", "source_learned", "generalized", "random", "majority", "unrestricted", "uncomposed",
    "gain",
)  # fmt: skip
_SHARES = ("source_learned", "generalized", "unrestricted", "says_source")
_PANELS = {
    "uncomposed": ("source_learned", "generalized"),
    "compose": ("source_learned", "target_learned"),
    "learn": ("source_learned", "generalized"),
}
_SUMMARY = [
    Column("mapping"),
    Column("n_seeds", "seeds"),
    Column("source_learned", "learned", ".0%"),
    Column("generalized", format=".0%"),
    Column("std", "std", ".0%"),
    Column("uncomposed", "no compose", ".0%"),
    Column("gain", format="+.0%"),
    Column("unrestricted", "of all", ".0%"),
    Column("says_source", "source", ".0%"),
    Column("random", "chance", ".0%"),
    Column("majority", format=".0%"),
    Column("paper", format=".0%"),
]
_RUNS = [
    Column("mapping"), Column("seed"), Column("composed"),
    *(Column(name, format=".1%") for name in _SHARES),
]  # fmt: skip


def ablation_results(
    corpus: PairedCorpus,
    embedding: TokenEmbedding,
    settings: Mapping[str, Any],
    *,
    composed: Sequence[RunScores],
    uncomposed: Sequence[RunScores],
    baselines: Baselines,
    history: History,
    cases: Iterable[Sequence[object]],
    seconds: float,
) -> Results:
    """Build the results of a run.

    Args:
        corpus: The texts.
        embedding: The token embedding.
        settings: Hyper-parameters of the study and its data.
        composed: Scores of each network after both phases.
        uncomposed: Scores without the compose phase; empty if it was not measured.
        baselines: Shares that are right without a network.
        history: (step, share) pairs by log key, ``val/phase/quantity/mapping``.
        cases: Rows of `CASE_COLUMNS`.
        seconds: Duration of the training.
    """
    relation, lm = corpus.labels.relation.name, short_name(embedding.name_or_path)
    summary = _summarize(relation, corpus.mappings, composed, uncomposed, baselines)
    first = summary[0]
    runs = [
        {**asdict(scores), "composed": is_composed}
        for is_composed, part in ((True, composed), (False, uncomposed))
        for scores in part
    ]
    n_seeds = len(corpus.seeds)
    subtitle = (
        f"vocabulary of {lm}; {corpus.n_new} new subjects; right answer within the domain; "
        + (f"mean and standard deviation of {n_seeds} seeds" if n_seeds > 1 else "one seed")
    )
    figures = [
        Figure(
            "generalization",
            f"{relation}: share of the new subjects that are generalized, by mapping",
            partial(generalization_bars, summary, f"{relation}: generalized", subtitle),
        )
    ]
    panels = {
        f"{phase}: {quantity.replace('_', ' ')}": f"val/{phase}/{quantity}"
        for phase, quantities in _PANELS.items()
        for quantity in quantities
        if f"val/{phase}/{quantity}/{first['mapping']}" in history
    }
    if panels:
        curves = {
            f"{title}/{mapping}": history[f"{prefix}/{mapping}"]
            for title, prefix in panels.items()
            for mapping in corpus.mappings
        }
        figures.append(
            Figure(
                "training",
                f"{relation}: shares during training, by phase and mapping",
                partial(
                    training_curves,
                    curves,
                    f"{relation}: composed from the vocabulary of {lm}",
                    "share of the new subjects (compose: of the paired texts)",
                ),
            )
        )
    tables = [
        Table.from_dicts(
            "summary",
            summary,
            _SUMMARY,
            caption=f"{relation}: generalized from the vocabulary of {lm} alone, means over seeds",
            note="Std: over seeds. No compose: without the paired texts. Of all: best of all "
            "candidates. Source: answers the source. Majority: the most frequent right answer. "
            "Paper: vocabulary of Llama-3.",
            headline=True,
        ),
        Table.from_dicts("runs", runs, _RUNS, caption="Shares of the new subjects, by network"),
        Table.from_rows(
            "cases", CASE_COLUMNS, [list(row) for row in cases],
            caption="New subjects of the first seed",
        ),
        Table.from_rows(
            "texts", COLUMNS, list(corpus.texts[0].rows(corpus.labels)),
            caption="Texts of the first seed, a valid data.texts_file",
        ),
    ]  # fmt: skip
    return Results(
        "vocabulary_ablation",
        values={
            **{name: first[name] for name in _VALUES},
            "n": corpus.n_new,
            "mappings": summary,
            "runs": runs,
            "relation": relation,
            "n_paired": corpus.n_paired,
            "n_source_labels": len(corpus.labels),
            "n_target_labels": len(corpus.labels.target_domain),
            "seconds": round(seconds, 2),
            "embedding": {"key": embedding.key, "shape": list(embedding.weight.shape)},
        },
        tables=tables,
        figures=figures,
        lm=embedding.info,
        settings=settings,
        charts={
            relation: {
                title: [f"{prefix}/{mapping}" for mapping in corpus.mappings]
                for title, prefix in panels.items()
            }
        },
    )


def _summarize(
    relation: str,
    mappings: Sequence[str],
    composed: Sequence[RunScores],
    uncomposed: Sequence[RunScores],
    baselines: Baselines,
) -> list[dict[str, Any]]:
    """Return means and standard deviation over seeds, for each mapping."""
    rows = []
    for m, mapping in enumerate(mappings):
        own = [asdict(scores) for scores in composed if scores.mapping == mapping]
        skipped = [s.generalized for s in uncomposed if s.mapping == mapping]
        means = {name: float(np.mean([scores[name] for scores in own])) for name in _SHARES}
        without = float(np.mean(skipped)) if skipped else None
        std = float(np.std([s["generalized"] for s in own], ddof=1)) if len(own) > 1 else None
        rows.append(
            {
                "mapping": mapping,
                "n_seeds": len(own),
                **means,
                "std": std,
                "random": baselines.random[m],
                "majority": baselines.majority[m],
                "uncomposed": without,
                "gain": None if without is None else means["generalized"] - without,
                "paper": PAPER.get(relation, {}).get(mapping),
            }
        )
    return rows
