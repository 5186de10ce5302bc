"""Scores of fitted maps on held-out subjects, beside those of their nulls (paper section 3).

To add a number: a field of `PairScore`, and a function that returns it by pair for `with_numbers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lincorr_lightning.functional import Moments, hit_rates, random_hit_rates, summarize
from lincorr_lightning.io import number
from lincorr_lightning.knowledge import Completeness
from lincorr_lightning.linear_map.layout import Pair, wordings_of
from lincorr_lightning.linear_map.solver import FittedMaps, mean_r
from lincorr_lightning.progress import progress

_NESTED = (
    "precision",
    "completeness",
    "baselines",
    "excess_over_random_labels",
    "excess_over_unembedding",
    "decomposition",
    "templates",
)
_BASELINES = ("constant", "unembedding", "same_prompt", "gaussian_states")
# Columns of tables, and where they lie in an entry of ``results.json``.
_COLUMNS = {
    "excess_over_random_low": ("excess_over_random_labels", "low"),
    "excess_over_random_high": ("excess_over_random_labels", "high"),
    "excess_over_random_target": ("excess_over_random_labels", "target", "mean"),
    "macro_1": ("precision", "macro", "1"),
    **{f"{name}_1": ("precision", "baselines", name, "1") for name in _BASELINES},
    **{f"{name}_macro_1": ("precision", "baselines", name, "macro_1") for name in _BASELINES},
    "excess_over_unembedding": ("excess_over_unembedding", "mean"),
    "excess_over_unembedding_low": ("excess_over_unembedding", "low"),
    "excess_over_unembedding_high": ("excess_over_unembedding", "high"),
    "cosine_same_prompt": ("decomposition", "cosine"),
    "rest_hit_1": ("decomposition", "hit_1"),
}
# Numbers of a row whose spread over wordings is reported.
_SPREAD = (
    "label_mean",
    "excess",
    "excess_over_random",
    "influenced_1",
    "macro_1",
    "best_baseline_1",
    "excess_over_unembedding",
)
_WAYS, _RANKS = ("influenced", "influencing"), ("1", "3", "5", "n")

Numbers = Mapping[Pair, Mapping[str, Any]]  #: Fields of `PairScore` by pair.


def pair_number(
    heading: str = "",
    format: str = "",
    matrix: str = "",
    shows: str = "",
    unit: str = "Pearson r",
    is_signed: bool = True,
    logged: bool = False,
) -> Any:
    """Declare a number of a pair, None by default: a field of a record, in all of its forms.

    Heading and format are those of `table.column`; a field with a format is a column of the
    headline table. `matrix` names a matrix over all pairs, the table and figure
    ``<matrix>_matrix``, with what it `shows` as caption. Its colours mean the `unit`: from -1 to 1
    if it `is_signed`, else from 0 to the highest value. Loggers get a number that is `logged`.
    """
    metadata = {
        "heading": heading,
        "format": format,
        "matrix": matrix,
        "caption": shows,
        "unit": unit,
        "is_signed": is_signed,
        "logged": logged,
    }
    return field(default=None, metadata=metadata)


@dataclass(frozen=True)
class PairScore:
    """Scores of one pair on held-out subjects; what is not known is None.

    The first are means over target labels of the label-wise r: of the map, of one fitted on
    permuted targets, and of one from the control prompt.
    """

    source: str
    target: str
    label_mean: float | None = pair_number(
        "r", ".2f", matrix="correlation", shows="Label-wise correlation", logged=True
    )
    label_std: float | None = pair_number(
        matrix="std",
        shows="Standard deviation of label-wise r over labels",
        unit="standard deviation of r",
        is_signed=False,
    )
    instance_mean: float | None = pair_number(
        matrix="instance", shows="Instance-wise correlation", logged=True
    )
    permuted_label_mean: float | None = pair_number(
        matrix="permuted",
        shows="Label-wise correlation, permuted targets",
        logged=True,
    )
    control_label_mean: float | None = pair_number(
        "r, control prompt",
        ".2f",
        matrix="control",
        shows="Label-wise correlation, control prompt",
        logged=True,
    )
    excess: float | None = pair_number("r above the control", ".2f", logged=True)
    """`label_mean` minus `control_label_mean`."""
    random_label_mean: float | None = pair_number("r, random words", ".2f", logged=True)
    """R of maps from as many random words as there are source labels."""
    random_target_label_mean: float | None = None  #: R of maps to as many random words.
    same_prompt_label_mean: float | None = None  #: R of W₀, the map of the vocabulary.
    excess_over_random: float | None = pair_number(
        "r above random words",
        ".2f",
        matrix="random_words",
        shows="Label-wise correlation above that of random words",
        unit="difference of r",
        logged=True,
    )
    """The mean of `excess_over_random_labels`."""
    best_baseline_1: float | None = pair_number(logged=True)  #: Hit@1 of the best baseline.
    label_error: float | None = None  #: Standard error of `label_mean` over subjects.
    excess_error: float | None = None  #: Standard error of `excess` (or `label_mean`).
    p: float | None = None  #: One-sided p-value of `excess`; of `label_mean` without control.
    q: float | None = None  #: `p` adjusted for all pairs of the run.
    partial_label_mean: float | None = None
    """Mean label-wise r with the knowledge of ``model.partial_out`` removed from both sides."""
    through_given: float | None = None
    """Fraction of the correlation that goes through that knowledge: 1 minus what the source
    explains of the target beyond it over what the source explains alone (squared correlations)."""
    ridge: float | None = pair_number(logged=True)
    n_labels: int = 0  #: Number of target labels.
    n_constant_labels: int = 0  #: Number of target labels without r because they never change.
    precision: Mapping[str, Any] | None = None
    """Hit@N, ``influenced`` and ``influencing``, that of ``baselines`` (`vocabulary_baselines`),
    ``macro``, means over distinct reference sets, and ``chance``, that of weights in random order;
    None without a reference."""
    baselines: Mapping[str, Any] | None = None  #: The same, with the range over draws of words.
    excess_over_random_labels: Mapping[str, Any] | None = None
    """R from some source labels above that from as many random words, with its interval over draws;
    ``target``: r of the target labels above that of random words after the target prompt."""
    excess_over_unembedding: Mapping[str, Any] | None = None
    """Hit@1 above the strongest baseline, with its interval over source labels."""
    decomposition: Mapping[str, Any] | None = None
    """W beside W₀, the map of the vocabulary: their cosine, and size and Hit@1 of W - W₀."""
    templates: Mapping[str, Any] | None = None
    """Number of wordings whose means the scores are, and their spread, see `over_wordings`."""
    completeness: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Scores by completeness of the target labels, where these differ, see `by_completeness`."""
    label_r: npt.NDArray[np.floating[Any]] = field(
        default_factory=lambda: np.empty(0), repr=False, compare=False
    )
    """r of each label, ``(n_target_labels,)``, NaN where constant; not in ``results.json``."""

    @property
    def pair(self) -> Pair:
        """Source and target."""
        return self.source, self.target

    @property
    def name(self) -> str:
        """The pair as ``city->country``."""
        return f"{self.source}->{self.target}"

    @property
    def evidence(self) -> float | None:
        """`excess`, or r itself where there is no control: what pairs are ranked by."""
        return self.label_mean if self.excess is None else self.excess

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the pair in ``results.json``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "label_r"}

    def row(self) -> dict[str, Any]:
        """Return the scores as a row of a table, with the pair's name and Hit@N in columns."""
        scores = self.to_json()
        columns = {name: value for name, value in scores.items() if name not in _NESTED}
        for name, path in _COLUMNS.items():
            value: Any = scores
            for key in path:
                value = (value or {}).get(key)
            columns[name] = value
        return {"pair": self.name, **columns, **hit_columns(self.precision)}


def hit_columns(precision: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return Hit@N in both directions as columns ``influenced_1`` to ``influencing_n``."""
    known = precision or {}
    return {f"{way}_{n}": (known.get(way) or {}).get(n) for way in _WAYS for n in _RANKS}


def with_numbers(scores: Sequence[PairScore], numbers: Numbers) -> list[PairScore]:
    """Return the scores with more of their fields."""
    return [replace(score, **numbers.get(score.pair, {})) for score in scores]


def over_wordings(by_pair: Mapping[Pair, Any]) -> dict[Pair, Any]:
    """Return means over the wordings of each pair, of scores or of what `mean_of` takes.

    ``templates`` of a score has the mean of some numbers, their standard deviation over wordings,
    the lowest, the highest and all ``values``. Means of standard errors and of ends of intervals
    are bounds for those of the mean. Ridge and strongest baseline are those of the first wording.
    """
    ones = {pair: [by_pair[one] for one in own] for pair, own in wordings_of(by_pair).items()}
    return {pair: mean_of(own) if len(own) > 1 else own[0] for pair, own in ones.items()}


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, or of those in scores, mappings and lists of the same shape.

    None is a missing number; of texts the first is returned.
    """
    known = [value for value in values if value is not None]
    if not known or isinstance(known[0], str):
        return known[0] if known else None
    if isinstance(known[0], PairScore):
        return _mean_score(known)
    if isinstance(known[0], Mapping):
        return {key: mean_of([one.get(key) for one in known]) for key in known[0]}
    if isinstance(known[0], list):
        return list(map(mean_of, zip(*known, strict=True)))
    if isinstance(known[0], np.ndarray):
        return torch.from_numpy(np.stack(known)).nanmean(0).numpy()
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)


def _mean_score(scores: Sequence[PairScore]) -> PairScore:
    means = {f.name: mean_of([getattr(one, f.name) for one in scores]) for f in fields(PairScore)}
    rows, spread = [score.row() for score in scores], dict[str, Any]()
    for name in _SPREAD:
        if known := [row[name] for row in rows if row[name] is not None]:
            ends = {"mean": np.mean(known), "std": np.std(known), "low": min(known)}
            spread[name] = {key: float(end) for key, end in ends.items()} | {"high": max(known)}
            spread[name]["values"] = [row[name] for row in rows]
    templates = {"n": len(scores), **spread}
    return PairScore(**means | {"ridge": scores[0].ridge, "templates": templates})


def score_maps(
    fitted: FittedMaps, test: Moments, instance: Mapping[Pair, float] | None = None
) -> list[PairScore]:
    """Score the maps of pairs, and of their nulls, on the held-out rows behind `test`.

    `instance` has the mean instance-wise r of pairs. Scores are in the order of the layout's pairs.
    """
    r, permuted, control = (fitted.label_r(test, name) for name in ("y", "permuted", "control"))
    layout, weights, scores = fitted.layout, fitted.weights(), []
    for pair in filter(weights.__contains__, layout.pairs):
        weight, reference = weights[pair].cpu(), layout.references.get(pair)
        summary, r_control = summarize(r[pair]), mean_r(control.get(pair))
        mean, hits = number(summary.mean), None
        if reference is not None and reference.any():
            right = torch.from_numpy(reference)
            rates, chance = (
                {way: one.by_rank() for way, one in zip(_WAYS, both, strict=True)}
                for both in (hit_rates(weight, right), random_hit_rates(right))
            )
            hits = dict[str, Any](rates, chance=chance)
        completeness = layout.domains[pair[1]].completeness
        scores.append(
            PairScore(
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
                precision=hits,
                completeness=by_completeness(r[pair], weight, reference, completeness),
                label_r=r[pair].numpy(),
            )
        )
    return scores


def by_completeness(
    r: Tensor,
    weight: Tensor,
    reference: npt.NDArray[np.bool_] | None,
    completeness: Sequence[Completeness],
) -> dict[str, dict[str, Any]]:
    """Return the scores by completeness of the target labels (paper, appendix K, table 18).

    By completeness, ``n_labels``, ``label_mean`` and ``influenced``: Hit@N of influenced targets.
    Of the source labels with a right target of one completeness, it is the fraction for which one
    of them is among the N highest; right ones of other completeness do not compete. `r` and
    `completeness` are of each target label: if all are equally complete, there are no scores. The
    reference has the shape of W, ``(n_target, n_source)``.
    """
    scores: dict[str, dict[str, Any]] = {}
    for kind in Completeness if len(set(completeness)) > 1 else ():
        chosen = torch.tensor([other is kind for other in completeness])
        if not chosen.any():
            continue
        influenced = None
        if reference is not None:
            right = torch.from_numpy(reference)
            elsewhere = weight.masked_fill(right & ~chosen[:, None], -torch.inf)
            influenced = hit_rates(elsewhere, right & chosen[:, None])[0].by_rank()
        scores[str(kind)] = {
            "n_labels": int(chosen.sum()),
            "label_mean": mean_r(r[chosen]),
            "influenced": influenced,
        }
    return scores


def ridge_paths(
    fitted: FittedMaps, test: Moments, grid: Sequence[float]
) -> dict[Pair, list[dict[str, Any]]]:
    """Score every ridge strength for every pair; there is no path without the fit's solvers.

    The points of a pair's path have ``ridge``, ``label_mean``, and Hit@N, or None without a
    reference, under ``influenced`` and ``influencing``.
    """
    paths: dict[Pair, list[dict[str, Any]]] = {}
    for source, solver in progress(fitted.solvers.items(), "ridge path"):
        for ridge in grid:
            alone = replace(fitted, maps={"y": {source: solver.solve(ridge)}})
            for one in score_maps(alone, test):
                hits = {way: (one.precision or {}).get(way) for way in _WAYS}
                point = {"ridge": float(ridge), "label_mean": one.label_mean, **hits}
                paths.setdefault(one.pair, []).append(point)
    return paths
