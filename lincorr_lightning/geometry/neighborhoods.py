"""Neighborhoods of tokens: overlap between layers, angles, and cosines of all pairs.

The observables of "The Geometry of Tokens in Internal Representations of Large Language Models"
(Viswanathan et al., 2025, arXiv 2501.10573), besides the intrinsic dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lincorr_lightning.errors import require
from lincorr_lightning.geometry.distances import (
    NearestTokens,
    full_precision,
    layer_name,
    layers_per_batch,
    numbers_at_once,
)


@torch.no_grad()
def neighborhoods(nearest: NearestTokens, k: int) -> Tensor:
    """Return the k nearest other tokens of each token, including copies.

    A token's own copies come first, and the copies of a neighbor right after it, in the order of
    the text. Without copies these are the first k of ``nearest.indices``.

    Returns:
        Positions, ``(..., n_tokens, k)``, int64.

    Raises:
        ConfigError: k is not within 1 and ``nearest.k``.

    Example:
        >>> from lincorr_lightning.geometry.distances import nearest_tokens
        >>> line = torch.tensor([[[0.0], [1.0], [3.0], [1.0]]])
        >>> neighborhoods(nearest_tokens(line, max_rank=2), k=2).tolist()
        [[[1, 3], [3, 0], [1, 3], [1, 0]]]
    """
    # Only up to nearest.k are neighbors in order.
    require("k", k, at_least=1, at_most=nearest.k)
    n_tokens = nearest.first.shape[-1]
    indices = nearest.indices[..., :k].reshape(-1, n_tokens, k)
    copied = ~nearest.distinct.reshape(-1, n_tokens).all(1)
    if bool(copied.any()):
        distances = nearest.distances[..., :k].reshape(-1, n_tokens, k)
        first = nearest.first.reshape(-1, n_tokens)
        indices = indices.clone()
        for layer in copied.nonzero().flatten().tolist():
            indices[layer] = _with_copies(distances[layer], indices[layer], first[layer])
    return indices.reshape(*nearest.first.shape, k)


def _with_copies(distances: Tensor, indices: Tensor, first: Tensor) -> Tensor:
    n_tokens, k = indices.shape
    position = torch.arange(n_tokens, device=indices.device)
    # Tokens at the same distance have the same rank, so that position orders their copies too.
    apart = torch.nn.functional.pad(distances.diff(dim=1) > 0, (1, 0))
    # Rank of each first token in each list; the last column takes the entries that are empty.
    rank = indices.new_full((n_tokens, n_tokens + 1), k + 1)
    rank.scatter_(1, indices.where(indices >= 0, n_tokens), 1 + apart.cumsum(1))
    rank[position, first] = 0
    order = rank[:, first] * n_tokens + position
    order.fill_diagonal_((k + 2) * n_tokens)
    return order.topk(k, dim=1, largest=False).indices


@torch.no_grad()
def neighborhood_overlap(a: Tensor, b: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the fraction of each token's k nearest tokens in one layer that are so in another.

    ``|kNN_a ∩ kNN_b| / k``; its mean over tokens is the paper's neighborhood overlap. Copies are
    tokens like all others here: they have an overlap of their own, and count as neighbors.

    Args:
        a: Neighborhoods in one layer, from `neighborhoods`, ``(..., n_tokens, k_max)``.
        b: Neighborhoods in the other layer, same shape.
        ks: Sizes of the neighborhood, at most k_max.

    Returns:
        ``(..., n_tokens, n_ks)``, float64.

    Raises:
        ValueError: The shapes differ, or there is no k.
        ConfigError: A k is not within 1 and k_max.

    Example:
        >>> a, b = torch.tensor([[1, 2], [0, 2], [1, 0]]), torch.tensor([[2, 1], [0, 2], [0, 1]])
        >>> neighborhood_overlap(a, b, ks=(1, 2)).tolist()
        [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    """
    if a.shape != b.shape:
        raise ValueError(
            f"neighborhoods {tuple(a.shape)} and {tuple(b.shape)} must be of one shape"
        )
    k_max = a.shape[-1]
    if not ks:
        raise ValueError("there must be a k, such as 2")
    for k in ks:
        require("k", k, at_least=1, at_most=k_max)
    n_tokens = a.shape[-2]
    rank = torch.arange(k_max, device=a.device)
    sizes = torch.tensor(list(ks), device=a.device)
    ranks_b = torch.full((n_tokens, n_tokens), k_max, device=a.device)
    pairs = a.reshape(-1, n_tokens, k_max), b.reshape(-1, n_tokens, k_max)
    shared = a.new_empty(len(pairs[0]), n_tokens, len(sizes), dtype=torch.float64)
    for i, (near_a, near_b) in enumerate(zip(*pairs, strict=True)):
        ranks_b.scatter_(1, near_b, rank.expand_as(near_b))
        # A token is in both neighborhoods for each k above its higher rank.
        enters = torch.maximum(ranks_b.gather(1, near_a), rank)
        ranks_b.scatter_(1, near_b, k_max)
        shared[i] = (enters[..., None] < sizes).sum(1)
    return (shared / sizes).reshape(*a.shape[:-1], len(sizes))


def consecutive_overlap(nearest: NearestTokens, ks: Sequence[int]) -> Tensor:
    """Return the neighborhood overlap of each layer with the next one.

    Returns:
        Overlap of each token, ``(..., n_layers - 1, n_tokens, n_ks)``, float64.
    """
    near = neighborhoods(nearest, max(ks, default=1))
    return neighborhood_overlap(near[..., :-1, :, :], near[..., 1:, :, :], ks)


@torch.no_grad()
def neighbor_angles(hidden: Tensor, nearest: NearestTokens) -> Tensor:
    """Return the angle at each token between its first and second nearest distinct token.

    Args:
        hidden: Hidden states, ``(..., n_layers, n_tokens, d)``.
        nearest: Their `nearest_tokens`, at least two.

    Returns:
        Degrees from 0 to 180, ``(..., n_layers, n_tokens)``, float64.

    Raises:
        ValueError: Neighbors and hidden states differ in shape, there is only one neighbor, or a
            layer, which is named, has fewer than three distinct tokens.

    Example:
        >>> from lincorr_lightning.geometry.distances import nearest_tokens
        >>> corner = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
        >>> neighbor_angles(corner, nearest_tokens(corner, max_rank=2)).round().tolist()
        [[90.0, 63.0, 27.0]]
    """
    leading, max_rank = tuple(hidden.shape[:-2]), nearest.indices.shape[-1]
    if hidden.shape[:-1] != nearest.first.shape or max_rank < 2 or nearest.k < 2:
        raise ValueError(
            f"hidden states {tuple(hidden.shape)} need two neighbors in order of each of their "
            f"tokens, not {nearest.k} of {tuple(nearest.first.shape)}"
        )
    layers = hidden.reshape(-1, *hidden.shape[-2:])
    pairs = nearest.indices[..., :2].reshape(len(layers), -1, 2)
    for position in (pairs < 0).flatten(1).any(1).nonzero()[:1].flatten().tolist():
        raise ValueError(
            f"{layer_name(position, leading)} (layers and prompts are counted from 0) has fewer "
            "than three distinct tokens"
        )
    angles = [_angles(tokens, *pair.unbind(1)) for tokens, pair in zip(layers, pairs, strict=True)]
    return torch.stack(angles).reshape(nearest.first.shape)


def _angles(tokens: Tensor, one: Tensor, two: Tensor) -> Tensor:
    parts = []
    size = max(1, numbers_at_once(tokens.device) // 4 // tokens.shape[-1])
    for own, a, b in zip(*(torch.split(x, size) for x in (tokens, one, two)), strict=True):
        u, v = (tokens[near].double() - own.double() for near in (a, b))
        u, v = (torch.nn.functional.normalize(x, dim=-1, eps=0) for x in (u, v))
        # Kahan's formula: the arc cosine loses its digits near 0 and 180 degrees.
        parts.append(2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)))
    return torch.cat(parts).rad2deg()


@torch.no_grad()
def cosine_statistics(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the cosine similarity over pairs of tokens by layer.

    The mean needs no pairs: ``(|Σ u|² - N) / (N (N - 1))`` of the unit vectors u.

    Args:
        hidden: Hidden states, ``(..., n_layers, n_tokens, d)``, of any floating dtype.

    Returns:
        Mean and population standard deviation, ``(..., n_layers)`` each, float64.

    Raises:
        ValueError: There are fewer than two tokens, or a layer, which is named, has NaN, infinite
            or zero hidden states.

    Example:
        >>> found = cosine_statistics(torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]))
        >>> [part.round(decimals=3).tolist() for part in found]
        [[0.333], [0.471]]
    """
    *leading, n_tokens, width = hidden.shape
    if n_tokens < 2 or not leading:
        raise ValueError(
            f"hidden states {tuple(hidden.shape)} must be (..., n_layers, n_tokens, d), with at "
            "least two tokens"
        )
    layers = hidden.reshape(-1, n_tokens, width)
    size = layers_per_batch(layers)
    n_pairs = n_tokens * (n_tokens - 1)
    means, stds = [], []
    for start in range(0, len(layers), size):
        tokens = layers[start : start + size]
        units = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        norms = torch.linalg.vector_norm(units, dim=-1, keepdim=True)
        _check_directions(norms, start, tuple(leading))
        units = units / norms
        mean = (units.sum(1, dtype=torch.float64).square().sum(-1) - n_tokens) / n_pairs
        with full_precision(units.device):
            spread = torch.bmm(units, units.mT)
        spread -= mean[:, None, None]
        spread.diagonal(dim1=1, dim2=2).zero_()
        means.append(mean)
        stds.append((spread.square().sum((1, 2), dtype=torch.float64) / n_pairs).sqrt())
    return torch.cat(means).reshape(leading), torch.cat(stds).reshape(leading)


def _check_directions(norms: Tensor, start: int, leading: tuple[int, ...]) -> None:
    good = norms.isfinite() & (norms > 0)
    for layer, token, _ in (~good).nonzero()[:1].tolist():
        raise ValueError(
            f"token {token} of {layer_name(start + layer, leading)} (counted from 0) has no "
            "direction: its hidden state is zero, NaN or infinite"
        )
