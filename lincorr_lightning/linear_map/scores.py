"""Scores of fitted maps on held-out subjects, beside those of their nulls (paper section 3).

To add a number: an entry of `NUMBERS`, and a function that returns it by pair for `with_numbers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
from lincorr_lightning.functional.precision import HIT_RANKS, ranks_of_right, reference_groups
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

WAYS = ("influenced", "influencing")
_HITS = (*map(str, HIT_RANKS), "n")
_BASELINES = (
    "constant",
    "unembedding",
    "same_prompt",
    "gaussian_states",
    "causal_inner_product",
)

Numbers = Mapping[Pair, Mapping[str, Any]]  #: Some of `NUMBERS` by pair.


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _under(path: str, *names: str, prefix: str = "") -> dict[str, str]:
    return {f"{prefix}{name}": f"{path}.{name}" for name in names}


def _interval(name: str, path: str, middle: str = "difference") -> dict[str, str]:
    """Return a number and its interval of 95 %."""
    ends = {f"{name}_{end}": f"{path}.{end}" for end in ("low", "high")}
    return {name: f"{path}.{middle}", **ends}


_RANGE = ("mean", "low", "high", "draws")
NUMBERS: dict[str, str] = {
    **_same("label_mean", "label_std", "instance_mean"),
    # Of maps to permuted targets, and from the control prompt; r above the latter.
    **_same("permuted_label_mean", "control_label_mean", "excess"),
    # Of maps from, and to, as many random words.
    **_under("baselines.random_source_labels", *_RANGE, prefix="random_label_"),
    **_under("baselines.random_target_labels", *_RANGE, prefix="random_target_label_"),
    "same_prompt_label_mean": "baselines.same_prompt_map",  # of W₀, the map of the vocabulary
    # R from some source labels above that from as many random words; at the target, too.
    **_interval("excess_over_random", "excess_over_random_labels", "mean"),
    "excess_over_random_labels": "excess_over_random_labels.n_source_labels",
    "excess_over_random_draws": "excess_over_random_labels.draws",
    **_interval("excess_over_random_target", "excess_over_random_labels.target", "mean"),
    # Hit@N of influenced targets and of influencing sources, and the number of labels judged.
    **{f"{way}_{n}": f"precision.{way}.{n}" for way in WAYS for n in _HITS},
    **{f"chance_{way}_{n}": f"precision.chance.{way}.{n}" for way in WAYS for n in _HITS},
    "best_baseline_1": "best_baseline_1",
    # Hit@N of influenced targets as a mean over distinct sets of right labels.
    **_under("precision.macro", *map(str, HIT_RANKS), prefix="macro_"),
    "n_references": "precision.macro.n_references",
    **{
        f"{name}_{key}": f"precision.baselines.{name}.{key}"
        for name in _BASELINES
        for key in ("1", "macro_1")
    },
    # Hit@1 above that of the best baseline, over source labels and over sets of right labels.
    "best_baseline": "above_best_baseline.baseline",
    **_interval("above_best_baseline", "above_best_baseline"),
    "best_macro_baseline": "above_best_baseline.by_answer.baseline",
    "best_macro_1": "best_baseline_macro_1",
    **_interval("above_best_macro", "above_best_baseline.by_answer"),
    # Cosine of W and W₀; size of W - W₀ as a fraction of that of W, and its Hit@1.
    "cosine_same_prompt": "decomposition.cosine",
    "rest_norm_share": "decomposition.norm_share",
    "rest_hit_1": "decomposition.hit_1",
    # Standard error of r over subjects; one-sided p of `excess_over_random`, q for all pairs.
    **_same("label_error", "p", "q"),
    # R with the knowledge of ``model.partial_out`` removed from both sides, and what goes through
    # it: 1 minus what the source explains beyond it over what it explains (squared correlations).
    **_same("partial_label_mean", "through_given", "ridge", "n_labels", "n_constant_labels"),
}
"""Numbers of a pair: columns of tables, and where they stand in its entry of ``results.json``.

R is the label-wise r, as a mean over the target labels that vary.
"""
_TOP = ("random_label_mean", "random_target_label_mean", "same_prompt_label_mean")
HEADINGS = {
    "label_mean": "r",
    "random_label_mean": "random words",
    "excess_over_random": "above random words",
    "macro_1": "W right",
    "causal_inner_product_macro_1": "nearest word",
    "best_macro_1": "best baseline",
    "control_label_mean": "unrelated prompt",
}
"""Numbers that tables show, and what they call them."""
FORMATS = {name: ".0%" if name.endswith("macro_1") else ".2f" for name in HEADINGS}
LOGGED = (
    *("label_mean", "excess_over_random", "macro_1", "causal_inner_product_macro_1"),
    *("best_macro_1", "instance_mean", "permuted_label_mean", "control_label_mean", "excess"),
    *("random_label_mean", "best_baseline_1", "ridge"),
    *(f"{way}_{n}" for way in WAYS for n in HIT_RANKS),
)
"""Numbers that loggers get, in this order: they may show some dozens."""
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


@dataclass(frozen=True)
class PairScore:
    """Scores of one pair on held-out subjects.

    Attributes:
        source: Name of the source.
        target: Name of the target.
        numbers: Those of `NUMBERS` that are known.
        templates: Number of wordings whose means the scores are, and their spread, see
            `over_wordings`.
        completeness: Numbers by completeness of the target labels, see `by_completeness`.
        label_r: r of each label, ``(n_target_labels,)``, NaN where constant.
        ranks: Rank of the best right target label of each source label with a reference,
            ``(n_judged,)``, by ``W`` and by each baseline.
        nearness: Weights of the nearest word, `NearestWords.weights`, of a pair with a reference.
    """

    source: str
    target: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    templates: Mapping[str, Any] | None = None
    completeness: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    label_r: npt.NDArray[np.floating[Any]] = field(
        default_factory=lambda: np.empty(0), repr=False, compare=False
    )
    ranks: Mapping[str, Tensor] = field(default_factory=dict, repr=False, compare=False)
    nearness: Tensor | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, name: str) -> Any:
        assert name in NUMBERS, name
        return self.numbers.get(name)

    @property
    def ends(self) -> Pair:
        """Source and target."""
        return self.source, self.target

    @property
    def pair(self) -> str:
        """The pair as ``city->country``."""
        return f"{self.source}->{self.target}"

    def row(self) -> dict[str, Any]:
        """Return the pair's names and its numbers: a row of a table."""
        names = {"pair": self.pair, "source": self.source, "target": self.target}
        return names | {name: self[name] for name in NUMBERS}

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the pair in ``results.json``."""
        entry = nested({path: self[name] for name, path in NUMBERS.items()})
        above = entry["above_best_baseline"]
        if above is not None:  # the name of earlier versions
            above = {key: above[key] for key in ("baseline", "low", "high")}
            above["mean"] = self["above_best_baseline"]
        completeness = {
            kind: {
                "n_labels": part["n_labels"],
                "label_mean": part["label_mean"],
                "influenced": hits_of(part, "influenced"),
            }
            for kind, part in self.completeness.items()
        }
        return {
            "source": self.source,
            "target": self.target,
            **entry,
            **{name: self[name] for name in (*_TOP, "excess_over_random")},
            "excess_over_unembedding": above,
            "templates": self.templates,
            "completeness": completeness,
        }


def hits_of(numbers: Mapping[str, Any], way: str) -> dict[str, Any] | None:
    """Return Hit@N, and ``n``, of ``influenced`` or ``influencing``; None without a reference."""
    rates = {key: numbers.get(f"{way}_{key}") for key in _HITS}
    return None if set(rates.values()) == {None} else rates


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
    """Return the scores with more numbers."""
    return [replace(one, numbers={**one.numbers, **numbers.get(one.ends, {})}) for one in scores]


def over_wordings(scores: Mapping[Pair, PairScore]) -> list[PairScore]:
    """Return means over the wordings of each pair.

    ``templates`` of a score has the mean of some numbers, their standard deviation over wordings,
    the lowest, the highest and all ``values``. Means of standard errors and of ends of intervals
    are bounds for those of the mean. Ridge and strongest baseline are those of the first wording.
    """
    means = []
    for wordings in wordings_of(scores).values():
        members = [scores[one] for one in wordings]
        mean = first = members[0]
        if len(members) > 1:
            numbers = mean_numbers([each.numbers for each in members])
            label_r = torch.from_numpy(np.stack([each.label_r for each in members]))
            mean = replace(
                first,
                numbers=numbers | {"ridge": first["ridge"]},
                templates=_spread(members),
                completeness={
                    kind: mean_numbers([each.completeness[kind] for each in members])
                    for kind in first.completeness
                },
                label_r=label_r.nanmean(0).numpy(),
            )
        means.append(mean)
    return means


def mean_numbers(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean of each number over those that have it; of texts the first."""
    means = {}
    for name in dict.fromkeys(name for each in members for name in each):
        known = [value for each in members if (value := each.get(name)) is not None]
        # The mean of equal numbers is that number, and whole if it is.
        is_one = len({*known}) <= 1 or isinstance(known[0], str)
        means[name] = next(iter(known), None) if is_one else sum(known) / len(known)
    return means


def _spread(scores: Sequence[PairScore]) -> dict[str, Any]:
    spread: dict[str, Any] = {"n": len(scores)}
    for name in SPREAD:
        values = [each[name] for each in scores]
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
        numbers = {
            "label_mean": mean,
            "label_std": number(summary.std),
            "instance_mean": number((instance or {}).get(pair)),
            "permuted_label_mean": mean_r(permuted.get(pair)),
            "control_label_mean": r_control,
            "excess": None if mean is None or r_control is None else mean - r_control,
            "ridge": number(fitted.ridges[pair]),
            "n_labels": layout.sizes[pair[1]],
            "n_constant_labels": summary.n_constant,
        }
        ranks = {}
        if right.any():
            groups = reference_groups(right)
            ranks = {"W": ranks_of_right(weight, right)}
            numbers |= {"n_references": len(set(groups)), **_hits(weight, right, groups)}
            for way, mask in zip(WAYS, (right, right.T), strict=True):
                numbers |= _named(f"chance_{way}", random_hit_rates(mask))
        kinds = layout.domains[pair[1]].completeness
        parts = by_completeness(r[pair], weight, right, kinds)
        label_r = r[pair].numpy()
        one = PairScore(*pair, numbers, completeness=parts, label_r=label_r, ranks=ranks)
        scores.append(one)
    return scores


def _hits(weight: Tensor, right: Tensor, groups: Sequence[int]) -> dict[str, Any]:
    """Return Hit@N in both directions, and by answer."""
    ranks = ranks_of_right(weight, right)
    hits: dict[str, Any] = {
        f"macro_{n}": macro_mean((ranks <= n).double().tolist(), groups) for n in HIT_RANKS
    }
    both = hit_rates(weight, right), hit_rates(weight.T, right.T)
    for way, rates in zip(WAYS, both, strict=True):
        hits |= _named(way, rates)
    return hits


def _named(name: str, rates: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_{rank}": rate for rank, rate in rates.items()}


def by_completeness(
    r: Tensor, weight: Tensor, right: Tensor, completeness: Sequence[Completeness]
) -> dict[str, dict[str, Any]]:
    """Return numbers by completeness of the target labels (paper, appendix K, table 18).

    Of each completeness, r, the number of labels and Hit@N of influenced targets. Of the source
    labels with a right target of one completeness, it is the fraction for which one of them is
    among the N highest; right ones of other completeness do not compete. R and `completeness` are
    those of each target label: if all are equally complete, there are no numbers. Which label pairs
    are `right` has the shape of W, ``(n_target, n_source)``.
    """
    parts: dict[str, dict[str, Any]] = {}
    for kind in Completeness if len(set(completeness)) > 1 else ():
        chosen = torch.tensor([other is kind for other in completeness])
        if chosen.any():
            numbers = {"label_mean": mean_r(r[chosen]), "n_labels": int(chosen.sum())}
            if right.any():
                elsewhere = weight.masked_fill(right & ~chosen[:, None], -torch.inf)
                rates = hit_rates(elsewhere, right & chosen[:, None])
                numbers |= _named("influenced", rates)
            parts[str(kind)] = numbers
    return parts


def ridge_paths(
    fitted: FittedMaps, test: Moments, grid: Sequence[float]
) -> list[dict[Pair, dict[str, Any]]]:
    """Return numbers of all pairs at every ridge strength: r and Hit@N, means over their wordings.

    The list is empty for stored maps, which have no moments.
    """
    layout = fitted.layout
    if fitted.moments is None:
        return []
    path: list[dict[Pair, dict[str, Any]]] = [{} for _ in grid]
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
                hits = _hits(part, *judged[target]) if target in judged else {}
                numbers = {"ridge": float(ridge), "label_mean": mean_r(r[target])}
                point[source, target] = numbers | hits
    wordings = wordings_of(layout.pairs).items()
    return [
        {pair: mean_numbers([point[one] for one in members]) for pair, members in wordings}
        for point in path
    ]
