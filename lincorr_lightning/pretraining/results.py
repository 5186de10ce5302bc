"""Results of pre-training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lincorr_lightning.pretraining.corpus import Corpus
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, column


@dataclass(frozen=True)
class Recall:
    """The share of a kind of knowledge's stated facts that the LM recalls."""

    knowledge: str
    recall: float = column(format=".1%")
    n_prompts: int = column("prompts", ",")


def pretraining_results(
    corpus: Corpus,
    model: Path,
    n_parameters: int,
    loss: float,
    recall: Mapping[str, float],
    n_steps: int,
    seconds: float,
) -> Results:
    """Build the results of a run."""
    rows = [Recall(name, value, len(corpus.facts(name)[0])) for name, value in recall.items()]
    caption = "Share of the stated facts that the LM recalls, over the whole vocabulary"
    return Results(
        "pretraining",
        values={
            "loss": loss,
            "recall": dict(recall),
            "n_people": len(corpus.world.people),
            "n_tokens": len(corpus.tokenizer),
            "n_parameters": n_parameters,
            "n_steps": n_steps,
            "seconds": round(seconds, 1),
            "model": str(model),
        },
        tables=[Table.of("recall", rows, Recall, caption, headline=True)] if rows else [],
    )
