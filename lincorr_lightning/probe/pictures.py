"""Which figures a probe leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from lincorr_lightning.io import safe_names
from lincorr_lightning.probe import correlation_figures as tie_figures
from lincorr_lightning.probe.clusters import cluster
from lincorr_lightning.probe.results import MOST_WEIGHT_FIGURES
from lincorr_lightning.results import heat_maps as figures
from lincorr_lightning.results.base import Drawings

if TYPE_CHECKING:
    from lincorr_lightning.probe.results import PairScore, ProbeReport

_Value = Callable[["PairScore"], "float | None"]
# A tree over fewer knowledges shows nothing that the matrix does not.
_LEAST_CLUSTERED = 4


def drawings_of(report: ProbeReport) -> Drawings:
    """Every figure of a probe, by its file name without suffix, to be drawn when called.

    Args:
        report: What the probe found.
    """
    drawings: dict[str, Callable[[], Figure]] = {
        "correlation_matrix": partial(_matrix, report, lambda s: s.label_mean, "label-wise"),
        "instance_matrix": partial(_matrix, report, lambda s: s.instance_mean, "instance-wise"),
        "std_matrix": partial(_spread, report),
    }
    if any(score.permuted_label_mean is not None for score in report.pairs):
        drawings["permuted_matrix"] = partial(
            _matrix, report, lambda s: s.permuted_label_mean, "permuted label-wise"
        )
    sources, targets, matrix = report.matrix(lambda s: s.label_mean)
    if (
        sources == targets
        and len(sources) >= _LEAST_CLUSTERED
        and np.isfinite(matrix).sum() == len(sources) * (len(sources) - 1)
    ):
        drawings["clusters"] = partial(_clusters, report)
    drawings["nulls"] = lambda: figures.nulls_figure(
        report.pairs, f"Correlation beside its nulls in {report.lm}"
    )
    if any(score.p is not None for score in report.pairs):
        drawings["ties"] = lambda: tie_figures.ties_figure(
            report.pairs, report.settings.get("given") or (), f"Which pairs are tied in {report.lm}"
        )
    if report.compositions:
        drawings["transitivity"] = lambda: tie_figures.transitivity_figure(
            report.compositions, f"Maps end to end in {report.lm}"
        )
    closely = report.notable(MOST_WEIGHT_FIGURES)
    paths = {s.name: report.ridge_path[s.name] for s in closely if s.name in report.ridge_path}
    if paths:
        chosen = {score.name: score.ridge for score in closely}
        title = f"Correlation and precision along the ridge in {report.lm}"
        drawings["ridge_path"] = lambda: figures.ridge_path_figure(
            paths, chosen, title, len(report.ridge_path)
        )
    safe = safe_names(score.name for score in closely)
    for score in closely:
        drawings[f"weights_{safe[score.name]}"] = partial(_weights, report, score)
    return drawings


def _told(report: ProbeReport) -> str:
    strengths = {f"{score.ridge:g}" for score in report.pairs}
    ridge = strengths.pop() if len(strengths) == 1 else report.settings.get("ridge")
    return f"{report.n_test:,} held-out X’s; maps fitted on {report.n_fit:,}; ridge {ridge}"


def _matrix(report: ProbeReport, value: _Value, kind: str) -> Figure:
    title = f"{kind.capitalize()} correlation between knowledges in {report.lm}"
    sources, targets, matrix = report.matrix(value)
    return figures.correlation_heatmap(
        matrix, sources, targets, title, _told(report), f"{kind} Pearson r"
    )


def _spread(report: ProbeReport) -> Figure:
    """How far labels differ (paper, figures 23 and 24)."""
    sources, targets, matrix = report.matrix(lambda s: s.label_std)
    known = matrix[np.isfinite(matrix)]
    return figures.correlation_heatmap(
        matrix,
        sources,
        targets,
        f"Standard deviation of label-wise r over labels in {report.lm}",
        _told(report),
        "standard deviation of r",
        limit=max(float(known.max(initial=0.0)), 0.01),
    )


def _clusters(report: ProbeReport) -> Figure:
    """The label-wise matrix with what belongs together side by side."""
    names, _, matrix = report.matrix(lambda s: s.label_mean)
    found = cluster(matrix)
    ordered = [names[i] for i in found.order]
    return figures.correlation_heatmap(
        matrix[np.ix_(found.order, found.order)],
        ordered,
        ordered,
        f"Clusters of knowledges in {report.lm}",
        f"{_told(report)}; average linkage of 1 − r, both directions averaged",
        links=found.links,
    )


def _weights(report: ProbeReport, score: PairScore) -> Figure:
    weight, right = report.weights[score.name], report.reference.get(score.name)
    part = figures.interesting_part(weight)
    cut = np.ix_(part.targets, part.sources)
    return figures.weight_heatmap(
        weight[cut],
        [report.labels[score.source][i] for i in part.sources],
        [report.labels[score.target][i] for i in part.targets],
        f"W of {score.name} in {report.lm}",
        f"ridge {score.ridge:g}; {len(part.targets)} of {weight.shape[0]} targets, those with "
        f"the highest weights, and {len(part.sources)} of {weight.shape[1]} sources",
        None if right is None else right[cut],
    )
