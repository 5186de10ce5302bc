"""Foretelling what an edit of the source will do to the target, and scoring what was foretold."""

from __future__ import annotations

import torch
from torch import Tensor


def forecast_from_map(source: Tensor, target: Tensor, answer: Tensor, weight: Tensor) -> Tensor:
    """Raise the answer's source logit until it leads, and carry the change through W.

    The paper's estimate of the target's change, ``W · ΔF_source`` (section 4.1), with the least
    change of the source that teaches the answer.

    Args:
        source: Source logits before the edit, ``(n, n_source)``.
        target: Target logits before it, ``(n, n_target)``.
        answer: Source label that each edit teaches, ``(n,)``.
        weight: W, ``(n_target, n_source)``.

    Returns:
        Target logits foreseen, ``(n, n_target)``.

    Example:
        >>> source, target = torch.tensor([[3.0, 1.0]]), torch.tensor([[2.0, 1.0]])
        >>> forecast_from_map(source, target, torch.tensor([1]), torch.eye(2)).tolist()
        [[2.0, 3.0]]
    """
    gap = source.amax(1) - source.gather(1, answer[:, None]).squeeze(1)
    return target + gap[:, None] * weight.T[answer]


def forecast_from_direction(
    source: Tensor, target: Tensor, d_source: Tensor, d_target: Tensor, answer: Tensor
) -> Tensor:
    """Go along a direction of change until the answer leads the source.

    Args:
        source: Source logits before the edit, ``(n, n_source)``.
        target: Target logits before it, ``(n, n_target)``.
        d_source: How the source logits change along the direction, ``(n, n_source)``.
        d_target: How the target logits change along it, ``(n, n_target)``.
        answer: Source label that each edit teaches, ``(n,)``.

    Returns:
        Target logits foreseen, ``(n, n_target)``: where the answer has passed every label that
        leads it and that it catches up with. Those that it never catches up with are left aside.
    """
    own = answer[:, None]
    gap = source - source.gather(1, own)
    speed = d_source.gather(1, own) - d_source
    time = torch.where((gap > 0) & (speed > 0), gap / speed, 0.0).amax(1, keepdim=True)
    return target + time * d_target


def risk(predicted: Tensor, right: Tensor) -> Tensor:
    """How far the reference stays behind the best wrong label; above 0 it does not lead.

    Args:
        predicted: Target logits foreseen, ``(n, n_target)``.
        right: Which labels are right, ``(n, n_target)`` bool.

    Returns:
        ``(n,)``; the higher, the less likely the edit is to generalize.
    """
    best_right = predicted.masked_fill(~right, -torch.inf).amax(1)
    best_wrong = predicted.masked_fill(right, -torch.inf).amax(1)
    return best_wrong - best_right


def auroc(score: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: how likely a positive case has the higher score; ties count half.

    Args:
        score: ``(n,)``.
        positive: ``(n,)`` bool.

    Returns:
        From 0 to 1; NaN if all cases are of one kind.

    Example:
        >>> auroc(torch.tensor([0.1, 0.4, 0.8]), torch.tensor([False, True, True]))
        1.0
    """
    _, group, count = torch.unique(score.double(), return_inverse=True, return_counts=True)
    above = count.cumsum(0).double()
    rank = (above - (count.double() - 1) / 2)[group]
    n_positive = int(positive.sum())
    n_negative = len(score) - n_positive
    if n_positive == 0 or n_negative == 0:
        return float("nan")
    # Mann-Whitney's U: how many pairs of a positive and a negative case are in the right order.
    in_order = float(rank[positive].sum()) - n_positive * (n_positive + 1) / 2
    return in_order / (n_positive * n_negative)
