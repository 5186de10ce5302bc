"""Products of many SAEs with few active features: only what is active is computed back.

Dense products would spend a step on zeros: of the five that one step of an SAE takes (the encoder
forward, and back to its weights; the decoder forward, and back to features and weights), only the
encoder's forward needs all features. The rest is sums of rows, `torch.nn.functional.embedding_bag`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


class Entries(NamedTuple):
    """Active features of several SAEs, row by row.

    Attributes:
        rows: Of each entry, ``place * n + row``, ascending, ``(n_entries,)``.
        features: Of each, ``place * n_features + feature``, ``(n_entries,)``.
        starts: Where each row's entries begin, ``(n_places * n,)``.
    """

    rows: Tensor
    features: Tensor
    starts: Tensor


def entries_of(chosen: Tensor) -> Entries:
    """Entries from a mask.

    Args:
        chosen: ``(n_places, n, n_features)``, bool.
    """
    n_hook_points, n, n_features = chosen.shape
    flat = chosen.view(n_hook_points * n, n_features)
    rows, columns = flat.nonzero(as_tuple=True)
    counts = flat.sum(1)
    features = rows.div(n, rounding_mode="floor") * n_features + columns
    return Entries(rows, features, counts.cumsum(0) - counts)


def encode_entries(
    inputs: Tensor, encoder: Tensor, bias: Tensor, center: Tensor, values: Tensor, entries: Entries
) -> Tensor:
    """Pre-activations of some entries, differentiable by encoder, bias and center.

    Args:
        inputs: ``(n_places, n, width)``.
        encoder: ``(n_places, n_features, width)``.
        bias: ``(n_places, n_features)``.
        center: What is taken off the inputs, ``(n_places, width)``.
        values: ``(inputs - center) encoderᵀ + bias`` of these entries, computed before.
        entries: Which.

    Returns:
        ``(n_entries,)``, the values.
    """
    return _EncodeEntries.apply(inputs, encoder, bias, center, values, entries)  # type: ignore[no-untyped-call]


class _EncodeEntries(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        encoder: Tensor,
        bias: Tensor,
        center: Tensor,
        values: Tensor,
        entries: Entries,
    ) -> Tensor:
        del bias
        ctx.save_for_backward(inputs, encoder, center, *entries)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        inputs, encoder, center, rows, features, _ = ctx.saved_tensors
        n_hook_points, n_features, width = encoder.shape
        order = features.argsort(stable=True)
        counts = torch.bincount(features, minlength=n_hook_points * n_features)
        read = (inputs - center[:, None]).flatten(0, 1)
        to_encoder = embedding_bag(
            rows[order], read, counts.cumsum(0) - counts, mode="sum",
            per_sample_weights=gradient[order],
        ).view(n_hook_points, n_features, width)  # fmt: skip
        # As many additions, but no atomic ones, so that a run is the same again.
        sums = embedding_bag(
            torch.arange(len(order), device=order.device), gradient[order, None],
            counts.cumsum(0) - counts, mode="sum",
        ).view(n_hook_points, 1, n_features)  # fmt: skip
        to_center = -torch.bmm(sums, encoder)[:, 0]
        return None, to_encoder, sums[:, 0], to_center, None, None


def decode_entries(values: Tensor, decoder: Tensor, entries: Entries) -> Tensor:
    """Sums of decoder rows, differentiable by values and decoder.

    Args:
        values: ``(n_entries,)``.
        decoder: ``(n_places, n_features, width)``.
        entries: Which.

    Returns:
        ``(n_places, n, width)``.
    """
    n_hook_points, _, width = decoder.shape
    rows = embedding_bag(
        entries.features, decoder.flatten(0, 1), entries.starts, mode="sum",
        per_sample_weights=values,
    )  # fmt: skip
    return rows.view(n_hook_points, -1, width)
