"""Forecasts of what an edit of the source does to the target's logits."""

from __future__ import annotations

import torch
from torch import Tensor


def forecast_from_map(source: Tensor, target: Tensor, answer: Tensor, weight: Tensor) -> Tensor:
    """Raise the answer's source logit until it leads, and carry the change through W.

    This is the paper's estimate of the target's change, ``W · ΔF_source`` (section 4.1), for the
    smallest change of the source logits that teaches the answer.

    Args:
        source: Source logits before the edit, ``(n, n_source)``.
        target: Target logits before the edit, ``(n, n_target)``.
        answer: Index of the source label that each edit teaches, ``(n,)``.
        weight: W, ``(n_target, n_source)``.

    Returns:
        Predicted target logits, ``(n, n_target)``.

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
    """Move along a direction of change until the answer leads the source.

    Args:
        source: Source logits before the edit, ``(n, n_source)``.
        target: Target logits before the edit, ``(n, n_target)``.
        d_source: Derivative of the source logits along the direction, ``(n, n_source)``.
        d_target: Derivative of the target logits along the direction, ``(n, n_target)``.
        answer: Index of the source label that each edit teaches, ``(n,)``.

    Returns:
        Predicted target logits, ``(n, n_target)``, at the point where the answer has passed every
        label that leads it and that it approaches. Labels that it never reaches are ignored.
    """
    own = answer[:, None]
    gap = source - source.gather(1, own)
    speed = d_source.gather(1, own) - d_source
    time = torch.where((gap > 0) & (speed > 0), gap / speed, 0.0).amax(1, keepdim=True)
    return target + time * d_target


def risk(predicted: Tensor, reference_mask: Tensor) -> Tensor:
    """Return how far the best wrong label is ahead of the best reference label.

    Args:
        predicted: Predicted target logits, ``(n, n_target)``.
        reference_mask: Target labels that are right, ``(n, n_target)`` bool.

    Returns:
        ``(n,)``, in logits; above 0 the reference does not lead. The higher, the less likely the
        edit is to generalize.
    """
    best_right = predicted.masked_fill(~reference_mask, -torch.inf).amax(1)
    best_wrong = predicted.masked_fill(reference_mask, -torch.inf).amax(1)
    return best_wrong - best_right
