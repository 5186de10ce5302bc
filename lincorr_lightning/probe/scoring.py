"""Scores of the probe's maps beside their nulls, from what was added up of the held-out half."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lincorr_lightning.errors import LanguageModelError
from lincorr_lightning.functional import HALF_DECADES, Moments
from lincorr_lightning.linear_map.baselines import beside_baselines
from lincorr_lightning.linear_map.layout import Pair, stem
from lincorr_lightning.linear_map.scores import over_wordings, ridge_paths, score_maps, with_numbers
from lincorr_lightning.linear_map.solver import FittedMaps
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.probe import significance
from lincorr_lightning.probe.results import ProbeFindings


def score_probe(
    fitted: FittedMaps,
    test: Moments,
    instance: Mapping[Pair, float],
    kept: Sequence[Tensor],
    lm: LanguageModel,
    random_labels: int,
    subjects: Mapping[Any, Sequence[str]],
    phase: str = "val",
) -> ProbeFindings:
    """Score maps on held-out subjects.

    Args:
        fitted: The maps, on the device of `test`.
        test: Moments of the joint rows of all held-out subjects.
        instance: Mean instance-wise r of each pair.
        kept: First columns of the joint rows of some held-out subjects, ``(n, n_kept)`` each.
        lm: The LM, whose head gives the nearest words.
        random_labels: See `LinearProbe`.
        subjects: Subjects of each half.
        phase: First part of the log keys.

    Raises:
        LanguageModelError: The LM has the same logits after every subject.
    """
    if (test.high - test.low).max() <= 1e-5 * test.high.abs().max():  # rounding
        raise LanguageModelError(
            f"{lm.config.name_or_path} has the same logits after every subject: it does not read "
            "its prompts. Its config.json or weights are wrong; copy them again."
        )
    layout = fitted.layout
    rows = torch.cat([torch.zeros(0, layout.n_kept), *kept])
    scores = score_maps(fitted, test, instance)
    scores = with_numbers(scores, significance.standard_errors(fitted, test, rows))
    scores = with_numbers(scores, significance.partial_correlations(scores, fitted, test))
    wordings, counts = beside_baselines(scores, fitted, test, lm, random_labels, rows=rows)
    scores = [*over_wordings({score.ends: score for score in wordings}).values()]
    return ProbeFindings(
        phase=phase,
        scores=with_numbers(scores, significance.p_values(scores)),
        wordings=wordings,
        weights={pair: w.cpu().numpy() for pair, w in fitted.weights().items()},
        layout=layout,
        path=[over_wordings(point) for point in ridge_paths(fitted, test, HALF_DECADES)],
        label_counts=[one for one in counts if one.pair == stem(one.pair)],
        subjects=subjects,
        n_fit=fitted.n,
        n_test=int(test.n),
    )


def warn_of_few_subjects(fitted: FittedMaps) -> None:
    """Warn if maps without a ridge have as many source labels as subjects, or more."""
    sizes = fitted.layout.sizes
    plain = {stem(source) for (source, _), ridge in fitted.ridges.items() if ridge == 0}
    n_labels, source = max(((sizes[s], s) for s in plain), default=(0, ""))
    if n_labels >= fitted.n:
        rank_zero_warn(
            f"the maps are fitted on {fitted.n:,} subjects, but {source} has {n_labels:,} labels: "
            "without a ridge they fit these subjects exactly, and do not generalize to others. "
            "Raise data.n_subjects, or set model.ridge to auto."
        )
