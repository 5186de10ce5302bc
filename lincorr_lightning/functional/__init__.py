"""Pure functions of tensors; they depend on torch and scipy only."""

from lincorr_lightning.functional.auroc import auroc, auroc_within, class_auroc, counted_auroc
from lincorr_lightning.functional.causal_inner_product import Whitening, causal_whitening
from lincorr_lightning.functional.correlation import (
    CorrelationSummary,
    labelwise_pearson,
    labelwise_pearson_from_moments,
    segmented_pearson,
    summarize,
)
from lincorr_lightning.functional.least_squares import HALF_DECADES, LeastSquares, strongest_within
from lincorr_lightning.functional.moments import Moments, merge_moments, moments_of, no_moments
from lincorr_lightning.functional.outcomes import (
    Cause,
    Outcome,
    attribute_causes,
    group_means,
    leaks,
    macro_mean,
    outcome_codes,
    outcome_shares,
    reference_scores,
    risk,
)
from lincorr_lightning.functional.precision import hit_rates, random_hit_rates

__all__ = [
    "HALF_DECADES",
    "Cause",
    "CorrelationSummary",
    "LeastSquares",
    "Moments",
    "Outcome",
    "Whitening",
    "attribute_causes",
    "auroc",
    "auroc_within",
    "causal_whitening",
    "class_auroc",
    "counted_auroc",
    "group_means",
    "hit_rates",
    "labelwise_pearson",
    "labelwise_pearson_from_moments",
    "leaks",
    "macro_mean",
    "merge_moments",
    "moments_of",
    "no_moments",
    "outcome_codes",
    "outcome_shares",
    "random_hit_rates",
    "reference_scores",
    "risk",
    "segmented_pearson",
    "strongest_within",
    "summarize",
]
