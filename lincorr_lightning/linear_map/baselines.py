"""What r and Hit@N of W must exceed: random words at the same prompts, and the vocabulary alone.

Beyond the paper. Where the states at the target prompt are nearly a linear function of those at the
source prompt, the logits of *any* two sets of words are correlated. And where states are Gaussian,
W pairs the labels whose rows of the LM's head are alike, whatever the LM has learned of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import stdtrit
from torch import Tensor

from lincorr_lightning.functional import Moments, macro_mean, precision
from lincorr_lightning.functional.significance import bootstrap_interval, weight_cosine
from lincorr_lightning.io import number
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map.layout import Pair
from lincorr_lightning.linear_map.scores import Numbers, PairScore, with_numbers
from lincorr_lightning.linear_map.solver import FittedMaps, RidgeSolver, Solution
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress

_FLOATS = npt.NDArray[np.floating[Any]]
_COUNTS = (5, 10, 20, 50, 100, 200)  # of source labels, compared with as many random words
_DRAWS = 10
R_BASELINES = (
    "random_label_mean",
    "random_target_label_mean",
    "same_prompt_label_mean",
    "excess_over_random",
)
"""Numbers of a pair that `random_words` gives."""
# Some values of r, ``(n_values, ...)``, and the influence of subjects on their mean.
_Sample = tuple[_FLOATS, _FLOATS]


class LabelCount(NamedTuple):
    """Mean label-wise r of maps from some source labels, and from as many random words."""

    pair: str
    n_source_labels: int
    label_mean: float | None
    label_std: float | None  #: Standard deviation over draws of the labels; 0 with one.
    random_mean: float | None
    random_std: float | None


def random_words(
    fitted: FittedMaps,
    test: Moments,
    n_compared: int,
    counts: Sequence[int] = _COUNTS,
    rows: Tensor | None = None,
) -> tuple[Numbers, list[LabelCount]]:
    """Fit maps from and to random words after the same prompts, with the pairs' ridges or none.

    Stored maps have no moments, and so no numbers. `test` has the moments of all held-out subjects;
    with `rows`, the first columns of the joint rows of some, ``(n, n_kept)``, intervals cover
    subjects, too. `n_compared` source labels are for ``excess_over_random_labels`` (with many, most
    directions of the states are read whatever the labels are, and no r is special), `counts` others
    for the curve. Returns fields of `PairScore` by pair, and r by the number of source labels.
    """
    layout, numbers = fitted.layout, dict[Pair, Any]()
    curve: list[LabelCount] = []
    if fitted.moments is None or not layout.words:
        return numbers, curve
    rows = test.mean.new_zeros(0, layout.n_kept) if rows is None else rows.to(test.mean)
    vocabulary = replace(fitted, maps={"y": fitted.maps["vocabulary"]}).label_r(test)
    for source in progress(layout.sources, "random words"):
        rng = np.random.default_rng(0)
        n_labels = layout.sizes[source]
        compared = min(n_compared, n_labels)
        r = {}
        for n in sorted({n for n in counts if n < n_labels} | {compared, n_labels}):
            kept = rows if n == compared else rows[:0]
            r[n] = _r_of_draws(fitted, test, source, n, rng, kept)
        at_targets = _r_at_targets(fitted, test, source, rows)
        for i, target in enumerate(layout.targets[source]):
            pair = source, target
            for n, drawn in r.items():
                means = [one[:, i] for one, _ in drawn]
                spread = [number(float(f(one))) for one in means for f in (np.mean, np.std)]
                curve.append(LabelCount("->".join(pair), n, *spread))
            labels, words = ((each[:, i], of_rows[:, i]) for each, of_rows in r[compared])
            excess, at_target = _difference(labels, words, test.n), at_targets[target]
            from_words, of_map = _range(r[n_labels][1][0][:, i]), solver.mean_r(vocabulary[pair])
            to_words = _range(_means(at_target[1][0], layout.sizes[target], rng))
            numbers[pair] = {
                "baselines": {
                    "random_source_labels": from_words,
                    "random_target_labels": to_words,
                    "same_prompt_map": of_map,
                },
                "excess_over_random_labels": {
                    **excess,
                    "n_source_labels": compared,
                    "draws": len(words[0]),
                    "target": _difference(at_target[0], at_target[1], test.n),
                },
                "random_label_mean": from_words["mean"],
                "random_target_label_mean": to_words["mean"],
                "same_prompt_label_mean": of_map,
                "excess_over_random": excess["mean"],
            }
    return numbers, curve


def _r_of_draws(
    fitted: FittedMaps, test: Moments, source: str, n: int, rng: np.random.Generator, rows: Tensor
) -> list[_Sample]:
    """Return r of maps from n labels of a source, and from n random words after its prompt.

    Each has ``(n_draws, n_targets)``, means over the labels of each target.
    """
    assert fitted.moments is not None
    layout, ridge = fitted.layout, solver.per_target_ridge(fitted.layout, source, fitted.ridges)
    y = layout.target_columns(source)
    sides = []
    for pool in (layout.columns(source), layout.columns(source, "words")):
        drawn = []
        for _ in range(_DRAWS if n < len(pool) else 1):
            x = pool[torch.from_numpy(rng.permutation(len(pool))[:n])]
            solution = _better(RidgeSolver(fitted.moments, x, y=y), ridge, test, x, y)
            values = _r_and_influences(test, solution, x, y, rows)
            parts = (part.nanmean(1) for _, part in solver.split_targets(layout, source, values))
            drawn.append(torch.stack(list(parts), 1))
        both = torch.stack(drawn)
        sides.append((both[:, 0].numpy(), both[:, 1:].nanmean(0).numpy()))
    return sides


def _better(
    one: RidgeSolver, ridge: float | Tensor, test: Moments, x: Tensor, y: Tensor, problem: str = "y"
) -> Solution:
    """Return the better of the maps with a pair's ridge and without, which words may need."""
    ridged = one.solve(ridge, problem)
    if not torch.as_tensor(ridge).any():
        return ridged
    plain = one.solve(0.0, problem)
    r, r_plain = (solver.label_r(test, each.weight, x, y) for each in (ridged, plain))
    return ridged._replace(weight=torch.where((r_plain > r)[:, None], plain.weight, ridged.weight))


def _r_and_influences(
    test: Moments, solution: Solution, x: Tensor, y: Tensor, rows: Tensor
) -> Tensor:
    """Return r of each label, and below it each row's influence, ``(1 + n_rows, n_target)``."""
    r = solver.label_r(test, solution.weight, x, y)
    if len(rows) == 0:
        return r[None].cpu()
    return torch.vstack([r, solver.r_influences(solution, x, y, test, rows)]).cpu()


def _r_at_targets(
    fitted: FittedMaps, test: Moments, source: str, rows: Tensor
) -> dict[str, list[_Sample]]:
    """Return r of each label, and of each random word after each target's prompt.

    The maps are from the source's labels.
    """
    assert fitted.moments is not None
    layout, own = fitted.layout, fitted.maps["y"][source]
    x, y = layout.problems[source]["y"]
    words = {target: layout.columns(target, "words") for target in layout.targets[source]}
    to_words = RidgeSolver(fitted.moments, x, **words)
    values, sides = _r_and_influences(test, own, x, y, rows), {}
    for target, labels in solver.split_targets(layout, source, values):
        one = _better(to_words, fitted.ridges[source, target], test, x, words[target], target)
        both = labels, _r_and_influences(test, one, x, words[target], rows)
        sides[target] = [(each[0].numpy(), each[1:].nanmean(1).numpy()) for each in both]
    return sides


def _means(values: _FLOATS, n: int, rng: np.random.Generator) -> _FLOATS:
    drawn = [torch.from_numpy(rng.permutation(values)[:n]) for _ in range(_DRAWS)]
    return torch.stack([one.nanmean() for one in drawn]).numpy()


def _range(drawn: _FLOATS) -> dict[str, Any]:
    ends = {"mean": drawn.mean(), "low": drawn.min(), "high": drawn.max()}
    return {**{name: number(one) for name, one in ends.items()}, "draws": len(drawn)}


def _difference(a: _Sample, b: _Sample, n_subjects: Tensor) -> dict[str, float | None]:
    """Return the difference between two means of r, and its 95 % interval.

    Labels or words are one sample, and held-out subjects, the same ones for each of them, another:
    by the law of total variance, the variance of the mean over the former adds to that over
    subjects, which is the spread of their influences on the difference (the infinitesimal
    jackknife). Degrees of freedom are Satterthwaite's. Fitted subjects are taken as they are.
    """
    values = [each[~np.isnan(each)] for each, _ in (a, b)]
    if not all(map(len, values)):
        return dict.fromkeys(("mean", "low", "high"))
    mean = float(values[0].mean() - values[1].mean())
    samples = [*((each, len(each)) for each in values), (a[1] - b[1], float(n_subjects))]
    # A side that was not drawn has no spread.
    parts = [(one.var(ddof=1) / n, len(one) - 1) for one, n in samples if len(one) > 1]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / n for part, n in parts) if variance > 0 else 1.0
    half = float(stdtrit(freedom, 0.975)) * variance**0.5
    return {"mean": number(mean), "low": number(mean - half), "high": number(mean + half)}


def vocabulary_baselines(
    scores: Sequence[PairScore], fitted: FittedMaps, head_rows: Tensor | None
) -> Numbers:
    """Score the pairings that need no knowledge of the subjects, beside that of W.

    They are the best constant answer (``constant``), the nearest target label by the rows of the
    LM's head (``unembedding``), the map between both label sets after the control prompt
    (``same_prompt``), and that after the source prompt, W₀, which Gaussian states with the
    covariance of the LM's give (``gaussian_states``). W is also compared with W₀ as a matrix.

    `head_rows` are the rows of the head for all labels, ``(n_labels, hidden_size)``, in the order
    of the columns; None for a head without rows. Returns fields of `PairScore`.
    """
    numbers: dict[Pair, dict[str, Any]] = {}
    layout, weights = fitted.layout, fitted.weights()
    names = {"same_prompt": "same_prompt", "gaussian_states": "vocabulary"}
    nulls = {name: fitted.weights(null) for name, null in names.items() if null in fitted.maps}
    for score in scores if layout.words else ():
        pair = score.pair
        weight, others = weights[pair].cpu(), {k: v[pair].cpu() for k, v in nulls.items()}
        reference, numbers[pair] = layout.references.get(pair), {}
        right = None if reference is None else torch.from_numpy(reference)
        if "gaussian_states" in others:
            rest = weight - others["gaussian_states"]
            hits = None if right is None else precision.is_hit(rest, right)[0].double().mean()
            numbers[pair]["decomposition"] = {
                "cosine": number(weight_cosine(weight, others["gaussian_states"])),
                "norm_share": number(float(rest.norm() / weight.norm())),
                "hit_1": None if hits is None else number(float(hits)),
            }
        if right is None or score.precision is None:
            continue
        order = right.sum(1).argsort(descending=True, stable=True).argsort()
        others["constant"] = -order[:, None].double().expand_as(weight)
        if head_rows is not None:
            source, target = (head_rows[layout.columns(name)] for name in pair)
            others["unembedding"] = precision.neighbor_weights(source, target)
        numbers[pair] |= _hits(weight, others, right, score.precision)
    return numbers


def _hits(
    weight: Tensor, others: Mapping[str, Tensor], right: Tensor, rates: Mapping[str, Any]
) -> dict[str, Any]:
    own, groups = precision.is_hit(weight, right).double(), precision.reference_groups(right)
    hits = {name: precision.is_hit(other, right)[0].double() for name, other in others.items()}
    baselines = {
        name: {"1": float(one.mean()), "macro_1": macro_mean(one.tolist(), groups)}
        for name, one in hits.items()
    }
    best = max(baselines, key=lambda name: baselines[name]["1"])
    difference = own[0] - hits[best]
    low, high = bootstrap_interval(difference)
    by_rank = zip(precision.HIT_RANKS, own.tolist(), strict=True)
    macro = {str(n): macro_mean(each, groups) for n, each in by_rank}
    return {
        "precision": {
            **rates,
            "macro": {**macro, "n_references": len(set(groups))},
            "baselines": baselines,
        },
        "excess_over_unembedding": {
            "mean": float(difference.mean()),
            "low": low,
            "high": high,
            "baseline": best,
        },
        "best_baseline_1": baselines[best]["1"],
    }


def beside_baselines(
    scores: Sequence[PairScore],
    fitted: FittedMaps,
    test: Moments,
    lm: LanguageModel,
    n_compared: int,
    counts: Sequence[int] = _COUNTS,
    rows: Tensor | None = None,
) -> tuple[list[PairScore], list[LabelCount]]:
    """Return the scores with what `random_words` and `vocabulary_baselines` give, and the curve."""
    words, curve = random_words(fitted, test, n_compared, counts, rows)
    labels = [token for domain in fitted.layout.domains.values() for token in domain.token_ids]
    head_rows = lm.head_rows(labels) if fitted.layout.words else None
    hits = vocabulary_baselines(scores, fitted, head_rows)
    return with_numbers(with_numbers(scores, words), hits), curve
