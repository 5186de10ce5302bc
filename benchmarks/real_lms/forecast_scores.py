"""Scores of forecasts against the outcomes of training, from the files of ``forecast.py``.

Probabilities are fitted on other relations of other LMs. Two choices were made on data that is
judged here: the step's length, on SmolLM2's LoRA edits, and that the probabilities use the step
alone, on all LMs: with the answer in context they are no better beyond the error, and misleading on
an LM that does not read its context (the tiny world).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression

from benchmarks.real_lms.forecast_baselines import BASELINES
from benchmarks.real_lms.tables import edits_of
from lincorr_lightning.finetune.forecasts import outcome_features
from lincorr_lightning.finetune.optimizer_step import STEP_SCALE
from lincorr_lightning.functional import Outcome, risk

FLOATS = npt.NDArray[np.float64]
N_RESAMPLES = 1000
PROBABILITIES = {"probability": "probabilities", "probability, in context too": "with_context"}
FORECASTERS = ("map_0", "map_auto", "in_context", "optimizer_step", *PROBABILITIES)
RISKS = ("answer_before", *BASELINES, *FORECASTERS)
STEP = f"step_{STEP_SCALE:g}"
GENERALIZED, HALLUCINATED = Outcome.GENERALIZED.code, Outcome.HALLUCINATED.code
MIN_PER_CLASS = 10


@dataclass(frozen=True)
class ForecastRun:
    """The edits of one run, with their forecasts and outcomes.

    Attributes:
        lm: Name of the LM.
        method: full or lora.
        relation: The relation, as city->country.
        arrays: See ``collect`` of ``forecast.py``.
        probabilities: Probability of each `Outcome` from the step, ``(n, 3)``; NaN if there are no
            edits to fit a model on.
        with_context: The same from the step and the answer in context.
        repeated: The same edits' logit of the reference's probability, and their outcome, in a
            second training from other adapters; None if there was none.
    """

    lm: str
    method: str
    relation: str
    arrays: dict[str, npt.NDArray[Any]]
    probabilities: FLOATS
    with_context: FLOATS
    repeated: tuple[FLOATS, npt.NDArray[np.int64]] | None = None

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether each edit did not generalize."""
        return np.asarray(self.arrays["outcome"] != GENERALIZED)

    @property
    def hallucinated(self) -> npt.NDArray[np.bool_]:
        """Whether each edit hallucinated."""
        return np.asarray(self.arrays["outcome"] == HALLUCINATED)

    @property
    def is_judged(self) -> bool:
        """Whether enough edits generalized, and did not, for an AUROC to mean something."""
        return bool(MIN_PER_CLASS <= self.failed.sum() <= len(self.failed) - MIN_PER_CLASS)

    def logits(self, name: str) -> FLOATS:
        """Return the target logits that a forecaster predicts, ``(n, n_target)``."""
        key = {"answer_before": "before", "optimizer_step": f"predicted/{STEP}"}.get(name)
        return self.arrays[key or f"predicted/{name}"].astype(float)

    def risk(self, name: str, truth: str = "failed") -> FLOATS:
        """Return the risk of each edit by a forecaster or baseline, ``(n,)``.

        `truth` is ``failed`` or ``hallucinated``, which have probabilities of their own.
        """
        if name in PROBABILITIES:
            p: FLOATS = getattr(self, PROBABILITIES[name])
            return p[:, HALLUCINATED] if truth == "hallucinated" else 1 - p[:, GENERALIZED]
        if name in BASELINES:
            return self.arrays[f"risk/{name}"].astype(float)
        logits = torch.from_numpy(self.logits(name))
        return np.asarray(risk(logits, torch.from_numpy(self.arrays["reference"])).numpy())

    def hits(self, name: str) -> npt.NDArray[np.bool_]:
        """Return whether each predicted answer is that after training, ``(n,)``."""
        return np.asarray(self.logits(name).argmax(1) == self.arrays["after"])

    @property
    def most_frequent(self) -> float:
        """Share of the most frequent answer after training."""
        return float(np.bincount(self.arrays["after"]).max() / len(self.failed))

    @property
    def brier(self) -> FLOATS:
        """Square error of the probabilities, summed over the outcomes, ``(n,)``."""
        truth = np.eye(len(Outcome))[self.arrays["outcome"]]
        return np.asarray(((self.probabilities - truth) ** 2).sum(1))

    def features(self, with_context: bool = False) -> FLOATS:
        """Return the inputs of the package's `OutcomeModel`, and those in context on request."""
        reference = torch.from_numpy(self.arrays["reference"])
        names = ("optimizer_step", "in_context") if with_context else ("optimizer_step",)
        before, *others = (
            torch.from_numpy(self.logits(name)) for name in ("answer_before", *names)
        )
        found = [outcome_features(before, logits, reference).numpy() for logits in others]
        return np.concatenate(found, 1)


def load(results: Path) -> list[ForecastRun]:
    """Read all edits that have been forecast."""
    found = []
    for file in sorted(results.glob("*/outcomes_*.npz")):
        method, relation = edits_of(file.stem)
        with np.load(file) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        again = file.with_name(file.name.replace("outcomes", "repeated", 1)).with_suffix(".csv")
        repeated = read_outcomes(again) if again.exists() else None
        unknown = np.full((len(content["outcome"]), len(Outcome)), np.nan)
        found.append(
            ForecastRun(file.parent.name, method, relation, content, unknown, unknown, repeated)
        )
    return with_probabilities(found)


def with_probabilities(runs: Sequence[ForecastRun]) -> list[ForecastRun]:
    """Return the runs with their probabilities."""
    return [
        replace(
            run,
            probabilities=probabilities(run, runs),
            with_context=probabilities(run, runs, with_context=True),
        )
        for run in runs
    ]


def read_outcomes(cases: Path) -> tuple[FLOATS, npt.NDArray[np.int64]]:
    """Return the log-odds of the reference after each edit, and its outcome."""
    with cases.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    p = np.array([float(row["probability_reference_after"]) for row in rows]).clip(1e-9, 1 - 1e-9)
    outcomes = [Outcome(row["outcome"]).code for row in rows]
    return np.log(p / (1 - p)), np.array(outcomes)


def fit(everything: Sequence[ForecastRun], with_context: bool = False) -> LogisticRegression:
    """Fit the probabilities of the outcomes on some edits; every run has the same weight.

    Strongly regularized: a prior that helps for one relation misleads for another.
    """
    model = LogisticRegression(C=0.01, max_iter=1000)
    weights = [np.full(len(e.failed), 1 / len(e.failed)) for e in everything]
    return model.fit(
        np.concatenate([e.features(with_context) for e in everything]),
        np.concatenate([e.arrays["outcome"] for e in everything]),
        np.concatenate(weights) * 100,
    )


def probabilities(
    edits: ForecastRun, everything: Sequence[ForecastRun], with_context: bool = False
) -> FLOATS:
    """Return the probabilities of the outcomes, ``(n, 3)``.

    They are by a fit on edits of other relations of other LMs; NaN if there are none.
    """
    others = [
        e
        for e in everything
        if e.lm != edits.lm and e.relation != edits.relation and e.method == edits.method
    ]
    found = np.zeros((len(edits.failed), len(Outcome)))
    if not others:
        return np.full_like(found, np.nan)
    model = fit(others, with_context)
    found[:, model.classes_] = model.predict_proba(edits.features(with_context))
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


def areas(truth: npt.NDArray[np.bool_], values: FLOATS) -> FLOATS:
    """Return the AUROC of values along the last axis; NaN where all truths are the same.

    All samples of a bootstrap at once, where the package's `auroc` takes one.
    """
    n = truth.shape[-1]
    n_true = truth.sum(-1)
    # The share of pairs in order, by ranks (Mann and Whitney 1947).
    above = (rankdata(values, axis=-1) * truth).sum(-1) - n_true * (n_true + 1) / 2
    with np.errstate(invalid="ignore"):
        return np.asarray(above / (n_true * (n - n_true)))


def mean_areas(
    truths: Sequence[npt.NDArray[np.bool_]], risks: Sequence[FLOATS]
) -> tuple[float, FLOATS]:
    """Return the AUROC, mean over runs, and those of samples of the edits (bootstrap).

    The samples are the same ones at each call.
    """
    rng = np.random.default_rng(0)
    samples = []
    for truth, values in zip(truths, risks, strict=True):
        rows = rng.integers(len(truth), size=(N_RESAMPLES, len(truth)))
        samples.append(areas(truth[rows], values[rows]))
    own = [areas(truth, values) for truth, values in zip(truths, risks, strict=True)]
    return float(np.mean(own)), np.nanmean(samples, 0)


def interval(
    truths: Sequence[npt.NDArray[np.bool_]], risks: Sequence[FLOATS]
) -> tuple[float, float, float]:
    """Return the mean AUROC over runs, with its 95 % interval over edits."""
    own, means = mean_areas(truths, risks)
    low, high = np.quantile(means, [0.025, 0.975])
    return own, float(low), float(high)


def compare(runs: Sequence[ForecastRun], name: str, than: str) -> tuple[float, float, float]:
    """Return the AUROC of two risks, mean over runs, and the low end of their difference.

    That is of its 95 % interval over edits (bootstrap).
    """
    failed = [run.failed for run in runs]
    means = [mean_areas(failed, [run.risk(each) for run in runs]) for each in (name, than)]
    low = np.quantile(means[0][1] - means[1][1], 0.025)
    return means[0][0], means[1][0], float(low)


def mean_interval(values: FLOATS) -> tuple[float, float, float]:
    """Return a mean over edits, with its 95 % interval (bootstrap)."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(len(values), size=(N_RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(values.mean()), float(low), float(high)
