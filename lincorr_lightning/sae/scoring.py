"""Score SAEs by the LM's loss with their reconstructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.data.texts import TokenRows
from lincorr_lightning.metrics import Reconstruction
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.table import column
from lincorr_lightning.sae.hook_points import HookKind, HookPoint
from lincorr_lightning.sae.hooks import captured, edited
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORES = ("explained_variance", "loss_recovered", "l0", "dead")


@torch.no_grad()
def score_texts(
    model: PreTrainedModel,
    saes: Mapping[HookPoint, SparseAutoencoder],
    texts: TokenRows,
    update: Callable[[int, Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, int]:
    """Run one batch of texts unchanged, and twice for each SAE.

    Activations are read and replaced at the counted tokens. `update` is called for each SAE with
    its number, the activations, their reconstruction, ``(n, width)`` each, and the features.

    Returns:
        The cross-entropies, ``(1 + 2 n_hook_points,)``, float64, summed over all tokens but the
        first: unchanged, then with each hook point's activations reconstructed, then with each set
        to zero; and the number of tokens in each sum.
    """
    ids, mask, counted = texts.input_ids, texts.attention_mask, texts.counted

    def loss() -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = torch.where(mask.bool(), ids, -100)[:, 1:]
        losses = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        return losses.double().sum()

    def replace_by(new: Tensor) -> Callable[[Tensor], Tensor]:
        def replace(activation: Tensor) -> Tensor:
            changed = activation.clone()
            changed[counted] = new.to(activation)
            return changed

        return replace

    with captured(model, saes) as read:
        clean = loss()
    spliced: list[Tensor] = []
    ablated: list[Tensor] = []
    for i, (hook_point, sae) in enumerate(saes.items()):
        activations = read[hook_point][counted]
        features = sae.encode(activations)
        rebuilt = sae.decode(features)
        update(i, activations, rebuilt, features)
        for losses, new in ((spliced, rebuilt), (ablated, torch.zeros_like(rebuilt))):
            with edited(model, {hook_point: replace_by(new)}):
                losses.append(loss())
    return torch.stack([clean, *spliced, *ablated]), int(mask[:, 1:].sum())


@dataclass(frozen=True)
class SAEScore:
    """Scores of one SAE on held-out texts; of all but l0, dead and the losses, higher is better.

    Attributes:
        hook_point: Id of the hook point, as ``residual.3``.
        explained_variance: 1 - squared error / variance, over all tokens; None for constant
            activations.
        l0: Mean number of active features per token.
        dead: Share of the features that are active at no token.
        loss_recovered: (ablated - spliced) / (ablated - clean) of the LM's cross-entropy; None
            where zeros do not increase the loss.
        loss_spliced: Cross-entropy with the activations replaced by their reconstruction, in nats.
        loss_ablated: Cross-entropy with the activations replaced by zeros, in nats.
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


def score_hook_points(
    saes: Mapping[HookPoint, SparseAutoencoder], scored: Reconstruction
) -> list[SAEScore]:
    """Return the scores of each SAE."""
    recovered = scored.loss_recovered
    return [
        SAEScore(
            at.id, at.kind, at.layer, sae.n_features,
            explained_variance=number(float(scored.explained_variance[i])),
            l0=float(scored.l0[i]),
            dead=float((scored.frequency[i, : sae.n_features] == 0).double().mean()),
            loss_recovered=number(float(recovered[i])),
            loss_spliced=float(scored.spliced[i]),
            loss_ablated=float(scored.ablated[i]),
        )
        for i, (at, sae) in enumerate(saes.items())
    ]  # fmt: skip
