"""Scores of forecasts against the outcomes of training, from the files of ``forecast.py``.

Probabilities are fitted on other relations of other LMs. Two choices were made on data that is
judged here: the step's length, on SmolLM2's LoRA edits, and that the package's probabilities use
the step alone, on all LMs. Edits with one reference mostly end alike, so that intervals are over
references and, of means, over relations.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pandas import DataFrame, concat, factorize
from scipy.stats import rankdata, zscore
from sklearn.linear_model import LogisticRegression

from benchmarks.common import read_csv
from benchmarks.real_lms.forecast_baselines import BASELINES
from benchmarks.real_lms.tables import edits_of
from lincorr_lightning.finetune.forecasts import outcome_features
from lincorr_lightning.finetune.optimizer_step import STEP_SCALE
from lincorr_lightning.functional import Outcome, risk

FLOATS = npt.NDArray[np.float64]
N_RESAMPLES = 1000
COUNT, WEIGHT, VOCABULARY = "same_reference", "minus_reference_weight", "vocabulary"
FORWARD = ("in_context", "popularity", COUNT, VOCABULARY)  # at most a forward pass of an edit
TOGETHER = (*FORWARD, "gradient_similarity", WEIGHT)
PROBABILITY, CHEAP, BOTH = "probability", "baselines together", "baselines and step"
FEWER = "in context, popularity, count, vocabulary"
FITS = {PROBABILITY: ("optimizer_step",), FEWER: FORWARD, CHEAP: TOGETHER,
        BOTH: (*TOGETHER, "optimizer_step")}  # fmt: skip
SINGLE = ("answer_before", *BASELINES, COUNT, WEIGHT, VOCABULARY, "map_0", "map_auto", "in_context")
RISKS = (*SINGLE, FEWER, CHEAP, "optimizer_step", PROBABILITY, BOTH)
# Trainings of the same edits: 1 to 3 steps, and all ten from other adapters.
OTHER_TRAININGS = ("steps1", "steps2", "steps3", "repeated")
STEP = f"step_{STEP_SCALE:g}"
GENERALIZED, HALLUCINATED = Outcome.GENERALIZED.code, Outcome.HALLUCINATED.code
MIN_PER_CLASS, MIN_PAIRS = 10, 20


@dataclass(frozen=True)
class ForecastRun:
    """The edits of one run, with their forecasts and outcomes.

    Attributes:
        lm: Name of the LM.
        method: full or lora.
        relation: The relation, as city->country.
        arrays: See ``collect`` of ``forecast.py``, and `read_cases`.
        fitted: Probability of each `Outcome` by the fits of `FITS`, ``(n, 3)``; empty if there are
            no edits to fit a model on.
    """

    lm: str
    method: str
    relation: str
    arrays: dict[str, npt.NDArray[Any]]
    fitted: Mapping[str, FLOATS] = field(default_factory=dict)

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether each edit did not generalize."""
        return np.asarray(self.arrays["outcome"] != GENERALIZED)

    @property
    def hallucinated(self) -> npt.NDArray[np.bool_]:
        """Whether each edit hallucinated."""
        return np.asarray(self.arrays["outcome"] == HALLUCINATED)

    def is_judged(self, within: bool = False) -> bool:
        """Whether enough edits generalized, and did not, for an AUROC to mean something.

        With `within`, whether there are enough such pairs of edits with one reference.
        """
        group, failed = self.arrays["group"], self.failed
        if within:
            return int((group[failed][:, None] == group[~failed]).sum()) >= MIN_PAIRS
        return bool(MIN_PER_CLASS <= failed.sum() <= len(failed) - MIN_PER_CLASS)

    def logits(self, name: str) -> FLOATS:
        """Return the target logits that a forecaster predicts, ``(n, n_target)``."""
        key = {"answer_before": "before", "optimizer_step": f"predicted/{STEP}"}.get(name)
        return self.arrays[key or f"predicted/{name}"].astype(float)

    def risk(self, name: str, truth: str = "failed") -> FLOATS:
        """Return the risk of each edit by a forecaster or baseline, ``(n,)``.

        `truth` is ``failed`` or ``hallucinated``, which have probabilities of their own.

        Raises:
            KeyError: It was not made of these edits.
        """
        if name in FITS:
            p = self.fitted[name]
            return p[:, HALLUCINATED] if truth == "hallucinated" else 1 - p[:, GENERALIZED]
        if f"risk/{name}" in self.arrays:
            return self.arrays[f"risk/{name}"].astype(float)
        logits = torch.from_numpy(self.logits(name))
        return np.asarray(risk(logits, torch.from_numpy(self.arrays["reference"])).numpy())

    def hits(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each predicted answer is that after training, ``(n,)``."""
        return np.asarray(self.logits(name).argmax(1) == self.arrays["after"])

    def in_context(self) -> npt.NDArray[np.bool_]:
        """Return whether the LM gives the reference in context, ``(n,)``."""
        leading = self.logits("in_context").argmax(1)
        return np.asarray(self.arrays["reference"][np.arange(len(leading)), leading])

    @property
    def most_frequent(self) -> float:
        """Share of the most frequent answer after training."""
        return float(np.bincount(self.arrays["after"]).max() / len(self.failed))

    def features(self, inputs: Sequence[str] = FITS[PROBABILITY]) -> FLOATS:
        """Return the inputs of a fit: of the step and in context those of `OutcomeModel`.

        The others, whose scales differ between LMs and relations, are ranks, standardized.
        """
        before, reference = self.logits("answer_before"), self.arrays["reference"]

        def columns(name: str) -> FLOATS:
            if name not in ("optimizer_step", "in_context"):
                return np.nan_to_num(zscore(rankdata(self.risk(name))))[:, None]
            three = map(torch.from_numpy, (before, self.logits(name), reference))
            return np.asarray(outcome_features(*three).numpy())

        return np.concatenate([columns(name) for name in inputs], 1)


def load(results: Path) -> list[ForecastRun]:
    """Read all edits that have been forecast, and fit their probabilities."""
    return with_fits(_read(results.glob("*/outcomes_*.npz")))


def load_balanced(results: Path, known: Sequence[ForecastRun]) -> list[ForecastRun]:
    """Read new edits, few of each reference, all seeds of a relation together.

    Nothing was chosen on them: fits are those on the `known` edits of other LMs and relations.
    """
    return with_fits(_read(results.glob("*/balanced*.npz")), known)


def _read(files: Iterable[Path]) -> list[ForecastRun]:
    by_relation: dict[tuple[str, ...], list[Path]] = {}
    for file in sorted(files):
        by_relation.setdefault((file.parent.name, *edits_of(file.stem)), []).append(file)
    found = []
    for about, own in by_relation.items():
        parts = [np.load(file) for file in own]
        names = [name for name in parts[0] if parts[0][name].ndim]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in names}
        cases = read_cases(*(file.with_suffix(".csv") for file in own))
        found.append(ForecastRun(*about, arrays | cases))
    return found


def read_cases(*files: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the number of each edit's reference, ``group``, and what only the cases have.

    That is ``risk/NAME`` of the number of edits that share the reference, of minus W of the
    reference, of the vocabulary alone, and of other trainings: minus the probability that they give
    the reference.

    Raises:
        SystemExit: Another training is not of these edits.
    """
    (file, *_), cases = files, concat(map(read_table, files))
    group = factorize(cases["reference"])[0]
    found = {"group": group, f"risk/{COUNT}": np.bincount(group)[group],
             f"risk/{WEIGHT}": -cases["weight_reference"].to_numpy(),
             f"risk/{VOCABULARY}": cases["vocabulary_risk"].to_numpy()}  # fmt: skip
    for name in OTHER_TRAININGS:
        other = file.with_name(file.name.replace("outcomes", name, 1))
        if other != file and other.exists():
            rows, own = read_table(other), ["subject", "source_answer"]
            if not rows[own].equals(cases[own]):
                raise SystemExit(f"{other} has other edits than {file}: make both by one plan")
            found[f"risk/{name}"] = -rows["probability_reference_after"].to_numpy()
    return found


def read_table(file: Path) -> DataFrame:
    """Read a table of cases."""
    text = dict.fromkeys(("subject", "source_answer", "reference"), str)
    return read_csv(file, keep_default_na=False, dtype=text)


def with_fits(
    runs: Sequence[ForecastRun], known: Sequence[ForecastRun] | None = None
) -> list[ForecastRun]:
    """Return the runs with the probabilities that edits of other relations of other LMs give.

    They are those of the `known` runs, or of the runs themselves.
    """
    found = []
    for run in runs:
        others = [
            one
            for one in known or runs
            if one.lm != run.lm and one.relation != run.relation and one.method == run.method
        ]
        fitted = {name: probabilities(run, others, inputs) for name, inputs in FITS.items()}
        found.append(replace(run, fitted=fitted if others else {}))
    return found


def fit(
    everything: Sequence[ForecastRun], inputs: Sequence[str] = FITS[PROBABILITY]
) -> LogisticRegression:
    """Fit the probabilities of the outcomes on some edits; every run has the same weight.

    Strongly regularized: a prior that helps for one relation misleads for another.
    """
    model = LogisticRegression(C=0.01, max_iter=1000)
    weights = [np.full(len(e.failed), 1 / len(e.failed)) for e in everything]
    return model.fit(
        np.concatenate([e.features(inputs) for e in everything]),
        np.concatenate([e.arrays["outcome"] for e in everything]),
        np.concatenate(weights) * 100,
    )


def probabilities(
    edits: ForecastRun, others: Sequence[ForecastRun], inputs: Sequence[str] = FITS[PROBABILITY]
) -> FLOATS:
    """Return the probabilities of the outcomes, ``(n, 3)``, by a fit on other edits."""
    found = np.zeros((len(edits.failed), len(Outcome)))
    if others:
        model = fit(others, inputs)
        found[:, model.classes_] = model.predict_proba(edits.features(inputs))
    return found


def stored_model(everything: Sequence[ForecastRun], method: str) -> dict[str, Any]:
    """Return the model of all edits by a method, as ``outcome_model.json`` holds it."""
    own = [e for e in everything if e.method == method]
    model = fit(own)
    coefficients = np.zeros((len(Outcome), model.coef_.shape[1]))
    intercepts = np.full(len(Outcome), -20.0)  # an outcome that never occurred
    coefficients[model.classes_], intercepts[model.classes_] = model.coef_, model.intercept_
    return {
        "coefficients": coefficients.round(4).tolist(),
        "intercepts": intercepts.round(4).tolist(),
        "n_edits": sum(len(e.failed) for e in own),
        "lms": list(dict.fromkeys(e.lm for e in own)),
        "relations": list(dict.fromkeys(e.relation for e in own)),
    }


def drawn(group: npt.NDArray[Any], n_samples: int, rng: np.random.Generator) -> FLOATS:
    """Return how often each reference is in the data, 1, and in each sample of references.

    The shape is ``(1 + n_samples, n_groups)``.
    """
    n = int(group.max()) + 1
    samples = rng.multinomial(n, np.full(n, 1 / n), size=n_samples)
    return np.concatenate([np.ones((1, n)), samples])


def areas(
    truth: npt.NDArray[np.bool_], values: FLOATS, group: npt.NDArray[Any], weights: FLOATS,
    within: bool = False,
) -> FLOATS:  # fmt: skip
    """Return the AUROC in each sample of references, ``(n_samples,)``; NaN without pairs.

    With `within`, over pairs with one reference. `weights` are those of `drawn`.
    """
    above, below = values[truth][:, None], values[~truth]
    order = (above > below) + (above == below) / 2
    first, second = group[truth], group[~truth]
    with np.errstate(invalid="ignore"):
        if within:
            same = first[:, None] == second
            of_pair = weights[:, np.broadcast_to(first[:, None], same.shape)[same]]
            return np.asarray(of_pair @ order[same] / of_pair.sum(1))
        first, second = weights[:, first], weights[:, second]
        return np.asarray(((first @ order) * second).sum(1) / (first.sum(1) * second.sum(1)))


def known_effect(run: ForecastRun, weights: FLOATS | None = None, within: bool = True) -> FLOATS:
    """Return how much more often edits generalize whose reference the LM gives in context.

    Within references: the Mantel-Haenszel risk difference in each sample of them, or in the data.
    """
    group, known = run.arrays["group"] * within, run.in_context()
    weights = np.ones((1, group.max() + 1)) if weights is None else weights
    n = [np.bincount(group, one) for one in (known, ~known)]
    right = [np.bincount(group, one & ~run.failed) for one in (known, ~known)]
    both = (n[0] > 0) & (n[1] > 0)
    (n, m), (a, b) = ([one[both] for one in pair] for pair in (n, right))
    size = n * m / (n + m)
    with np.errstate(invalid="ignore"):
        return np.asarray(weights[:, both] @ (size * (a / n - b / m)) / (weights[:, both] @ size))


def mean_over_relations(
    runs: Sequence[ForecastRun], score: Callable[[ForecastRun, FLOATS], FLOATS]
) -> FLOATS:
    """Return a score, mean over relations, and those of samples: ``(1 + N_RESAMPLES,)``.

    Each sample has as many relations, and of each as many references. `score` takes a run and
    weights of its references. The samples are the same ones at each call.
    """
    if not runs:
        raise KeyError("no relation has enough edits")
    rng, n = np.random.default_rng(0), len(runs)
    chosen = rng.integers(n, size=(n, N_RESAMPLES))
    found = [score(run, drawn(run.arrays["group"], n * N_RESAMPLES, rng)) for run in runs]
    samples = np.array([one[1:].reshape(n, N_RESAMPLES) for one in found])
    places = np.arange(n)[:, None], np.arange(N_RESAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a sample without pairs
        means = np.nanmean(samples[chosen, *places], 0)
    return np.concatenate([[np.mean([one[0] for one in found])], means])


def area(run: ForecastRun, name: str, within: bool = False, truth: str = "failed") -> float:
    """Return the AUROC of a risk on the edits of one run."""
    group = run.arrays["group"]
    alike = np.ones((1, group.max() + 1))
    return float(areas(getattr(run, truth), run.risk(name, truth), group, alike, within)[0])


def mean_areas(runs: Sequence[ForecastRun], name: str, within: bool = False) -> FLOATS:
    """Return the AUROC of a risk, mean over relations, and those of samples."""

    def score(run: ForecastRun, weights: FLOATS) -> FLOATS:
        return areas(run.failed, run.risk(name), run.arrays["group"], weights, within)

    return mean_over_relations(runs, score)


def interval(values: FLOATS) -> tuple[float, float, float]:
    """Return a score with its 95 % interval, from the score and those of samples."""
    low, high = np.nanquantile(values[1:], [0.025, 0.975])
    return float(values[0]), float(low), float(high)
