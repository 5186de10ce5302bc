"""Results of `SparseAutoencoders`: how well each SAE reconstructs held-out activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.table import Column, Table
from lincorr_lightning.results.training_curves import History
from lincorr_lightning.sae.figures import quality_figure, training_figure
from lincorr_lightning.sae.scoring import DENSITY_EDGES, SCORES, SAEScore, feature_densities

STUDY = "sparse_autoencoders"
_COLUMNS = (
    Column("hook_point"), Column("kind"), Column("layer"), Column("n_features", "features", ","),
    Column("explained_variance", format=".3f"), Column("l0", "L0", ".1f"),
    Column("dead", format=".1%"), Column("loss_recovered", format=".3f"),
    Column("loss_spliced", format=".3f"), Column("loss_ablated", format=".3f"),
)  # fmt: skip


def sae_results(
    scores: Sequence[SAEScore],
    found: Reconstruction | None,
    history: History,
    *,
    lm: Mapping[str, Any],
    settings: Mapping[str, Any],
    n_steps: int,
    n_tokens: int,
    seconds: float | None,
) -> Results:
    """Return the results of a run.

    Without held-out texts there are no scores and `found` is None; without training, the history,
    (step, value) pairs by tag, is empty and `seconds` is None.
    """
    values: dict[str, Any] = {}
    tables: list[Table] = []
    figures: list[Figure] = []
    name = short_name(str(lm["name_or_path"]))
    if found is not None:
        values |= {
            "n_held_out_tokens": found.n_tokens,
            "loss_clean": found.clean,
            "mean": {what: _mean([getattr(s, what) for s in scores]) for what in SCORES},
            "hook_points": [asdict(score) for score in scores],
        }
        sizes = [score.n_features for score in scores]
        density = feature_densities(found.frequency.cpu().numpy(), sizes)
        tables += [_score_table(scores, found), _density_table(scores, density)]
        size = f"{sizes[0]:,} features each" if len(set(sizes)) == 1 else "of several sizes"
        subtitle = f"{name}; {len(scores)} SAEs, {size}; {found.n_tokens:,} held-out tokens"
        figures += [
            Figure(
                "quality",
                "Scores of the SAEs on held-out texts by layer.",
                partial(quality_figure, scores, subtitle),
            ),
        ]
    if history:
        figures.append(
            Figure("training", "Training curves.", partial(training_figure, history, name))
        )
    values |= {
        "n_steps": n_steps,
        "n_tokens": n_tokens,
        "seconds": None if seconds is None else round(seconds, 1),
    }
    return Results(STUDY, values, tables=tables, figures=figures, lm=lm, settings=settings)


def _score_table(scores: Sequence[SAEScore], found: Reconstruction) -> Table:
    return Table.from_dicts(
        "hook_points",
        [asdict(score) for score in scores],
        _COLUMNS,
        caption=f"Scores of each SAE on {found.n_tokens:,} held-out tokens.",
        note=f"The LM's loss is {found.clean:.3f} nats per token; spliced and ablated are its loss "
        "with the activations replaced by their reconstruction and by zeros, and loss recovered is "
        "(ablated - spliced) / (ablated - clean).",
        headline=True,
    )


def _density_table(scores: Sequence[SAEScore], density: npt.NDArray[np.float64]) -> Table:
    bins = ["never", *(f"10^{low:g} to 10^{low + 0.5:g}" for low in DENSITY_EDGES[:-1])]
    return Table.from_rows(
        "feature_density",
        [Column("hook_point"), *(Column(each, format=".1%") for each in bins)],
        [
            [score.hook_point, *shares]
            for score, shares in zip(scores, density.tolist(), strict=True)
        ],
        caption="Share of each SAE's features by the share of the tokens at which they are active.",
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
