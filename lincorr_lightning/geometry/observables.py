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

_ROWS = 128  # whose products with themselves and later rows are taken at a time
# Of the squared norms: below it, distances are taken from differences; others are right to 1e-9.
_CLOSE = 1e-6
_STEPS = 54  # bisection halves the interval with each step, to the precision of float64
_ROUNDING = 1e-9  # two distances whose difference is a smaller fraction of them are equal


class NearestTokens(NamedTuple):
    """The nearest tokens of every token, of which those with equal hidden states are copies.

    Neighbors of `distances` and `indices` are no copies, and a copy has the neighbors of the first
    token of its state: no distance is zero.
    """

    distances: Tensor  #: Increasing, ``(n_layers, n_tokens, max_rank)``, float64; inf for none.
    indices: Tensor  #: Positions of these tokens, same shape, int64; -1 where the distance is inf.
    distinct: Tensor  #: Whether a token is no copy of an earlier one, ``(n_layers, n_tokens)``.
    neighborhoods: Tensor
    """Positions of the nearest other tokens including copies, ``(n_layers, n_tokens, max_rank)`` or
    less if there are fewer tokens: its own copies come first, and the copies of a neighbor right
    after it, in the order of the text."""


def nearest_tokens(hidden: Tensor, max_rank: int) -> NearestTokens:
    """Find the nearest tokens of each token of each layer.

    The distances of one layer, ``(n_tokens, n_tokens)`` in float64, are in memory at a time. Tokens
    at exactly the same distance come in any order.

    Args:
        hidden: Hidden states or other clouds, ``(n_layers, n_tokens, d)``, of any floating dtype;
            they and their squares are finite.
        max_rank: Number of neighbors: the largest n2 of GRIDE or k of overlaps.
    """
    layers = [_nearest(tokens, max_rank) for tokens in hidden]
    return NearestTokens(*map(torch.stack, zip(*layers, strict=True)))


def _nearest(tokens: Tensor, max_rank: int) -> NearestTokens:
    squared = _squared_distances(tokens)
    first = (squared == 0).int().argmax(1)  # the first token of the same state
    distinct = first == torch.arange(len(tokens), device=tokens.device)
    n_neighbors = min(max_rank, len(tokens))
    neighborhoods = None
    if not distinct.all():
        # Copies then are equally far from all others, to the last digit.
        squared = squared[first][:, first].fill_diagonal_(torch.inf)
        neighborhoods = squared.sort(stable=True).indices[:, :n_neighbors]
        squared.masked_fill_(~distinct | (squared == 0), torch.inf)
    values, indices = squared.fill_diagonal_(torch.inf).topk(n_neighbors, largest=False)
    beyond = (0, max_rank - n_neighbors)
    return NearestTokens(
        pad(values.sqrt(), beyond, value=torch.inf),
        pad(indices.masked_fill(values.isinf(), -1), beyond, value=-1),
        distinct,
        indices if neighborhoods is None else neighborhoods,
    )


def _squared_distances(tokens: Tensor) -> Tensor:
    """Return squared distances, ``(n_tokens, n_tokens)`` float64; 0 between equal tokens alone.

    Distances do not depend on the origin; at the mean token, products lose the fewest digits.
    """
    points = tokens.double()
    centered = points - points.mean(0)
    products = points.new_zeros(len(points), len(points))
    for i in range(0, len(points), _ROWS):  # the half above the diagonal
        products[i : i + _ROWS, i:] = centered[i : i + _ROWS] @ centered[i:].T
    products = products.triu_().add_(products.triu(1).mT)
    norms = products.diagonal().clone()
    squared = products.mul_(-2).add_(norms).add_(norms[:, None])
    # Rounding might decide which tokens are neighbors, or equal.
    is_close = squared <= _CLOSE * (norms + norms[:, None])
    rows = is_close.fill_diagonal_(False).any(1).nonzero().flatten()
    if len(rows):
        mode = "donot_use_mm_for_euclid_dist"  # not of centered points, which are rounded
        squared[rows] = torch.cdist(points[rows], points, compute_mode=mode).square_()
    return squared


def token_observables(
    hidden: Tensor, nearest: NearestTokens, range_scalings: Sequence[int], ks: Sequence[int]
) -> dict[str, Tensor]:
    """Return the observables of the clouds of a prompt's tokens.

    By name and setting, ``(n_layers,)`` float64 each: ``dimension n2=2`` (may be inf), ``overlap
    k=2`` with the next layer (one layer less), and the means of the cosine over pairs
    (``cosine_mean``) and of the angle over tokens (``angle_mean``).

    Args:
        hidden: Hidden states of a prompt, ``(n_layers, n_tokens, d)``.
        nearest: Their `nearest_tokens`, up to the largest range scaling and k, at least two.
        range_scalings: See `intrinsic_dimension`.
        ks: Sizes of the neighborhoods whose overlap is taken.
    """
    dimension = intrinsic_dimension(nearest, range_scalings)
    neighbors = nearest.neighborhoods[..., : max(ks)]
    overlap = neighborhood_overlap(neighbors[:-1], neighbors[1:], ks).mean(-2)
    return {
        **{f"dimension n2={n2}": dimension[..., i] for i, n2 in enumerate(range_scalings)},
        **{f"overlap k={k}": overlap[..., i] for i, k in enumerate(ks)},
        "cosine_mean": mean_cosines(hidden),
        "angle_mean": neighbor_angles(hidden, nearest).mean(-1),
    }


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
    enough = nearest.distinct.sum(-1, keepdim=True) > outer
    ratio = (nearest.distances[..., outer - 1] / nearest.distances[..., outer // 2 - 1]).mT
    ratio = ratio.where(ratio > 1 + _ROUNDING, 1.0)  # (n_layers, n_scalings, n_tokens)
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
    n = used.sum(-1).double()
    total = log_ratio.sum(-1)
    high = (n - 1 + a * n) / (n2 / 2 * total)
    low = torch.zeros_like(high)
    for _ in range(_STEPS):
        d = (low + high) / 2
        x = d[..., None] * log_ratio
        h = torch.where(x > 0, x / -torch.expm1(-x), 1.0)
        is_below = n - 1 + a * (h * used).sum(-1) > (n2 - 1) * d * total
        low = torch.where(is_below, d, low)
        high = torch.where(is_below, high, d)
    return high.where(total > 0, torch.inf)


def neighborhood_overlap(a: Tensor, b: Tensor, ks: Sequence[int]) -> Tensor:
    """Return the fraction of each token's k nearest tokens in one layer that are so in another.

    ``|kNN_a ∩ kNN_b| / k``, ``(n_layers, n_tokens, n_ks)`` float64, of the neighborhoods of two
    `NearestTokens`; its mean over tokens is the paper's neighborhood overlap. Copies are tokens
    like all others here.
    """
    overlap = a.new_empty(*a.shape[:2], len(ks), dtype=torch.float64)
    for of_layer, near_a, near_b in zip(overlap, a, b, strict=True):
        same = near_a[:, :, None] == near_b[:, None, :]
        for i, k in enumerate(ks):
            of_layer[:, i] = same[:, :k, :k].sum((1, 2)).double() / k
    return overlap


def neighbor_angles(hidden: Tensor, nearest: NearestTokens) -> Tensor:
    """Return the angle at each token between its first and second nearest distinct token.

    Of hidden states, ``(n_layers, n_tokens, d)``, and their `nearest_tokens`, two at least; in
    degrees from 0 to 180, ``(n_layers, n_tokens)``, float64.
    """
    angles = []
    for tokens, pair in zip(hidden, nearest.indices[..., :2], strict=True):
        u, v = normalize(tokens[pair].double() - tokens[:, None].double(), dim=-1, eps=0).unbind(1)
        # Kahan's formula: the arc cosine loses its digits near 0 and 180 degrees.
        angles.append(2 * torch.atan2((u - v).norm(dim=-1), (u + v).norm(dim=-1)))
    return torch.stack(angles).rad2deg()


def mean_cosines(hidden: Tensor) -> Tensor:
    """Return the mean cosine similarity over pairs of tokens by layer, ``(n_layers,)`` float64.

    Of hidden states, ``(n_layers, n_tokens, d)``, none of them zero.
    """
    sums = [normalize(tokens.double(), eps=0).sum(0) for tokens in hidden]
    n = hidden.shape[1]
    # The square of the sum of unit vectors is n plus the cosines of all ordered pairs.
    return (torch.stack(sums).square().sum(-1) - n) / (n * (n - 1))


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
