"""Forecast the target's logits after an edit of the source (paper section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def forecast_from_map(source: Tensor, target: Tensor, answer: Tensor, weight: Tensor) -> Tensor:
    """Forecast the target logits by W, for the smallest change that teaches the answer.

    The answer's source logit is raised to the highest one, and the target changes by the paper's
    estimate, ``W · ΔF_source`` (section 4.1).

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


def risk(predicted: Tensor, reference_mask: Tensor) -> Tensor:
    """Return by how much the best wrong label leads the best right label.

    Args:
        predicted: Predicted target logits, ``(n, n_target)``.
        reference_mask: Which target labels are right, ``(n, n_target)`` bool.

    Returns:
        ``(n,)``, in logits; positive if a wrong label leads. The higher, the less likely the
        edit is to generalize.
    """
    best_right = predicted.masked_fill(~reference_mask, -torch.inf).amax(1)
    best_wrong = predicted.masked_fill(reference_mask, -torch.inf).amax(1)
    return best_wrong - best_right
