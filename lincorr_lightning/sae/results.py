"""Results of `SparseAutoencoders`: how well each SAE reconstructs held-out activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.plots import History
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.table import Table
from lincorr_lightning.sae.figures import quality_figure, training_figure
from lincorr_lightning.sae.scoring import DENSITY_EDGES, SCORES, SAEScore, feature_densities


def sae_results(
    scores: Sequence[SAEScore],
    scored: Reconstruction | None,
    history: History,
    *,
    lm_name: str,
    n_steps: int,
    n_tokens: int,
    seconds: float | None,
) -> Results:
    """Return the results of a run.

    Without held-out texts there are no scores and `scored` is None; without training, the history,
    (step, value) pairs by tag, is empty and `seconds` is None.
    """
    values: dict[str, Any] = {}
    tables: list[Table] = []
    figures: list[Figure] = []
    name = short_name(lm_name)
    if scored is not None:
        tables = [_score_table(scores, scored), _density_table(scores, scored)]
        means = tables[0].frame[list(SCORES)].astype(float).mean()
        values = {
            "n_held_out_tokens": scored.n_tokens,
            "loss_clean": scored.clean,
            "mean": {what: number(means[what]) for what in SCORES},
            "hook_points": [asdict(score) for score in scores],
        }
        sizes = {score.n_features for score in scores}
        size = f"{min(sizes):,} features each" if len(sizes) == 1 else "of several sizes"
        subtitle = f"{name}; {len(scores)} SAEs, {size}; {scored.n_tokens:,} held-out tokens"
        draw = partial(quality_figure, tables[0].frame, subtitle)
        figures = [Figure("quality", "Scores of the SAEs on held-out texts by layer.", draw)]
    if history:
        draw = partial(training_figure, history, name)
        figures.append(Figure("training", "Training curves.", draw))
    values |= {
        "n_steps": n_steps,
        "n_tokens": n_tokens,
        "seconds": None if seconds is None else round(seconds, 1),
    }
    return Results("sparse_autoencoders", values, tables=tables, figures=figures)


def _score_table(scores: Sequence[SAEScore], scored: Reconstruction) -> Table:
    return Table.of(
        "hook_points",
        scores,
        caption=f"Scores of each SAE on {scored.n_tokens:,} held-out tokens.",
        note=f"The LM's loss is {scored.clean:.3f} nats per token; spliced and ablated are its "
        "loss with the activations replaced by their reconstruction and by zeros, and loss "
        "recovered is (ablated - spliced) / (ablated - clean).",
        headline=True,
    )


def _density_table(scores: Sequence[SAEScore], scored: Reconstruction) -> Table:
    bins = ["never", *(f"10^{low:g} to 10^{low + 0.5:g}" for low in DENSITY_EDGES[:-1])]
    density = feature_densities(
        scored.frequency.cpu().numpy(), [score.n_features for score in scores]
    )
    return Table.of(
        "feature_density",
        [[score.hook_point, *row] for score, row in zip(scores, density.tolist(), strict=True)],
        ["hook_point", *bins],
        caption="Share of each SAE's features by the share of the tokens at which they are active.",
        formats=dict.fromkeys(bins, ".1%"),
    )
