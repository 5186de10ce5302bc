"""What r and Hit@N of W must exceed: random words at the same prompts, and the vocabulary alone.

Beyond the paper. Where the states at the target prompt are nearly a linear function of those at the
source prompt, the logits of *any* two sets of words are correlated. And where states are Gaussian,
W pairs the labels whose rows of the LM's head are alike, whatever the LM has learned of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import stdtr, stdtrit
from torch import Tensor

from lincorr_lightning.functional import Moments, group_means, macro_mean, precision
from lincorr_lightning.functional.significance import named_interval, weight_cosine
from lincorr_lightning.io import number
from lincorr_lightning.linear_map import solver
from lincorr_lightning.linear_map.layout import JointLayout, Pair
from lincorr_lightning.linear_map.scores import Numbers, PairScore, with_numbers
from lincorr_lightning.linear_map.solver import FittedMaps, Judge, REstimate, RidgeSolver, Solution
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.progress import progress

_FLOATS = npt.NDArray[np.floating[Any]]
_DRAWS = 10
_SKIPPED = (5, 10, 20, 50, 100, 200)
"""Numbers of labels of which a probe once drew, too: the draws are passed over, so that others stay
those of its published numbers."""
R_BASELINES = (
    "random_label_mean",
    "random_target_label_mean",
    "same_prompt_label_mean",
    "excess_over_random",
)
"""Numbers of a pair that `random_words` gives."""


def random_words(
    fitted: FittedMaps,
    test: Moments,
    n_compared: int,
    skipped: Sequence[int] = _SKIPPED,
    rows: Tensor | None = None,
) -> Numbers:
    """Fit maps from and to random words after the same prompts, with the pairs' ridges or none.

    Stored maps have no moments, and so no numbers; `test` are those of all held-out subjects.
    ``excess_over_random`` is of `n_compared` source labels: with many, most directions of the
    states are read whatever the labels are, and no r is special. Draws of `skipped` numbers of
    labels are passed over. With `rows`, those of some held-out subjects as they are read,
    ``(n, n_kept)``, intervals cover subjects, too.
    """
    layout = fitted.layout
    numbers: dict[Pair, dict[str, Any]] = {}
    if fitted.moments is None or not layout.words:
        return numbers
    rows = test.mean.new_zeros(0, layout.n_kept) if rows is None else rows
    vocabulary = fitted.label_r(test, "vocabulary", on="y")
    for source in progress(layout.sources, "random words"):
        rng = np.random.default_rng(0)
        n_labels = layout.sizes[source]
        compared = min(n_compared, n_labels)
        r = {}
        for n in sorted({n for n in skipped if n < n_labels} | {compared, n_labels}):
            drawn = _draw(layout, source, n, rng)
            if n in (compared, n_labels):
                kept = rows if n == compared else rows[:0]
                r[n] = _r_of_draws(fitted, test, source, drawn, kept)
        at_targets = _r_at_targets(fitted, test, source, rows)
        for i, target in enumerate(layout.targets[source]):
            labels, words = (REstimate(*(part[:, i] for part in side)) for side in r[compared])
            to_words = _means(at_targets[target][1].r, layout.sizes[target], rng)
            numbers[source, target] = {
                **_range("random_label", r[n_labels][1].r[:, i].numpy()),
                **_range("random_target_label", to_words),
                "same_prompt_label_mean": solver.mean_r(vocabulary[source, target]),
                **_difference("excess_over_random", labels, words, test.n, "p"),
                "excess_over_random_labels": compared,
                "excess_over_random_draws": len(words.r),
                **_difference("excess_over_random_target", *at_targets[target], test.n),
            }
    return numbers


def _draw(layout: JointLayout, source: str, n: int, rng: np.random.Generator) -> list[list[Tensor]]:
    """Return the columns of draws of n labels of a source, and of n words after its prompt."""
    return [
        [
            pool[torch.from_numpy(rng.permutation(len(pool))[:n])]
            for _ in range(_DRAWS if n < len(pool) else 1)
        ]
        for pool in (layout.columns(source), layout.columns(source, "words"))
    ]


def _r_of_draws(
    fitted: FittedMaps,
    test: Moments,
    source: str,
    columns: Sequence[Sequence[Tensor]],
    rows: Tensor,
) -> list[REstimate]:
    """Return r of maps from draws of columns, on each side.

    They are means over the labels of each target, ``(n_draws, n_targets)``, and the influences are
    means over draws, ``(n_rows, n_targets)``.
    """
    assert fitted.moments is not None
    layout = fitted.layout
    ridge = solver.per_target_ridge(layout, source, fitted.ridges)
    y = layout.target_columns(source)
    sizes = layout.target_sizes(source)
    sides = []
    for draws in columns:
        r, influence = [], []
        for x in draws:
            squares = RidgeSolver(fitted.moments, x, y)
            judge = Judge(test, x, y)
            solution = _better(squares.solve(ridge), squares.solve(0.0), judge)
            estimate = judge.influences(solution, rows, sizes)
            parts = torch.split(estimate.r, sizes)
            r.append(torch.stack([part.nanmean() for part in parts]))
            influence.append(estimate.influence)
        sides.append(REstimate(torch.stack(r), torch.stack(influence).nanmean(0)))
    return sides


def _better(one: Solution, other: Solution, judge: Judge) -> Solution:
    """Return the better map of each label, as words may need another ridge than the pair."""
    if one.weight.equal(other.weight):
        return one
    r, r_other = (judge.label_r(each.weight) for each in (one, other))
    return one._replace(weight=torch.where((r_other > r)[:, None], other.weight, one.weight))


def _r_at_targets(
    fitted: FittedMaps, test: Moments, source: str, rows: Tensor
) -> dict[str, tuple[REstimate, REstimate]]:
    """Return r of each label, and of each random word after each target's prompt.

    The maps are from the source's labels.
    """
    assert fitted.moments is not None
    layout = fitted.layout
    x, y = layout.problems[source]["y"]
    words = {target: layout.columns(target, "words") for target in layout.targets[source]}
    parts = [
        torch.full((len(columns),), fitted.ridges[source, target], dtype=torch.float64)
        for target, columns in words.items()
    ]
    squares = RidgeSolver(fitted.moments, x, torch.cat(list(words.values())))
    maps = squares.solve(torch.cat(parts)), squares.solve(0.0)
    sizes = layout.target_sizes(source)
    of_labels = Judge(test, x, y).influences(fitted.maps["y"][source], rows, sizes)
    at_labels = zip(torch.split(of_labels.r, sizes), of_labels.influence.T, strict=True)
    start, samples = 0, {}
    for (target, columns), labels in zip(words.items(), at_labels, strict=True):
        part = slice(start, start + len(columns))
        start = part.stop
        one, other = (Solution(w[part], mean_x, mean_y[part]) for w, mean_x, mean_y in maps)
        judge = Judge(test, x, columns)
        estimate = judge.influences(_better(one, other, judge), rows, [len(columns)])
        samples[target] = REstimate(*labels), REstimate(estimate.r, estimate.influence[:, 0])
    return samples


def _means(values: Tensor, n: int, rng: np.random.Generator) -> _FLOATS:
    drawn = [torch.from_numpy(rng.permutation(values.numpy())[:n]) for _ in range(_DRAWS)]
    return torch.stack([one.nanmean() for one in drawn]).numpy()


def _range(name: str, drawn: _FLOATS) -> dict[str, Any]:
    return {
        f"{name}_mean": number(drawn.mean()),
        f"{name}_low": number(drawn.min()),
        f"{name}_high": number(drawn.max()),
        f"{name}_draws": len(drawn),
    }


def _difference(
    name: str, a: REstimate, b: REstimate, n_subjects: Tensor, p: str | None = None
) -> dict[str, float | None]:
    """Return the difference between two means of r, its 95 % interval, and as `p` that it is not 0.

    Labels or words are one sample, and held-out subjects, the same ones for each of them, another:
    by the law of total variance, the variance of the mean over the former adds to that over
    subjects, which is the spread of their influences on the difference (the infinitesimal
    jackknife). Degrees of freedom are Satterthwaite's. Fitted subjects are taken as they are.
    """
    names = (name, f"{name}_low", f"{name}_high")
    values = [each.r[~each.r.isnan()].numpy() for each in (a, b)]
    if not all(map(len, values)):
        return dict.fromkeys(names)
    mean = float(values[0].mean() - values[1].mean())
    influences = (a.influence - b.influence).numpy()
    samples = [*((each, len(each)) for each in values), (influences, float(n_subjects))]
    # A side that was not drawn has no spread.
    parts = [(one.var(ddof=1) / n, len(one) - 1) for one, n in samples if len(one) > 1]
    variance = sum(part for part, _ in parts)
    freedom = variance**2 / sum(part**2 / n for part, n in parts) if variance > 0 else 1.0
    half = float(stdtrit(freedom, 0.975)) * variance**0.5
    numbers = dict(zip(names, map(number, (mean, mean - half, mean + half)), strict=True))
    if p is not None and variance > 0:
        numbers[p] = number(float(stdtr(freedom, -mean / variance**0.5)))
    return numbers


def vocabulary_baselines(
    scores: Sequence[PairScore],
    fitted: FittedMaps,
    head_rows: Tensor | None = None,
    whitening: Tensor | None = None,
) -> list[PairScore]:
    """Return scores with those of the pairings that need no knowledge of the subjects.

    They are the best constant answer (``constant``), the nearest target label by the rows of the
    LM's head (``unembedding``), the same in the causal inner product (``causal_inner_product``),
    the map after the control prompt (``same_prompt``), and that after the source prompt, W₀
    (``gaussian_states``), see `JointLayout.problems`. W is also compared with W₀ as a matrix.

    `head_rows` are the rows of the head for all labels, ``(n_labels, hidden_size)``, in the order
    of the columns, and `whitening` is the matrix of `causal_whitening`; None for a head without
    rows.
    """
    layout = fitted.layout
    weights = vocabulary = same_prompt = dict[Pair, Tensor]()
    compared: dict[Pair, PairScore] = {}
    for one in sorted(scores, key=lambda score: score.source) if layout.words else ():
        pair = one.ends
        if pair not in weights:  # the maps of one source at a time, which take memory
            problems = ("y", "vocabulary", "same_prompt")
            weights, vocabulary, same_prompt = (fitted.weights(x, one.source) for x in problems)
        if not vocabulary:  # of a stored map that was fitted without
            continue
        weight, w0 = weights[pair].cpu(), vocabulary[pair].cpu()
        rest = weight - w0
        numbers: dict[str, Any] = {
            "cosine_same_prompt": number(weight_cosine(weight, w0)),
            "rest_norm_share": number(float(rest.norm() / weight.norm())),
        }
        right = torch.from_numpy(layout.reference(pair))
        near, ranks = None, dict(one.ranks)
        if right.any():
            rank = right.sum(1).argsort(descending=True, stable=True).argsort()
            # Weights like W; to add a baseline, add its weights here.
            pairings = {
                "same_prompt": same_prompt.get(pair),
                "gaussian_states": w0,
                "constant": -rank[:, None].double().expand_as(weight),
            }
            if head_rows is not None:
                source, target = (head_rows[layout.columns(name)] for name in pair)
                near = precision.neighbor_weights(source, target, whitening)
                pairings["unembedding"] = precision.neighbor_weights(source, target)
                pairings["causal_inner_product"] = near
            for name, other in pairings.items():
                if other is not None:
                    ranks[name] = precision.ranks_of_right(other.cpu(), right)
            of_rest = precision.ranks_of_right(rest, right) == 1
            numbers |= {"rest_hit_1": float(of_rest.double().mean()), **_hits(ranks, right)}
        numbers = {**one.numbers, **numbers}
        compared[pair] = replace(one, numbers=numbers, ranks=ranks, nearness=near)
    return [compared.get(one.ends, one) for one in scores]


def _hits(ranks: Mapping[str, Tensor], right: Tensor) -> dict[str, Any]:
    """Return Hit@1 of the baselines, and that of ``W`` above the best of them."""
    groups = precision.reference_groups(right)
    numbers: dict[str, Any] = {}
    hits = {name: (each == 1).double() for name, each in ranks.items()}
    of_w = hits.pop("W")
    for name, each in hits.items():
        numbers[f"{name}_1"] = float(each.mean())
        numbers[f"{name}_macro_1"] = macro_mean(each.tolist(), groups)
    best = max(hits, key=lambda name: numbers[f"{name}_1"])
    by_answer = max(hits, key=lambda name: numbers[f"{name}_macro_1"])
    means = torch.tensor(group_means((of_w - hits[by_answer]).tolist(), groups))
    return numbers | {
        "best_baseline": best,
        "best_baseline_1": numbers[f"{best}_1"],
        **named_interval("above_best_baseline", of_w - hits[best]),
        "best_macro_baseline": by_answer,
        "best_macro_1": numbers[f"{by_answer}_macro_1"],
        **named_interval("above_best_macro", means),
    }


def beside_baselines(
    scores: Sequence[PairScore],
    fitted: FittedMaps,
    test: Moments,
    lm: LanguageModel,
    n_compared: int,
    skipped: Sequence[int] = _SKIPPED,
    rows: Tensor | None = None,
) -> list[PairScore]:
    """Return the scores with what `random_words` and `vocabulary_baselines` give."""
    scores = with_numbers(scores, random_words(fitted, test, n_compared, skipped, rows))
    labels = [token for domain in fitted.layout.domains.values() for token in domain.token_ids]
    nearest = lm.nearest_words() if fitted.layout.words else None
    of_head = () if nearest is None else (nearest.head.rows(labels), nearest.whitening.matrix)
    return vocabulary_baselines(scores, fitted, *of_head)
