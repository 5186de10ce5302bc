"""Features that carry the answers of a relation, and where the flows of two answers meet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from lincorr_lightning.flow.graph import DecoderMatcher
from lincorr_lightning.functional.auroc import class_auroc
from lincorr_lightning.sae.hook_points import Feature, HookKind, HookPoint

MIN_SUBJECTS = 3
"""Minimum number of subjects with a label as their answer, in each half."""


@dataclass(frozen=True)
class AnswerFeatures:
    """The feature of a hook point that best predicts, for each label, that it is the answer.

    Attributes:
        hook_point: Hook point of the features.
        indices: Feature of each label, ``(n_labels,)``; -1 if the label is the answer of fewer
            than `MIN_SUBJECTS` subjects in either half.
        auroc: AUROC of that feature on subjects that it was not chosen on, ``(n_labels,)`` float64;
            NaN if there is no feature.
    """

    hook_point: HookPoint
    indices: Tensor
    auroc: Tensor

    def feature(self, label: int) -> Feature | None:
        """Return the feature of a label, if it has one."""
        index = int(self.indices[label])
        return None if index < 0 else Feature(self.hook_point, index)

    @property
    def features(self) -> dict[int, Feature]:
        """Features by label, for labels that have one."""
        indices = enumerate(self.indices.tolist())
        return {label: Feature(self.hook_point, i) for label, i in indices if i >= 0}


def answer_members(logits: Tensor, n_fit: int, share: float | None) -> Tensor:
    """Return for which subjects each label counts as the answer, bool, ``(n_subjects, n_labels)``.

    Args:
        logits: Domain logits, ``(n_subjects, n_labels)``.
        n_fit: Number of subjects, from the first, that features are chosen on.
        share: Share of the subjects of either half, those with the highest logit of the label
            relative to the mean of all labels; None takes the subjects whose most likely answer the
            label is.
    """
    if share is None:
        return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).bool()
    relative = logits - logits.mean(1, keepdim=True)
    members = torch.zeros_like(logits, dtype=torch.bool)
    for half in (slice(0, n_fit), slice(n_fit, None)):
        own = relative[half]
        highest = own.topk(max(1, round(share * len(own))), dim=0).indices
        members[half] = members[half].scatter(0, highest, True)
    return members


def find_answer_features(
    hook_point: HookPoint, features: Tensor, members: Tensor, n_fit: int
) -> AnswerFeatures:
    """Choose for each label the feature with the highest AUROC for being the answer.

    Args:
        hook_point: Hook point of the features.
        features: Features at the end of each subject's prompt, ``(n_subjects, n_features)``.
        members: Result of `answer_members`.
        n_fit: Number of subjects, from the first, that features are chosen on; AUROC is of others.
    """
    n_labels = members.shape[1]
    fit, test = members[:n_fit], members[n_fit:]
    enough = (fit.sum(0) >= MIN_SUBJECTS) & (test.sum(0) >= MIN_SUBJECTS)
    chosen = class_auroc(features[:n_fit], fit).nan_to_num(0.5).argmax(1)
    auroc = torch.full((n_labels,), torch.nan, dtype=torch.float64)
    held_out = class_auroc(features[n_fit:, chosen[enough]], test[:, enough])
    auroc[enough] = held_out.diagonal()
    return AnswerFeatures(hook_point, torch.where(enough, chosen, -1), auroc)


@dataclass(frozen=True)
class AnswerPair:
    """What the features of a source answer and a target answer have in common."""

    source: int
    target: int
    is_reference: bool
    shared: tuple[Feature, ...]
    carriers: tuple[Feature, ...]


def compare_answers(
    matcher: DecoderMatcher,
    source: Mapping[HookPoint, AnswerFeatures],
    target: Mapping[HookPoint, AnswerFeatures],
    reference: Tensor,
    thresholds: Mapping[HookKind, float] | float,
    k: int = 1,
) -> list[AnswerPair]:
    """Follow the features of all source and target answers back, and see where they meet.

    The flow of an answer starts at the feature that carries it in the last residual stream. Pairs
    outside the reference, ``(n_target, n_source)`` bool, are the chance level for those in it.

    Returns:
        All pairs of a source and a target label that have a feature in the last residual stream.
    """
    last = matcher.last
    below = [at for at in matcher.hook_points if at != last]

    def flow(start: Feature) -> set[Feature]:
        graph = matcher.follow(start, direction="backward", thresholds=thresholds, k=k)
        return set(graph.features)

    source_flows = {label: flow(start) for label, start in source[last].features.items()}
    target_flows = {label: flow(start) for label, start in target[last].features.items()}
    pairs = []
    for (s, from_source), (t, from_target) in product(source_flows.items(), target_flows.items()):
        both = ((source[at].feature(s), target[at].feature(t)) for at in below)
        carriers = tuple(one for one, other in both if one is not None and one == other)
        shared = tuple(sorted(from_source & from_target))
        pairs.append(AnswerPair(s, t, bool(reference[t, s]), shared, carriers))
    return pairs
