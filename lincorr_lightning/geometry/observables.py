"""What is observed of the cloud of a prompt's tokens, layer by layer, and of what is said of them.

After "The Geometry of Tokens in Internal Representations of Large Language Models" (Viswanathan et
al., 2025, arXiv 2501.10573).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.geometry.distances import NearestTokens
from lincorr_lightning.geometry.intrinsic_dimension import intrinsic_dimension
from lincorr_lightning.geometry.neighborhoods import (
    consecutive_overlap,
    cosine_statistics,
    neighbor_angles,
)


class TokenObservables(NamedTuple):
    """What is observed of the clouds of tokens, a number or more a layer, in float64.

    Attributes:
        dimension: Intrinsic dimension, ``(..., n_layers, n_scalings)``; inf where it has no end.
        overlap: Mean over tokens of the neighborhood overlap with the next layer,
            ``(..., n_layers - 1, n_ks)``.
        cosine_mean: Mean cosine similarity over pairs of tokens, ``(..., n_layers)``.
        cosine_std: Its standard deviation over pairs, likewise.
        angle_mean: Mean over tokens of the angle between the directions of the first and the second
            nearest token, in degrees, likewise.
        angle_std: Its standard deviation over tokens, likewise.
    """

    dimension: Tensor
    overlap: Tensor
    cosine_mean: Tensor
    cosine_std: Tensor
    angle_mean: Tensor
    angle_std: Tensor


@torch.no_grad()
def token_observables(
    hidden: Tensor, nearest: NearestTokens, range_scalings: Sequence[int], ks: Sequence[int]
) -> TokenObservables:
    """Observe the clouds of tokens of all layers of some prompts.

    Args:
        hidden: Hidden states, ``(..., n_layers, n_tokens, d)``.
        nearest: What `nearest_tokens` found in them, up to the largest of the scalings and of the
            ks, two at least.
        range_scalings: The n2's of the intrinsic dimension.
        ks: Sizes of the neighborhoods whose overlap is taken.

    Raises:
        ValueError: A layer, which is named, has too few distinct tokens, or one without direction.
    """
    angles = neighbor_angles(hidden, nearest)
    cosines = cosine_statistics(hidden)
    return TokenObservables(
        intrinsic_dimension(nearest, range_scalings).dimension,
        consecutive_overlap(nearest, ks).mean(-2),
        cosines.mean,
        cosines.std,
        angles.mean(-1),
        angles.std(-1, correction=0),
    )


def shuffle_blocks(n_tokens: int, level: int, seed: Sequence[int]) -> Tensor:
    """Order of a prompt's tokens after a shuffle of its blocks (paper, figure 1).

    The prompt is cut into ``4^S`` blocks of equal length, which change places; within a block the
    order stays. Level 0 leaves the prompt as it is.

    Args:
        n_tokens: Length of the prompt.
        level: S.
        seed: Whole numbers below 2^32 that the order is drawn from, such as a run's seed and the
            prompt's number: the same anywhere.

    Returns:
        Positions, ``(n_tokens,)``.

    Raises:
        ValueError: ``4^S`` does not divide the length.

    Example:
        >>> shuffle_blocks(8, 1, seed=[0]).tolist()
        [2, 3, 6, 7, 4, 5, 0, 1]
    """
    n_blocks = 4**level
    if level < 0 or n_tokens % n_blocks:
        raise ValueError(
            f"{n_tokens} tokens cannot be cut into 4^{level} = {n_blocks} equal blocks"
        )
    positions = torch.arange(n_tokens).view(n_blocks, -1)
    if level == 0:
        return positions.flatten()
    state = 0
    for number in seed:
        # Of the seeds' digits one after another, so that neighboring prompts share no order.
        state = (state * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    generator = torch.Generator().manual_seed(state)
    return positions[torch.randperm(n_blocks, generator=generator)].flatten()


class NextTokens(NamedTuple):
    """What an LM says of each next token of some prompts.

    Attributes:
        loss: Cross-entropy of the token that follows, in nats, ``(..., n_tokens - 1)``, float64.
        entropy: Of the distribution over the vocabulary at each token, in nats,
            ``(..., n_tokens)``, float64: the contextual entropy.
    """

    loss: Tensor
    entropy: Tensor


@torch.no_grad()
def next_tokens(logits: Tensor, tokens: Tensor) -> NextTokens:
    """Compute loss and entropy of each position.

    Args:
        logits: ``(..., n_tokens, n_vocabulary)``.
        tokens: The prompts, ``(..., n_tokens)``.

    Example:
        >>> said = next_tokens(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 1]]))
        >>> [part.round(decimals=3).tolist() for part in said]
        [[[0.693, 0.693]], [[0.693, 0.693, 0.693]]]
    """
    log_p = logits.float().log_softmax(-1)
    loss = -log_p[..., :-1, :].gather(-1, tokens[..., 1:, None].to(log_p.device))[..., 0]
    # A logit of minus infinity has no share in the entropy.
    entropy = torch.special.entr(log_p.exp()).sum(-1, dtype=torch.float64)
    return NextTokens(loss.double(), entropy)
