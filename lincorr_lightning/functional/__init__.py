"""The maths: plain tensors in, plain tensors out. Imports torch alone."""

from lincorr_lightning.functional.correlation import (
    CorrelationSummary,
    instancewise_pearson,
    labelwise_pearson,
    labelwise_pearson_from_moments,
    segmented_pearson,
    summarize,
)
from lincorr_lightning.functional.least_squares import LeastSquares, strongest_within
from lincorr_lightning.functional.moments import Moments, merge_moments, moments_of, no_moments
from lincorr_lightning.functional.precision import HIT_RANKS, hit_rates

__all__ = [
    "HIT_RANKS",
    "CorrelationSummary",
    "LeastSquares",
    "Moments",
    "hit_rates",
    "instancewise_pearson",
    "labelwise_pearson",
    "labelwise_pearson_from_moments",
    "merge_moments",
    "moments_of",
    "no_moments",
    "segmented_pearson",
    "strongest_within",
    "summarize",
]
