"""Pearson's r between predicted and true logits, by label and by instance (paper section 3.2)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_CONSTANT_PREDICTION = 1e-12  # of its target's spread; one below it is constant up to rounding


class CorrelationSummary(NamedTuple):
    """Mean and population standard deviation of r over the `n` labels (or instances) that have one.

    Both are NaN if none has; `n_constant` are left out because target or prediction is constant.
    """

    mean: float
    std: float
    n: int
    n_constant: int


def labelwise_pearson(prediction: Tensor, target: Tensor) -> Tensor:
    """Return Pearson's r of each label over instances, the paper's main measure.

    Of predicted and true logits, ``(n_subjects, n_labels)`` each: ``(n_labels,)``, float64; NaN
    where the label or its prediction is constant.

    Example:
        >>> t = torch.tensor([[1.0, 5.0], [2.0, 5.0], [3.0, 5.0]])
        >>> labelwise_pearson(2 * t + 1, t).round(decimals=9).tolist()
        [1.0, nan]
    """
    prediction, target = prediction.double(), target.double()
    constant = (target.amax(0) <= target.amin(0)) | (prediction.amax(0) <= prediction.amin(0))
    p, t = prediction - prediction.mean(0), target - target.mean(0)
    r = (p * t).sum(0) / (p.norm(dim=0) * t.norm(dim=0))
    return torch.where(constant, torch.nan, r.clamp(-1, 1))


def segments_of(sizes: Sequence[int], device: torch.device | None = None) -> Tensor:
    """Return which columns are those of each target, ``(sum(sizes), n_targets)`` of 0 and 1.

    Targets, of so many labels each, lie side by side. The segments are float64.
    """
    eye = torch.eye(len(sizes), dtype=torch.float64, device=device)
    return eye.repeat_interleave(torch.tensor(sizes, device=device), 0, output_size=sum(sizes))


def segmented_pearson(prediction: Tensor, target: Tensor, segments: Tensor) -> Tensor:
    """Return the instance-wise r, over the labels of each target (paper appendix D).

    Predicted and true logits hold all targets side by side, ``(n_subjects, n_columns)``; the
    `segments` are the columns of each target, ``(n_columns, n_targets)`` of zeros and ones. Returns
    ``(n_subjects, n_targets)``, float64; NaN where all logits of a target are equal.
    """
    segments = segments.double()
    size = segments.sum(0)

    def centred(logits: Tensor) -> Tensor:
        logits = logits.double()
        return logits - (logits @ segments / size) @ segments.T

    p, t = centred(prediction), centred(target)
    pp, tt, pt = (p * p) @ segments, (t * t) @ segments, (p * t) @ segments
    scale = (target.double() ** 2) @ segments
    constant = (tt <= _CONSTANT_PREDICTION**2 * scale) | (pp <= _CONSTANT_PREDICTION**2 * tt)
    return torch.where(constant, torch.nan, (pt / (pp * tt).sqrt()).clamp(-1, 1))


def labelwise_pearson_from_moments(
    weight: Tensor, xx: Tensor, xy: Tensor, yy: Tensor, constant: Tensor
) -> Tensor:
    """Return the label-wise r of ``W x + b`` from the second moments of the rows.

    ``r_j = w_j·xy_j / sqrt(w_j·xx·w_j  yy_j)``: the rows themselves are not needed, so that many
    maps, ``(..., n_target, n_source)``, can be scored after one pass over the data. `xx` and `xy`
    are scatters, ``(n_source, n_source)`` and ``(n_source, n_target)``, `yy` is the diagonal of the
    target's, ``(n_target,)``, and `constant` says which target labels never change. The r is
    ``(..., n_target)``, float64, and NaN where the label or its prediction is constant.
    """
    explained = ((weight @ xx) * weight).sum(-1)
    covariance = (weight * xy.T).sum(-1)
    undefined = constant | (explained <= _CONSTANT_PREDICTION**2 * yy)
    r = covariance / (explained.clamp(min=0) * yy).sqrt()
    return torch.where(undefined, torch.nan, r.clamp(-1, 1))


def summarize(r: Tensor) -> CorrelationSummary:
    """Return mean and standard deviation of r, leaving out constant labels (NaN).

    Example:
        >>> summarize(torch.tensor([0.5, 1.0, float("nan")]))
        CorrelationSummary(mean=0.75, std=0.25, n=2, n_constant=1)
    """
    kept = r[~r.isnan()].double()
    if len(kept) == 0:
        return CorrelationSummary(torch.nan, torch.nan, 0, r.numel())
    return CorrelationSummary(
        kept.mean().item(), kept.std(correction=0).item(), len(kept), r.numel() - len(kept)
    )
