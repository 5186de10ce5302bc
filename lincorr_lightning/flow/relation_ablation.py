"""Correlation of a relation with the features removed that its answers share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lincorr_lightning.functional import labelwise_pearson, moments_of, summarize
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.solver import RidgeSolver, Solution
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.numbers import number
from lincorr_lightning.sae.forwards import Interventions
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.hooks import edited
from lincorr_lightning.sae.interventions import remove_everywhere, sae_at
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

_N_NEAREST = 20


class RelationLogits(NamedTuple):
    """Domain logits of source and target for the same subjects, ``(n_subjects, n_labels)``."""

    source: Tensor
    target: Tensor


def relation_logits(
    lm: LanguageModel,
    relation: TokenizedRelation,
    subjects: Sequence[str],
    interventions: Interventions | None = None,
) -> RelationLogits:
    """Return the domain logits of a relation's prompts, with interventions."""
    with edited(lm.model, interventions or {}):
        source = lm.domain_logits(relation.source_prompts(subjects), relation.source.token_ids)
        target = lm.domain_logits(relation.target_prompts(subjects), relation.target.token_ids)
    return RelationLogits(source.cpu(), target.cpu())


def ablation(
    saes: Mapping[HookPoint, SparseAutoencoder], features: Iterable[Feature]
) -> Interventions:
    """Return interventions that remove features wherever they are active."""
    indices: dict[HookPoint, list[int]] = {}
    for feature in sorted(features):
        indices.setdefault(feature.hook_point, []).append(feature.index)
    return {at: remove_everywhere(sae_at(saes, at), own) for at, own in indices.items()}


def control_features(
    features: Iterable[Feature],
    activations: Mapping[HookPoint, Tensor],
    generator: torch.Generator,
) -> list[Feature]:
    """Draw as many other features of the same hook points that are active about as often.

    Each is one of the 20 whose number of activations, ``(n_features,)`` by hook point, is closest
    to that of the feature that it stands for.
    """
    features = sorted(features)
    drawn: list[Feature] = []
    for feature in features:
        at = feature.hook_point
        count = activations[at].double().cpu()
        difference = (count - count[feature.index]).abs()
        taken = [f.index for f in (*features, *drawn) if f.hook_point == at]
        difference[taken] = torch.inf
        n = min(_N_NEAREST, int(difference.isfinite().sum()))
        if not n:
            continue
        nearest = difference.argsort(stable=True)[:n]
        chosen = nearest[torch.randint(n, (1,), generator=generator)]
        drawn.append(Feature(at, int(chosen)))
    return drawn


@dataclass(frozen=True)
class RelationScores:
    """Correlation of a relation with some features removed, on held-out subjects.

    Attributes:
        fixed: Mean label-wise r of the linear map of the unchanged LM, with the features removed in
            both prompts; None if no label varies.
        target_only: The same with the features removed in the target's prompt alone.
        refitted: Mean label-wise r of a linear map fitted with the features removed.
        recall: Share of subjects whose target answer is a reference answer for the source answer
            of the unchanged LM; None without a reference.
        kept: Share of subjects whose target answer is that of the unchanged LM.
    """

    fixed: float | None
    target_only: float | None
    refitted: float | None
    recall: float | None
    kept: float


def score_relation(
    relation: TokenizedRelation, before: RelationLogits, after: RelationLogits, n_fit: int
) -> RelationScores:
    """Compare the logits of a relation with and without some features.

    Maps are fitted on the first `n_fit` subjects; the others are scored.
    """
    old, new = _fit(before, n_fit), _fit(after, n_fit)
    test = slice(n_fit, None)
    answered = before.source[test].argmax(1)
    now, then = after.target[test].argmax(1), before.target[test].argmax(1)
    correct = torch.from_numpy(relation.reference_mask)[now, answered]
    return RelationScores(
        fixed=_label_mean(old, after.source[test], after.target[test]),
        target_only=_label_mean(old, before.source[test], after.target[test]),
        refitted=_label_mean(new, after.source[test], after.target[test]),
        recall=float(correct.double().mean()) if relation.has_reference else None,
        kept=float((now == then).double().mean()),
    )


def _fit(logits: RelationLogits, n_fit: int) -> Solution:
    """Return the map of least squares, as the linear probe fits it."""
    moments = moments_of(torch.cat([logits.source[:n_fit], logits.target[:n_fit]], 1))
    columns, n_source = torch.arange(len(moments.mean)), logits.source.shape[1]
    return RidgeSolver(moments, columns[:n_source], columns[n_source:]).solve(0.0)


def _label_mean(linear_map: Solution, source: Tensor, target: Tensor) -> float | None:
    return number(summarize(labelwise_pearson(linear_map(source), target)).mean)
