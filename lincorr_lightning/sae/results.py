"""Results of `SparseAutoencoders`: how well each SAE reconstructs held-out activations."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.table import Table, column, number, percent, show
from lincorr_lightning.sae.hook_points import HookKind
from lincorr_lightning.sae.sparse_autoencoder import SAEs

SCORES = ("explained_variance", "loss_recovered", "l0", "dead")


@dataclass(frozen=True)
class SAEScore:
    """Scores of one SAE on held-out texts; of all but l0, dead and the losses, higher is better.

    `explained_variance` is 1 - squared error / variance (None for constant activations), `l0` the
    mean number of active features per token, `dead` the share of features active at no token, and
    `loss_recovered` (ablated - spliced) / (ablated - clean) of the LM's cross-entropy, in nats:
    with activations replaced by their reconstruction and by zeros; None where these do no harm.
    """

    hook_point: str
    kind: HookKind
    layer: int
    n_features: int = column("features", ",")
    explained_variance: float | None = column(format=".3f")
    l0: float = column("L0", ".1f")
    dead: float = column(format=".1%")
    loss_recovered: float | None = column(format=".3f")
    loss_spliced: float = column(format=".3f")
    loss_ablated: float = column(format=".3f")


def held_out_scores(saes: SAEs, scored: Reconstruction) -> dict[str, Any]:
    """Return what ``results.json`` has of SAEs, which are in the order of the `Reconstruction`.

    ``hook_points`` has the `SAEScore` of each; ``loss_clean`` is the loss of the unchanged LM per
    token, in nats.
    """
    scores = [
        SAEScore(
            hook_point=at.id,
            kind=at.kind,
            layer=at.layer,
            n_features=sae.n_features,
            explained_variance=number(float(scored.explained_variance[i])),
            l0=float(scored.l0[i]),
            dead=float((scored.frequency[i, : sae.n_features] == 0).double().mean()),
            loss_recovered=number(float(scored.loss_recovered[i])),
            loss_spliced=float(scored.spliced[i]),
            loss_ablated=float(scored.ablated[i]),
        )
        for i, (at, sae) in enumerate(saes.items())
    ]
    return {
        "n_held_out_tokens": scored.n_tokens,
        "loss_clean": scored.clean,
        "hook_points": [asdict(score) for score in scores],
    }


def sae_results(scores: Mapping[str, Any] | None, values: Mapping[str, Any]) -> Results:
    """Return the results of a run, of which `values` are those on the length of the training.

    `scores` are `held_out_scores`, None without held-out texts.
    """
    if scores is None:
        return Results("sparse_autoencoders", values)
    table = Table.of(
        "hook_points",
        scores["hook_points"],
        SAEScore,
        f"Scores of each SAE on {scores['n_held_out_tokens']:,} held-out tokens.",
        f"The LM's loss is {scores['loss_clean']:.3f} nats per token; spliced and ablated are "
        "its loss with the activations replaced by their reconstruction and by zeros, and loss "
        "recovered is (ablated - spliced) / (ablated - clean).",
        headline=True,
    )
    means = table.frame[list(SCORES)].astype(float).mean()
    mean = {key: number(means[key]) for key in SCORES}
    sentence = (
        f"The SAEs explain {percent(mean['explained_variance'])} of the variance with "
        f"{show(mean['l0'], ',.0f')} active features, and recover "
        f"{percent(mean['loss_recovered'])} of the LM's loss (means over hook points)."
    )
    values = {**scores, "mean": mean, **values}
    return Results("sparse_autoencoders", values, tables=[table], verdict=[sentence])
