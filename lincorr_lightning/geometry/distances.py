"""Nearest tokens of every token in each layer, from inner products in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# Columns that are multiplied at a time: a cloud of next-token probabilities has as many as the
# vocabulary, and is not copied to float64 as a whole.
_COLUMNS = 8192
# A token with a squared distance below this fraction of the squared norms has all its distances
# computed from differences: the others are right to about 1e-9.
_CLOSE = 1e-6


class NearestTokens(NamedTuple):
    """The nearest distinct tokens of every token.

    Tokens of a layer with equal hidden states are copies of the first of them. Neighbors are first
    tokens only, and a copy has the neighbors of its first token: no distance is zero.
    """

    distances: Tensor
    """Euclidean distances, increasing, ``(..., n_tokens, max_rank)``, float64; inf if there are
    fewer distinct tokens."""
    indices: Tensor
    """Positions of these tokens, same shape, int64; -1 where the distance is inf."""
    first: Tensor
    """Position of the first token with the same hidden state, ``(..., n_tokens)``, int64."""

    @property
    def distinct(self) -> Tensor:
        """Whether a token is not a copy, ``(..., n_tokens)`` bool."""
        return self.first == torch.arange(self.first.shape[-1], device=self.first.device)


@torch.no_grad()
def nearest_tokens(hidden: Tensor, max_rank: int) -> NearestTokens:
    """Find the nearest distinct tokens of each token of each layer.

    Of hidden states or other clouds, ``(..., n_layers, n_tokens, d)``, of any floating dtype; a
    `ValueError` if a layer is not finite. `max_rank` is the number of neighbors: the largest n2 of
    GRIDE or k of overlaps. The distances of one layer, ``(n_tokens, n_tokens)`` in float64, are in
    memory at a time. Tokens at exactly the same distance come in any order.

    Example:
        >>> line = torch.tensor([[[0.0], [1.0], [3.0], [1.0]]])
        >>> nearest = nearest_tokens(line, max_rank=2)
        >>> nearest.indices.tolist(), nearest.first.tolist()
        ([[[1, 2], [0, 2], [1, 0], [0, 2]]], [[0, 1, 2, 1]])
    """
    *leading, n_tokens, width = hidden.shape
    layers = [_nearest(tokens, max_rank) for tokens in hidden.reshape(-1, n_tokens, width)]
    distances, indices, first = (
        torch.stack(part).reshape(*leading, *part[0].shape) for part in zip(*layers, strict=True)
    )
    beyond = (0, max_rank - distances.shape[-1])
    return NearestTokens(
        pad(distances, beyond, value=torch.inf), pad(indices, beyond, value=-1), first
    )


def _nearest(tokens: Tensor, max_rank: int) -> NearestTokens:
    """Find the neighbors in one layer, ``(n_tokens, d)``."""
    squared, norms = _squared_distances(tokens)
    if not bool(norms.isfinite().all()):
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
    is_close = values < _CLOSE * (norms[:, None] + norms[indices])
    close = is_close.any(1).nonzero().flatten()
    if len(close):
        exact = _exact_distances(tokens, close).masked_fill_(squared[close].isinf(), torch.inf)
        values[close], indices[close] = exact.topk(max_rank, largest=False)
    distances = values.clamp_(min=0).sqrt_()
    indices = indices.masked_fill(distances.isinf(), -1)
    return NearestTokens(distances[first], indices[first], first)


def _squared_distances(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared distances, inf on the diagonal, and squared norms about the mean token.

    Distances do not depend on the origin; at the mean, products are small and lose the fewest
    digits when they cancel.
    """
    products = tokens.new_zeros(len(tokens), len(tokens), dtype=torch.float64)
    for columns in torch.split(tokens, _COLUMNS, dim=-1):
        block = columns.double()
        block = block - block.mean(0)  # not in place: it may be the hidden states themselves
        products.addmm_(block, block.T)
    norms = products.diagonal().clone()
    squared = products.mul_(-2).add_(norms).add_(norms[:, None])
    squared.fill_diagonal_(torch.inf)
    return squared, norms


def _exact_distances(tokens: Tensor, rows: Tensor) -> Tensor:
    """Return squared distances of some tokens from all, ``(n_rows, n_tokens)``, by differences."""
    squared = tokens.new_zeros(len(rows), len(tokens), dtype=torch.float64)
    for columns in torch.split(tokens, _COLUMNS, dim=-1):
        block = columns.double()
        mode = "donot_use_mm_for_euclid_dist"
        squared += torch.cdist(block[rows], block, compute_mode=mode).square_()
    return squared
