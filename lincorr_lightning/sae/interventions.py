"""Taking features out of an LM's activations, or adding them, while it runs.

A feature is rescaled by ``x - (1 - r) f_i d_i``, where ``f_i`` is its activation in this very
forward and ``d_i`` its decoder row on the LM's scale: what the SAE does not explain stays in, and
``r = 1`` changes nothing. ("Analyze Feature Flow ...", Laptev et al., 2025, arXiv 2502.03032,
deactivation and steering.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

Intervention = Callable[[Tensor], Tensor]
"""From activations ``(batch, seq, width)`` to those that take their place."""


def rescale_at(
    sae: SparseAutoencoder, positions: Tensor, chosen: Tensor, r: float | Tensor = 0.0
) -> Intervention:
    """Rescale some features of each row at one position of it.

    Args:
        sae: Of the place.
        positions: Position in each row, ``(batch,)``.
        chosen: Features of each row, ``(batch, k)``, each once; -1 is none.
        r: What is left of them: 0 removes, 1 changes nothing; one number or one for each row,
            ``(batch,)``.
    """

    def edit(x: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        where = positions.to(x.device)
        index = chosen.to(x.device)
        features = sae.encode(x[rows, where]).gather(1, index.clamp(min=0)) * (index >= 0)
        share = 1 - torch.as_tensor(r, dtype=features.dtype, device=x.device)
        removed = (features.unsqueeze(1) @ sae.decoder[index.clamp(min=0)]).squeeze(1)
        changed = x.clone()
        changed[rows, where] -= (share.reshape(-1, 1) * removed / sae.input_scale).to(x.dtype)
        return changed

    return edit


def rescale_everywhere(
    sae: SparseAutoencoder, chosen: Sequence[int] | Tensor, r: float = 0.0
) -> Intervention:
    """Rescale some features wherever they are active.

    Args:
        sae: Of the place.
        chosen: The features, ``(k,)``, each once.
        r: What is left of them.

    Raises:
        SparseAutoencoderError: The SAE does not have such a feature.
    """
    index = torch.as_tensor(chosen, dtype=torch.long)
    for feature in index.tolist():
        sae.check_feature(feature)

    def edit(x: Tensor) -> Tensor:
        own = index.to(x.device)
        removed = sae.encode(x)[..., own] @ sae.decoder[own] / sae.input_scale
        return x - ((1 - r) * removed).to(x.dtype)

    return edit


def add_features(
    saes: Mapping[HookPoint, SparseAutoencoder], amounts: Mapping[Feature, float]
) -> dict[HookPoint, Intervention]:
    """Add features to every token, so as to steer with them.

    Args:
        saes: Of the places.
        amounts: How much of each feature is added, in units of its activation.

    Raises:
        SparseAutoencoderError: A place has no SAE, or an SAE no such feature.
    """
    added: dict[HookPoint, Tensor] = {}
    for feature, amount in amounts.items():
        sae = sae_at(saes, feature.hook_point)
        row = sae.decoder.detach()[sae.check_feature(feature.index)] * (amount / sae.input_scale)
        added[feature.hook_point] = added.get(feature.hook_point, torch.zeros_like(row)) + row

    def adding(vector: Tensor) -> Intervention:
        return lambda x: x + vector.to(x)

    return {hook_point: adding(vector) for hook_point, vector in added.items()}


def draw_active(active: Tensor, n: Tensor, generator: torch.Generator) -> Tensor:
    """Draw features at random among those that are active, without replacement.

    Args:
        active: What may be drawn, ``(n_rows, n_features)`` bool.
        n: How many in each row, ``(n_rows,)``; fewer where fewer are active.
        generator: On the CPU, so that every device draws the same.

    Returns:
        ``(n_rows, max(n))``, int64; -1 is none.
    """
    most = int(n.max()) if len(n) else 0
    drawn = torch.full((len(active), most), -1, dtype=torch.int64, device=active.device)
    if not most:
        return drawn
    # Only as many random numbers as there are active features.
    rows, features = active.nonzero(as_tuple=True)
    order = torch.rand(len(rows), generator=generator, dtype=torch.float64).to(active.device)
    by_row = torch.argsort(rows.double() + order, stable=True)
    rows, features = rows[by_row], features[by_row]
    count = torch.bincount(rows, minlength=len(active))
    rank = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[rows]
    kept = rank < n.to(rank.device)[rows]
    drawn[rows[kept], rank[kept]] = features[kept]
    return drawn


def sae_at(saes: Mapping[HookPoint, SparseAutoencoder], hook_point: HookPoint) -> SparseAutoencoder:
    """Get the SAE of a place.

    Raises:
        SparseAutoencoderError: There is none; it says where there is one.
    """
    if hook_point not in saes:
        raise SparseAutoencoderError(
            f"there is no SAE for the {hook_point}; there are for {', '.join(map(str, saes))}. "
            "Load one, or take one of these places."
        )
    return saes[hook_point]
