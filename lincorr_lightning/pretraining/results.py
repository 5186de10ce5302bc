"""Results of pre-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Column, Table


def pretraining_results(
    corpus: Corpus,
    model: Path,
    lm: Mapping[str, Any],
    loss: float,
    recall: Mapping[str, float],
    n_steps: int,
    seconds: float,
    settings: Mapping[str, Any],
    included: Sequence[Results] = (),
) -> Results:
    """Build the results of a run."""
    n_prompts = {name: len(corpus.facts(name)[0]) for name in recall}
    table = Table.from_rows(
        "recall",
        [Column("knowledge"), Column("recall", format=".1%"), Column("n_prompts", "prompts", ",")],
        [(name, value, n_prompts[name]) for name, value in recall.items()],
        caption="Share of the stated facts that the LM recalls, over the whole vocabulary",
        headline=True,
    )
    return Results(
        "pretraining",
        values={
            "loss": loss,
            "recall": dict(recall),
            "n_people": len(corpus.world.people),
            "n_tokens": len(corpus.tokenizer),
            "n_parameters": lm["n_parameters"],
            "n_steps": n_steps,
            "seconds": round(seconds, 1),
            "model": str(model),
        },
        tables=[table] if recall else [],
        lm=lm,
        settings=settings,
        included=included,
    )
