"""Observables of the clouds of a prompt's tokens by layer, and of its next-token distributions.

From "The Geometry of Tokens in Internal Representations of Large Language Models" (Viswanathan et
al., 2025, arXiv 2501.10573): overlap of neighborhoods, angles, cosines, block shuffles, loss and
entropy. Their intrinsic dimension has a file of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lincorr_lightning.geometry.distances import NearestTokens
from lincorr_lightning.geometry.intrinsic_dimension import intrinsic_dimension

# A difference of distances below this fraction of them is rounding.
_ROUNDING = 1e-12


@torch.no_grad()
def token_observables(
    hidden: Tensor, nearest: NearestTokens, range_scalings: Sequence[int], ks: Sequence[int]
) -> dict[str, Tensor]:
    """Return the observables of the clouds of tokens of some prompts.

    Of hidden states, ``(..., n_layers, n_tokens, d)``, and their `nearest_tokens`, up to the
    largest range scaling (see `intrinsic_dimension`) and k, at least two.

    Returns:
        By name and setting, ``(..., n_layers)`` float64 each: ``dimension n2=2`` (may be inf),
        ``overlap k=2`` with the next layer (one layer less), and mean and standard deviation of the
        cosine over pairs (``cosine_mean``, ``cosine_std``) and of the angle over tokens.
    """
    dimension = intrinsic_dimension(nearest, range_scalings)
    near = neighborhoods(nearest, max(ks))
    overlap = neighborhood_overlap(near[..., :-1, :, :], near[..., 1:, :, :], ks).mean(-2)
    angles = neighbor_angles(hidden, nearest)
    cosine_mean, cosine_std = cosine_statistics(hidden)
    return {
        **{f"dimension n2={n2}": dimension[..., i] for i, n2 in enumerate(range_scalings)},
        **{f"overlap k={k}": overlap[..., i] for i, k in enumerate(ks)},
        "cosine_mean": cosine_mean,
        "cosine_std": cosine_std,
        "angle_mean": angles.mean(-1),
        "angle_std": angles.std(-1, correction=0),
    }


@torch.no_grad()
def neighborhoods(nearest: NearestTokens, k: int) -> Tensor:
    """Return the k nearest other tokens of each token, including copies.

    A token's own copies come first, and the copies of a neighbor right after it, in the order of
    the text. Without copies these are the first k of ``nearest.indices``.

    Returns:
        Positions, ``(..., n_tokens, k)``, int64.

    Example:
        >>> from lincorr_lightning.geometry.distances import nearest_tokens
        >>> line = torch.tensor([[[0.0], [1.0], [3.0], [1.0]]])
        >>> neighborhoods(nearest_tokens(line, max_rank=2), k=2).tolist()
        [[[1, 3], [3, 0], [1, 3], [1, 0]]]
    """
    n_tokens = nearest.first.shape[-1]
    distances, indices = (
        part[..., :k].reshape(-1, n_tokens, k) for part in (nearest.distances, nearest.indices)
    )
    first, copied = nearest.first.view(-1, n_tokens), ~nearest.distinct.view(-1, n_tokens).all(1)
    layers = [
        _with_copies(distances[i], near, first[i]) if copied[i] else near
        for i, near in enumerate(indices)
    ]
    return torch.stack(layers).reshape(*nearest.first.shape, k)


def _with_copies(distances: Tensor, indices: Tensor, first: Tensor) -> Tensor:
    n_tokens, k = indices.shape
    position = torch.arange(n_tokens, device=indices.device)
    # Tokens at the same distance have the same rank, so that position orders their copies too.
    apart = distances.diff(dim=1) > _ROUNDING * distances[:, 1:]
    # Rank of each first token in each list; the last column takes the entries that are empty.
    rank = indices.new_full((n_tokens, n_tokens + 1), k + 1)
    ranks = 1 + torch.nn.functional.pad(apart, (1, 0)).cumsum(1)
    rank.scatter_(1, indices.where(indices >= 0, n_tokens), ranks)
    rank[position, first] = 0
    order = rank[:, first] * n_tokens + position
    order.fill_diagonal_((k + 2) * n_tokens)
    return order.topk(k, dim=1, largest=False).indices


@torch.no_grad()
def neighborhood_overlap(a: Tensor, b: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the fraction of each token's k nearest tokens in one layer that are so in another.

    ``|kNN_a ∩ kNN_b| / k``, ``(..., n_tokens, n_ks)`` float64, of two `neighborhoods`, ``(...,
    n_tokens, k_max)``; its mean over tokens is the paper's neighborhood overlap. Copies are tokens
    like all others here.

    Example:
        >>> a, b = torch.tensor([[1, 2], [0, 2], [1, 0]]), torch.tensor([[2, 1], [0, 2], [0, 1]])
        >>> neighborhood_overlap(a, b, ks=(1, 2)).tolist()
        [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0]]
    """
    sizes = torch.tensor(list(ks), device=a.device)
    shape = -1, *a.shape[-2:]
    layers = list(zip(a.reshape(shape), b.reshape(shape), strict=True))
    shared = a.new_empty(len(layers), a.shape[-2], len(sizes), dtype=torch.float64)
    for i, (near_a, near_b) in enumerate(layers):
        same = near_a[:, :, None] == near_b[:, None, :]
        # Number of tokens that are among the first k of both, for each k.
        counts = same.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32)
        shared[i] = counts.diagonal(dim1=1, dim2=2)[:, sizes - 1]
    return (shared / sizes).reshape(*a.shape[:-1], len(sizes))


@torch.no_grad()
def neighbor_angles(hidden: Tensor, nearest: NearestTokens) -> Tensor:
    """Return the angle at each token between its first and second nearest distinct token.

    Of hidden states, ``(..., n_layers, n_tokens, d)``, and their `nearest_tokens`, two at least;
    in degrees from 0 to 180, ``(..., n_layers, n_tokens)``, float64.

    Example:
        >>> from lincorr_lightning.geometry.distances import nearest_tokens
        >>> corner = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
        >>> neighbor_angles(corner, nearest_tokens(corner, max_rank=2)).round().tolist()
        [[90.0, 63.0, 27.0]]
    """
    pairs = nearest.indices[..., :2]
    angles = []
    shape = -1, *hidden.shape[-2:]
    for tokens, near in zip(hidden.reshape(shape), pairs.reshape(*shape[:2], 2), strict=True):
        differences = tokens[near].double() - tokens[:, None].double()
        u, v = torch.nn.functional.normalize(differences, dim=-1, eps=0).unbind(1)
        # Kahan's formula: the arc cosine loses its digits near 0 and 180 degrees.
        angles.append(2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)))
    return torch.stack(angles).rad2deg().reshape(nearest.first.shape)


@torch.no_grad()
def cosine_statistics(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the cosine similarity over pairs of tokens by layer.

    Of hidden states, ``(..., n_layers, n_tokens, d)``, none of them zero; the population's standard
    deviation, ``(..., n_layers)`` each, float64.

    Example:
        >>> found = cosine_statistics(torch.tensor([[[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]]))
        >>> [part.round(decimals=3).tolist() for part in found]
        [[0.333], [0.471]]
    """
    *leading, n_tokens, width = hidden.shape
    n_pairs = n_tokens * (n_tokens - 1)
    statistics = []
    for tokens in hidden.reshape(-1, n_tokens, width):
        norms = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=torch.float64)
        units = tokens / norms
        cosines = units @ units.T
        mean = (cosines.sum() - cosines.trace()) / n_pairs
        spread = (cosines - mean).fill_diagonal_(0).square().sum()
        statistics.append(torch.stack([mean, (spread / n_pairs).sqrt()]))
    means, stds = torch.stack(statistics).unbind(1)
    return means.reshape(leading), stds.reshape(leading)


def shuffle_blocks(n_tokens: int, level: int, seed: Sequence[int]) -> Tensor:
    """Return a prompt's positions after a shuffle of its blocks, ``(n_tokens,)`` (figure 1).

    At level S the prompt is cut into ``4^S`` blocks of equal length, whose order is shuffled; the
    order within a block stays. Level 0 leaves the prompt as it is. `seed` has integers below 2^32,
    such as a run's seed and a prompt's number; equal ones give the same order on any machine.

    Example:
        >>> shuffle_blocks(8, 1, seed=[0]).tolist()
        [2, 3, 6, 7, 4, 5, 0, 1]
    """
    n_blocks = 4**level
    positions = torch.arange(n_tokens).view(n_blocks, -1)
    if level == 0:
        return positions.flatten()
    state = 0
    for number in seed:
        # All integers are mixed, so that consecutive prompts have unrelated orders.
        state = (state * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    generator = torch.Generator().manual_seed(state)
    return positions[torch.randperm(n_blocks, generator=generator)].flatten()


@torch.no_grad()
def next_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the entropy of the next token at each token.

    From logits, ``(..., n_tokens, n_vocabulary)``: the cross-entropy, ``(..., n_tokens - 1)``, and
    the entropy of the distribution (contextual entropy), ``(..., n_tokens)``; float64, in nats.

    Example:
        >>> found = next_tokens(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 1]]))
        >>> [part.round(decimals=3).tolist() for part in found]
        [[[0.693, 0.693]], [[0.693, 0.693, 0.693]]]
    """
    log_p = logits.float().log_softmax(-1)
    loss = -log_p[..., :-1, :].gather(-1, tokens[..., 1:, None].to(log_p.device))[..., 0]
    # entr(0) is 0, so a logit of minus infinity adds nothing.
    entropy = torch.special.entr(log_p.exp()).sum(-1, dtype=torch.float64)
    return loss.double(), entropy
