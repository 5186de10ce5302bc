"""Does a tie between two pieces of knowledge run through some features? Cut them and see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lincorr_lightning.functional import (
    LeastSquares,
    labelwise_pearson,
    moments_of,
    summarize,
)
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.sae.hook_points import Feature, HookPoint
from lincorr_lightning.sae.hooks import edited
from lincorr_lightning.sae.interventions import Intervention, rescale_everywhere, sae_at
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

_NEAREST = 20


@dataclass(frozen=True)
class RelationScores:
    """How strongly a relation is tied in an LM, perhaps with some features cut.

    Attributes:
        fixed: Label-wise r of the map of the LM as it is, source and target cut alike; None where
            nothing varies. All scores are of held-out subjects.
        target_only: That map's r where the features are cut in the target's prompt alone.
        refitted: r of a map that is fitted on the cut LM.
        recall: Share of subjects whose target answer is right for the source answer they have
            without the cut; None without a reference.
        kept: Share of subjects whose target answer is as without the cut.
    """

    fixed: float | None
    target_only: float | None
    refitted: float | None
    recall: float | None
    kept: float


def cut_edits(
    saes: Mapping[HookPoint, SparseAutoencoder], features: Iterable[Feature], r: float = 0.0
) -> dict[HookPoint, Intervention]:
    """Edits that rescale features wherever they are active.

    Args:
        saes: At the LM's places.
        features: Which, each once.
        r: What is left of them.

    Raises:
        SparseAutoencoderError: A place has no SAE, or an SAE no such feature.
    """
    by_hook_point: dict[HookPoint, list[int]] = {}
    for feature in features:
        by_hook_point.setdefault(feature.hook_point, []).append(feature.index)
    return {
        hook_point: rescale_everywhere(sae_at(saes, hook_point), sorted(indices), r)
        for hook_point, indices in sorted(by_hook_point.items())
    }


def control_features(
    features: Iterable[Feature], how_often: Mapping[HookPoint, Tensor], generator: torch.Generator
) -> list[Feature]:
    """Other features of the same places that are active about as often, drawn at random.

    Each is one of the `_NEAREST` whose number of activations is nearest to that of the feature it
    stands for: cutting it takes as much away, but not the same.

    Args:
        features: What is cut.
        how_often: Activations of each feature of a place, ``(n_features,)``.
        generator: On the CPU.
    """
    features = sorted(features)
    drawn: list[Feature] = []
    for feature in features:
        count = how_often[feature.hook_point].double().cpu()
        away = (count - count[feature.index]).abs()
        taken = [f.index for f in (*features, *drawn) if f.hook_point == feature.hook_point]
        away[taken] = torch.inf
        n = min(_NEAREST, int(away.isfinite().sum()))
        if not n:
            continue
        nearest = away.argsort(stable=True)[:n]
        chosen = nearest[torch.randint(n, (1,), generator=generator)]
        drawn.append(Feature(feature.hook_point, int(chosen)))
    return drawn


@dataclass(frozen=True)
class AskedSubjects:
    """What an LM answers about some subjects.

    Attributes:
        source: Logits of the source's labels, ``(n_subjects, n_source)``, float64.
        target: Logits of the target's labels, ``(n_subjects, n_target)``, float64.
    """

    source: Tensor
    target: Tensor


def ask_subjects(
    lm: LanguageModel,
    asked: TokenizedRelation,
    subjects: Sequence[str],
    edits: Mapping[HookPoint, Intervention] | None = None,
) -> AskedSubjects:
    """Ask an LM about subjects, with edits on the way.

    Args:
        lm: The LM, loaded.
        asked: The relation.
        subjects: The X's.
        edits: What is changed.

    Raises:
        NonFiniteError: The LM answers an X with NaN or infinite logits.
    """
    with edited(lm.model, edits or {}):
        source = lm.domain_logits(asked.source_prompts(subjects), asked.source.token_ids)
        target = lm.domain_logits(asked.target_prompts(subjects), asked.target.token_ids)
    return AskedSubjects(source.cpu(), target.cpu())


def score_relation(
    asked: TokenizedRelation, before: AskedSubjects, after: AskedSubjects, n_fit: int
) -> RelationScores:
    """Compare what an LM answers with and without a cut.

    Args:
        asked: The relation.
        before: Without the cut.
        after: With it; the same again scores the LM as it is.
        n_fit: The first so many subjects fit maps, the others score them.
    """
    old, new = _fit(before, n_fit), _fit(after, n_fit)
    held = slice(n_fit, None)
    said = before.source[held].argmax(1)
    now, then = after.target[held].argmax(1), before.target[held].argmax(1)
    right = torch.from_numpy(asked.right)[now, said]
    return RelationScores(
        fixed=_r(old, after.source[held], after.target[held]),
        target_only=_r(old, before.source[held], after.target[held]),
        refitted=_r(new, after.source[held], after.target[held]),
        recall=float(right.double().mean()) if asked.has_reference else None,
        kept=float((now == then).double().mean()),
    )


def _fit(said: AskedSubjects, n_fit: int) -> tuple[Tensor, Tensor]:
    """W and b of least squares, as the linear probe fits them."""
    n_source = said.source.shape[1]
    moments = moments_of(torch.cat([said.source[:n_fit], said.target[:n_fit]], 1))
    scatter = moments.scatter
    weight = LeastSquares(scatter[:n_source, :n_source], scatter[:n_source, n_source:]).weight(0.0)
    return weight, moments.mean[n_source:] - weight @ moments.mean[:n_source]


def _r(linear_map: tuple[Tensor, Tensor], source: Tensor, target: Tensor) -> float | None:
    weight, bias = linear_map
    r = summarize(labelwise_pearson(source @ weight.T + bias, target)).mean
    return None if r != r else r
