"""What the edits of ``ripples.py`` did: do they ripple to their own subject alone, and along what?

It reads the files of `EditRecorder`; ``findings.py`` writes the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from pandas import DataFrame, Series, factorize

from benchmarks.common import Estimate, arrow, mean_estimate
from benchmarks.real_lms.edit_explanations import explanations, margins, row_r
from benchmarks.real_lms.edit_recorder import read_arrays
from benchmarks.real_lms.edits import N_RESAMPLES, areas, drawn, interval
from benchmarks.real_lms.ripples import plan
from lincorr_lightning.results import plots
from lincorr_lightning.results.table import column

FLOATS = npt.NDArray[np.float64]
INTS = npt.NDArray[np.int64]
LEARNED = "learned"
PEAK = "peak"
RULES: dict[str, float] = {LEARNED: 0.0, "p > .5": 0.5, "p > .9": 0.9}
"""Rules by which the step of each edit is chosen: the first with a larger probability."""
N_PERMUTATIONS = 200
PREDICTORS = {
    "nearest": "nearest word",
    "cosine": "nearest word, cosine",
    "W": "W",
    "W0": "W₀",
    "in_context": "the LM in context",
    "context_of_other": "in context, of somebody else",
    "gradient": "the edit's gradient",
    "predicted": "W · ΔF of the source",
}
"""What may say which target logits an edit changes, by the names of arrays."""


@dataclass(frozen=True)
class RippleRun:
    """The edits of one run on one LM, those of all seeds together, as arrays over the n edits.

    Attributes:
        arrays: Those of `EditRecorder`, with edits of all seeds.
        steps: Steps after which edits were measured.
        kept: Those of them with changes of logits.
        seed: Seed of each edit, ``(n,)``.
    """

    lm: str
    name: str
    relation: str
    arrays: Mapping[str, Any]
    steps: list[int]
    kept: list[int]
    seed: INTS

    @cached_property
    def group(self) -> INTS:
        """Number of the reference of each edit."""
        references = [row.tobytes() for row in self.arrays["reference"]]
        return factorize(np.array(references, dtype=object))[0].astype(np.int64)

    def by_answer(self, values: npt.NDArray[Any]) -> Estimate:
        """Return the mean over answers of a number of each edit, with its interval over answers."""
        return mean_estimate(Series(values, dtype=float).groupby(self.group).mean().dropna())

    def is_right(self, labels: INTS) -> npt.NDArray[np.bool_]:
        """Return whether target labels, ``(..., n)``, are right for each edit."""
        reference = self.arrays["reference"]
        return np.asarray(reference[np.arange(len(reference)), labels])

    @cached_property
    def right_before(self) -> npt.NDArray[np.bool_]:
        """Whether the LM gives a right label before the edit."""
        return self.is_right(self.arrays["before"].argmax(1))

    @cached_property
    def nearest_right(self) -> npt.NDArray[np.bool_]:
        """Whether the nearest word is right."""
        return self.is_right(self.arrays["nearest"].argmax(1))

    @cached_property
    def in_context_right(self) -> npt.NDArray[np.bool_]:
        """Whether the LM gives a right label after the taught statement."""
        return self.is_right(self.arrays["in_context"].argmax(1))

    @cached_property
    def shares(self) -> dict[str, FLOATS]:
        """Numbers of each edit after each step, ``(s, n)``."""
        of = self.arrays
        n = len(of["labels"])
        rows = np.arange(n)[:, None]
        shares = {
            "probability": of["probability"].astype(float),
            LEARNED: of["learned"].astype(float),
            "own": (self.is_right(of["own"]) & ~self.right_before).astype(float),
        }
        for name in ("others", "nobody", "paraphrases"):
            before, after = (of["reference"][rows, of[key]] for key in (f"before_{name}", name))
            # Some targets have no other wordings.
            shares[name] = (after & ~before).sum(2) / (after.shape[2] or np.nan)
        shares["leak"] = shares.pop("others")
        shares["specific"] = shares["own"] - shares["leak"]
        shares["color"], shares["pet"] = np.moveaxis(of["controls"].astype(float), 2, 0)
        taught = np.full((len(self.steps), n), np.nan)
        taught[[self.steps.index(step) for step in self.kept]] = of["others_taught"].mean(2)
        shares["others_taught"] = taught
        return shares

    def index_at(self, rule: str) -> INTS:
        """Return the position of each edit's step among `steps`; -1 for none.

        By a rule, or the same step of all edits, as text.
        """
        if rule.isdigit():
            return np.full(len(self.seed), self.steps.index(int(rule)))
        if rule == PEAK:
            return self._peak
        reached = (
            self.shares[LEARNED] > 0
            if rule == LEARNED
            else self.shares["probability"] > RULES[rule]
        )
        return np.where(reached.any(0), reached.argmax(0), -1)

    @cached_property
    def _peak(self) -> INTS:
        """The step at which edits of other seeds are most specific, mean over answers.

        With one seed, edits of the other half of the answers.
        """
        fold = self.seed if len({*self.seed}) > 1 else self.group % 2
        peak = np.zeros(len(fold), dtype=np.int64)
        for one in {*fold}:
            others = np.where(fold == one, np.nan, self.shares["specific"])
            peak[fold == one] = np.argmax([self.by_answer(row).value for row in others])
        return peak

    @cached_property
    def kept_peak(self) -> int:
        """Position in `kept` of the step that is the peak for most edits, or of the last before."""
        step = self.steps[int(np.bincount(self._peak).argmax())]
        return max(i for i, one in enumerate(self.kept) if one <= step)

    def at(self, index: INTS, values: FLOATS) -> FLOATS:
        """Return the values of each edit at its own step; NaN where it has none."""
        chosen = values[index, np.arange(values.shape[1])].astype(float)
        return np.where(index < 0, np.nan, chosen)


def read_run(results: Path, lm: str, name: str, relation: str) -> RippleRun | None:
    """Read a run, with all seeds that there are; None if there is none."""
    files = [
        results / run.path
        for run in plan()
        if (run.lm, run.name, run.relation) == (lm, name, relation)
    ]
    files = [file for file in files if file.exists()]
    if not files:
        return None
    abouts = [json.loads(file.with_suffix(".json").read_text("utf-8")) for file in files]
    parts = [_of_edits(read_arrays(file) | explanations(file)) for file in files]
    arrays = {
        key: np.concatenate([part[key] for part in parts], axis=int(key in _BY_STEP))
        for key in parts[0]
        if all(key in part for part in parts)
    }
    seeds = [
        np.full(len(part["labels"]), about["seed"])
        for part, about in zip(parts, abouts, strict=True)
    ]
    return RippleRun(
        lm, name, relation, arrays, abouts[0]["steps"], abouts[0]["kept"], np.concatenate(seeds)
    )


_BY_STEP = (
    *("probability", "learned", "own", "others", "nobody", "paraphrases", "controls"),
    *("change", "others_change", "predicted", "others_taught"),
)


def _of_edits(arrays: dict[str, Any]) -> dict[str, Any]:
    """Repeat what is of a whole run for each of its edits."""
    n = len(arrays["labels"])
    whole = ("before_others", "before_others_source", "before_nobody", "prior")
    return {key: np.tile(x, (n, 1)) if key in whole else x for key, x in arrays.items()}


def read_runs(results: Path) -> Iterator[RippleRun]:
    """Yield all runs that there are."""
    for lm, name, relation in dict.fromkeys((run.lm, run.name, run.relation) for run in plan()):
        run = read_run(results, lm, name, relation)
        if run is not None:
            yield run


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
    taken out, too. AUROC is of its highest weight of a right label minus the highest of a wrong one
    for edits whose own target generalizes, with intervals from samples of answers.
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    run: str = column()
    step: int = column("", "d")
    by: str = column("by")
    r: Estimate = column("r", ".2f")
    r_others: Estimate = column("r, other people", ".2f")
    r_specific: Estimate = column("r, specific", ".2f")
    auroc: Estimate | None = column("AUROC", ".2f")
    auroc_within: Estimate | None = column("AUROC, one answer", ".2f")
    auroc_specific: Estimate | None = column("AUROC, specific", ".2f")


def auroc(run: RippleRun, score: FLOATS, outcome: FLOATS, within: bool = False) -> Estimate | None:
    """Return the AUROC of a score for an outcome of each edit; None for too few of either."""
    failed = outcome <= 0
    if min(failed.sum(), (~failed).sum()) < 10:
        return None
    weights = drawn(run.group, N_RESAMPLES, np.random.default_rng(0))
    found = areas(-score, failed, run.group, weights, within)
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


def along(run: RippleRun, ks: tuple[int, ...]) -> Iterator[Along]:
    """Yield how well each predictor does at some of the kept steps."""
    for k in ks:
        s = run.steps.index(run.kept[k])
        change, of_others = run.arrays["change"][k], run.arrays["others_change"][k]
        own = run.shares["own"][s]
        is_specific = own * (run.shares["leak"][s] < 0.5)
        for key, weights in predictions(run, k).items():
            score = margins(weights, run.arrays["reference"])
            yield Along(
                run.lm,
                arrow(run.relation),
                run.name,
                run.kept[k],
                PREDICTORS[key],
                run.by_answer(row_r(weights, change)),
                run.by_answer(row_r(weights, of_others)),
                run.by_answer(row_r(weights, change - of_others)),
                auroc(run, score, own),
                auroc(run, score, own, within=True),
                auroc(run, score, is_specific),
            )


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
    r: Estimate = column("gradient r", ".2f")
    permuted: Estimate = column("permuted W", ".2f")
    r_specific: float = column("gradient r, specific", ".2f")
    permuted_specific: Estimate = column("permuted W, specific", ".2f")


def label_r(first: FLOATS, second: FLOATS) -> float:
    """Return Pearson's r of each column of two matrices, mean over columns."""
    first, second = (x - x.mean(0) for x in (first, second))
    scale = np.sqrt((first**2).sum(0) * (second**2).sum(0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(np.nanmean((first * second).sum(0) / scale))


def gradients_at(run: RippleRun) -> Iterator[GradientsAt]:
    """Yield gradient r after each kept step."""
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

    Edits of all runs of a relation at the shipped rate, after a step or at their peak. *Known* are
    those whose right label leads where the taught statement stands before the prompt. The matched
    difference is between known and other edits with the same rank of the right label by the nearest
    word and the same half of its prior logit, weighted by pairs; its interval is from samples of
    right answers.
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
    near_instead: float = column("nearest word given instead", ".0%")


RANKS = (1, 2, 4, 9, 1000)
"""Bins of the number of wrong labels that are nearer than a right one, by their ends."""


def strata(run: RippleRun) -> INTS:
    """Return numbers of strata: the rank of the right label by the nearest word, and its prior."""
    reference, near = run.arrays["reference"], run.arrays["nearest"]
    best = np.where(reference, near, -np.inf).max(1, keepdims=True)
    n_nearer = ((near > best) & ~reference).sum(1)
    prior = np.where(reference, run.arrays["prior"], -np.inf).max(1)
    return np.asarray(np.searchsorted(RANKS, n_nearer) * 2 + (prior > np.median(prior)))


def matched_difference(
    run: RippleRun, chosen: npt.NDArray[np.bool_], values: FLOATS
) -> Estimate | None:
    """Return the difference of values between known and other chosen edits of the same strata."""
    known, stratum = run.in_context_right, strata(run)
    weights = drawn(run.group, N_RESAMPLES, np.random.default_rng(0))
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
        yield Fictitious(
            run.lm,
            step,
            len(true),
            mean(run.in_context_right).value,
            mean(run.shares["own"][i]),
            mean(of["own"][i] == true),
            mean((of["others"][i] == true[:, None]).mean(1)),
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
