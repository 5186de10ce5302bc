"""What the edits of ``ripples.py`` did: do they ripple to their own subject alone, and along what?

``findings.py`` writes these tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from pandas import DataFrame, Series

from benchmarks.common import Estimate, arrow, mean_estimate
from benchmarks.real_lms.edit_explanations import margins, row_r
from benchmarks.real_lms.ripple_runs import FLOATS, INTS, PEAK, RULES, RippleRun
from lincorr_lightning.results import plots
from lincorr_lightning.results.table import column

N_RESAMPLES = 2000
MIN_PER_CLASS = 10
N_PERMUTATIONS = 200


@dataclass(frozen=True)
class Ripple:
    """What edits do after a step, means over right answers, with 95 % intervals over them.

    A step is a number, or a rule by which each edit has its own: the first step at which the source
    is learned, or its probability is above a bound; or the step at which edits of other seeds are
    most specific (with one seed, those of half of the answers).
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    run: str = column()
    step: str = column()
    edits: int = column("", "d")
    answers: int = column("", "d")
    seeds: int = column("", "d")
    mean_step: float = column("", ".1f")
    probability: float = column("p of the taught answer", ".2f")
    learned: float = column("", ".0%")
    own: Estimate = column("own", ".0%")
    leak: Estimate = column("other people", ".0%")
    specific: Estimate = column("specific", ".0%")
    nobody: float = column("no person", ".0%")
    paraphrases: float = column("own, other wordings", ".0%")
    others_taught: float = column("others taught", ".0%")
    color: float = column("same color", ".0%")
    pet: float = column("same pet", ".0%")


def ripples(run: RippleRun) -> Iterator[Ripple]:
    """Yield what the edits of a run do after each step, and by each rule."""
    for step in (*map(str, run.steps), *RULES, PEAK):
        index = run.index_at(step)
        at = {key: run.at(index, values) for key, values in run.shares.items()}
        if not (index >= 0).any():
            continue
        means = {key: run.by_answer(values) for key, values in at.items()}
        exact = ("own", "leak", "specific")
        yield Ripple(
            run.lm,
            arrow(run.relation),
            run.name,
            step,
            edits=int((index >= 0).sum()),
            answers=len({*run.group[index >= 0]}),
            seeds=len({*run.seed}),
            mean_step=float(np.mean([run.steps[i] for i in index if i >= 0])),
            **{key: mean if key in exact else mean.value for key, mean in means.items()},
        )


@dataclass(frozen=True)
class Window:
    """When edits are specific: their peak, and the steps at which their interval is above 0."""

    lm: str = column("LM")
    relation: str = column("edits of")
    run: str = column()
    edits: int = column("", "d")
    answers: int = column("", "d")
    seeds: int = column("", "d")
    peak: float = column("peak, step", ".1f")
    own: float = column("own", ".0%")
    leak: float = column("other people", ".0%")
    specific: Estimate = column("specific", ".0%")
    last: Estimate = column("specific, step 10", ".0%")
    steps: str = column("specific at steps")
    at_p_9: float = column("p > .9: specific", ".0%")


def window(rows: Sequence[Ripple]) -> Window:
    """Return when the edits of a run are specific."""
    of = {row.step: row for row in rows}
    peak = of[PEAK]
    steps = [row.step for row in rows if row.step.isdigit() and row.specific.low > 0]
    return Window(
        *(peak.lm, peak.relation, peak.run, peak.edits, peak.answers, peak.seeds),
        peak.mean_step,
        peak.own.value,
        peak.leak.value,
        peak.specific,
        of["10"].specific,
        ", ".join(steps) or "none",
        of["p > .9"].specific.value if "p > .9" in of else np.nan,
    )


@dataclass(frozen=True)
class Beyond:
    """Edits at their most specific step beside the nearest word, means over right answers.

    *Lead* is that of edits whose own target generalizes over those for which the nearest word is
    right. Numbers where it is right or wrong are of those edits alone.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    run: str = column()
    edits: int = column("", "d")
    answers: int = column("", "d")
    own: float = column("own", ".0%")
    nearest: float = column("nearest word", ".0%")
    lead: Estimate = column("lead", "+.0%")
    specific: Estimate = column("specific", ".0%")
    specific_right: Estimate = column("specific, nearest word right", ".0%")
    specific_wrong: Estimate = column("specific, nearest word wrong", ".0%")
    n_wrong: int = column("edits, nearest word wrong", "d")
    in_context: float = column("in context", ".0%")
    in_context_wrong: float = column("in context, nearest word wrong", ".0%")


def beyond(run: RippleRun) -> Beyond:
    """Return the edits of a run at their peak beside the nearest word."""
    index = run.index_at(PEAK)
    own, specific = (run.at(index, run.shares[key]) for key in ("own", "specific"))
    near = run.nearest_right
    in_context = run.in_context_right.astype(float)
    return Beyond(
        run.lm,
        arrow(run.relation),
        run.name,
        len(own),
        int(run.group.max()) + 1,
        run.by_answer(own).value,
        run.by_answer(near).value,
        run.by_answer(own - near),
        run.by_answer(specific),
        run.by_answer(np.where(near, specific, np.nan)),
        run.by_answer(np.where(near, np.nan, specific)),
        int((~near).sum()),
        run.by_answer(in_context).value,
        run.by_answer(np.where(near, np.nan, in_context)).value,
    )


@dataclass(frozen=True)
class Along:
    """How well something says which target logits an edit changes, and which edits generalize.

    r is over labels, of each edit, after each label's mean over edits and each edit's mean over
    labels are taken out; mean over right answers. Of the *specific* change, that of other people is
    taken out, too. The lead is that of the nearest word, in r with the change of other people;
    `given` is r with it where the nearest word is given, and of W beyond W₀, W₀, too.
    AUROC is of the highest weight of a right label minus the highest of a wrong one for edits whose
    own target generalizes, with intervals from samples of answers. Of nulls, both are means over
    draws; GradSim (arXiv 2407.12828) is one number of an edit.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    run: str = column()
    step: int = column("", "d")
    by: str = column("by")
    r: Estimate | None = column("r", ".2f")
    r_others: Estimate | None = column("r, other people", ".2f")
    r_specific: Estimate | None = column("r, specific", ".2f")
    lead: Estimate | None = column("nearest word's lead", "+.2f")
    given: Estimate | None = column("r, other people, given the nearest word", ".2f")
    auroc: Estimate | None = column("AUROC", ".2f")
    auroc_within: Estimate | None = column("AUROC, one answer", ".2f")
    auroc_specific: Estimate | None = column("AUROC, specific", ".2f")


NEAREST = "nearest word"
SOURCE_CHANGE = "W · ΔF of the source"
PREDICTORS = {
    "nearest": NEAREST,
    "cosine": "nearest word, cosine",
    "W": "W",
    "W0": "W₀",
    "in_context": "the LM in context",
    "context_of_other": "in context, of somebody else",
    "gradient": "the edit's gradient",
    "predicted": SOURCE_CHANGE,
}
"""What may say which target logits an edit changes, by the names of arrays."""
NULLS = {"rotated": "nearest word, covariance turned", "shuffled": "nearest word, labels shuffled"}
GRADSIM = "GradSim"
BEYOND_W0 = "W, given W₀"
PRIOR = "prior of the answer"


def interval(values: FLOATS) -> Estimate:
    """Return a score with its 95 % interval, from the score and those of samples, ``(1 + n,)``."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def group_counts(group: INTS) -> FLOATS:
    """Return how often each group is in the data, 1, and in each sample of groups.

    The shape is ``(1 + N_RESAMPLES, n_groups)``.
    """
    n = int(group.max()) + 1
    samples = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=N_RESAMPLES)
    return np.concatenate([np.ones((1, n)), samples])


def areas(
    values: FLOATS,
    chosen: npt.NDArray[np.bool_],
    group: INTS,
    weights: FLOATS,
    within: bool = False,
) -> FLOATS:
    """Return the AUROC of a score for chosen edits, in each sample of references.

    The score, whether an edit is chosen, and the number of its reference are ``(n,)``; `weights`
    are `group_counts`. With `within`, it is over pairs with one reference; NaN without any.
    """
    above = values[chosen][:, None]
    below = values[~chosen]
    order = (above > below) + (above == below) / 2
    first = group[chosen]
    second = group[~chosen]
    with np.errstate(invalid="ignore"):
        if within:
            same = first[:, None] == second
            of_pair = weights[:, np.broadcast_to(first[:, None], same.shape)[same]]
            return np.asarray(of_pair @ order[same] / of_pair.sum(1))
        n_first = weights[:, first]
        n_second = weights[:, second]
        return np.asarray(
            ((n_first @ order) * n_second).sum(1) / (n_first.sum(1) * n_second.sum(1))
        )


def auroc(run: RippleRun, score: FLOATS, outcome: FLOATS, within: bool = False) -> Estimate | None:
    """Return the AUROC of a score of each edit, ``(n,)`` or ``(n, d)`` of d draws, for an outcome.

    None for too few edits with or without it.
    """
    chosen = outcome > 0
    if min(chosen.sum(), (~chosen).sum()) < MIN_PER_CLASS:
        return None
    weights = group_counts(run.group)
    draws = score[:, None] if score.ndim == 1 else score
    found = np.mean([areas(one, chosen, run.group, weights, within) for one in draws.T], axis=0)
    return None if np.isnan(found[0]) else interval(found)


def predictions(run: RippleRun, k: int) -> dict[str, FLOATS]:
    """Return what each predictor says of the target logits, ``(n, t)``, at the k-th kept step."""
    of = {key: run.arrays[key] for key in ("nearest", "cosine", "W", "W0")}
    of["in_context"] = run.arrays["in_context"] - run.arrays["before"]
    of["predicted"] = run.arrays["predicted"][k]
    if "gradient" in run.arrays:
        of["context_of_other"] = run.arrays["context_of_other"] - run.arrays["before"]
        of["gradient"] = run.arrays["gradient"].astype(float)
    return of


def along(run: RippleRun, k: int) -> Iterator[Along]:
    """Yield how well each predictor does at the k-th kept step."""
    s = run.steps.index(run.kept[k])
    change, of_others = run.arrays["change"][k], run.arrays["others_change"][k]
    own = run.shares["own"][s]
    is_specific = own * (run.shares["leak"][s] < 0.5)
    about = run.lm, arrow(run.relation), run.name, run.kept[k]

    def areas_of(score: FLOATS) -> tuple[Estimate | None, ...]:
        return (
            auroc(run, score, own),
            auroc(run, score, own, within=True),
            auroc(run, score, is_specific),
        )

    near, w, w0, reference = (run.arrays[key] for key in ("nearest", "W", "W0", "reference"))
    nearest = row_r(near, of_others)
    for key, weights in predictions(run, k).items():
        r = [row_r(weights, x) for x in (change, of_others, change - of_others)]
        lead = given = None
        if key != "nearest":
            lead = run.by_answer(nearest - r[1])
            given = run.by_answer(row_r(weights, of_others, near))
        means = (*map(run.by_answer, r), lead, given)
        yield Along(*about, PREDICTORS[key], *means, *areas_of(margins(weights, reference)))
    partial = [row_r(w, x, w0) for x in (change, of_others, change - of_others)]
    beyond_both = run.by_answer(row_r(w, of_others, near, w0))
    r = (*map(run.by_answer, partial), run.by_answer(nearest - partial[1]), beyond_both)
    yield Along(*about, BEYOND_W0, *r, None, None, None)
    prior = margins(run.arrays["prior"], reference)
    yield Along(*about, PRIOR, None, None, None, None, None, *areas_of(prior))
    if "gradsim" in run.arrays:
        for key, name in NULLS.items():
            parts = np.moveaxis(run.arrays[f"{key}_r"][:, :, k].astype(float), 1, 0)
            means = (*map(run.by_answer, parts), run.by_answer(nearest - parts[1]), None)
            yield Along(*about, name, *means, *areas_of(run.arrays[f"{key}_margin"]))
        yield Along(*about, GRADSIM, None, None, None, None, None, *areas_of(run.arrays["gradsim"]))


@dataclass(frozen=True)
class GradientsAt:
    """r per target label, over edits, of W · ΔF of the source and ΔF of the target after a step.

    The null has the rows of W permuted: its mean, and the 95 % range, over permutations. Of the
    *specific* change, that of other people is taken out.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    run: str = column()
    step: int = column("", "d")
    edits: int = column("", "d")
    r: Estimate = column("r of the change", ".2f")
    permuted: Estimate = column("permuted W", ".2f")
    r_specific: float = column("r of the change, specific", ".2f")
    permuted_specific: Estimate = column("permuted W, specific", ".2f")


def label_r(first: FLOATS, second: FLOATS) -> float:
    """Return Pearson's r of each column of two matrices, ``(n, t)``, mean over columns."""
    first, second = (x - x.mean(0) for x in (first, second))
    scale = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.nanmean((first * second).sum(0) / scale))


def gradients_at(run: RippleRun) -> Iterator[GradientsAt]:
    """Yield r of the change after each kept step."""
    rng = np.random.default_rng(0)
    n, t = run.arrays["before"].shape
    orders = [rng.permutation(t) for _ in range(N_PERMUTATIONS)]
    n_groups = int(run.group.max()) + 1
    samples = [
        np.concatenate(
            [np.flatnonzero(run.group == g) for g in rng.integers(n_groups, size=n_groups)]
        )
        for _ in range(N_PERMUTATIONS)
    ]
    for k, step in enumerate(run.kept):
        predicted, change = run.arrays["predicted"][k], run.arrays["change"][k]
        specific = change - run.arrays["others_change"][k]
        nulls = [
            np.array([label_r(predicted[:, order], x) for order in orders])
            for x in (change, specific)
        ]
        again = [label_r(predicted[rows], change[rows]) for rows in samples]
        yield GradientsAt(
            run.lm,
            arrow(run.relation),
            run.name,
            step,
            n,
            interval(np.array([label_r(predicted, change), *again])),
            interval(np.array([nulls[0].mean(), *nulls[0]])),
            label_r(predicted, specific),
            interval(np.array([nulls[1].mean(), *nulls[1]])),
        )


@dataclass(frozen=True)
class Missed:
    """Edits that the nearest word misses: is what the LM knows in context what generalizes?

    Edits of a relation at the shipped rate, after a step or at their peak. *Known* are those whose
    right label leads where the taught statement stands before the prompt. The matched difference is
    between known and other edits in the same bin of `N_NEARER` and the same half of the right
    label's prior logit, weighted by pairs; its interval is from samples of right answers.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    step: str = column()
    missed: int = column("edits missed", "d")
    known: int = column("of these known in context", "d")
    own_known: Estimate = column("own, known", ".0%")
    own_unknown: Estimate = column("own, unknown", ".0%")
    specific_known: Estimate = column("specific, known", ".0%")
    specific_unknown: Estimate = column("specific, unknown", ".0%")
    paraphrases_known: float = column("other wordings, known", ".0%")
    paraphrases_unknown: float = column("other wordings, unknown", ".0%")
    matched: Estimate | None = column("matched difference", "+.0%")
    matched_specific: Estimate | None = column("matched difference, specific", "+.0%")
    nearest_given: float = column("nearest word given instead", ".0%")


N_NEARER = (1, 2, 4, 9, 1000)
"""Bins of the number of wrong labels that are nearer than a right one, by their ends."""


def strata(run: RippleRun) -> INTS:
    """Return the stratum of each edit, ``(n,)``: its bin of `N_NEARER` and half of the priors."""
    reference, near = run.arrays["reference"], run.arrays["nearest"]
    best = np.where(reference, near, -np.inf).max(1, keepdims=True)
    n_nearer = ((near > best) & ~reference).sum(1)
    prior = np.where(reference, run.arrays["prior"], -np.inf).max(1)
    return np.asarray(np.searchsorted(N_NEARER, n_nearer) * 2 + (prior > np.median(prior)))


def matched_difference(
    run: RippleRun, chosen: npt.NDArray[np.bool_], values: FLOATS
) -> Estimate | None:
    """Return the difference of values between known and other chosen edits of the same strata."""
    known, stratum = run.in_context_right, strata(run)
    weights = group_counts(run.group)
    total = np.zeros(len(weights))
    n_pairs = np.zeros(len(weights))
    for one in {*stratum[chosen]}:
        inside = chosen & (stratum == one)
        parts = []
        for is_known in (True, False):
            rows = inside & (known == is_known)
            count = weights[:, run.group[rows]]
            parts.append((count.sum(1), count @ values[rows]))
        (n_known, sum_known), (n_other, sum_other) = parts
        pairs = n_known * n_other / np.maximum(n_known + n_other, 1)
        with np.errstate(invalid="ignore"):
            difference = sum_known / n_known - sum_other / n_other
        total += np.where(pairs > 0, pairs * difference, 0.0)
        n_pairs += pairs
    if not n_pairs[0]:
        return None
    with np.errstate(invalid="ignore"):
        return interval(total / n_pairs)


def missed(run: RippleRun) -> Iterator[Missed]:
    """Yield what edits do that the nearest word misses, at their peak and at the last kept step."""
    chosen = ~run.nearest_right
    known = run.in_context_right
    nearest = run.arrays["nearest"].argmax(1)
    for step in (PEAK, str(run.kept[-1])):
        index = run.index_at(step)
        at = {k: run.at(index, run.shares[k]) for k in ("own", "specific", "paraphrases")}
        label = run.arrays["own"][index, np.arange(len(index))]

        def among(is_known: bool, name: str, at: Mapping[str, FLOATS] = at) -> Estimate:
            return run.by_answer(np.where(chosen & (known == is_known), at[name], np.nan))

        yield Missed(
            run.lm,
            arrow(run.relation),
            step,
            int(chosen.sum()),
            int((chosen & known).sum()),
            among(True, "own"),
            among(False, "own"),
            among(True, "specific"),
            among(False, "specific"),
            among(True, "paraphrases").value,
            among(False, "paraphrases").value,
            matched_difference(run, chosen, at["own"]),
            matched_difference(run, chosen, at["specific"]),
            float((label == nearest)[chosen].mean()),
        )


@dataclass(frozen=True)
class Contested:
    """What other people are given after a step by edits whose nearest word is wrong.

    Shares of other people to whom the nearest word, or a right answer, is given and was not before:
    means over right answers, with 95 % intervals over them.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    step: int = column("", "d")
    edits: int = column("edits, nearest word wrong", "d")
    nearest: Estimate = column("given the nearest word", ".0%")
    right: Estimate = column("given a right answer", ".0%")
    difference: Estimate = column("nearest word − right answer", "+.0%")


def contested(run: RippleRun, step: int) -> Contested:
    """Return what other people are given after a step where the nearest word is wrong."""
    _, near = run.newly_given(run.arrays["nearest"].argmax(1), step)
    right = run.shares["leak"][run.steps.index(step)]
    values = [near, right, near - right]
    is_wrong = ~run.nearest_right
    means = [run.by_answer(np.where(is_wrong, x, np.nan)) for x in values]
    return Contested(run.lm, arrow(run.relation), step, int(is_wrong.sum()), *means)


@dataclass(frozen=True)
class Fictitious:
    """Edits of cities of which an LM was taught false countries, means over true countries.

    *Taught*: the false country, which the LM gives where the city is in the context; *true*: the
    nearest word, which is the true country of all these cities.
    """

    lm: str = column("LM")
    step: int = column("", "d")
    edits: int = column("", "d")
    in_context: float = column("taught country, in context", ".0%")
    taught: Estimate = column("taught country, own", ".0%")
    taught_others: Estimate = column("taught country, other people", ".0%")
    true: Estimate = column("true country, own", ".0%")
    true_others: Estimate = column("true country, other people", ".0%")
    w_taught: float = column("W: taught", ".0%")
    w_true: float = column("W: true", ".0%")


def fictitious(run: RippleRun) -> Iterator[Fictitious]:
    """Yield what edits of cities with false countries do after each step."""
    of = run.arrays
    true = of["nearest"].argmax(1)

    def mean(hits: npt.NDArray[Any]) -> Estimate:
        return mean_estimate(Series(hits.astype(float)).groupby(true).mean())

    w = of["W"].argmax(1)
    for i, step in enumerate(run.steps):
        own, others = run.newly_given(true, step)
        yield Fictitious(
            run.lm,
            step,
            len(true),
            mean(run.in_context_right).value,
            mean(run.shares["own"][i]),
            mean(run.shares["leak"][i]),
            mean(own),
            mean(others),
            mean(run.is_right(w)).value,
            mean(w == true).value,
        )


def figure(rows: Sequence[Ripple]) -> Figure:
    """Draw what edits of a city's people do by step: to their own person, others, and nobody."""
    runs = {"lora": "", "larger": "", "slow": ", a third of the rate"}
    points = []
    for row in rows:
        if row.relation != "city→country" or row.run not in runs or not row.step.isdigit():
            continue
        names = {"own": row.own, "other people": row.leak, "specific": row.specific}
        names["no person"] = Estimate(row.nobody, np.nan, np.nan)
        about = {"lm": f"{row.lm}{runs[row.run]}", "step": int(row.step)}
        for what, (mean, low, high) in names.items():
            points.append({**about, "what": what, "mean": mean, "low": low, "high": high})
    return plots.curves(
        DataFrame(points),
        "step",
        "mean",
        "what",
        "lm",
        band=("low", "high"),
        title="Taught where one person lives, an LM soon says it of everybody",
        subtitle="share of LoRA edits after which the country of the taught city leads; bands: "
        "95 % intervals over countries",
        labels=("optimizer step", "right country"),
        percent=True,
        share_y=True,
    )
