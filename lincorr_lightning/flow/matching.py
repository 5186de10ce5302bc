"""Data-free matching of features by the cosine of their decoders, and what it carries over.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032). Here a feature is a row of a decoder ``(n_features, width)``, where the
paper has a column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Of cosines that are held at a time: 16 million float32 numbers are 64 MiB.
_TILE_NUMBERS = 2**24


class Matches(NamedTuple):
    """The sources most like each target.

    Attributes:
        indices: Sources, the most similar first, ``(n_targets, k)``, int64; -1 where there is none:
            the target has no direction, or there are fewer than k sources that have one.
        cosines: Their cosines, ``(n_targets, k)``, float32; NaN where there is none.
        n_zero_targets: Targets left out because their norm is zero.
        n_zero_sources: Sources left out because their norm is zero.
        full: All cosines, ``(n_targets, n_sources)``, if asked for; NaN where a norm is zero.
    """

    indices: Tensor
    cosines: Tensor
    n_zero_targets: int
    n_zero_sources: int
    full: Tensor | None = None


class Assignment(NamedTuple):
    """One source for each target, no source twice.

    Attributes:
        indices: Source of each target, ``(n_targets,)``, int64; -1 where there is none.
        cosines: Its cosine, ``(n_targets,)``, float32; NaN where there is none.
        n_zero_targets: Targets left out because their norm is zero.
        n_zero_sources: Sources left out because their norm is zero.
    """

    indices: Tensor
    cosines: Tensor
    n_zero_targets: int
    n_zero_sources: int


@torch.no_grad()
def match_features(
    targets: Tensor, sources: Tensor, k: int = 1, return_full: bool = False
) -> Matches:
    """The k sources with the highest cosine to each target.

    Cosines are computed a tile of targets at a time, in float32: the whole matrix, a gibibyte for
    16k features against 16k, is never held unless asked for.

    Args:
        targets: Decoder of the features to match, ``(n_targets, width)``.
        sources: Decoder in which to look for them, ``(n_sources, width)``.
        k: How many sources; the paper's top-1 and top-5.
        return_full: Whether to return all cosines too.

    Raises:
        ValueError: The widths differ, or k is below 1.

    Example:
        >>> matches = match_features(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1], [3, 3]]))
        >>> matches.indices.tolist(), matches.cosines.round(decimals=3).tolist()
        ([[1]], [[0.7070000171661377]])
    """
    if targets.ndim != 2 or sources.ndim != 2 or targets.shape[1] != sources.shape[1]:
        raise ValueError(
            f"decoders {tuple(targets.shape)} and {tuple(sources.shape)} cannot be compared: "
            "they must be (n_features, width) of one width"
        )
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1")
    n_targets, n_sources = len(targets), len(sources)
    targets, sources = targets.float(), sources.float()
    target_norm, source_norm = targets.norm(dim=1), sources.norm(dim=1)
    # Where all have a direction nothing is copied.
    present = source_norm > 0
    n_zero_sources = n_sources - int(present.sum())
    kept = present.nonzero().squeeze(1) if n_zero_sources else None
    if kept is not None:
        sources, source_norm = sources[kept], source_norm[kept]
    n_kept = min(k, len(sources))

    indices = targets.new_full((n_targets, k), -1, dtype=torch.int64)
    cosines = targets.new_full((n_targets, k), torch.nan, dtype=torch.float32)
    shape = (n_targets, n_sources)
    full = targets.new_full(shape, torch.nan, dtype=torch.float32) if return_full else None
    rows = max(1, min(n_targets, _TILE_NUMBERS // max(1, len(sources))))
    tile = sources.new_empty(rows, len(sources))
    inverse = 1 / source_norm
    for start in range(0, n_targets if n_kept else 0, rows):
        stop = min(start + rows, n_targets)
        norm = target_norm[start:stop, None]
        product = torch.mm(targets[start:stop], sources.T, out=tile[: stop - start])
        product.mul_(inverse)
        values, best = _largest(product, n_kept)
        # Only what is kept is divided by the target's norm, which does not change the order.
        cosines[start:stop, :n_kept] = torch.where(norm > 0, values / norm, torch.nan)
        indices[start:stop, :n_kept] = torch.where(
            norm > 0, best if kept is None else kept[best], -1
        )
        if full is not None:
            columns = slice(None) if kept is None else kept
            full[start:stop, columns] = torch.where(norm > 0, product / norm, torch.nan)
    n_zero_targets = n_targets - int((target_norm > 0).sum())
    return Matches(indices, cosines.clamp_(-1, 1), n_zero_targets, n_zero_sources, full)


def _largest(product: Tensor, k: int) -> tuple[Tensor, Tensor]:
    if k == 1:
        values, best = product.max(dim=1, keepdim=True)
        return values, best
    values, best = product.topk(k, dim=1)
    return values, best


@torch.no_grad()
def assign_features(targets: Tensor, sources: Tensor) -> Assignment:
    """One-to-one matching with the highest sum of cosines, as in "SAE Match" (arXiv 2410.07656).

    It holds the whole matrix of cosines, in float64: 2 GiB for 16k features against 16k.

    Args:
        targets: Decoder of the features to match, ``(n_targets, width)``.
        sources: Decoder in which to look for them, ``(n_sources, width)``. Where they are fewer
            than the targets, some targets get none.

    Raises:
        ValueError: The widths differ.

    Example:
        >>> assign_features(torch.eye(2).flip(0), torch.tensor([[2.0, 1], [0, 3]])).indices.tolist()
        [1, 0]
    """
    from scipy.optimize import linear_sum_assignment

    matches = match_features(targets, sources, return_full=True)
    full = matches.full
    assert full is not None
    known = ~full.isnan()
    target_kept = known.any(1).nonzero().squeeze(1)
    source_kept = known.any(0).nonzero().squeeze(1)
    cost = full[target_kept][:, source_kept].double().cpu().numpy()
    rows, columns = linear_sum_assignment(cost, maximize=True)
    to = targets.device
    chosen = target_kept[torch.from_numpy(rows).to(to)]
    found = source_kept[torch.from_numpy(columns).to(to)]
    indices = torch.full_like(matches.indices[:, 0], -1)
    cosines = torch.full_like(matches.cosines[:, 0], torch.nan)
    indices[chosen] = found
    cosines[chosen] = full[chosen, found].clamp(-1, 1)
    return Assignment(indices, cosines, matches.n_zero_targets, matches.n_zero_sources)


def transition_matrix(indices: Tensor, n_sources: int) -> Tensor:
    """T, by which features of one SAE become those of a later one.

    ``T = indicator(top-k of W_dec(source)ᵀ W_dec(target))``: one where the source is among the k
    that are most like the target.

    Args:
        indices: Sources of each target, ``(n_targets, k)`` of `match_features` or ``(n_targets,)``
            of `assign_features`; -1 is nothing.
        n_sources: Number of features of the source.

    Returns:
        ``(n_sources, n_targets)``, sparse, float32.

    Raises:
        ValueError: An index is not below `n_sources`.

    Example:
        >>> transition_matrix(torch.tensor([[1, 0], [1, -1]]), 2).to_dense().tolist()
        [[1.0, 0.0], [1.0, 1.0]]
    """
    indices = indices.reshape(len(indices), -1)
    if indices.numel() and int(indices.max()) >= n_sources:
        raise ValueError(f"a match is of source {int(indices.max())} of {n_sources}")
    target, rank = (indices >= 0).nonzero(as_tuple=True)
    hook_points = torch.stack([indices[target, rank], target])
    ones = torch.ones(len(target), device=indices.device)
    shape = (n_sources, len(indices))
    return torch.sparse_coo_tensor(hook_points, ones, shape, check_invariants=True).coalesce()


def carry_features(features: Tensor, transition: Tensor) -> Tensor:
    """What a transition matrix makes of the source's features: ``f T``.

    Args:
        features: ``(n, n_sources)``.
        transition: T, ``(n_sources, n_targets)``, sparse or not.

    Returns:
        ``(n, n_targets)``, to be decoded by the target's SAE: source and target are then a
        transcoder from one place to the other.
    """
    return (transition.to(features.dtype).transpose(0, 1) @ features.T).T


def explained_variance(true: Tensor, predicted: Tensor) -> float:
    """``1 - Σ|x - x̂|² / Σ|x - mean|²`` over all rows and columns, in float64.

    Args:
        true: Activations x, ``(n, width)``.
        predicted: x̂, likewise.

    Returns:
        At most 1; NaN where the activations never change.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> explained_variance(x, x), explained_variance(x, torch.ones(2, 1))
        (1.0, 0.0)
    """
    true, predicted = true.double(), predicted.double()
    total = float(((true - true.mean(0)) ** 2).sum())
    missed = float(((true - predicted) ** 2).sum())
    return 1 - missed / total if total > 0 else float("nan")
