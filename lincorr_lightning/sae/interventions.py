"""Remove features from an LM's activations, or add them, while it runs.

A feature is rescaled by ``x - (1 - r) f_i d_i``, where ``f_i`` is its activation in the same
forward pass and ``d_i`` its decoder row on the LM's scale: what the SAE does not explain is kept,
and ``r = 1`` changes nothing ("Analyze Feature Flow ...", Laptev et al., 2025, arXiv 2502.03032,
deactivation and steering).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lincorr_lightning.errors import SparseAutoencoderError
from lincorr_lightning.sae.hook_points import KINDS, Feature, HookPoint, at_hook_point
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

Intervention = Callable[[Tensor], Tensor]
"""Function from activations ``(batch, sequence, width)`` to their replacement."""


def rescale_at(
    sae: SparseAutoencoder, positions: Tensor, chosen: Tensor, r: Tensor
) -> Intervention:
    """Rescale features at one of the `positions` of each row, ``(batch,)``.

    `chosen` are indices of distinct features of each row, ``(batch, k)``, -1 for none; `r` is the
    factor of their activations in each row, ``(batch,)``: 0 removes, 1 changes nothing.
    """

    def rescale(x: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        where = positions.to(x.device)
        index = chosen.to(x.device)
        features = sae.encode(x[rows, where]).gather(1, index.clamp(min=0)) * (index >= 0)
        share = 1 - r.to(features)[:, None]
        removed = (features.unsqueeze(1) @ sae.decoder[index.clamp(min=0)]).squeeze(1)
        changed = x.clone()
        changed[rows, where] -= (share * removed / sae.input_scale).to(x.dtype)
        return changed

    return rescale


def remove_everywhere(sae: SparseAutoencoder, chosen: Sequence[int]) -> Intervention:
    """Remove distinct features, given by their indices, at every token."""
    index = torch.tensor([sae.check_feature(feature) for feature in chosen])

    def remove(x: Tensor) -> Tensor:
        own = index.to(x.device)
        removed = sae.encode(x)[..., own] @ sae.decoder[own] / sae.input_scale
        return x - removed.to(x.dtype)

    return remove


def add_features(
    saes: Mapping[HookPoint, SparseAutoencoder], amounts: Mapping[Feature, float]
) -> dict[HookPoint, Intervention]:
    """Add features to every token by amounts in units of their activation, to steer with them."""
    added: dict[HookPoint, Tensor] = {}
    for feature, amount in amounts.items():
        sae = at_hook_point(saes, feature.hook_point)
        row = sae.decoder.detach()[sae.check_feature(feature.index)] * (amount / sae.input_scale)
        added[feature.hook_point] = added.get(feature.hook_point, torch.zeros_like(row)) + row

    def adding(vector: Tensor) -> Intervention:
        return lambda x: x + vector.to(x)

    return {hook_point: adding(vector) for hook_point, vector in added.items()}


def parse_feature(text: str, saes: Mapping[HookPoint, SparseAutoencoder]) -> Feature:
    """Return the feature of an id, if there is an SAE that has it."""
    name, _, index = text.strip().rpartition(".")
    hook_point = HookPoint.named(name)
    if hook_point is None or not index.isdecimal():
        raise SparseAutoencoderError(
            f"{text!r} names no feature: write its kind of hook point ({', '.join(KINDS)}), layer "
            "and index, such as residual.1.37."
        )
    return Feature(hook_point, at_hook_point(saes, hook_point).check_feature(int(index)))
