"""Losses of pre-training."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lincorr_lightning.pretraining.batches import IGNORED


def mixup_cross_entropy(
    logits: Tensor, targets: Tensor, second_targets: Tensor, second_shares: Tensor
) -> Tensor:
    """Return the mean cross-entropy of targets, mixed with second targets where there are some.

    Args:
        logits: ``(n, n_tokens)``.
        targets: Target tokens, ``(n,)``.
        second_targets: Second target tokens or `IGNORED`, ``(n,)``.
        second_shares: Weight of the second targets, 0 to 1, ``(n,)``.
    """
    first, second = (
        cross_entropy(logits, t, ignore_index=IGNORED, reduction="none")
        for t in (targets, second_targets)
    )
    return torch.lerp(first, second, second_shares).mean()


def off_target_penalty(
    logits: Tensor, targets: Tensor, second_targets: Tensor, knowledge: Tensor, answers: Tensor
) -> Tensor:
    """Return the mean square of the logits of a domain's other answers.

    Only rows whose target is an answer count.

    Args:
        logits: ``(n, n_tokens)``.
        targets: Target tokens, ``(n,)``.
        second_targets: Second target tokens or `IGNORED`, ``(n,)``.
        knowledge: Index of the kind of knowledge of an answer, or `IGNORED`, ``(n,)``.
        answers: 1 where a token is an answer of a kind of knowledge, ``(n_knowledge, n_tokens)``.
    """
    is_answer = knowledge != IGNORED
    logits, targets, second, knowledge = (
        t[is_answer] for t in (logits, targets, second_targets, knowledge)
    )
    second = torch.where(second == IGNORED, targets, second)
    wrong = answers[knowledge].scatter(1, torch.stack([targets, second], 1), 0.0)
    squares = (logits.square() * wrong).sum(1) / wrong.sum(1).clamp(min=1)
    return squares.mean()
