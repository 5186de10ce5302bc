"""Which pairs are tied? Significance, r given independent knowledges, and transitivity.

The paper leaves it open (appendix B). What is told here is in `functional.ties`; this says of which
pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, summarize
from lincorr_lightning.functional.significance import (
    adjust_for_many,
    one_sided_p,
    partial_tie,
    weight_cosine,
)
from lincorr_lightning.linear_map.affine_map import AffineMap
from lincorr_lightning.linear_map.solver import Pair, label_r, per_target_ridge, split_targets
from lincorr_lightning.metrics import MeanRError, Scale
from lincorr_lightning.probe.ranking import Composition
from lincorr_lightning.probe.results import PairScore

if TYPE_CHECKING:
    from lincorr_lightning.probe.module import LinearProbe

# So many maps are laid end to end, those of the pairs with the highest r.
_MOST_COMPOSED = 50


def measure_errors(probe: LinearProbe, test: Moments, rows: Sequence[Tensor]) -> None:
    """Take standard errors of r, and of its excess, over held-out X's.

    The influence function is taken around what was found on the held-out half itself: around the
    fit half, whose r a map overfits, errors come out far too large.

    Args:
        probe: With solved maps.
        test: Moments of the held-out half.
        rows: Joint rows of held-out X's of this process.
    """
    layout = probe.layout
    for source in layout.sources:
        errors = cast(MeanRError, probe.errors[source])
        errors.reset()
        x, y = layout.columns(source), layout.target_columns(source).to(test.mean.device)
        own = cast(AffineMap, probe.maps[source])
        control = probe.control_maps[source] if probe.control_maps else None
        c = layout.control_columns(source) if control is not None else x
        errors.prepare(
            Scale(test.mean[y], _std(test.scatter.diagonal()[y], test.n), test.mean[y]),
            _scale(own, test, x, y),
            None if control is None else _scale(cast(AffineMap, control), test, c, y),
        )
        for kept in rows:
            part = kept.double()
            null = None if control is None else control(part[:, c.to(part.device)])
            errors.update(own(part[:, x.to(part.device)]), part[:, y], null)


def _scale(module: AffineMap, test: Moments, x: Tensor, y: Tensor) -> Scale:
    x = x.to(test.mean.device)
    weight = module.weight.detach()
    variance = ((weight @ test.scatter[x][:, x]) * weight).sum(1)
    return Scale(module(test.mean[x]).detach(), _std(variance, test.n), label_r(test, weight, x, y))


def _std(scatter: Tensor, n: Tensor) -> Tensor:
    return (scatter.clamp(min=0) / n).sqrt()


def judge(
    probe: LinearProbe, scores: Mapping[Pair, PairScore], fit: Moments | None, test: Moments
) -> list[PairScore]:
    """Add standard errors, p-values and r given other knowledges to the scores of all pairs.

    Args:
        probe: A fitted probe.
        scores: Of each pair.
        fit: Moments of the fit half; None where a stored fit is scored, of which no more is told.
        test: Moments of the held-out half.
    """
    layout = probe.layout
    judged = dict(scores)
    for source in layout.sources:
        errors = cast(MeanRError, probe.errors[source])
        if errors.ready:
            # All X's tell r; errors are of those that were kept.
            share = (errors.count / test.n).sqrt().cpu()
            own, above = (errors.compute().cpu() * share).tolist()
            for target, error, excess_error in zip(layout.targets(source), own, above, strict=True):
                score = judged[source, target]
                height = score.label_mean if score.excess is None else score.excess
                p = one_sided_p(height / excess_error) if excess_error > 0 else None
                judged[source, target] = replace(
                    score, label_error=error, excess_error=excess_error, p=p
                )
        if fit is not None and probe.given:
            judged |= _given_others(probe, source, judged, fit, test)
    ordered = [judged[pair] for pair in layout.pairs]
    values = [torch.nan if score.p is None else score.p for score in ordered]
    adjusted = adjust_for_many(torch.tensor(values, dtype=torch.float64)).tolist()
    return [
        replace(score, q=None if score.p is None else q)
        for score, q in zip(ordered, adjusted, strict=True)
    ]


def _given_others(
    probe: LinearProbe,
    source: str,
    scores: Mapping[Pair, PairScore],
    fit: Moments,
    test: Moments,
) -> dict[Pair, PairScore]:
    """R of a source's pairs given what is independent of them, and how much of the tie is left."""
    layout = probe.layout
    found: dict[Pair, PairScore] = {}
    if source in probe.given:
        return found
    third = torch.cat([layout.columns(name) for name in probe.given])
    tie = partial_tie(
        fit, test, layout.columns(source), layout.target_columns(source), third,
        per_target_ridge(layout, source, probe.ridges).to(fit.mean.device),
    )  # fmt: skip
    r = dict(split_targets(layout, source, tie.r.cpu()))
    unique = dict(split_targets(layout, source, tie.unique.cpu()))
    for target in layout.targets(source):
        if target in probe.given:
            continue
        score = scores[source, target]
        alone = torch.from_numpy(score.label_r).square()
        known = ~(alone + unique[target]).isnan()
        told = float(alone[known].sum())
        through = 1 - float(unique[target][known].sum()) / told if told > 0 else None
        found[source, target] = replace(
            score, partial_label_mean=summarize(r[target]).mean, through_given=through
        )
    return found


def compositions(
    probe: LinearProbe, scores: Sequence[PairScore], test: Moments
) -> list[Composition]:
    """Maps laid end to end, ``W(via→target) W(source→via)``, against the map of the pair.

    Told wherever the world says what belongs to what on both legs (city→country→continent), beside
    the median over the knowledges in between of which it says nothing: what drift alone carries.

    Args:
        probe: A fitted probe.
        scores: Of its pairs.
        test: Moments of the held-out half.
    """
    layout, told = probe.layout, probe.layout.references
    weights = {
        (source, target): block
        for source in layout.sources
        for target, block in split_targets(
            layout, source, cast(AffineMap, probe.maps[source]).weight.detach(), dim=0
        )
    }
    found = []
    for score in sorted(scores, key=lambda s: -_or(s.label_mean, -2)):
        source, target = score.source, score.target
        between = [n for n in layout.domains if {(source, n), (n, target)} <= set(weights)]
        known = [n for n in between if _knows(told, source, n) and _knows(told, n, target)]
        if not known:
            continue
        maps = {n: weights[n, target] @ weights[source, n] for n in between}
        columns = layout.columns(source), layout.columns(target)
        r = {n: summarize(label_r(test, w, *columns).cpu()).mean for n, w in maps.items()}
        others = [
            r[n]
            for n in between
            if not _knows(told, source, n) and not _knows(told, n, target) and r[n] == r[n]
        ]
        found += [
            Composition(
                source, via, target, score.label_mean, r[via],
                weight_cosine(maps[via], weights[source, target]),
                median(others) if others else None,
            )
            for via in known
        ]  # fmt: skip
        if len(found) >= _MOST_COMPOSED:
            break
    return found


def _knows(references: Mapping[Pair, object], source: str, target: str) -> bool:
    return references.get((source, target)) is not None


def _or(value: float, otherwise: float) -> float:
    return value if value == value else otherwise
