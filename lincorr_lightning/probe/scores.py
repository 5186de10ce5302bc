"""The scores of a fitted probe on held-out rows, put into a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, hit_rates, summarize
from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.linear_map.affine_map import AffineMap
from lincorr_lightning.linear_map.solver import Pair, label_r, split_targets
from lincorr_lightning.probe.results import CompletenessScore, PairScore, ProbeReport
from lincorr_lightning.probe.ridge_path import RidgePoint, as_rates
from lincorr_lightning.probe.significance import compositions, judge
from lincorr_lightning.results.provenance import versions

if TYPE_CHECKING:
    from lincorr_lightning.probe.module import LinearProbe


def score_probe(
    probe: LinearProbe,
    test: Moments,
    instance: Mapping[str, Tensor],
    paths: Mapping[Pair, list[RidgePoint]],
    fit: Moments | None,
) -> ProbeReport:
    """Score every pair, beside its nulls.

    Args:
        probe: A fitted probe.
        test: Moments of the joint rows of the test half.
        instance: Mean instance-wise r of every target of each source, ``(n_targets,)``.
        paths: Ridge paths, if this run fitted.
        fit: Moments of the fit half, if this run fitted.
    """
    layout = probe.layout
    scores: dict[Pair, PairScore] = {}
    weights: dict[str, Any] = {}
    for source in layout.sources:
        columns = layout.columns(source), layout.target_columns(source)
        weight = cast(AffineMap, probe.maps[source]).weight.detach()
        r = dict(split_targets(layout, source, label_r(test, weight, *columns).cpu()))
        permuted = _null_means(probe, test, source, "permuted_maps", shuffled=True)
        control = _null_means(probe, test, source, "control_maps", shuffled=False)
        for i, (target, block) in enumerate(split_targets(layout, source, weight, dim=0)):
            pair = source, target
            summary = summarize(r[target])
            scores[pair] = PairScore(
                source=source,
                target=target,
                label_mean=summary.mean,
                label_std=summary.std,
                instance_mean=float(instance[source][i]),
                n_labels=layout.sizes[target],
                n_constant_labels=summary.n_constant,
                permuted_label_mean=permuted.get(target),
                control_label_mean=control.get(target),
                ridge=probe.ridges[pair],
                label_r=r[target].numpy(),
                precision=_precision(block.cpu(), layout.references[pair]),
                completeness=by_completeness(
                    r[target],
                    block.cpu(),
                    layout.references[pair],
                    layout.domains[target].completeness,
                ),
            )
            weights[f"{source}->{target}"] = block.cpu().numpy()
    judged = judge(probe, scores, fit, test)
    return ProbeReport(
        lm=probe.lm.config.name_or_path,
        n_fit=probe.fitted_on,
        n_test=int(test.n),
        pairs=judged,
        compositions=compositions(probe, judged, test),
        left_out=layout.left_out,
        ridge_path={f"{s}->{t}": path for (s, t), path in paths.items()},
        weights=weights,
        labels={name: list(domain.texts) for name, domain in layout.domains.items()},
        reference={f"{s}->{t}": right for (s, t), right in layout.references.items()},
        settings={
            **probe.hparams,
            "data": dict(getattr(getattr(probe.trainer, "datamodule", None), "hparams", {})),
            "fingerprint": probe.lm.fingerprint,
            "versions": versions(),
        },
    )


def by_completeness(
    r: Tensor,
    weight: Tensor,
    reference: npt.NDArray[np.bool_] | None,
    completeness: Sequence[Completeness],
) -> dict[str, CompletenessScore]:
    """Scores by how much the target's labels say of their answers (paper, appendix K, table 18).

    Hit@N is of influenced targets: of the source labels with a right target of a kind, the share
    for which one of that kind is among the N highest; right ones of other kinds do not compete.

    Args:
        r: Of each target label, ``(n_target,)``.
        weight: W, ``(n_target, n_source)``.
        reference: Which labels belong together, shaped like W; None if unknown.
        completeness: Of each target label.

    Returns:
        By kind; empty where all labels are of one.
    """
    found: dict[str, CompletenessScore] = {}
    if len(set(completeness)) < 2:
        return found
    for kind in Completeness:
        mine = torch.tensor([other is kind for other in completeness])
        if not mine.any():
            continue
        hits = None
        if reference is not None:
            right = torch.from_numpy(reference)
            elsewhere = right & ~mine[:, None]
            influenced, _ = hit_rates(
                weight.masked_fill(elsewhere, -torch.inf), right & mine[:, None]
            )
            hits = as_rates(influenced)
        found[str(kind)] = CompletenessScore(int(mine.sum()), summarize(r[mine]).mean, hits)
    return found


def _null_means(
    probe: LinearProbe, test: Moments, source: str, maps: str, *, shuffled: bool
) -> dict[str, float]:
    """Mean label-wise r of the maps of one null, by target; empty when it was left out."""
    modules = getattr(probe, maps)
    if not modules:
        return {}
    layout = probe.layout
    x = layout.columns(source) if shuffled else layout.control_columns(source)
    weight = modules[source].weight
    r = label_r(test, weight, x, layout.target_columns(source), shuffled=shuffled).cpu()
    return {target: summarize(part).mean for target, part in split_targets(layout, source, r)}


def _precision(weight: Tensor, reference: Any) -> dict[str, dict[str, float]] | None:
    if reference is None:
        return None
    influenced, influencing = hit_rates(weight, torch.from_numpy(reference))
    if math.isnan(influenced.rates[0]):
        return None
    return {"influenced": as_rates(influenced), "influencing": as_rates(influencing)}
