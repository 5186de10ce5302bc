"""Observables of the clouds of a prompt's tokens by layer, and of its next-token distributions.

From "The Geometry of Tokens in Internal Representations of Large Language Models" (Viswanathan et
al., 2025, arXiv 2501.10573): intrinsic dimension, overlap of neighborhoods, angles, cosines, block
shuffles, loss and entropy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

RANGE_SCALINGS = (2, 4, 8, 16, 32, 64, 128, 256)  #: The paper's n2 (Viswanathan et al.).

# Columns multiplied at a time: a cloud of probabilities is not copied to float64 as a whole.
_COLUMNS = 8192
_ROWS = 128  # whose products with themselves and later rows are taken at a time
# Of the squared norms: below it, distances are taken from differences; others are right to 1e-9.
_CLOSE = 1e-6
_STEPS = 54  # bisection halves the interval with each step, to the precision of float64
_ROUNDING = 1e-9  # two distances whose difference is a smaller fraction of them are equal


class NearestTokens(NamedTuple):
    """The nearest distinct tokens of every token.

    Tokens of a layer with equal hidden states are copies of the first of them. Neighbors are first
    tokens only, and a copy has the neighbors of its first token: no distance is zero.
    """

    distances: Tensor  #: Increasing, ``(n_layers, n_tokens, max_rank)``, float64; inf for none.
    indices: Tensor  #: Positions of these tokens, same shape, int64; -1 where the distance is inf.
    first: Tensor  #: Position of the first token of the same state, ``(n_layers, n_tokens)``.

    @property
    def distinct(self) -> Tensor:
        """Whether a token is not a copy, ``(n_layers, n_tokens)`` bool."""
        return self.first == torch.arange(self.first.shape[-1], device=self.first.device)


def nearest_tokens(hidden: Tensor, max_rank: int) -> NearestTokens:
    """Find the nearest distinct tokens of each token of each layer.

    Of hidden states or other clouds, ``(n_layers, n_tokens, d)``, of any floating dtype; a
    `ValueError` if a layer is not finite. `max_rank` is the number of neighbors: the largest n2 of
    GRIDE or k of overlaps. The distances of one layer, ``(n_tokens, n_tokens)`` in float64, are in
    memory at a time. Tokens at exactly the same distance come in any order.
    """
    layers = zip(*(_nearest(tokens, max_rank) for tokens in hidden), strict=True)
    distances, indices, first = map(torch.stack, layers)
    beyond = (0, max_rank - distances.shape[-1])
    distances, indices = pad(distances, beyond, value=torch.inf), pad(indices, beyond, value=-1)
    return NearestTokens(distances, indices, first)


def _nearest(tokens: Tensor, max_rank: int) -> NearestTokens:
    squared, norms = _squared_distances(tokens)
    if not norms.isfinite().all():
        raise ValueError("hidden states are NaN, infinite or too large to be squared")
    position = torch.arange(len(tokens), device=tokens.device)
    first = position.clone()
    suspects = (squared.amin(1) <= _CLOSE * norms).nonzero().flatten()
    if len(suspects):
        _, group = torch.unique(tokens[suspects], dim=0, return_inverse=True)
        earliest = suspects.scatter_reduce(0, group, suspects, "amin", include_self=False)
        first[suspects] = earliest[group]
        squared[:, first != position] = torch.inf
    max_rank = min(max_rank, len(tokens))
    values, indices = squared.topk(max_rank, largest=False)
    # Rounding might decide which tokens are neighbors.
    close = (values < _CLOSE * (norms[:, None] + norms[indices])).any(1).nonzero().flatten()
    if len(close):
        exact = _exact_distances(tokens, close).masked_fill_(squared[close].isinf(), torch.inf)
        values[close], indices[close] = exact.topk(max_rank, largest=False)
    distances = values.clamp_(min=0).sqrt_()
    indices = indices.masked_fill(distances.isinf(), -1)
    return NearestTokens(distances[first], indices[first], first)


def _squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared distances, inf on the diagonal, and squared norms about the mean token.

    Distances do not depend on the origin; at the mean, products lose the fewest digits.
    """
    products = tokens.new_zeros(len(tokens), len(tokens), dtype=torch.float64)
    for columns in torch.split(tokens, _COLUMNS, dim=-1):
        block = columns.double()
        block = block - block.mean(0)  # not in place: it may be the hidden states themselves
        for i in range(0, len(block), _ROWS):  # the half above the diagonal
            products[i : i + _ROWS, i:].addmm_(block[i : i + _ROWS], block[i:].T)
    products = products.triu_().add_(products.triu(1).mT)
    norms = products.diagonal().clone()
    squared = products.mul_(-2).add_(norms).add_(norms[:, None])
    squared.fill_diagonal_(torch.inf)
    return squared, norms


def _exact_distances(tokens: Tensor, rows: Tensor) -> Tensor:
    squared = tokens.new_zeros(len(rows), len(tokens), dtype=torch.float64)
    for columns in torch.split(tokens, _COLUMNS, dim=-1):
        block = columns.double()
        mode = "donot_use_mm_for_euclid_dist"
        squared += torch.cdist(block[rows], block, compute_mode=mode).square_()
    return squared


def token_observables(
    hidden: Tensor, nearest: NearestTokens, range_scalings: Sequence[int], ks: Sequence[int]
) -> dict[str, Tensor]:
    """Return the observables of the clouds of a prompt's tokens.

    Of a prompt's hidden states, ``(n_layers, n_tokens, d)``, and their `nearest_tokens`, up to the
    largest range scaling (see `intrinsic_dimension`) and k, at least two. By name and setting,
    ``(n_layers,)`` float64 each: ``dimension n2=2`` (may be inf), ``overlap k=2`` with the next
    layer (one layer less), and mean and standard deviation of the cosine over pairs
    (``cosine_mean``, ``cosine_std``) and of the angle over tokens.
    """
    dimension = intrinsic_dimension(nearest, range_scalings)
    near = neighborhoods(nearest, max(ks))
    overlap = neighborhood_overlap(near[:-1], near[1:], ks).mean(-2)
    angles = neighbor_angles(hidden, nearest)
    cosine_mean, cosine_std = cosine_statistics(hidden)
    return {
        **{f"dimension n2={n2}": dimension[..., i] for i, n2 in enumerate(range_scalings)},
        **{f"overlap k={k}": overlap[..., i] for i, k in enumerate(ks)},
        "cosine_mean": cosine_mean, "cosine_std": cosine_std,
        "angle_mean": angles.mean(-1), "angle_std": angles.std(-1, correction=0),
    }  # fmt: skip


def intrinsic_dimension(
    nearest: NearestTokens, range_scalings: Sequence[int] = RANGE_SCALINGS
) -> Tensor:
    """Estimate the intrinsic dimension of each layer at each range scaling, which are even: GRIDE.

    Denti et al., 2022, "The generalized ratios intrinsic dimension estimator" (arXiv 2104.13832).
    With ``μ = r_{n2} / r_{n1}`` of each distinct token and n2 = 2 n1, maximum likelihood for d
    under ``p(μ | d) = d (μ^d - 1)^{n2-n1-1} / (B(n2-n1, n1) μ^{(n2-1)d+1})``. At n2 = 2 it is the
    2NN estimator, ``d = (N - 1) / Σ log μ``. As in DADApy, the score's N/d is (N - 1)/d, which
    makes 2NN unbiased, and ratios above ``q50 + 20 (q95 - q50)`` are left out: such a token has an
    almost identical neighbor.

    It is ``(n_layers, n_scalings)``, float64; inf if each token has its n1-th and n2-th neighbor at
    the same distance, as in a simplex; NaN if a layer has fewer than n2 + 1 distinct tokens.
    """
    outer = torch.tensor(range_scalings, device=nearest.distances.device)
    near, far = (nearest.distances[..., rank - 1] for rank in (outer // 2, outer))
    enough = nearest.distinct.sum(-1, keepdim=True) > outer
    ratio = (far / near).mT  # (..., n_scalings, n_tokens)
    ratio = ratio.where(ratio > 1 + _ROUNDING, 1.0)
    ratio = ratio.where(nearest.distinct[..., None, :] & enough[..., None], torch.nan)
    middle, high = ratio.nanquantile(ratio.new_tensor([0.5, 0.95]), dim=-1, keepdim=True)
    # With <=, a cloud in which all ratios are equal keeps them.
    used = ratio <= middle + 20 * (high - middle)
    return _maximum_likelihood(ratio.log().where(used, 0.0), used, outer).where(enough, torch.nan)


def _maximum_likelihood(log_ratio: Tensor, used: Tensor, outer: Tensor) -> Tensor:
    """Return the root of the score, by bisection.

    The score times d is ``N - 1 + a Σ h(d log μ) - (n2 - 1) d Σ log μ``, with a = n2 - n1 - 1 and
    h(x) = x / (1 - exp(-x)) <= 1 + x, which bounds the root from above; at n2 = 2 the bound is the
    closed form. `log_ratio` is log μ, ``(..., n_scalings, n_tokens)``, 0 where it is not `used`;
    `outer` is n2.
    """
    n2 = outer.double()
    a = n2 / 2 - 1
    n, total = used.sum(-1).double(), log_ratio.sum(-1)
    high = (n - 1 + a * n) / (n2 / 2 * total)
    low = torch.zeros_like(high)
    for _ in range(_STEPS):
        d = (low + high) / 2
        x = d[..., None] * log_ratio
        h = torch.where(x > 0, x / -torch.expm1(-x), 1.0)
        is_below = n - 1 + a * (h * used).sum(-1) > (n2 - 1) * d * total
        low, high = torch.where(is_below, d, low), torch.where(is_below, high, d)
    return high.where(total > 0, torch.inf)


def neighborhoods(nearest: NearestTokens, k: int) -> Tensor:
    """Return the k nearest other tokens of each token, including copies.

    A token's own copies come first, and the copies of a neighbor right after it, in the order of
    the text. Without copies these are the first k of ``nearest.indices``. As positions,
    ``(n_layers, n_tokens, k)``, int64.
    """
    parts = nearest.distances[..., :k], nearest.indices[..., :k], nearest.first, nearest.distinct
    return torch.stack([
        near if distinct.all() else _with_copies(distances, near, first)
        for distances, near, first, distinct in zip(*parts, strict=True)
    ])  # fmt: skip


def _with_copies(distances: Tensor, indices: Tensor, first: Tensor) -> Tensor:
    n_tokens, k = indices.shape
    position = torch.arange(n_tokens, device=indices.device)
    # Tokens at the same distance have the same rank, so that position orders their copies too.
    apart = distances.diff(dim=1) > _ROUNDING * distances[:, 1:]
    # Rank of each first token in each list; the last column takes the entries that are empty.
    rank = indices.new_full((n_tokens, n_tokens + 1), k + 1)
    rank.scatter_(1, indices.where(indices >= 0, n_tokens), 1 + pad(apart, (1, 0)).cumsum(1))
    rank[position, first] = 0
    order = rank[:, first] * n_tokens + position
    order.fill_diagonal_((k + 2) * n_tokens)
    return order.topk(k, dim=1, largest=False).indices


def neighborhood_overlap(a: Tensor, b: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the fraction of each token's k nearest tokens in one layer that are so in another.

    ``|kNN_a ∩ kNN_b| / k``, ``(n_layers, n_tokens, n_ks)`` float64, of two `neighborhoods`; its
    mean over tokens is the paper's neighborhood overlap. Copies are tokens like all others here.
    """
    sizes = torch.tensor(list(ks), device=a.device)
    shared = a.new_empty(*a.shape[:2], len(sizes), dtype=torch.float64)
    for i, (near_a, near_b) in enumerate(zip(a, b, strict=True)):
        same = near_a[:, :, None] == near_b[:, None, :]
        # Number of tokens that are among the first k of both, for each k.
        counts = same.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32)
        shared[i] = counts.diagonal(dim1=1, dim2=2)[:, sizes - 1]
    return shared / sizes


def neighbor_angles(hidden: Tensor, nearest: NearestTokens) -> Tensor:
    """Return the angle at each token between its first and second nearest distinct token.

    Of hidden states, ``(n_layers, n_tokens, d)``, and their `nearest_tokens`, two at least; in
    degrees from 0 to 180, ``(n_layers, n_tokens)``, float64.
    """
    angles = []
    for tokens, near in zip(hidden, nearest.indices[..., :2], strict=True):
        u, v = normalize(tokens[near].double() - tokens[:, None].double(), dim=-1, eps=0).unbind(1)
        # Kahan's formula: the arc cosine loses its digits near 0 and 180 degrees.
        angles.append(2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)))
    return torch.stack(angles).rad2deg()


def cosine_statistics(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of the cosine similarity over pairs of tokens by layer.

    Of hidden states, ``(n_layers, n_tokens, d)``, none of them zero; the population's standard
    deviation, ``(n_layers,)`` each, float64.
    """
    n_pairs = hidden.shape[1] * (hidden.shape[1] - 1)
    means, deviations = [], []
    for tokens in hidden:
        units = tokens / torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=torch.float64)
        cosines = units @ units.T
        means.append((cosines.sum() - cosines.trace()) / n_pairs)
        deviations.append(((cosines - means[-1]).fill_diagonal_(0).square().sum() / n_pairs).sqrt())
    return torch.stack(means), torch.stack(deviations)


def shuffle_blocks(n_tokens: int, level: int, seed: Sequence[int]) -> Tensor:
    """Return a prompt's positions after a shuffle of its blocks, ``(n_tokens,)`` (figure 1).

    At level S the prompt is cut into ``4^S`` blocks of equal length, whose order is shuffled; the
    order within a block stays. Level 0 leaves the prompt as it is. `seed` has integers below 2^32,
    such as a run's seed and a prompt's number; equal ones give the same order on any machine.
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


def next_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the entropy of the next token at each token.

    From logits, ``(..., n_tokens, n_vocabulary)``: the cross-entropy, ``(..., n_tokens - 1)``, and
    the entropy of the distribution (contextual entropy), ``(..., n_tokens)``; float64, in nats.
    """
    log_p = logits.float().log_softmax(-1)
    loss = -log_p[..., :-1, :].gather(-1, tokens[..., 1:, None].to(log_p.device))[..., 0]
    # A logit of minus infinity adds nothing.
    entropy = -log_p.exp().mul_(log_p.clamp_(min=-1e9)).sum(-1, dtype=torch.float64)
    return loss.double(), entropy
