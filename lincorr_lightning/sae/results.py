"""Results of `SparseAutoencoders`: how well each SAE reconstructs held-out activations."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Drawing

from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.plots import BLUE, GREEN, ORANGE, History, curves
from lincorr_lightning.results.results import Figure, Results
from lincorr_lightning.results.table import Table, column, make_frame, number, short_name
from lincorr_lightning.sae.hook_points import KIND_NAMES, HookKind, HookPoint

if TYPE_CHECKING:
    from pandas import DataFrame

_COLOURS = dict(zip(KIND_NAMES.values(), (BLUE, ORANGE, GREEN), strict=True))
_TITLES = {
    "explained_variance": "explained variance",
    "loss_recovered": "loss recovered (0: zeros, 1: unchanged)",
    "l0": "active features per token",
    "dead": "dead features (active at no token)",
}
SCORES = tuple(_TITLES)


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


def score_hook_points(sizes: Mapping[HookPoint, int], scored: Reconstruction) -> list[SAEScore]:
    """Return the scores of each SAE; `sizes` are their numbers of features."""
    recovered = scored.loss_recovered
    return [
        SAEScore(
            at.id,
            at.kind,
            at.layer,
            size,
            number(float(scored.explained_variance[i])),
            float(scored.l0[i]),
            float((scored.frequency[i, :size] == 0).double().mean()),
            number(float(recovered[i])),
            float(scored.spliced[i]),
            float(scored.ablated[i]),
        )
        for i, (at, size) in enumerate(sizes.items())
    ]


def sae_results(
    sizes: Mapping[HookPoint, int],
    scored: Reconstruction | None,
    history: History,
    *,
    lm_name: str,
    n_steps: int,
    n_tokens: int,
    seconds: float | None,
) -> Results:
    """Return the results of a run, whose SAEs have these numbers of features.

    Without held-out texts `scored` is None; without training, the history, (step, value) pairs by
    tag, is empty and `seconds` is None.
    """
    values, tables, figures = dict[str, Any](), list[Table](), list[Figure]()
    name = short_name(lm_name)
    if scored is not None:
        scores = score_hook_points(sizes, scored)
        table = Table.of(
            "hook_points",
            scores,
            SAEScore,
            f"Scores of each SAE on {scored.n_tokens:,} held-out tokens.",
            f"The LM's loss is {scored.clean:.3f} nats per token; spliced and ablated are its loss "
            "with the activations replaced by their reconstruction and by zeros, and loss "
            "recovered is (ablated - spliced) / (ablated - clean).",
            True,
        )
        tables = [table]
        means = table.frame[list(SCORES)].astype(float).mean()
        values = {
            "n_held_out_tokens": scored.n_tokens,
            "loss_clean": scored.clean,
            "mean": {what: number(means[what]) for what in SCORES},
            "hook_points": [asdict(score) for score in scores],
        }
        n, *others = set(sizes.values())
        size = "of several sizes" if others else f"{n:,} features each"
        subtitle = f"{name}; {len(scores)} SAEs, {size}; {scored.n_tokens:,} held-out tokens"
        draw = partial(quality_figure, table.frame, subtitle)
        figures = [Figure("quality", "Scores of the SAEs on held-out texts by layer.", draw)]
    if history:
        figures += [Figure("training", "Training curves.", partial(training_figure, history, name))]
    values |= {"n_steps": n_steps, "n_tokens": n_tokens, "seconds": seconds}
    return Results("sparse_autoencoders", values, tables=tables, figures=figures)


def quality_figure(scores: "DataFrame", subtitle: str) -> Drawing:
    """Draw the scores of SAEs by layer, a panel per score; the rows are `SAEScore`."""
    points = scores.melt(["kind", "layer"], list(_TITLES), "score")
    points = points.assign(
        value=points["value"].astype(float),
        kind=points["kind"].map(KIND_NAMES),
        score=points["score"].map(_TITLES),
    )

    def limit(axes: Axes, score: str, rows: "DataFrame") -> None:
        low, high = rows["value"].min(), rows["value"].max()
        whole = score != _TITLES["l0"]
        axes.set_ylim(min(0.0, low) - 0.02, max(1.02, 1.02 * high) if whole else 1.15 * high)

    return curves(
        points,
        "layer",
        "value",
        "kind",
        "score",
        title="Sparse autoencoders by layer",
        subtitle=subtitle,
        colours=_COLOURS,
        labels=("layer", ""),
        per_row=2,
        each=limit,
    )


def training_figure(history: History, lm: str) -> Drawing:
    """Draw the training curves: a panel per curve and kind of hook point, a line per layer."""
    rows = []
    for tag, points in history.items():
        what, _, name = tag.partition("/")
        hook_point = HookPoint.named(name)
        assert hook_point is not None, name
        panel = f"{what}, {KIND_NAMES[hook_point.kind]}".replace("_", " ")
        rows += [(panel, f"layer {hook_point.layer}", step, value) for step, value in points]
    frame = make_frame(rows, ["panel", "layer", "step", "value"])
    return curves(
        frame.sort_values("panel", kind="stable"),
        "step",
        "value",
        "layer",
        "panel",
        title=f"Training of {lm}'s SAEs",
        labels=("step", ""),
    )
