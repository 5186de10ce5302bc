"""Linear maps of one relation, fitted on an LM in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from lincorr_lightning.errors import SubjectsError
from lincorr_lightning.functional import HALF_DECADES, moments_of
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.layout import JointLayout, Pair, RowReader
from lincorr_lightning.linear_map.solver import (
    Solution,
    choose_ridges,
    fit_layout,
    split_targets,
    tuning_rows,
    weights_by_pair,
)
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MIN_FITTED = 10
"""Subjects that must remain to fit a map on, besides those that it is applied to."""


def to_linear_map(
    layout: JointLayout,
    maps: Mapping[str, Solution],
    ridges: Mapping[Pair, float],
    lm: LanguageModel,
) -> LinearMap:
    """Return maps as an artifact of their own."""
    on_cpu = {source: Solution(*(part.cpu() for part in each)) for source, each in maps.items()}
    return LinearMap(
        weights={f"{s}->{t}": weight for (s, t), weight in weights_by_pair(layout, on_cpu).items()},
        biases={
            f"{source}->{target}": bias
            for source, solution in on_cpu.items()
            for target, bias in split_targets(layout, source, solution.bias)
        },
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
    reader: RowReader | None = None,
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
        reader: Keeps the LM's joint rows that others have read.

    Returns:
        A map for each ridge strength.
    """
    layout = relation_layout(relation)
    rows = (reader or RowReader(lm)).read(layout, subjects)
    moments, maps = moments_of(rows), []
    for ridge in ridges:
        if ridge == "auto":
            judge = tuning_rows(len(rows)).to(rows.device)
            fit, tune = moments_of(rows[~judge]), moments_of(rows[judge])
            strengths = choose_ridges(fit, tune, layout, HALF_DECADES, tolerance)
        else:
            strengths = dict.fromkeys(layout.pairs, float(ridge))
        fitted = fit_layout(moments, layout, strengths)
        maps.append(to_linear_map(layout, fitted.maps, strengths, lm))
    return maps


def sample_fitted_subjects(
    tokenizer: PreTrainedTokenizerBase, n: int, applied_to: Collection[str]
) -> list[str]:
    """Sample up to n subjects to fit a map on, none of those that it is applied to."""
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
