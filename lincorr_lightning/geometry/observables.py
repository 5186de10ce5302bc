"""Observables of the clouds of a prompt's tokens by layer, and of its next-token distributions.

From "The Geometry of Tokens in Internal Representations of Large Language Models" (Viswanathan et
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
    """Observables of clouds of tokens by layer, float64.

    Attributes:
        dimension: Intrinsic dimension, ``(..., n_layers, n_scalings)``; may be inf.
        overlap: Neighborhood overlap with the next layer, mean over tokens,
            ``(..., n_layers - 1, n_ks)``.
        cosine_mean: Mean cosine similarity over pairs of tokens, ``(..., n_layers)``.
        cosine_std: Its standard deviation over pairs, ``(..., n_layers)``.
        angle_mean: Angle between the directions of the first and the second nearest token in
            degrees, mean over tokens, ``(..., n_layers)``.
        angle_std: Its standard deviation over tokens, ``(..., n_layers)``.
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
    """Return the observables of the clouds of tokens of some prompts.

    Args:
        hidden: Hidden states, ``(..., n_layers, n_tokens, d)``.
        nearest: Their `nearest_tokens`, up to the largest range scaling and k, at least two.
        range_scalings: Range scalings n2 of the intrinsic dimension.
        ks: Sizes of the neighborhoods.
    """
    angles = neighbor_angles(hidden, nearest)
    return TokenObservables(
        intrinsic_dimension(nearest, range_scalings),
        consecutive_overlap(nearest, ks).mean(-2),
        *cosine_statistics(hidden),
        angles.mean(-1),
        angles.std(-1, correction=0),
    )


def shuffle_blocks(n_tokens: int, level: int, seed: Sequence[int]) -> Tensor:
    """Return the order of a prompt's tokens after a shuffle of its blocks (paper, figure 1).

    The prompt is cut into ``4^S`` blocks of equal length, whose order is shuffled; the order within
    a block stays. Level 0 leaves the prompt as it is.

    Args:
        n_tokens: Number of tokens of the prompt.
        level: Shuffling level S.
        seed: Integers below 2^32, such as the seed of a run and the number of the prompt; the same
            integers give the same order everywhere.

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
        # All integers are mixed, so that consecutive prompts have unrelated orders.
        state = (state * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    generator = torch.Generator().manual_seed(state)
    return positions[torch.randperm(n_blocks, generator=generator)].flatten()


@torch.no_grad()
def next_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the entropy of the next token at each token.

    Args:
        logits: ``(..., n_tokens, n_vocabulary)``.
        tokens: Token ids of the prompts, ``(..., n_tokens)``.

    Returns:
        Cross-entropy of the next token, ``(..., n_tokens - 1)``, and entropy of the next-token
        distribution (contextual entropy), ``(..., n_tokens)``; float64, in nats.

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
