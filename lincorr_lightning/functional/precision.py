"""Precision of W: how often its highest weights agree with the reference (paper section 3.5)."""

from collections.abc import Sequence

import scipy
import torch
from torch import Tensor

from lincorr_lightning.io import number

HIT_RANKS = (1, 3, 5)  #: The N of Hit@N.


def ranks_of_right(weight: Tensor, reference_mask: Tensor) -> Tensor:
    """Return the rank of the best right target label of each source label, 1 for the highest.

    Of weights, and which target labels are right for each source label, ``(n_target, n_source)``:
    ``(n_judged,)``, of the source labels with a reference.
    """
    judged = reference_mask.any(0)
    weight, right = weight[:, judged], reference_mask[:, judged]
    best = weight.masked_fill(~right, -torch.inf).amax(0)
    # A wrong entry equal to the best right one counts as ahead: a column of zeros is no hit.
    return 1 + ((weight >= best) & ~right).sum(0)


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


def random_hit_rates(reference_mask: Tensor) -> dict[str, float | None]:
    """Return the Hit@N expected of weights in random order, a null for `hit_rates`."""
    n_right = reference_mask.sum(0)[reference_mask.any(0)].cpu().numpy()
    n = len(reference_mask)
    misses = [scipy.stats.hypergeom.pmf(0, n, n_right, min(drawn, n)) for drawn in HIT_RANKS]
    return _by_rank([1 - each.mean() for each in misses], len(n_right))


def hit_rates(weight: Tensor, reference_mask: Tensor) -> dict[str, float | None]:
    """Return Hit@N of influenced targets by N = 1, 3 and 5, and ``n``, how many are judged.

    It is the fraction of the source labels with a reference for which a right target label is among
    the N with the highest weight in their column; None if ``n`` is 0. Of weights, and which target
    labels are right for each source label, ``(n_target, n_source)``. That of influencing sources is
    Hit@N of both transposed.

    Example:
        >>> w, right = torch.tensor([[0.9, 0.8], [0.1, 0.5]]), torch.eye(2, dtype=torch.bool)
        >>> hit_rates(w, right), hit_rates(w.T, right.T)["1"]
        ({'1': 0.5, '3': 1.0, '5': 1.0, 'n': 2}, 1.0)
    """
    ranks = ranks_of_right(weight, reference_mask)
    return _by_rank([float((ranks <= n).double().mean()) for n in HIT_RANKS], len(ranks))


def _by_rank(rates: Sequence[float], n: int) -> dict[str, float | None]:
    return {str(rank): number(rate) for rank, rate in zip(HIT_RANKS, rates, strict=True)} | {"n": n}
