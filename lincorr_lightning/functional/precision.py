"""Precision of W (paper section 3.5): do its highest weights pair what the world pairs?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

HIT_RANKS = (1, 3, 5)


class HitRates(NamedTuple):
    """Hit@N in one direction.

    Attributes:
        rates: Hit@N for each N asked for, ``(..., n_ranks)`` in [0, 1]; NaN when `n` is 0.
        n: Number of labels that have a reference.
    """

    rates: Tensor
    n: int

    def by_rank(self) -> dict[str, float]:
        """Return Hit@N by N, for one map, and the number of labels: ``{"1": .., .., "n": ..}``."""
        rates = {str(n): rate for n, rate in zip(HIT_RANKS, self.rates.tolist(), strict=True)}
        return {**rates, "n": self.n}


def _hits(weight: Tensor, right: Tensor, ranks: Sequence[int]) -> HitRates:
    """Hit@N along the last dimension: a row hits when a right entry is among its N highest."""
    asked = right.any(-1)
    weight, right = weight[..., asked, :], right[asked]
    best = weight.masked_fill(~right, -torch.inf).amax(-1, keepdim=True)
    # A wrong entry that ties with the best right one goes first: a row of zeros is no hit.
    ahead = ((weight >= best) & ~right).sum(-1)
    return HitRates(
        torch.stack([(ahead < n).double().mean(-1) for n in ranks], -1), int(asked.sum())
    )


def hit_rates(
    weight: Tensor, reference: Tensor, ranks: Sequence[int] = HIT_RANKS
) -> tuple[HitRates, HitRates]:
    """Hit@N of influenced targets and of influencing sources.

    Args:
        weight: Maps, ``(..., n_target, n_source)``.
        reference: Which pairs are right in the world, ``(n_target, n_source)`` bool.
        ranks: The N's.

    Returns:
        *Influenced target*: of the source labels that have a reference, the share for which a right
        target is among the N with the highest weight in its column. *Influencing source*: the same
        for target labels, along their rows.

    Example:
        >>> w = torch.tensor([[0.9, 0.8], [0.1, 0.5]])
        >>> influenced, influencing = hit_rates(w, torch.eye(2, dtype=torch.bool), ranks=(1,))
        >>> influenced.rates.tolist(), influencing.rates.tolist()
        ([0.5], [1.0])
    """
    return _hits(weight.mT, reference.T, ranks), _hits(weight, reference, ranks)
