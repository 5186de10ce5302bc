"""Which correlations are real: standard errors, partial correlations, and composed maps.

Beyond the paper, which leaves the question open (appendix B); the statistics are in
`functional.significance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, significance
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map.layout import Pair, wordings_of
from lincorr_lightning.linear_map.scores import Numbers, PairScore
from lincorr_lightning.linear_map.solver import FittedMaps, label_r, mean_r, split_targets
from lincorr_lightning.results.table import number

FINDING = 0.01  #: Largest adjusted p-value of an excess that counts as a finding.

_MAX_COMPOSED = 50  # number of composed maps, those of the pairs with the highest r


def standard_errors(fitted: FittedMaps, test: Moments, rows: Tensor) -> Numbers:
    """Measure the standard errors of r, and of its excess, over held-out subjects.

    The influence function is taken around the moments of the held-out half itself: around those of
    the fit half, whose r a map overfits, errors come out far too large. `test` are the moments of
    all held-out subjects, `rows` the first columns of the joint rows of some, ``(n, n_kept)``.
    """
    layout, errors = fitted.layout, dict[Pair, dict[str, float | None]]()
    if len(rows) < 2:
        return errors
    rows = rows.to(test.mean)
    for source in layout.sources:
        y = layout.target_columns(source)
        r = solver.r_influences(fitted.maps["y"][source], layout.columns(source), y, test, rows)
        excess, control = r, fitted.maps.get("control", {}).get(source)
        if control is not None:
            columns = layout.control_columns(source)
            excess = r - solver.r_influences(control, columns, y, test, rows)
        # Rows are independent, labels are not: labels are averaged within a row. R is that of all
        # subjects, the spread that of those whose rows were kept.
        for (target, own), (_, above) in zip(
            *(split_targets(layout, source, each) for each in (r, excess)), strict=True
        ):
            means = own.where(~above.isnan(), torch.nan), above
            label, both = (number(m.nanmean(1).std() / test.n.sqrt()) for m in means)
            errors[source, target] = {"label_error": label, "excess_error": both}
    return errors


def p_values(scores: Sequence[PairScore]) -> Numbers:
    """Return p, and q adjusted for all pairs, of scores that have standard errors."""
    p = {
        score.ends: significance.one_sided_p(score.evidence / score.excess_error)
        for score in scores
        if score.evidence is not None and score.excess_error
    }
    q = significance.adjust_for_many(torch.tensor(list(p.values()), dtype=torch.float64)).tolist()
    return {
        pair: {"p": number(one), "q": number(adjusted)}
        for (pair, one), adjusted in zip(p.items(), q, strict=True)
    }


def partial_correlations(scores: Sequence[PairScore], fitted: FittedMaps, test: Moments) -> Numbers:
    """Return r after other knowledge was removed from both sides; none for stored maps."""
    numbers: dict[Pair, dict[str, float | None]] = {}
    alone = {score.ends: torch.from_numpy(score.label_r).square() for score in scores}
    fit, layout = fitted.moments, fitted.layout
    if fit is None or not (partial_out := layout.removed):
        return numbers
    for source in layout.sources:
        if source in partial_out:
            continue
        partial = significance.partial_correlation(
            fit,
            test,
            layout.columns(source),
            layout.target_columns(source),
            torch.cat([layout.columns(name) for name in partial_out]),
            solver.per_target_ridge(layout, source, fitted.ridges),
        )
        unique = dict(split_targets(layout, source, partial.unique.cpu()))
        for target, r in split_targets(layout, source, partial.r.cpu()):
            if target not in partial_out:
                both = torch.stack([alone[source, target], unique[target]])
                explained, beyond = both[:, ~both.isnan().any(0)].sum(1).tolist()
                numbers[source, target] = {
                    "partial_label_mean": mean_r(r),
                    "through_given": number(1 - beyond / explained) if explained > 0 else None,
                }
    return numbers


@dataclass(frozen=True)
class Composition:
    """``W(via→target) W(source→via)`` in place of ``W(source→target)``."""

    source: str
    via: str
    target: str
    direct: float | None  #: Mean label-wise r of the pair's own map.
    composed: float | None  #: Mean label-wise r of the composed map.
    weight_cosine: float | None  #: Cosine between the two matrices.
    elsewhere: float | None  #: Median r through knowledge without a reference on either leg.
    kept: float | None  #: `composed` as a fraction of `direct`.


def compose_maps(
    scores: Sequence[PairScore], fitted: FittedMaps, test: Moments
) -> list[Composition]:
    """Score composed maps, ``W(via→target) W(source→via)``, against the map of the pair.

    Every pair is composed through knowledge with a reference on both legs (city→country→continent),
    and set beside the median over the knowledge without one: what common drift alone carries.
    Of several wordings of a prompt the first is taken.
    """
    layout, weights = fitted.layout, fitted.weights()
    weights = {pair: weights[pair] for pair in wordings_of(weights)}
    compositions: list[Composition] = []
    scores = [score for score in scores if score.ends in weights]
    for score in sorted(scores, key=lambda s: 2.0 if s.label_mean is None else -s.label_mean):
        source, target = score.ends
        between = [n for n in layout.domains if {(source, n), (n, target)} <= set(weights)]
        known = {
            n: [layout.references[leg] is not None for leg in ((source, n), (n, target))]
            for n in between
        }
        if not (through := [n for n in between if all(known[n])]):
            continue
        composed = {n: weights[n, target] @ weights[source, n] for n in between}
        columns = layout.columns(source), layout.columns(target)
        r = {n: mean_r(label_r(test, weight, *columns).cpu()) for n, weight in composed.items()}
        others = [one for n in between if not any(known[n]) and (one := r[n]) is not None]
        for via in through:
            direct, indirect = score.label_mean, r[via]
            compositions.append(
                Composition(
                    source,
                    via,
                    target,
                    direct,
                    indirect,
                    number(significance.weight_cosine(composed[via], weights[score.ends])),
                    median(others) if others else None,
                    number(indirect / direct) if direct and indirect is not None else None,
                )
            )
        if len(compositions) >= _MAX_COMPOSED:
            break
    return compositions
