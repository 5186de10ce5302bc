"""Outcomes of an edit at the target, their risk and their causes (paper, sections 4 and 5)."""

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from enum import StrEnum
from math import nan
from statistics import fmean

import torch
from torch import Tensor


class Outcome(StrEnum):
    """Outcome of an edit at the target.

    The paper reports only the first, of all answers that are right after the edit; the split into
    four is this package's.
    """

    GENERALIZED = "generalized"  #: Right after the edit, and not before.
    HALLUCINATED = "hallucinated"  #: Another wrong answer than before.
    UNCHANGED = "unchanged"  #: The wrong answer of before.
    RIGHT_BEFORE = "right_before"  #: Right before the edit, whatever follows.

    @property
    def code(self) -> int:
        """Its position, as in `outcome_codes`."""
        return list(Outcome).index(self)


def group_means(values: Sequence[float], groups: Sequence[Hashable]) -> list[float]:
    """Return the mean of the values of each distinct group."""
    by_group: dict[Hashable, list[float]] = defaultdict(list)
    for value, group in zip(values, groups, strict=True):
        by_group[group].append(value)
    return [fmean(members) for members in by_group.values()]


def macro_mean(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Return the mean over distinct groups of the mean of their values; NaN without any."""
    means = group_means(values, groups)
    return fmean(means) if means else nan


def reference_scores(
    outcomes: Sequence[str], references: Sequence[Collection[Hashable]]
) -> dict[str, float]:
    """Return what the shares of outcomes are compared with where references are unequal in number.

    `references` are the target labels that are right for each edit. Returns ``constant``, the share
    of the edits for which the best constant target label is right, and ``macro_generalized`` and
    ``macro_hallucinated``, means over distinct references, but not an empty one, of the share of
    their edits; NaN without edits.
    """
    counts = Counter(label for reference in references for label in set(reference))
    scores = {"constant": max(counts.values(), default=0) / len(outcomes) if outcomes else nan}
    judged = [pair for pair in zip(outcomes, references, strict=True) if pair[1]]
    groups = [frozenset(reference) for _, reference in judged]
    for counted in (Outcome.GENERALIZED, Outcome.HALLUCINATED):
        hits = [float(outcome == counted) for outcome, _ in judged]
        scores[f"macro_{counted}"] = macro_mean(hits, groups)
    return scores


class Cause(StrEnum):
    """Cause of a hallucination (paper, section 5.2)."""

    IMPRECISE = "imprecise W"
    LOW_PRIOR = "low prior"
    NOT_LEARNED = "source not learned"


def outcome_codes(before: Tensor, after: Tensor, reference_mask: Tensor) -> Tensor:
    """Return the outcome of each edit, judged by the leading target label.

    `before` and `after` are its index before and after the edit, ``(n,)``; the mask says which
    target labels are right for the new source answer, ``(n, n_target)`` bool. Returns positions in
    `Outcome`, ``(n,)``.
    """
    was_right, is_right = (
        reference_mask.gather(1, labels[:, None])[:, 0] for labels in (before, after)
    )
    # Each rule overrides those above it.
    codes = torch.where(after == before, Outcome.UNCHANGED.code, Outcome.HALLUCINATED.code)
    codes[is_right] = Outcome.GENERALIZED.code
    codes[was_right] = Outcome.RIGHT_BEFORE.code
    return codes


def leaks(before: Tensor, after: Tensor, reference_mask: Tensor) -> Tensor:
    """Return for which share of other subjects each edit made its reference lead, ``(n,)``.

    An edit that is specific to its subject has 0; one after which the LM gives its reference to
    everybody has 1. `before` and `after` are the leading target label of m subjects without an edit
    before and after each edit, ``(n, m)``; the mask says which target labels are right for the
    edit's source answer, ``(n, n_target)`` bool.

    Example:
        >>> right = torch.tensor([[True, False, False]])
        >>> leaks(torch.tensor([[1, 2, 0, 1]]), torch.tensor([[0, 2, 0, 2]]), right)
        tensor([0.2500], dtype=torch.float64)
    """
    is_right = reference_mask.gather(1, after) & ~reference_mask.gather(1, before)
    return is_right.double().mean(1)


def attribute_causes(
    weight: Tensor, taught: Tensor, reference_mask: Tensor, learned: Tensor
) -> list[Cause]:
    """Return the cause of each hallucination.

    If the source answer was not learned, W explains nothing. If a wrong target label has a higher
    weight for the taught source label than every right one, W is imprecise. Otherwise the right
    label was raised most and still does not lead: its prior was too low. `taught` is the index of
    the source label that each edit taught, ``(n,)``, the mask says which target labels are right
    for it, ``(n, n_target)``, and `learned` whether it was learned.
    """
    imprecise = (risk(weight.T[taught], reference_mask) > 0).tolist()
    return [
        Cause.NOT_LEARNED if not known else Cause.IMPRECISE if wrong else Cause.LOW_PRIOR
        for known, wrong in zip(learned.tolist(), imprecise, strict=True)
    ]


def risk(scores: Tensor, reference_mask: Tensor) -> Tensor:
    """Return by how much the best wrong label leads the best right label, ``(n,)``.

    Of scores of the target labels, and which of these are right, ``(n, n_target)`` each. Positive
    if a wrong label leads: the higher, the less likely the edit is to generalize.
    """
    best_right = scores.masked_fill(~reference_mask, -torch.inf).amax(1)
    best_wrong = scores.masked_fill(reference_mask, -torch.inf).amax(1)
    return best_wrong - best_right
