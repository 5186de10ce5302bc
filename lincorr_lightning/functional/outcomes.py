"""What an edit of the source did to the target (paper, section 5)."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Outcome(StrEnum):
    """Where the target went.

    The paper reports the first only; the three-way split is this package's.
    """

    GENERALIZED = "generalized"
    HALLUCINATED = "hallucinated"
    UNCHANGED = "unchanged"


class Cause(StrEnum):
    """Why a target was hallucinated (paper, section 5.2)."""

    IMPRECISE = "imprecise W"
    LOW_PRIOR = "low prior"


def outcome_codes(before: Tensor, after: Tensor, right: Tensor) -> Tensor:
    """Judge edits by the target label that leads.

    Args:
        before: Leading target label before the edit, ``(n,)``.
        after: Leading target label after it, ``(n,)``.
        right: Which target labels are the new answer's reference, ``(n, n_target)`` bool.

    Returns:
        Positions in `Outcome`, ``(n,)``: generalized if the label after is right; else unchanged
        if it is the one before, and hallucinated if it is another.

    Example:
        >>> right = torch.tensor([[True, False, False]] * 3)
        >>> outcome_codes(torch.tensor([2, 2, 2]), torch.tensor([0, 1, 2]), right).tolist()
        [0, 1, 2]
    """
    generalized = right.gather(1, after[:, None]).squeeze(1)
    moved = torch.where(after == before, 2, 1)
    return torch.where(generalized, 0, moved)


def outcome_rates(codes: Tensor) -> dict[str, float]:
    """Share of each outcome; NaN if there is no edit.

    Args:
        codes: What `outcome_codes` returns, ``(n,)``.
    """
    return {str(outcome): (codes == i).double().mean().item() for i, outcome in enumerate(Outcome)}


def attribute_cause(weight: Tensor, taught: Tensor, right: Tensor) -> list[Cause]:
    """Say of hallucinated edits what misled the target.

    If W gives some wrong target label a higher weight for the taught source label than to each
    right one, W is imprecise there. Else the reference was moved most, and still did not lead: it
    had too far to go, its prior was low.

    Args:
        weight: W, ``(n_target, n_source)``.
        taught: Source label that each edit taught, ``(n,)``.
        right: Which target labels are right for it, ``(n, n_target)`` bool.
    """
    columns = weight.T[taught]
    best_right = columns.masked_fill(~right, -torch.inf).amax(1)
    best_wrong = columns.masked_fill(right, -torch.inf).amax(1)
    imprecise = (best_wrong > best_right).tolist()
    return [Cause.IMPRECISE if wrong else Cause.LOW_PRIOR for wrong in imprecise]
