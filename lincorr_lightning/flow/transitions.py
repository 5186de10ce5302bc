"""Transition matrices, which carry the features of one SAE to another, and how much they explain.

"Analyze Feature Flow to Enhance Interpretation and Steering in Language Models" (Laptev et al.,
2025, arXiv 2502.03032), figures 21 to 23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lincorr_lightning.flow.graph import DecoderMatcher
from lincorr_lightning.flow.matching import match_features
from lincorr_lightning.results.table import column, number
from lincorr_lightning.sae.hook_points import HookPoint
from lincorr_lightning.sae.sparse_autoencoder import SparseAutoencoder

TRANSITION_K = (1, 2, 5, 10, 20)
"""Numbers of sources per target for which the explained variance is measured."""


@dataclass(frozen=True)
class Transition:
    """Variance that the features of one SAE, `source`, explain at another hook point, `target`.

    Features are matched by their cosines in the weights `compared`, ``decoder`` or ``encoder``, k
    sources per target. `own` is what the target's own SAE explains; None if activations are
    constant.
    """

    source: str
    target: str
    kind: str
    compared: str
    k: int
    explained_variance: float | None = column(format=".3f")
    own: float | None = column(format=".3f")


def transition_matrix(indices: Tensor, n_sources: int) -> Tensor:
    """Return T, which maps the features of one SAE to those of a later one.

    ``T = indicator(top-k of W_dec(source)ᵀ W_dec(target))``: 1 where the source is among the k most
    similar to the target, else 0. It is sparse, ``(n_sources, n_targets)``; `indices` are the
    sources of each target, ``(n_targets, k)``, and -1 is none.

    Example:
        >>> transition_matrix(torch.tensor([[1, 0], [1, -1]]), 2).to_dense().tolist()
        [[1.0, 0.0], [1.0, 1.0]]
    """
    target, rank = (indices >= 0).nonzero(as_tuple=True)
    entries = torch.stack([indices[target, rank], target])
    ones = torch.ones(len(target), device=indices.device)
    shape = (n_sources, len(indices))
    return torch.sparse_coo_tensor(entries, ones, shape, check_invariants=True).coalesce()


def carry_features(features: Tensor, transition: Tensor) -> Tensor:
    """Carry features to another SAE: ``f T``, with T sparse or dense, ``(n, n_targets)``.

    Decoded by the target's SAE, they make the two SAEs a transcoder between their hook points.
    """
    return (transition.to(features.dtype).transpose(0, 1) @ features.T).T


def explained_variance(true: Tensor, predicted: Tensor) -> float:
    """Return ``1 - Σ|x - x̂|² / Σ|x - mean|²`` over all rows and columns, in float64.

    It is at most 1, and NaN if the activations x, ``(n, width)``, are constant.

    Example:
        >>> x = torch.tensor([[0.0], [2.0]])
        >>> explained_variance(x, x), explained_variance(x, torch.ones(2, 1))
        (1.0, 0.0)
    """
    true, predicted = true.double(), predicted.double()
    total = float(((true - true.mean(0)) ** 2).sum())
    missed = float(((true - predicted) ** 2).sum())
    return 1 - missed / total if total > 0 else float("nan")


@torch.no_grad()
def measure_transitions(
    saes: Mapping[HookPoint, SparseAutoencoder],
    matcher: DecoderMatcher,
    sample: Mapping[HookPoint, Tensor],
) -> list[Transition]:
    """Carry the features of every predecessor to the next residual stream.

    `sample` holds activations of the same tokens at each hook point, ``(n, width)``. There is a
    result per pair of hook points, kind of weights and k of `TRANSITION_K`.
    """
    transitions = []
    for target in matcher.hook_points:
        to = saes[target]
        x = sample[target].to(to.decoder.device)
        for source in matcher.predecessors(target):
            of = saes[source]
            features = of.encode(sample[source].to(of.decoder.device))
            own = number(explained_variance(x, to(x)))
            for compared in ("decoder", "encoder"):
                weights = getattr(to, compared), getattr(of, compared)
                indices = match_features(*weights, max(TRANSITION_K)).indices
                for k in TRANSITION_K:
                    transition = transition_matrix(indices[:, :k], of.n_features)
                    carried = to.decode(carry_features(features, transition))
                    explained = number(explained_variance(x, carried))
                    transitions.append(
                        Transition(
                            str(source), str(target), source.kind, compared, k, explained, own
                        )
                    )
    return transitions
