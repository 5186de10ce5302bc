"""How well numbers tell apart what belongs to a class from what does not (area under the ROC)."""

from __future__ import annotations

import torch
from torch import Tensor


def counted_auroc(values: Tensor, positive: Tensor, negative: Tensor) -> float:
    """AUROC of values that many cases share: the chance that a positive case has the higher one.

    Args:
        values: ``(n_values,)``, in any order; two may be equal. NaN is left out.
        positive: How many positive cases have each value, ``(n_values,)``.
        negative: How many negative cases, likewise.

    Returns:
        Ties count half; NaN where there are no positive or no negative cases.

    Example:
        >>> counted_auroc(torch.tensor([0.1, 0.9]), torch.tensor([1, 3]), torch.tensor([4, 0]))
        0.875
    """
    known = ~values.isnan()
    levels, level_of = torch.unique(values[known].double(), return_inverse=True)
    up = torch.zeros_like(levels).index_add_(0, level_of, positive[known].to(levels))
    down = torch.zeros_like(levels).index_add_(0, level_of, negative[known].to(levels))
    pairs = float(up.sum() * down.sum())
    below = down.cumsum(0) - down / 2
    return float((up * below).sum()) / pairs if pairs else float("nan")


def class_auroc(values: Tensor, members: Tensor) -> Tensor:
    """AUROC of each feature for each class, against all other cases.

    Args:
        values: ``(n_cases, n_features)``.
        members: Which cases belong to each class, ``(n_cases, n_classes)`` bool.

    Returns:
        ``(n_classes, n_features)``, float64; ties count half, and a class to which no case or every
        case belongs has NaN.

    Example:
        >>> members = torch.tensor([[True], [False], [False]])
        >>> class_auroc(torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 5.0]]), members).tolist()
        [[1.0, 0.25]]
    """
    columns = values.T.contiguous()
    ordered = columns.sort(1).values
    # Of equal values each has the mean of their ranks.
    first = torch.searchsorted(ordered, columns)
    last = torch.searchsorted(ordered, columns, right=True)
    ranks = (first + last + 1).double() / 2
    n_in = members.sum(0).double()[:, None]
    n_out = len(members) - n_in
    above = members.double().T @ ranks.T - n_in * (n_in + 1) / 2
    pairs = n_in * n_out
    return torch.where(pairs > 0, above / pairs, torch.nan)
