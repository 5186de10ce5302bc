"""Which features carry an answer, and what two answers' features have to do with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lincorr_lightning.flow.matcher import DecoderMatcher
from lincorr_lightning.functional.separation import class_auroc
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.forwards import Forward, run_with_hooks
from lincorr_lightning.sae.hook_points import Feature, HookKind, HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

LEAST_CASES = 3
"""Subjects that a label must be the answer of, in each half."""


@dataclass(frozen=True)
class AnswerFeatures:
    """The feature of one place that tells best, for each label, whether it is the answer.

    Attributes:
        hook_point: Of the features.
        indices: ``(n_labels,)``; -1 where the label is the answer of too few subjects.
        auroc: On subjects that it was not chosen on, ``(n_labels,)``; NaN likewise.
    """

    hook_point: HookPoint
    indices: Tensor
    auroc: Tensor

    def feature(self, label: int) -> Feature | None:
        """The feature of a label, if it has one."""
        index = int(self.indices[label])
        return None if index < 0 else Feature(self.hook_point, index)


def last_activations(
    lm: LanguageModel, rows: Sequence[Sequence[int]], hook_points: Sequence[HookPoint]
) -> dict[HookPoint, Tensor]:
    """Activations at each prompt's last position, ``(n_prompts, width)`` of each place.

    Args:
        lm: The LM, loaded.
        rows: Token ids of the prompts.
        hook_points: Which.
    """
    found: dict[HookPoint, Tensor] = {}

    def look(forward: Forward) -> None:
        for hook_point in hook_points:
            x = forward.at_positions(hook_point, forward.last).cpu()
            found.setdefault(hook_point, x.new_empty(len(rows), x.shape[1]))[forward.cases] = x

    run_with_hooks(lm, rows, look, hook_points=hook_points, logits=False)
    return found


def find_answer_features(
    sae: SparseAutoencoder, activations: Tensor, answers: Tensor, n_labels: int, n_fit: int
) -> AnswerFeatures:
    """Choose, for each label, the feature whose activation tells best whether it is the answer.

    Args:
        sae: Of the place.
        activations: At the last position of each subject's prompt, ``(n_subjects, width)``.
        answers: What the LM answers: a label each, ``(n_subjects,)``.
        n_labels: How many labels there are.
        n_fit: The first so many subjects choose, the others judge.
    """
    with torch.no_grad():
        features = sae.encode(activations.to(sae.decoder.device)).cpu()
    members = torch.nn.functional.one_hot(answers.cpu(), n_labels).bool()
    enough = (members[:n_fit].sum(0) >= LEAST_CASES) & (members[n_fit:].sum(0) >= LEAST_CASES)
    indices = class_auroc(features[:n_fit], members[:n_fit]).nan_to_num(0.5).argmax(1)
    indices = torch.where(enough, indices, -1)
    auroc = torch.full((n_labels,), torch.nan, dtype=torch.float64)
    for label in enough.nonzero()[:, 0].tolist():
        own = features[n_fit:, indices[label]][:, None]
        auroc[label] = class_auroc(own, members[n_fit:, label : label + 1])[0, 0]
    return AnswerFeatures(sae.hook_point, indices, auroc)


@dataclass(frozen=True)
class LabelTie:
    """What connects the features of a source answer and a target answer.

    Attributes:
        source: Label of the source.
        target: Label of the target.
        right: Whether they belong together.
        shared: Features that are in the backward flow of both.
        carriers: Places below the last one at which one feature carries both, and that feature.
    """

    source: int
    target: int
    right: bool
    shared: tuple[Feature, ...]
    carriers: tuple[Feature, ...]


def label_ties(
    flow: DecoderMatcher,
    source: Mapping[HookPoint, AnswerFeatures],
    target: Mapping[HookPoint, AnswerFeatures],
    right: Tensor,
    thresholds: Mapping[HookKind, float] | float,
    k: int = 1,
) -> list[LabelTie]:
    """Follow the features of all source and target answers back, and see where they meet.

    The flow of an answer begins at the feature that carries it in the last residual stream. Pairs
    that do not belong together are the chance that those are compared with that do.

    Args:
        flow: The decoders.
        source: Features of the source's labels at each place.
        target: Features of the target's labels, likewise.
        right: Which belong together, ``(n_target, n_source)`` bool.
        thresholds: Least cosine of an edge.
        k: Predecessors looked at in each place.

    Returns:
        Every pair of a source and a target label that have a feature in the last residual stream.
    """
    last = max(hook_point for hook_point in flow.hook_points if hook_point.kind == "residual")
    below = [hook_point for hook_point in flow.hook_points if hook_point != last]

    def flows(side: Mapping[HookPoint, AnswerFeatures]) -> dict[int, set[Feature]]:
        starts = {label: side[last].feature(label) for label in range(len(side[last].indices))}
        return {
            label: set(
                flow.follow(start, direction="backward", thresholds=thresholds, k=k).features
            )
            for label, start in starts.items()
            if start is not None
        }

    of_source, of_target = flows(source), flows(target)
    ties = []
    for s, from_source in of_source.items():
        for t, from_target in of_target.items():
            same = [
                source[hook_point].feature(s)
                for hook_point in below
                if source[hook_point].feature(s) == target[hook_point].feature(t)
            ]
            ties.append(
                LabelTie(
                    s,
                    t,
                    bool(right[t, s]),
                    tuple(sorted(from_source & from_target)),
                    tuple(feature for feature in same if feature is not None),
                )
            )
    return ties
