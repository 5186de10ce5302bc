"""Results of `SparseAutoencoders`: how well each SAE reconstructs held-out activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.results import Column, Figure, Results, Table
from lincorr_lightning.results.style import short_name
from lincorr_lightning.results.training_curves import History
from lincorr_lightning.sae.figures import (
    DENSITY_EDGES,
    SCORES,
    density_figure,
    quality_figure,
    training_figure,
)
from lincorr_lightning.sae.hook_points import HookKind, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

STUDY = "sparse_autoencoders"
_COLUMNS = (
    Column("hook_point"), Column("kind"), Column("layer"), Column("n_features", "features", ","),
    Column("explained_variance", format=".3f"), Column("l0", "L0", ".1f"),
    Column("dead", format=".1%"), Column("loss_recovered", format=".3f"),
    Column("loss_spliced", format=".3f"), Column("loss_ablated", format=".3f"),
)  # fmt: skip


@dataclass(frozen=True)
class SAEScore:
    """Scores of one SAE on held-out texts.

    Attributes:
        hook_point: Id of the hook point, as ``residual.3``.
        kind: Kind of the hook point.
        layer: Index of the layer, from 0.
        n_features: Number of features.
        explained_variance: 1 - squared error / variance, over all tokens; None for constant
            activations. Higher is better.
        l0: Mean number of active features per token.
        dead: Share of the features that are active at no token.
        loss_recovered: (ablated - spliced) / (ablated - clean) of the LM's cross-entropy; None
            where zeros do not increase the loss. Higher is better.
        loss_spliced: Cross-entropy with the activations replaced by their reconstruction, in nats.
        loss_ablated: Cross-entropy with the activations replaced by zeros, in nats.
    """

    hook_point: str
    kind: HookKind
    layer: int
    n_features: int
    explained_variance: float | None
    l0: float
    dead: float
    loss_recovered: float | None
    loss_spliced: float
    loss_ablated: float


def score_hook_points(
    saes: Mapping[HookPoint, SparseAutoencoder], found: Reconstruction
) -> list[SAEScore]:
    """Return the scores of each SAE.

    Args:
        saes: SAE of each hook point, in the order of the metric.
        found: Result of the metric.
    """
    recovered = found.loss_recovered
    return [
        SAEScore(
            hook_point=hook_point.id,
            kind=hook_point.kind,
            layer=hook_point.layer,
            n_features=sae.n_features,
            explained_variance=number(float(found.explained_variance[i])),
            l0=float(found.l0[i]),
            dead=float((found.frequency[i, : sae.n_features] == 0).double().mean()),
            loss_recovered=number(float(recovered[i])),
            loss_spliced=float(found.spliced[i]),
            loss_ablated=float(found.ablated[i]),
        )
        for i, (hook_point, sae) in enumerate(saes.items())
    ]


def feature_densities(
    frequency: npt.NDArray[np.float64], n_features: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Return a histogram of how often features are active.

    Args:
        frequency: Share of the tokens at which each feature is active,
            ``(n_hook_points, max(n_features))``.
        n_features: Number of features of each hook point; columns beyond it are ignored.

    Returns:
        Shares of the features of each hook point: never active, then by half decades of the share
        of tokens (`DENSITY_EDGES`, the first without lower edge), ``(n_hook_points, 1 + n_bins)``.

    Example:
        >>> feature_densities(np.array([[0.0, 0.5, 1.0, 0.0002]]), [4])[0, [0, 3, -1]]
        array([0.25, 0.25, 0.5 ])
    """
    rows = []
    for shares, n in zip(frequency, n_features, strict=True):
        own = shares[:n]
        active = own[own > 0]
        # The outer bins include what lies beyond the outer edges.
        logs = np.clip(np.log10(active), DENSITY_EDGES[0], DENSITY_EDGES[-1])
        counts, _ = np.histogram(logs, DENSITY_EDGES)
        rows.append(np.array([n - len(active), *counts]) / n)
    return np.stack(rows)


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

    Args:
        scores: Scores of each SAE; empty if the run had no held-out texts.
        found: Result of the metric, None likewise.
        history: Training curves, (step, value) pairs by tag; empty if nothing was trained.
        lm: The LM, see `LanguageModel.info`.
        settings: Hyper-parameters of the study and its data.
        n_steps: Number of training steps.
        n_tokens: Number of tokens trained on, over all ranks.
        seconds: Duration of the training; None if nothing was trained.
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
            Figure(
                "feature_density",
                "Share of the tokens at which features are active.",
                partial(density_figure, [s.hook_point for s in scores], density, subtitle),
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
    return Table(
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
