"""Edits of pretrained LMs: how often they carry over, beside baselines, and what forecasts it.

It reads the runs of ``run.py``; ``findings.py`` writes the tables.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np
import numpy.typing as npt
from pandas import DataFrame, concat, factorize

from benchmarks.common import Estimate, arrow, mean_estimate, read_csv, record, scored
from benchmarks.real_lms.run import PLAN
from benchmarks.real_lms.tables import LMS, load, of_paper
from lincorr_lightning.results.table import column

FLOATS = npt.NDArray[np.float64]
N_RESAMPLES = 1000
SAMPLES = {"outcomes": "any", "balanced": "two per country"}
"""Beginnings of names of runs, and what their edits are: of any city, or two of a country."""

NEAREST = "nearest word"
WEIGHT = "−W of the reference"
COUNT = "edits of the reference"
NEVER_GENERALIZES = "X+1→X+2"
MIN_PER_CLASS = 10
MIN_PAIRS = 20


@dataclass(frozen=True)
class EditRun:
    """The edits of one relation on one LM, those of all seeds together.

    Attributes:
        lm: Name of the LM.
        relation: The relation, as city→country.
        method: full or lora.
        sample: Of what the edits are, see `SAMPLES`.
        color: Share of edits whose subject has the color of before, mean over seeds.
        pet: The same of the pet.
        cases: A row per edit, as in ``cases.csv``.
    """

    lm: str
    relation: str
    method: str
    sample: str
    color: float
    pet: float
    cases: DataFrame

    @cached_property
    def group(self) -> npt.NDArray[np.int64]:
        """Number of the reference of each edit, ``(n,)``."""
        return factorize(self.cases["reference"])[0]

    @cached_property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether each edit did not generalize, ``(n,)``."""
        return (self.cases["outcome"] != "generalized").to_numpy()

    def risk(self, name: str) -> FLOATS:
        """Return the risk of each edit not to generalize, ``(n,)``, by the name of the forecast."""
        if name == NEAREST:
            return self.cases["nearest_risk"].to_numpy(float)
        if name == WEIGHT:
            return -self.cases["weight_reference"].to_numpy(float)
        return np.bincount(self.group)[self.group].astype(float)

    def is_judged(self, within: bool = False) -> bool:
        """Return whether enough edits generalized, and did not, for an AUROC to mean something.

        With `within`, whether there are enough such pairs of edits with one reference.
        """
        if self.relation == NEVER_GENERALIZES:
            return False
        if within:
            is_pair = self.group[self.failed][:, None] == self.group[~self.failed]
            return int(is_pair.sum()) >= MIN_PAIRS
        n_failed = int(self.failed.sum())
        return MIN_PER_CLASS <= n_failed <= len(self.failed) - MIN_PER_CLASS


def read_edits(results: Path) -> list[EditRun]:
    """Read the edits of all LMs."""
    found = []
    for lm in LMS:
        for sample, method in ("outcomes", "lora"), ("outcomes", "full"), ("balanced", "lora"):
            for relation in PLAN["edited"]:
                name = f"{method}_{relation.replace('->', '_to_')}"
                files = sorted((results / lm).glob(f"{sample}*_{name}.csv"))
                runs = [load(lm, file.stem, results) for file in files]
                if files:
                    kept = [
                        fmean(run["controls"][kind]["unchanged"] for run in runs)
                        for kind in ("color", "pet")
                    ]
                    about = lm, arrow(relation), method, SAMPLES[sample]
                    found.append(EditRun(*about, *kept, read_cases(*files)))
    return found


def read_cases(*files: Path) -> DataFrame:
    """Read tables of cases, one below the other."""
    text = dict.fromkeys(("subject", "source_answer", "reference"), str)
    tables = [read_csv(file, keep_default_na=False, dtype=text) for file in files]
    return concat(tables, ignore_index=True)


@dataclass(frozen=True)
class Outcomes:
    """How often edits carry over, how often baselines are right, and what else changes.

    Numbers by answer are means over distinct sets of right answers; `lead` is that over the better
    baseline, with an interval over them (Student's t).
    """

    lm: str = column("LM")
    relation: str = column("edits of")
    method: str = column()
    sample: str = column()
    edits: int = column(format="d")
    answers: int = column("right answers", "d")
    hallucinated: float = column(format=".0%")
    generalized: float = column(format=".0%")
    constant: float = column("best constant", ".0%")
    nearest_word: float = column(format=".0%")
    by_answer: float = column("by answer: generalized", ".0%")
    constant_by_answer: float = column("best constant", ".0%")
    nearest_by_answer: float = column("nearest word", ".0%")
    lead: Estimate = column("lead", "+.0%")
    color: float = column("same color", ".0%")
    pet: float = column("same pet", ".0%")
    paper: float | None = column("generalized, paper", ".0%")


def outcomes_of(run: EditRun) -> Outcomes:
    """Return the outcomes of the edits of a run."""
    labels = run.cases["reference"].str.split("|")
    constant = labels.explode().value_counts().index[0]
    right = DataFrame(
        {
            "generalized": ~run.failed,
            "constant": labels.map(lambda answers: constant in answers),
            "nearest_word": run.risk(NEAREST) < 0,
        }
    )
    by_edit = right.mean()
    by_answer = right.groupby(run.group).mean()
    shares = by_answer.mean()
    best = shares[["constant", "nearest_word"]].idxmax()
    return Outcomes(
        lm=run.lm,
        relation=run.relation,
        method=run.method,
        sample=run.sample,
        edits=len(right),
        answers=len(by_answer),
        hallucinated=(run.cases["outcome"] == "hallucinated").mean(),
        **by_edit,
        by_answer=shares["generalized"],
        constant_by_answer=shares["constant"],
        nearest_by_answer=shares["nearest_word"],
        lead=mean_estimate(by_answer["generalized"] - by_answer[best]),
        color=run.color,
        pet=run.pet,
        paper=of_paper("generalized", run.relation.replace("→", "->")),
    )


def interval(values: FLOATS) -> Estimate:
    """Return a score with its 95 % interval, from the score and those of samples."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high))


def drawn(group: npt.NDArray[np.int64], n_samples: int, rng: np.random.Generator) -> FLOATS:
    """Return how often each group is in the data, 1, and in each sample of groups.

    The shape is ``(1 + n_samples, n_groups)``.
    """
    n = int(group.max()) + 1
    samples = rng.multinomial(n, np.full(n, 1 / n), size=n_samples)
    return np.concatenate([np.ones((1, n)), samples])


def areas(
    values: FLOATS,
    failed: npt.NDArray[np.bool_],
    group: npt.NDArray[np.int64],
    weights: FLOATS,
    within: bool = False,
) -> FLOATS:
    """Return the AUROC of a risk for edits that failed, in each sample of references.

    The risk, whether an edit failed, and the number of its reference are ``(n,)``; `weights` are
    those of `drawn`. With `within`, it is over pairs with one reference; NaN without any.
    """
    above = values[failed][:, None]
    below = values[~failed]
    order = (above > below) + (above == below) / 2
    first = group[failed]
    second = group[~failed]
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


def mean_areas(runs: Sequence[EditRun], risk: str, within: bool = False) -> FLOATS:
    """Return the AUROC of a risk, mean over relations, and in samples: ``(1 + N_RESAMPLES,)``.

    Each sample has as many relations, and of each as many references. The samples are the same
    ones at each call.
    """
    rng = np.random.default_rng(0)
    n = len(runs)
    chosen = rng.integers(n, size=(n, N_RESAMPLES))
    found = [
        areas(run.risk(risk), run.failed, run.group, drawn(run.group, n * N_RESAMPLES, rng), within)
        for run in runs
    ]
    samples = np.array([area[1:].reshape(n, N_RESAMPLES) for area in found])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sample without pairs
        means = np.nanmean(samples[chosen, np.arange(n)[:, None], np.arange(N_RESAMPLES)], 0)
    return np.concatenate([[np.mean([area[0] for area in found])], means])


@dataclass(frozen=True)
class Forecasts:
    """AUROC of forecasts of edits that do not generalize, means over the relations of an LM.

    The lead of the nearest word is that over the better of the two others. Intervals are over
    references, and over the relations, of which there are few.
    """

    sample: str = column()
    lm: str = column("LM")
    method: str = column()
    among: str = column()
    relations: int = column(format="d")
    nearest_word: Estimate = column(NEAREST, ".2f")
    weight: float = column(WEIGHT, ".2f")
    count: float = column(COUNT, ".2f")
    lead: Estimate = column("lead of the nearest word", "+.2f")
    weight_lead: Estimate = column("lead of −W over the count", "+.2f")


def forecasts_of(runs: Sequence[EditRun]) -> Iterator[Forecasts]:
    """Yield the AUROC of forecasts among all edits, and among those of one reference."""
    for within in (False, True):
        judged = sorted(
            (run for run in runs if run.is_judged(within)), key=lambda run: run.relation
        )
        if not judged:
            continue
        nearest, weight, count = (
            mean_areas(judged, name, within) for name in (NEAREST, WEIGHT, COUNT)
        )
        yield Forecasts(
            runs[0].sample,
            runs[0].lm,
            runs[0].method,
            "edits of one reference" if within else "all edits",
            len(judged),
            interval(nearest),
            float(weight[0]),
            float(count[0]),
            interval(nearest - max(weight, count, key=lambda area: area[0])),
            interval(weight - count),
        )


@dataclass(frozen=True)
class Gradients:
    """Label-wise r of ``W · ΔF_source`` and ``ΔF_target`` over edits, and its nulls."""

    lm: str = column("LM")
    relation: str = column("edits of")
    edits: int = scored("n_edits", "edits", "d")
    first: float = scored("pair.gradient_correlation", "first step")
    permuted: float = scored("pair.permuted_gradient_correlation", "permuted W")
    color: float = scored("color.gradient_correlation", "city→color")
    all_steps: float = scored("pair.gradient_correlation_all_steps", "all ten steps")
    color_all_steps: float = scored("color.gradient_correlation_all_steps", "city→color, all steps")


def gradients(results: Path) -> Iterator[Gradients]:
    """Yield the gradient r of each LM and relation."""
    for lm in LMS:
        for relation in PLAN["edited"]:
            found = load(lm, f"lora_{relation.replace('->', '_to_')}", results)
            if found:
                of = found["gradients"]
                numbers = {**found, "pair": of[relation], "color": of["city->color"]}
                yield record(Gradients, numbers, lm=lm, relation=arrow(relation))


@dataclass(frozen=True)
class Ripple:
    """What edits of city→country do after a step, means over seeds of means by answer.

    `low` and `high` are the lowest and the highest *specific* of a seed.
    """

    lm: str = column("LM")
    people: str = column()
    method: str = column()
    seeds: int = column("", "d")
    step: int = column("", "d")
    learned: float = column("", ".0%")
    generalized: float = column("", ".0%")
    leak: float = column("", ".0%")
    specific: float = column("", ".0%")
    low: float = column("lowest seed", ".0%")
    high: float = column("highest seed", ".0%")
    color: float = column("same color", ".0%")
    pet: float = column("same pet", ".0%")


RIPPLES = {
    "leak{}_names_city_to_country": ("names", "lora"),
    "leak{}_lora_city_to_country": ("any string", "lora"),
    "leak{}_full_city_to_country": ("any string", "full"),
}
"""Names of runs: of whom the edits and the other people are, and how the edits are trained."""


def ripples(results: Path) -> Iterator[Ripple]:
    """Yield what edits do by step on all LMs."""
    for lm in LMS:
        for name, about in RIPPLES.items():
            files = sorted((results / lm).glob(name.format("*") + ".json"))
            by_seed = [load(lm, file.stem, results).get("by_step", ()) for file in files]
            for rows in zip(*by_seed, strict=True):
                means = DataFrame(list(rows)).select_dtypes("number").mean()
                specific = [row["specific"] for row in rows]
                yield Ripple(
                    lm,
                    *about,
                    seeds=len(rows),
                    step=rows[0]["step"],
                    learned=means["source_learned"],
                    generalized=means["leak"] + means["specific"],
                    leak=means["leak"],
                    specific=means["specific"],
                    low=min(specific),
                    high=max(specific),
                    color=fmean(row["controls"]["color"] for row in rows),
                    pet=fmean(row["controls"]["pet"] for row in rows),
                )
