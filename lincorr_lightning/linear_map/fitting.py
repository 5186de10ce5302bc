"""Fitting the linear maps of all pairs of a layout, or of one relation on an LM in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.functional import HALF_DECADES, Moments, moments_of
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.layout import JointLayout, Pair, read_rows, source_progress
from lincorr_lightning.linear_map.solver import (
    RidgeSolver,
    Solution,
    choose_ridges,
    per_target_ridge,
    split_targets,
    tuning_rows,
)
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_FITTED = 10
"""Subjects that must remain to fit a map on, besides those that it is applied to."""


@dataclass(frozen=True)
class FittedMaps:
    """The maps of all pairs of a layout, and of their nulls.

    Each is by source and leads to all targets of the source, side by side.

    Attributes:
        ridges: Ridge strength of each pair.
        maps: The maps.
        permuted: Maps fitted with the targets' rows permuted; empty without that null.
        control: Maps from the control prompt, read at the source's tokens; empty without it.
        n: Number of subjects they were fitted on.
        moments: Moments of the joint rows they were fitted on; None for stored maps.
        solvers: Solver of each source, for other ridge strengths; empty for stored maps.
    """

    ridges: Mapping[Pair, float]
    maps: Mapping[str, Solution]
    permuted: Mapping[str, Solution]
    control: Mapping[str, Solution]
    n: int
    moments: Moments | None = None
    solvers: Mapping[str, RidgeSolver] = field(default_factory=dict)


def fit_layout(moments: Moments, layout: JointLayout, ridges: Mapping[Pair, float]) -> FittedMaps:
    """Solve for W and b of every pair, and of its nulls.

    Args:
        moments: Moments of the joint rows to fit on; with permuted scatter, if the permuted null is
            wanted.
        layout: Columns of the joint rows.
        ridges: Ridge strength of each pair.
    """
    solvers, maps, permuted, control = {}, {}, {}, {}
    for source in source_progress(layout, "solving"):
        y = layout.target_columns(source)
        ridge = per_target_ridge(layout, source, ridges).to(moments.mean.device)
        with_null = moments.n_shuffled > 0
        solver = solvers[source] = RidgeSolver(moments, layout.columns(source), y, with_null)
        maps[source] = solver.solve(ridge)
        if with_null:
            permuted[source] = solver.solve(ridge, permuted=True)
        if layout.control is not None:
            columns = layout.control_columns(source)
            control[source] = RidgeSolver(moments, columns, y).solve(ridge)
    return FittedMaps(dict(ridges), maps, permuted, control, int(moments.n), moments, solvers)


def to_linear_map(
    layout: JointLayout,
    maps: Mapping[str, Solution],
    ridges: Mapping[Pair, float],
    lm: LanguageModel,
) -> LinearMap:
    """Return maps as an artifact of their own."""
    weights, biases = {}, {}
    for source, solution in maps.items():
        on_cpu = Solution(*(part.cpu() for part in solution))
        for target, weight in split_targets(layout, source, on_cpu.weight, dim=0):
            weights[f"{source}->{target}"] = weight
        for target, bias in split_targets(layout, source, on_cpu.bias):
            biases[f"{source}->{target}"] = bias
    return LinearMap(
        weights=weights,
        biases=biases,
        token_ids={name: domain.token_ids for name, domain in layout.domains.items()},
        labels={name: domain.texts for name, domain in layout.domains.items()},
        templates={name: domain.knowledge.template for name, domain in layout.domains.items()},
        ridge={f"{source}->{target}": ridge for (source, target), ridge in ridges.items()},
        lm=lm.config.name_or_path,
        fingerprint=lm.fingerprint,
    )


def fit_linear_maps(
    lm: LanguageModel,
    relation: TokenizedRelation,
    subjects: Sequence[str],
    ridges: Sequence[float | str] = (0.0,),
    tolerance: float = 0.02,
) -> list[LinearMap]:
    """Fit ``F_target(X) = W F_source(X) + b`` on some subjects, for several ridges at once.

    The maps are those of ``lincorr fit`` on the same subjects (paper, section 3.2); the LM reads
    each prompt once.

    Args:
        lm: The LM as it is now.
        relation: The relation with this LM's labels.
        subjects: The subjects to fit on, all of them.
        ridges: Ridge strengths; ``auto`` takes the strongest of `HALF_DECADES` whose r stays
            within `tolerance` of the best, judged on every fifth subject and fitted on all.
        tolerance: What ``auto`` may cost in mean label-wise r.

    Returns:
        A map for each ridge strength.

    Raises:
        NonFiniteError: The LM answers a subject with NaN or infinite logits.
    """
    layout = relation_layout(relation)
    return maps_of_rows(lm, layout, read_rows(lm, layout, subjects), ridges, tolerance)


def sample_fitted_subjects(
    tokenizer: PreTrainedTokenizerBase, n: int, applied_to: Collection[str]
) -> list[str]:
    """Sample up to n subjects to fit a map on, none of those that it is applied to.

    Raises:
        SubjectsError: Fewer than ten subjects remain.
    """
    others = sample_up_to(tokenizer, max(n, MIN_FITTED), excluding=applied_to)
    if applied_to and len(others) < MIN_FITTED:
        raise SubjectsError(
            f"a linear map must not be fitted on the {len(set(applied_to))} subjects that it is "
            f"applied to, and only {len(others)} others remain; it needs {MIN_FITTED}. Use fewer "
            "subjects or edits, or pass a fitted map as linear_map."
        )
    return others[:n]


def relation_layout(relation: TokenizedRelation) -> JointLayout:
    """Return the layout of one relation's source and target."""
    domains = {domain.knowledge.name: domain for domain in (relation.source, relation.target)}
    source, target = domains
    return JointLayout(domains, ((source, target),))


def maps_of_rows(
    lm: LanguageModel,
    layout: JointLayout,
    rows: Tensor,
    ridges: Sequence[float | str] = (0.0,),
    tolerance: float = 0.02,
) -> list[LinearMap]:
    """Fit the maps of `fit_linear_maps` on joint rows that have been read.

    Args:
        lm: The LM that was read.
        layout: Columns of the rows, of one pair.
        rows: ``(n_subjects, n_columns)``, float64.
        ridges: Ridge strengths, or ``auto``.
        tolerance: What ``auto`` may cost in mean label-wise r.

    Returns:
        A map for each ridge strength.
    """
    ((source, target),) = layout.pairs
    pair = source, target
    solver = RidgeSolver(moments_of(rows), layout.columns(source), layout.columns(target))
    maps = []
    for ridge in ridges:
        if ridge == "auto":
            judge = tuning_rows(len(rows)).to(rows.device)
            fit, tune = moments_of(rows[~judge]), moments_of(rows[judge])
            strengths = choose_ridges(fit, tune, layout, HALF_DECADES, tolerance)
        else:
            strengths = {pair: float(ridge)}
        solution = solver.solve(strengths[pair])
        maps.append(to_linear_map(layout, {source: solution}, strengths, lm))
    return maps
