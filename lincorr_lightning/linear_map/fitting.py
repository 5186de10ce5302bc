"""Fitting the linear map of one relation on an LM in memory, without a run of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lincorr_lightning.functional import (
    HALF_DECADES,
    LeastSquares,
    Moments,
    labelwise_pearson_from_moments,
    moments_of,
    strongest_within,
    summarize,
)
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.lm.language_model import LanguageModel

_TUNE_EVERY = 5


def fit_linear_maps(
    lm: LanguageModel,
    asked: TokenizedRelation,
    inputs: Sequence[str],
    ridges: Sequence[float | str] = (0.0,),
    tolerance: float = 0.02,
) -> list[LinearMap]:
    """Fit ``F_target(X) = W F_source(X) + b`` on some X's, for several ridge strengths at once.

    The maps are those of `lincorr fit` on the same X's (paper, section 3.2): the LM is asked once.

    Args:
        lm: As it is now.
        asked: The relation with this LM's labels.
        inputs: The X's, all of which are fitted on.
        ridges: Ridge strengths; ``auto`` takes the strongest of `HALF_DECADES` whose r stays
            within `tolerance` of the best, judged on every fifth X and fitted on all.
        tolerance: What ``auto`` may cost in mean label-wise r.

    Returns:
        A map for each ridge strength.

    Raises:
        NonFiniteError: The LM answers an X with NaN or infinite logits.
    """
    rows = lm.joint_logits(
        [asked.source_prompts(inputs), asked.target_prompts(inputs)],
        [asked.source.token_ids, asked.target.token_ids],
    )
    n_source = len(asked.source.token_ids)
    everything = moments_of(rows)
    squares = _squares(everything, n_source)
    maps = []
    for ridge in ridges:
        strength = choose_ridge(rows, n_source, tolerance) if ridge == "auto" else float(ridge)
        weight = squares.weight(strength)
        bias = everything.mean[n_source:] - weight @ everything.mean[:n_source]
        maps.append(_linear_map(lm, asked, weight, bias, strength))
    return maps


def choose_ridge(rows: Tensor, n_source: int, tolerance: float = 0.02) -> float:
    """The strongest ridge whose r on every fifth row stays within `tolerance` of the best.

    Args:
        rows: Source and target logits side by side, ``(n_rows, n_source + n_target)``.
        n_source: Columns of the source.
        tolerance: What a stronger ridge may cost in mean label-wise r.
    """
    # The same rows as in the linear probe, so that its choice is this one.
    judge = torch.arange(len(rows), device=rows.device) % _TUNE_EVERY == _TUNE_EVERY - 1
    squares = _squares(moments_of(rows[~judge]), n_source)
    tune = moments_of(rows[judge])
    means = []
    for ridge in HALF_DECADES:
        r = labelwise_pearson_from_moments(
            squares.weight(ridge),
            xx=tune.scatter[:n_source, :n_source],
            xy=tune.scatter[:n_source, n_source:],
            yy=tune.scatter.diagonal()[n_source:],
            constant=tune.constant[n_source:],
        )
        means.append(summarize(r).mean)
    return HALF_DECADES[strongest_within(means, tolerance)]


def _squares(moments: Moments, n_source: int) -> LeastSquares:
    return LeastSquares(
        moments.scatter[:n_source, :n_source], moments.scatter[:n_source, n_source:]
    )


def _linear_map(
    lm: LanguageModel, asked: TokenizedRelation, weight: Tensor, bias: Tensor, ridge: float
) -> LinearMap:
    domains = {d.knowledge.name: d for d in (asked.source, asked.target)}
    return LinearMap(
        weights={asked.name: weight},
        biases={asked.name: bias},
        token_ids={name: domain.token_ids for name, domain in domains.items()},
        labels={name: domain.texts for name, domain in domains.items()},
        templates={name: domain.knowledge.template for name, domain in domains.items()},
        ridge={asked.name: ridge},
        lm=lm.config.name_or_path,
        fingerprint=lm.fingerprint,
    )
