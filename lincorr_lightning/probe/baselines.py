"""What r and Hit@N of W must exceed: random words at the same prompts, and the vocabulary alone.

Beyond the paper. Where the states at the target prompt are nearly a linear function of those at the
source prompt, the logits of *any* two sets of words are correlated. And where states are Gaussian,
W pairs the labels whose rows of the LM's head are alike, whatever the LM has learned of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from lincorr_lightning.functional import Moments, macro_mean
from lincorr_lightning.functional.precision import (
    HIT_RANKS,
    is_hit,
    neighbor_weights,
    reference_groups,
)
from lincorr_lightning.functional.significance import bootstrap_interval, weight_cosine
from lincorr_lightning.linear_map.layout import JointLayout, Pair, source_progress
from lincorr_lightning.linear_map.solver import (
    FittedMaps,
    RidgeSolver,
    label_r,
    label_r_by_pair,
    per_target_ridge,
    split_targets,
    weights_by_pair,
)
from lincorr_lightning.probe.scores import Numbers, PairScore, mean_r
from lincorr_lightning.results.table import number

_FLOATS = npt.NDArray[np.floating[Any]]
# Numbers of source labels at which r is compared with that of as many random words.
_COUNTS = (5, 10, 20, 50, 100, 200)
_DRAWS = 10


# -- random words: r -------------------------------------------------------------------------


class LabelCount(NamedTuple):
    """Mean label-wise r of maps from some source labels, and from as many random words."""

    pair: str
    n_source_labels: int
    label_mean: float | None
    label_std: float | None
    """Standard deviation over draws of the labels; 0 where all of them are drawn."""
    random_mean: float | None
    random_std: float | None


def random_words(
    scores: Sequence[PairScore],
    fitted: FittedMaps,
    test: Moments,
    layout: JointLayout,
    n_compared: int,
) -> tuple[Numbers, list[LabelCount]]:
    """Fit maps from and to random words after the same prompts, with the ridges of the pairs.

    Args:
        scores: Scores of the pairs so far.
        fitted: Maps of all pairs, with the moments that they were fitted on; stored maps have none.
        test: Moments of the joint rows of all held-out subjects.
        layout: Columns of the rows, those of random words included.
        n_compared: Number of source labels for ``excess_over_random_labels``. With many labels,
            most directions of the states are read whatever the labels are, and no r is special.

    Returns:
        Fields of `PairScore` by pair, and r by the number of source labels.
    """
    numbers: dict[Pair, dict[str, Any]] = {}
    curve: list[LabelCount] = []
    if fitted.moments is None or not layout.words:
        return numbers, curve
    own_r = {score.pair: score.label_r for score in scores}
    same_prompt = {source: one.weight for source, one in fitted.nulls["vocabulary"].items()}
    on_targets = label_r_by_pair(test, layout, same_prompt)
    for source in source_progress(layout, "random words"):
        rng = np.random.default_rng(0)
        n_labels = layout.sizes[source]
        compared = min(n_compared, n_labels)
        counts = sorted({n for n in _COUNTS if n < n_labels} | {compared, n_labels})
        r = {n: _r_of_draws(fitted, test, layout, source, n, rng) for n in counts}
        of_words = _r_of_target_words(fitted, test, layout, source)
        for i, target in enumerate(layout.targets(source)):
            pair = source, target
            for n, drawn in r.items():
                spread = [number(float(f(one[:, i]))) for one in drawn for f in (np.mean, np.std)]
                curve.append(LabelCount("->".join(pair), n, *spread))
            labels, words = (drawn[:, i] for drawn in r[compared])
            excess = _difference(labels, words)
            from_words = _range(r[n_labels][1][:, i])
            to_words = _range(_means(of_words[target], layout.sizes[target], rng))
            numbers[pair] = {
                "baselines": {
                    "random_source_labels": from_words,
                    "random_target_labels": to_words,
                    "same_prompt_map": mean_r(on_targets[pair]),
                },
                "excess_over_random_labels": {
                    **excess,
                    "n_source_labels": compared,
                    "draws": len(words),
                    "target": _difference(own_r[pair], of_words[target]),
                },
                "random_label_mean": from_words["mean"],
                "excess_over_random": excess["mean"],
            }
    return numbers, curve


def _r_of_draws(
    fitted: FittedMaps,
    test: Moments,
    layout: JointLayout,
    source: str,
    n: int,
    rng: np.random.Generator,
) -> tuple[_FLOATS, _FLOATS]:
    """Return r of maps from n labels of a source, and from n random words after its prompt.

    Each is ``(n_draws, n_targets)``, means over the labels of each target.
    """
    assert fitted.moments is not None
    y, ridge = layout.target_columns(source), per_target_ridge(layout, source, fitted.ridges)
    sides = []
    for pool in (layout.columns(source), layout.word_columns(source)):
        r = []
        for _ in range(_DRAWS if n < len(pool) else 1):
            x = pool[torch.from_numpy(rng.permutation(len(pool))[:n])]
            weight = RidgeSolver(fitted.moments, x, y=y).solve(ridge).weight
            parts = split_targets(layout, source, label_r(test, weight, x, y).cpu())
            r.append([float(part.nanmean()) for _, part in parts])
        sides.append(np.array(r))
    return sides[0], sides[1]


def _r_of_target_words(
    fitted: FittedMaps, test: Moments, layout: JointLayout, source: str
) -> dict[str, _FLOATS]:
    """Return r of each random word after each target's prompt, of maps from the source's labels."""
    assert fitted.moments is not None
    columns = {target: layout.word_columns(target) for target in layout.targets(source)}
    x = layout.columns(source)
    solver = RidgeSolver(fitted.moments, x, **columns)
    return {
        target: label_r(
            test, solver.solve(fitted.ridges[source, target], target).weight, x, y
        ).cpu().numpy()
        for target, y in columns.items()
    }  # fmt: skip


def _means(values: _FLOATS, n: int, rng: np.random.Generator) -> _FLOATS:
    """Return the mean of n of the values for several draws; all of them if there are no more."""
    return np.array([np.nanmean(rng.permutation(values)[:n]) for _ in range(_DRAWS)])


def _range(drawn: _FLOATS) -> dict[str, Any]:
    """Return mean, lowest and highest of some draws."""
    ends = {"mean": drawn.mean(), "low": drawn.min(), "high": drawn.max()}
    return {**{name: number(one) for name, one in ends.items()}, "draws": len(drawn)}


def _difference(a: _FLOATS, b: _FLOATS) -> dict[str, float | None]:
    """Return the difference between two means, and its 95 % interval over the values of both."""
    a, b = (each[~np.isnan(each)] for each in (a, b))
    if not (len(a) and len(b)):
        return dict.fromkeys(("mean", "low", "high"))
    mean = float(a.mean() - b.mean())
    # A side that was not drawn has no spread.
    variance = sum(each.var(ddof=1) / len(each) for each in (a, b) if len(each) > 1)
    half = stats.t.ppf(0.975, max(len(a) + len(b) - 2, 1)) * variance**0.5
    return {"mean": number(mean), "low": number(mean - half), "high": number(mean + half)}


# -- the vocabulary: Hit@N -------------------------------------------------------------------


def vocabulary_baselines(
    scores: Sequence[PairScore],
    fitted: FittedMaps,
    layout: JointLayout,
    head_rows: Tensor | None,
) -> Numbers:
    """Score the pairings that need no knowledge of the subjects, beside that of W.

    They are the best constant answer (``constant``), the nearest target label by the rows of the
    LM's head (``unembedding``), the map between both label sets after the control prompt
    (``same_prompt``), and that after the source prompt, W₀, which Gaussian states with the
    covariance of the LM's give (``gaussian_states``). W is also compared with W₀ as a matrix.

    `head_rows` are the rows of the head for all labels in the order of the layout's columns,
    ``(n_labels, hidden_size)``; None for a head without rows.
    """
    numbers: dict[Pair, dict[str, Any]] = {}
    weights = weights_by_pair(layout, fitted.maps)
    nulls = {
        name: weights_by_pair(layout, fitted.nulls[null])
        for name, null in (("same_prompt", "same_prompt"), ("gaussian_states", "vocabulary"))
        if null in fitted.nulls
    }
    for score in scores:
        pair = score.pair
        weight, others = weights[pair].cpu(), {k: v[pair].cpu() for k, v in nulls.items()}
        reference, numbers[pair] = layout.references.get(pair), {}
        right = None if reference is None else torch.from_numpy(reference)
        if "gaussian_states" in others:
            numbers[pair]["decomposition"] = _decomposition(
                weight, others["gaussian_states"], right
            )
        if right is None or score.precision is None:
            continue
        counts = right.sum(1)
        order = counts.argsort(descending=True, stable=True).argsort()
        others["constant"] = -order[:, None].double().expand_as(weight)
        if head_rows is not None:
            source, target = (head_rows[layout.columns(name)] for name in pair)
            others["unembedding"] = neighbor_weights(source, target)
        numbers[pair] |= _hits(weight, others, right, score)
    return numbers


def _decomposition(weight: Tensor, other: Tensor, right: Tensor | None) -> dict[str, Any]:
    rest = weight - other
    hit = None if right is None else number(float(is_hit(rest, right)[0].double().mean()))
    return {
        "cosine": number(weight_cosine(weight, other)),
        "norm_share": number(float(rest.norm() / weight.norm())),
        "hit_1": hit,
    }


def _hits(
    weight: Tensor, others: Mapping[str, Tensor], right: Tensor, score: PairScore
) -> dict[str, Any]:
    """Return the fields that compare Hit@N of W with that of other weights."""
    own, groups = is_hit(weight, right).double(), reference_groups(right)
    hits = {name: is_hit(other, right)[0].double() for name, other in others.items()}
    baselines = {
        name: {"1": float(one.mean()), "macro_1": macro_mean(one.tolist(), groups)}
        for name, one in hits.items()
    }
    best = max(baselines, key=lambda name: baselines[name]["1"])
    difference = own[0] - hits[best]
    low, high = bootstrap_interval(difference)
    macro = {
        str(n): macro_mean(one, groups) for n, one in zip(HIT_RANKS, own.tolist(), strict=True)
    }
    return {
        "precision": {
            **(score.precision or {}),
            "macro": {**macro, "n_references": len(set(groups))},
            "baselines": baselines,
        },
        "excess_over_unembedding": {
            "mean": float(difference.mean()), "low": low, "high": high, "baseline": best,
        },
        "best_baseline_1": baselines[best]["1"],
    }  # fmt: skip
