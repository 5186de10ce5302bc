"""Data-free matching of features by the cosine of their decoders.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032). Here a feature is a row of a decoder ``(n_features, width)``; the paper
writes it as a column.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from lincorr_lightning.errors import require

# Cosines held in memory at a time: 16 million float32 numbers are 64 MiB.
_TILE_SIZE = 2**24


class Matches(NamedTuple):
    """The sources most similar to each target, the most similar first, and their cosines.

    Both are ``(n_targets, k)``, int64 and float32; -1 and NaN where there is none, because the
    target's norm is zero or fewer than k sources have a norm above zero.
    """

    indices: Tensor
    cosines: Tensor


@torch.no_grad()
def match_features(targets: Tensor, sources: Tensor, k: int = 1) -> Matches:
    """Find the k sources with the highest cosine to each target.

    Cosines are computed in float32 for a tile of targets at a time: the whole matrix is a gibibyte
    for 16k features against 16k.

    Args:
        targets: Decoder of the features to match, ``(n_targets, width)``.
        sources: Decoder to search, ``(n_sources, width)``.
        k: Number of sources per target; 1 and 5 in the paper.

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
    require("k", k, at_least=1)
    targets, sources = targets.float(), sources.float()
    target_norm, source_norm = targets.norm(dim=1, keepdim=True), sources.norm(dim=1)
    is_zero = source_norm == 0
    inverse = torch.where(is_zero, 0.0, 1 / source_norm)
    n_best = min(k, len(sources))
    best = [
        (tile @ sources.T * inverse).masked_fill_(is_zero, -torch.inf).topk(n_best, dim=1)
        for tile in torch.split(targets, max(1, _TILE_SIZE // max(1, len(sources))))
    ]
    values, indices = (torch.cat(parts) for parts in zip(*best, strict=True))
    known = (target_norm > 0) & values.isfinite()
    # The target's norm does not change the order: only the kept cosines are divided by it.
    cosines = torch.where(known, values / target_norm, torch.nan).clamp_(-1, 1)
    rest = (0, k - n_best)
    return Matches(
        pad(torch.where(known, indices, -1), rest, value=-1), pad(cosines, rest, value=torch.nan)
    )


@torch.no_grad()
def assign_features(targets: Tensor, sources: Tensor) -> Matches:
    """Match features one to one with the highest sum of cosines ("SAE Match", arXiv 2410.07656).

    The whole matrix of cosines is held in float64: 2 GiB for 16k features against 16k.

    Args:
        targets: Decoder of the features to match, ``(n_targets, width)``.
        sources: Decoder to search, ``(n_sources, width)``. If there are fewer sources than targets,
            some targets have none.

    Returns:
        One source per target, each source at most once.

    Example:
        >>> assign_features(torch.eye(2).flip(0), torch.tensor([[2.0, 1], [0, 3]])).indices.tolist()
        [[1], [0]]
    """
    from scipy.optimize import linear_sum_assignment

    target_kept, source_kept = (d.float().norm(dim=1).nonzero()[:, 0] for d in (targets, sources))
    cosines = normalize(targets[target_kept].float()) @ normalize(sources[source_kept].float()).T
    rows, columns = linear_sum_assignment(cosines.double().cpu().numpy(), maximize=True)
    matches = Matches(
        targets.new_full((len(targets), 1), -1, dtype=torch.int64),
        targets.new_full((len(targets), 1), torch.nan, dtype=torch.float32),
    )
    matches.indices[target_kept[rows], 0] = source_kept[columns]
    matches.cosines[target_kept[rows], 0] = cosines[rows, columns].clamp(-1, 1)
    return matches
