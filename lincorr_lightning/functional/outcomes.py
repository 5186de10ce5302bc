"""What an edit of the source did to the target (paper, section 5)."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor


class Outcome(StrEnum):
    """Where the target of an edit went.

    The paper reports the first only; the three-way split is this package's.
    """

    GENERALIZED = "generalized"
    HALLUCINATED = "hallucinated"
    UNCHANGED = "unchanged"


class Cause(StrEnum):
    """Why a target was hallucinated (paper, section 5.2)."""

    IMPRECISE = "imprecise W"
    LOW_PRIOR = "low prior"
    NOT_LEARNED = "source not learned"


def outcome_codes(before: Tensor, after: Tensor, reference_mask: Tensor) -> Tensor:
    """Return the outcome of each edit, judged by the leading target label.

    Args:
        before: Index of the leading target label before the edit, ``(n,)``.
        after: Index of the leading target label after the edit, ``(n,)``.
        reference_mask: Target labels that are right for the new answer, ``(n, n_target)`` bool.

    Returns:
        Positions in `Outcome`, ``(n,)``: generalized if the label after the edit is right; else
        unchanged if it is the same as before, and hallucinated if it is another.

    Example:
        >>> mask = torch.tensor([[True, False, False]] * 3)
        >>> outcome_codes(torch.tensor([2, 2, 2]), torch.tensor([0, 1, 2]), mask).tolist()
        [0, 1, 2]
    """
    generalized = reference_mask.gather(1, after[:, None]).squeeze(1)
    moved = torch.where(after == before, 2, 1)
    return torch.where(generalized, 0, moved)


def attribute_causes(
    weight: Tensor, taught: Tensor, reference_mask: Tensor, learned: Tensor
) -> list[Cause]:
    """Return why each hallucinated target went wrong.

    If the source was not learned, W has nothing to explain. If some wrong target label has a higher
    weight for the taught source label than every right one, W is imprecise there. Otherwise the
    reference was moved most and still does not lead: its prior was too low.

    Args:
        weight: W, ``(n_target, n_source)``.
        taught: Index of the source label that each edit taught, ``(n,)``.
        reference_mask: Target labels that are right for it, ``(n, n_target)`` bool.
        learned: Whether each source answer was learned, ``(n,)`` bool.
    """
    columns = weight.T[taught]
    best_right = columns.masked_fill(~reference_mask, -torch.inf).amax(1)
    best_wrong = columns.masked_fill(reference_mask, -torch.inf).amax(1)
    imprecise = (best_wrong > best_right).tolist()
    return [
        Cause.NOT_LEARNED if not known else Cause.IMPRECISE if wrong else Cause.LOW_PRIOR
        for known, wrong in zip(learned.tolist(), imprecise, strict=True)
    ]
