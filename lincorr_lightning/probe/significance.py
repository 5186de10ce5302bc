"""Which correlations are real: standard errors, p-values and partial correlations.

Beyond the paper, which leaves the question open (appendix B); the statistics are in
`functional.significance`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, significance
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map.layout import Pair, stem
from lincorr_lightning.linear_map.scores import Numbers, PairScore
from lincorr_lightning.linear_map.solver import FittedMaps, mean_r, split_targets
from lincorr_lightning.results.table import number

FINDING = 0.01  #: Largest adjusted p-value of an r above random words that is a finding.


def standard_errors(fitted: FittedMaps, test: Moments, rows: Tensor) -> Numbers:
    """Measure the standard errors of r over held-out subjects.

    The influence function is taken around the moments of the held-out half itself: around those of
    the fit half, whose r a map overfits, errors come out far too large. `test` are the moments of
    all held-out subjects, `rows` those of some as they are read, ``(n, n_kept)``.
    """
    layout, errors = fitted.layout, dict[Pair, dict[str, float | None]]()
    if len(rows) < 2:
        return errors
    for source, targets in layout.targets.items():
        x, y = layout.problems[source]["y"]
        sizes, solution = layout.target_sizes(source), fitted.maps["y"][source]
        estimate = solver.Judge(test, x, y).influences(solution, rows, sizes)
        # Rows are independent, labels are not: labels are averaged within a row. R is that of all
        # subjects, the spread that of those whose rows were kept.
        deviations = estimate.influence.std(0) / test.n.cpu().sqrt()
        for target, error in zip(targets, deviations, strict=True):
            errors[source, target] = {"label_error": number(float(error))}
    return errors


def adjusted_p_values(scores: Sequence[PairScore]) -> Numbers:
    """Return p, and q adjusted for all pairs, of scores that stand beside random words.

    P of a mean over wordings is twice their mean p, which is valid whatever the dependence (Vovk
    and Wang, "Combining p-values via averaging", 2020).
    """
    p: dict[Pair, Any] = {
        score.ends: score["p"] if score.templates is None else min(2 * score["p"], 1.0)
        for score in scores
        if score["p"] is not None
    }
    q = significance.adjust_for_many(torch.tensor(list(p.values()), dtype=torch.float64)).tolist()
    both = zip(p.items(), q, strict=True)
    return {pair: {"p": one, "q": number(adjusted)} for (pair, one), adjusted in both}


def partial_correlations(scores: Sequence[PairScore], fitted: FittedMaps, test: Moments) -> Numbers:
    """Return r after other knowledge was removed from both sides; none for stored maps."""
    numbers: dict[Pair, dict[str, float | None]] = {}
    alone = {score.ends: torch.from_numpy(score.label_r).square() for score in scores}
    fit, layout = fitted.moments, fitted.layout
    partial_out = [name for name in layout.domains if stem(name) in layout.partial_out]
    if fit is None or not partial_out:
        return numbers
    for source in (name for name in layout.sources if name not in partial_out):
        r, unique = significance.partial_correlation(
            fit,
            test,
            layout.columns(source),
            layout.target_columns(source),
            torch.cat([layout.columns(name) for name in partial_out]),
            solver.per_target_ridge(layout, source, fitted.ridges),
        )
        for target, parts in split_targets(layout, source, torch.stack([r, unique]).cpu()):
            if target not in partial_out:
                both = torch.stack([alone[source, target], parts[1]])
                explained, beyond = both[:, ~both.isnan().any(0)].sum(1).tolist()
                numbers[source, target] = {
                    "partial_label_mean": mean_r(parts[0]),
                    "through_given": number(1 - beyond / explained) if explained > 0 else None,
                }
    return numbers
