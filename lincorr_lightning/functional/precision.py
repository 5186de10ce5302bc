"""Precision of W: how often its highest weights agree with the reference (paper section 3.5)."""

from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

HIT_RANKS = (1, 3, 5)  #: The N of Hit@N.


class HitRates(NamedTuple):
    """Hit@N of one direction for N = 1, 3 and 5, ``(..., n_ranks)`` in [0, 1].

    NaN if `n`, the number of labels that have a reference, is 0.
    """

    rates: Tensor
    n: int

    def by_rank(self) -> dict[str, float | None]:
        """Return the rates of one map by N, None without labels, and ``n``, the number of these."""
        rates = self.rates.tolist() if self.n else [None] * len(HIT_RANKS)
        return {**dict(zip(map(str, HIT_RANKS), rates, strict=True)), "n": self.n}


def ranks_of_right(weight: Tensor, reference_mask: Tensor) -> Tensor:
    """Return the rank of the best right target label of each source label, 1 for the highest.

    Of maps, ``(..., n_target, n_source)``, and which target labels are right for each source label,
    ``(n_target, n_source)``: ``(..., n_judged)``, of the source labels with a reference.
    """
    judged = reference_mask.any(0)
    weight, right = weight[..., judged], reference_mask[:, judged]
    best = weight.masked_fill(~right, -torch.inf).amax(-2, keepdim=True)
    # A wrong entry equal to the best right one counts as ahead: a column of zeros is no hit.
    return 1 + ((weight >= best) & ~right).sum(-2)


def reference_groups(reference_mask: Tensor) -> list[int]:
    """Return which distinct reference set each source label has, for means over such sets.

    Half of all cities may be in one country, whose label a constant answer gives: `macro_mean` over
    these groups counts each set of right labels once. Of which target labels are right for each
    source label, ``(n_target, n_source)``: a number for each source label with a reference.
    """
    judged = reference_mask[:, reference_mask.any(0)]
    groups: list[int] = torch.unique(judged, dim=1, return_inverse=True)[1].tolist()
    return groups


def neighbor_weights(
    source_rows: Tensor, target_rows: Tensor, whitening: Tensor | None = None
) -> Tensor:
    """Return cosines between the rows of an LM's head, each side centered on its own mean.

    As weights, ``(n_target, n_source)`` like W in float64, they pair each source label with the
    nearest target label of the vocabulary. Rows are ``(n_labels, hidden_size)`` on each side; in
    the causal inner product they are multiplied by the matrix of `causal_whitening` first.
    """

    def directions(rows: Tensor) -> Tensor:
        rows = rows.double() if whitening is None else rows.double() @ whitening
        return torch.nn.functional.normalize(rows - rows.mean(0), dim=1)

    return directions(target_rows) @ directions(source_rows).T


def random_hit_rates(reference_mask: Tensor) -> tuple[HitRates, HitRates]:
    """Return the Hit@N expected of weights in random order, a null for `hit_rates`."""
    return _random_rates(reference_mask.T), _random_rates(reference_mask)


def _random_rates(right: Tensor) -> HitRates:
    n_right = right[right.any(-1)].sum(-1).cpu().numpy()
    n = right.shape[-1]
    misses = [scipy.stats.hypergeom.pmf(0, n, n_right, min(drawn, n)) for drawn in HIT_RANKS]
    return HitRates(1 - torch.from_numpy(np.stack(misses)).mean(1), len(n_right))


def hit_rates(weight: Tensor, reference_mask: Tensor) -> tuple[HitRates, HitRates]:
    """Return Hit@N of influenced targets and of influencing sources.

    *Influenced target*: fraction of the source labels with a reference for which a right target
    label is among the N with the highest weight in their column. *Influencing source*: the same for
    target labels, along their rows. Of maps, ``(..., n_target, n_source)``, and which target labels
    are right for each source label, ``(n_target, n_source)`` bool.

    Example:
        >>> w = torch.tensor([[0.9, 0.8], [0.1, 0.5]])
        >>> influenced, influencing = hit_rates(w, torch.eye(2, dtype=torch.bool))
        >>> influenced.rates.tolist(), influencing.rates.tolist()
        ([0.5, 1.0, 1.0], [1.0, 1.0, 1.0])
    """

    def rates(weight: Tensor, right: Tensor) -> HitRates:
        ranks = ranks_of_right(weight, right)
        hits = [(ranks <= n).double().mean(-1) for n in HIT_RANKS]
        return HitRates(torch.stack(hits, -1), ranks.shape[-1])

    return rates(weight, reference_mask), rates(weight.mT, reference_mask.T)
