"""Scores of fitted maps on held-out subjects, beside those of their nulls (paper section 3).

To add a number: a field of `PairScore`, and a function that returns it by pair for `with_numbers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lincorr_lightning.functional import (
    Moments,
    hit_rates,
    macro_mean,
    random_hit_rates,
    summarize,
)
from lincorr_lightning.functional.precision import (
    HIT_RANKS,
    HitRates,
    ranks_of_right,
    reference_groups,
)
from lincorr_lightning.io import number
from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.linear_map.layout import Pair, wordings_of
from lincorr_lightning.linear_map.solver import (
    FittedMaps,
    Judge,
    RidgeSolver,
    mean_r,
    split_targets,
)
from lincorr_lightning.progress import progress

_WAYS = ("influenced", "influencing")
_NO_NUMBER = {"is_number": False}  # of fields that are no column of a table

Numbers = Mapping[Pair, Mapping[str, Any]]  #: Fields of `PairScore` by pair.


SPREAD = (
    "label_mean",
    "excess",
    "excess_over_random",
    "influenced_1",
    "best_baseline_1",
    "macro_1",
    "best_macro_1",
    "above_best_baseline",
)
"""Numbers whose spread over wordings is reported."""


def score(*paths: str, heading: str = "", format: str = ".2f", logged: int = 0) -> Any:
    """Declare a number of a pair: a field of `PairScore`, None by default.

    `paths` are its keys in the pair's entry of ``results.json``, by default the field's name; a dot
    leads into a group. The headline table has the numbers with a heading. `logged` is 1 if loggers
    get it first, which may show some dozens, and 2 if later.
    """
    shown = {"heading": heading, "format": format} if heading else {}
    return field(default=None, metadata={"paths": paths, "logged": logged, **shown})


@dataclass(frozen=True)
class PairScore:
    """Scores of one pair on held-out subjects; what is not known is None.

    R is the label-wise r, as a mean over the target labels that vary. An interval (low, high) is
    that of 95 %.
    """

    source: str
    target: str
    label_mean: float | None = score(heading="r", logged=1)
    label_std: float | None = None
    instance_mean: float | None = score(logged=2)
    permuted_label_mean: float | None = score(logged=2)
    """Label-wise r of a map that is fitted on permuted targets."""
    control_label_mean: float | None = score(heading="unrelated prompt", logged=2)
    """Label-wise r of a map from the source's labels after the control prompt."""
    excess: float | None = score(logged=2)
    """`label_mean` minus `control_label_mean`."""
    random_label_mean: float | None = score(
        "random_label_mean",
        "baselines.random_source_labels.mean",
        heading="random words",
        logged=2,
    )
    """Label-wise r of maps from as many random words as there are source labels."""
    random_label_low: float | None = score("baselines.random_source_labels.low")
    random_label_high: float | None = score("baselines.random_source_labels.high")
    random_label_draws: int | None = score("baselines.random_source_labels.draws")
    random_target_label_mean: float | None = score(
        "random_target_label_mean", "baselines.random_target_labels.mean"
    )
    """Label-wise r of maps to as many random words as there are target labels."""
    random_target_label_low: float | None = score("baselines.random_target_labels.low")
    random_target_label_high: float | None = score("baselines.random_target_labels.high")
    random_target_label_draws: int | None = score("baselines.random_target_labels.draws")
    same_prompt_label_mean: float | None = score(
        "same_prompt_label_mean", "baselines.same_prompt_map"
    )
    """Label-wise r of W₀, the map of the vocabulary."""
    excess_over_random: float | None = score(
        "excess_over_random",
        "excess_over_random_labels.mean",
        heading="above random words",
        logged=1,
    )
    """R from some source labels above that from as many random words."""
    excess_over_random_low: float | None = score("excess_over_random_labels.low")
    excess_over_random_high: float | None = score("excess_over_random_labels.high")
    excess_over_random_labels: int | None = score("excess_over_random_labels.n_source_labels")
    """Number of these source labels."""
    excess_over_random_draws: int | None = score("excess_over_random_labels.draws")
    excess_over_random_target: float | None = score("excess_over_random_labels.target.mean")
    """Label-wise r of the target labels above that of random words after the target prompt."""
    excess_over_random_target_low: float | None = score("excess_over_random_labels.target.low")
    excess_over_random_target_high: float | None = score("excess_over_random_labels.target.high")
    influenced_1: float | None = score("precision.influenced.1", logged=2)
    """Hit@N of influenced targets and of influencing sources, and the labels that are judged."""
    influenced_3: float | None = score("precision.influenced.3", logged=2)
    influenced_5: float | None = score("precision.influenced.5", logged=2)
    influenced_n: int | None = score("precision.influenced.n")
    influencing_1: float | None = score("precision.influencing.1", logged=2)
    influencing_3: float | None = score("precision.influencing.3", logged=2)
    influencing_5: float | None = score("precision.influencing.5", logged=2)
    influencing_n: int | None = score("precision.influencing.n")
    chance_influenced_1: float | None = score("precision.chance.influenced.1")
    """Hit@N of weights in random order."""
    chance_influenced_3: float | None = score("precision.chance.influenced.3")
    chance_influenced_5: float | None = score("precision.chance.influenced.5")
    chance_influenced_n: int | None = score("precision.chance.influenced.n")
    chance_influencing_1: float | None = score("precision.chance.influencing.1")
    chance_influencing_3: float | None = score("precision.chance.influencing.3")
    chance_influencing_5: float | None = score("precision.chance.influencing.5")
    chance_influencing_n: int | None = score("precision.chance.influencing.n")
    best_baseline_1: float | None = score(logged=2)
    """Hit@1 of influenced targets of the strongest of the baselines below."""
    macro_1: float | None = score("precision.macro.1", heading="W right", format=".0%", logged=1)
    """Hit@N of influenced targets as a mean over distinct sets of right labels."""
    macro_3: float | None = score("precision.macro.3")
    macro_5: float | None = score("precision.macro.5")
    n_references: int | None = score("precision.macro.n_references")
    constant_1: float | None = score("precision.baselines.constant.1")
    constant_macro_1: float | None = score("precision.baselines.constant.macro_1")
    unembedding_1: float | None = score("precision.baselines.unembedding.1")
    unembedding_macro_1: float | None = score("precision.baselines.unembedding.macro_1")
    same_prompt_1: float | None = score("precision.baselines.same_prompt.1")
    same_prompt_macro_1: float | None = score("precision.baselines.same_prompt.macro_1")
    gaussian_states_1: float | None = score("precision.baselines.gaussian_states.1")
    gaussian_states_macro_1: float | None = score("precision.baselines.gaussian_states.macro_1")
    causal_inner_product_1: float | None = score("precision.baselines.causal_inner_product.1")
    causal_inner_product_macro_1: float | None = score(
        "precision.baselines.causal_inner_product.macro_1",
        heading="nearest word",
        format=".0%",
        logged=1,
    )
    # `excess_over_unembedding` is the name of earlier versions.
    best_baseline: str | None = score(
        "above_best_baseline.baseline", "excess_over_unembedding.baseline"
    )
    above_best_baseline: float | None = score(
        "above_best_baseline.difference", "excess_over_unembedding.mean"
    )
    """Hit@1 above that of the strongest baseline, with its interval over source labels."""
    above_best_baseline_low: float | None = score(
        "above_best_baseline.low", "excess_over_unembedding.low"
    )
    above_best_baseline_high: float | None = score(
        "above_best_baseline.high", "excess_over_unembedding.high"
    )
    best_macro_baseline: str | None = score("above_best_baseline.by_answer.baseline")
    best_macro_1: float | None = score(
        "best_baseline_macro_1", heading="best baseline", format=".0%", logged=1
    )
    """The same of Hit@1 as a mean over distinct sets of right labels, with intervals over them."""
    above_best_macro: float | None = score("above_best_baseline.by_answer.difference")
    above_best_macro_low: float | None = score("above_best_baseline.by_answer.low")
    above_best_macro_high: float | None = score("above_best_baseline.by_answer.high")
    cosine_same_prompt: float | None = score("decomposition.cosine")
    """Cosine of W and W₀; size of W - W₀ as a fraction of that of W, and its Hit@1."""
    rest_norm_share: float | None = score("decomposition.norm_share")
    rest_hit_1: float | None = score("decomposition.hit_1")
    label_error: float | None = None  #: Standard error of `label_mean` over subjects.
    p: float | None = None  #: One-sided p-value of `excess_over_random`.
    q: float | None = None  #: `p` adjusted for all pairs of the run.
    partial_label_mean: float | None = None
    """Mean label-wise r with the knowledge of ``model.partial_out`` removed from both sides."""
    through_given: float | None = None
    """Fraction of the correlation that goes through that knowledge: 1 minus what the source
    explains of the target beyond it over what the source explains alone (squared correlations)."""
    ridge: float | None = score(logged=2)
    n_labels: int = 0  #: Number of target labels.
    n_constant_labels: int = 0  #: Number of target labels without r because they never change.
    templates: Mapping[str, Any] | None = field(default=None, metadata=_NO_NUMBER)
    """Number of wordings whose means the scores are, and their spread, see `over_wordings`."""
    completeness: Mapping[str, "PairScore"] = field(default_factory=dict, metadata=_NO_NUMBER)
    """Scores by completeness of the target labels, where these differ, see `by_completeness`."""
    label_r: npt.NDArray[np.floating[Any]] = field(
        default_factory=lambda: np.empty(0), repr=False, compare=False, metadata=_NO_NUMBER
    )
    """r of each label, ``(n_target_labels,)``, NaN where constant; not in ``results.json``."""
    ranks: Mapping[str, Tensor] = field(
        default_factory=dict, repr=False, compare=False, metadata=_NO_NUMBER
    )
    """Rank of the best right target label of each source label with a reference, ``(n_judged,)``,
    by ``W`` and by each baseline."""
    nearness: Tensor | None = field(
        default=None, repr=False, compare=False, metadata=_NO_NUMBER
    )  #: Weights of the nearest word, `NearestWords.weights`, of a pair with a reference.

    @property
    def ends(self) -> Pair:
        """Source and target."""
        return self.source, self.target

    @property
    def pair(self) -> str:
        """The pair as ``city->country``."""
        return f"{self.source}->{self.target}"

    def row(self) -> dict[str, Any]:
        """Return the pair's name and its numbers: a row of a table."""
        return {"pair": self.pair} | {name: getattr(self, name) for name in number_columns()}

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the pair in ``results.json``."""
        numbers = {
            path: getattr(self, one.name)
            for one in _numbers()
            for path in one.metadata.get("paths") or [one.name]
        }
        completeness = {
            kind: {
                "n_labels": part.n_labels,
                "label_mean": part.label_mean,
                "influenced": hits_of(part, "influenced"),
            }
            for kind, part in self.completeness.items()
        }
        return nested(numbers) | {"templates": self.templates, "completeness": completeness}


class RidgePoint(NamedTuple):
    """What results show of a pair at one ridge strength: fields of `PairScore`."""

    ridge: float
    label_mean: float | None
    influenced_1: float | None = None
    influenced_3: float | None = None
    influenced_5: float | None = None
    influenced_n: float | None = None
    influencing_1: float | None = None
    influencing_3: float | None = None
    influencing_5: float | None = None
    influencing_n: float | None = None
    macro_1: float | None = None


def hits_of(score: PairScore | RidgePoint, way: str) -> dict[str, Any] | None:
    """Return Hit@N, and ``n``, of ``influenced`` or ``influencing``; None without a reference."""
    rates = {key: getattr(score, f"{way}_{key}") for key in ("1", "3", "5", "n")}
    return None if set(rates.values()) == {None} else rates


def _numbers() -> list[Field[Any]]:
    return [one for one in fields(PairScore) if one.metadata.get("is_number", True)]


def number_columns() -> list[str]:
    """Return the names of the fields that are columns of tables: the pair's ends, and numbers."""
    return [one.name for one in _numbers()]


def nested(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers in groups, by paths with dots; a group of which no number is known is None.

    Example:
        >>> nested({"r": 0.5, "hits.1": 1.0, "hits.n": None, "p.low": None})
        {'r': 0.5, 'hits': {'1': 1.0, 'n': None}, 'p': None}
    """
    entry: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for path, value in numbers.items():
        key, _, rest = path.partition(".")
        entry[key] = value
        if rest:
            groups.setdefault(key, {})[rest] = value
    for key, members in groups.items():
        is_known = any(value is not None for value in members.values())
        entry[key] = nested(members) if is_known else None
    return entry


def with_numbers(scores: Sequence[PairScore], numbers: Numbers) -> list[PairScore]:
    """Return the scores with more of their fields."""
    return [replace(one, **numbers.get(one.ends, {})) for one in scores]


def over_wordings(scores: Mapping[Pair, PairScore]) -> dict[Pair, PairScore]:
    """Return means over the wordings of each pair.

    ``templates`` of a score has the mean of some numbers, their standard deviation over wordings,
    the lowest, the highest and all ``values``. Means of standard errors and of ends of intervals
    are bounds for those of the mean. Ridge and strongest baseline are those of the first wording.
    """
    means = {}
    for pair, wordings in wordings_of(scores).items():
        members = [scores[one] for one in wordings]
        means[pair] = members[0]
        if len(members) > 1:
            means[pair] = replace(mean_score(members), templates=_spread(members))
    return means


def mean_score(scores: Sequence[PairScore]) -> PairScore:
    """Return the mean of each number over the scores that have it, and otherwise the first."""
    first = scores[0]
    means: dict[str, Any] = {}
    for one in _numbers():
        values = [getattr(each, one.name) for each in scores]
        if not any(isinstance(value, str) for value in values):
            means[one.name] = _mean(values)
    label_r = torch.from_numpy(np.stack([each.label_r for each in scores])).nanmean(0).numpy()
    completeness = {
        kind: mean_score([each.completeness[kind] for each in scores])
        for kind in first.completeness
    }
    means |= {"ridge": first.ridge, "label_r": label_r, "completeness": completeness}
    return replace(first, **means)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    # The mean of equal numbers is that number, and whole if it is.
    return known[0] if len({*known}) == 1 else sum(known) / len(known) if known else None


def _spread(scores: Sequence[PairScore]) -> dict[str, Any]:
    spread: dict[str, Any] = {"n": len(scores)}
    for name in SPREAD:
        values = [getattr(each, name) for each in scores]
        known = [value for value in values if value is not None]
        if known:
            spread[name] = {
                "mean": float(np.mean(known)),
                "std": float(np.std(known)),
                "low": min(known),
                "high": max(known),
                "values": values,
            }
    return spread


def score_maps(
    fitted: FittedMaps, test: Moments, instance: Mapping[Pair, float] | None = None
) -> list[PairScore]:
    """Score the maps of pairs, and of their nulls, on the held-out rows behind `test`.

    `instance` has the mean instance-wise r of pairs. Scores are in the order of the layout's pairs.
    """
    r, permuted, control = (fitted.label_r(test, name) for name in ("y", "permuted", "control"))
    layout, weights = fitted.layout, fitted.weights()
    scores = []
    for pair in filter(weights.__contains__, layout.pairs):
        weight, right = weights[pair].cpu(), torch.from_numpy(layout.reference(pair))
        summary = summarize(r[pair])
        mean, r_control = number(summary.mean), mean_r(control.get(pair))
        one = PairScore(
            *pair,
            label_mean=mean,
            label_std=number(summary.std),
            instance_mean=number((instance or {}).get(pair)),
            permuted_label_mean=mean_r(permuted.get(pair)),
            control_label_mean=r_control,
            excess=None if mean is None or r_control is None else mean - r_control,
            ridge=number(fitted.ridges[pair]),
            n_labels=layout.sizes[pair[1]],
            n_constant_labels=summary.n_constant,
            label_r=r[pair].numpy(),
        )
        completeness = layout.domains[pair[1]].completeness
        parts = by_completeness(one, weight, right, completeness)
        hits: dict[str, Any] = {}
        if right.any():
            groups, ranks = reference_groups(right), ranks_of_right(weight, right)
            hits = {"n_references": len(set(groups)), "ranks": {"W": ranks}}
            hits |= _hits(weight, right, ranks, groups)
            for way, rate in zip(_WAYS, random_hit_rates(right), strict=True):
                hits |= _by_rank(f"chance_{way}", rate)
        scores.append(replace(one, completeness=parts, **hits))
    return scores


def _hits(weight: Tensor, right: Tensor, ranks: Tensor, groups: Sequence[int]) -> dict[str, Any]:
    """Return Hit@N in both directions, and by answer, as fields."""
    hits: dict[str, Any] = {
        f"macro_{n}": macro_mean((ranks <= n).double().tolist(), groups) for n in HIT_RANKS
    }
    for way, rate in zip(_WAYS, hit_rates(weight, right), strict=True):
        hits |= _by_rank(way, rate)
    return hits


def _by_rank(name: str, rates: HitRates) -> dict[str, Any]:
    return {f"{name}_{rank}": rate for rank, rate in rates.by_rank().items()}


def by_completeness(
    whole: PairScore,
    weight: Tensor,
    right: Tensor,
    completeness: Sequence[Completeness],
) -> dict[str, PairScore]:
    """Return the scores by completeness of the target labels (paper, appendix K, table 18).

    Of each completeness, r, the number of labels and Hit@N of influenced targets. Of the source
    labels with a right target of one completeness, it is the fraction for which one of them is
    among the N highest; right ones of other completeness do not compete. `whole` are the pair's
    scores, `completeness` is that of each target label: if all are equally complete, there are no
    scores. Which label pairs are `right` has the shape of W, ``(n_target, n_source)``.
    """
    scores: dict[str, PairScore] = {}
    for kind in Completeness if len(set(completeness)) > 1 else ():
        chosen = torch.tensor([other is kind for other in completeness])
        if not chosen.any():
            continue
        hits: dict[str, Any] = {}
        if right.any():
            elsewhere = weight.masked_fill(right & ~chosen[:, None], -torch.inf)
            hits = _by_rank("influenced", hit_rates(elsewhere, right & chosen[:, None])[0])
        scores[str(kind)] = PairScore(
            *whole.ends,
            label_mean=mean_r(torch.from_numpy(whole.label_r)[chosen]),
            n_labels=int(chosen.sum()),
            **hits,
        )
    return scores


def ridge_paths(
    fitted: FittedMaps, test: Moments, grid: Sequence[float]
) -> list[dict[Pair, RidgePoint]]:
    """Return r and Hit@N of all pairs at every ridge strength, means over their wordings.

    The list is empty for stored maps, which have no moments.
    """
    layout = fitted.layout
    if fitted.moments is None:
        return []
    path: list[dict[Pair, RidgePoint]] = [{} for _ in grid]
    for source in progress(layout.sources, "ridge path"):
        columns = layout.problems[source]["y"]
        squares, judge = RidgeSolver(fitted.moments, *columns), Judge(test, *columns)
        judged = {}
        for target in layout.targets[source]:
            right = torch.from_numpy(layout.reference((source, target)))
            if right.any():
                judged[target] = right, reference_groups(right)
        for ridge, point in zip(grid, path, strict=True):
            weight = squares.solve(ridge).weight
            r = dict(split_targets(layout, source, judge.label_r(weight).cpu()))
            for target, part in split_targets(layout, source, weight.cpu(), dim=0):
                hits: dict[str, Any] = {}
                if target in judged:
                    right, groups = judged[target]
                    hits = _hits(part, right, ranks_of_right(part, right), groups)
                    hits = {name: hits[name] for name in RidgePoint._fields if name in hits}
                point[source, target] = RidgePoint(float(ridge), mean_r(r[target]), **hits)
    wordings = wordings_of(layout.pairs).items()
    return [
        {
            pair: RidgePoint._make(map(_mean, zip(*(point[one] for one in members), strict=True)))
            for pair, members in wordings
        }
        for point in path
    ]
