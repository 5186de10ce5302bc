"""Pure functions of tensors; they depend on torch and scipy only."""

from lincorr_lightning.functional.auroc import auroc, auroc_within
from lincorr_lightning.functional.causal_inner_product import Whitening, causal_whitening
from lincorr_lightning.functional.correlation import (
    CorrelationSummary,
    labelwise_pearson,
    segmented_pearson,
    summarize,
)
from lincorr_lightning.functional.least_squares import HALF_DECADES, LeastSquares
from lincorr_lightning.functional.moments import Moments, moments_of
from lincorr_lightning.functional.outcomes import (
    Cause,
    Outcome,
    attribute_causes,
    group_means,
    leaks,
    macro_mean,
    outcome_codes,
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
    "group_means",
    "hit_rates",
    "labelwise_pearson",
    "leaks",
    "macro_mean",
    "moments_of",
    "outcome_codes",
    "random_hit_rates",
    "reference_scores",
    "risk",
    "segmented_pearson",
    "summarize",
]
