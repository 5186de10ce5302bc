"""Scores of forecasts against the outcomes of training, from the files of ``forecast.py``.

`combined` is fitted on other relations of other LMs. Two choices were made on data that is judged
here: the step's length, on SmolLM2's LoRA edits, and that `combined` uses no map, on those of
SmolLM2 and Gemma.
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
from forecast_baselines import BASELINES
from numbers_file import read_numbers
from real_lm_tables import edits_of
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression

from lincorr_lightning.finetune.optimizer_step import STEP_SCALE
from lincorr_lightning.finetune.outcome_model import outcome_features
from lincorr_lightning.functional import Outcome, risk

FLOATS = npt.NDArray[np.float64]
N_RESAMPLES = 1000
RISKS = (
    "answer_before", *BASELINES, "map_0", "map_auto", "in_context", "optimizer_step", "combined"
)  # fmt: skip
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
        training_seconds: Duration of the training.
        probabilities: Probability of each `Outcome` by `combined`, ``(n, 3)``; NaN if there are no
            edits to fit it on.
        repeated: The same edits' logit of the reference's probability, and their outcome, in a
            second training from other adapters; None if there was none.
    """

    lm: str
    method: str
    relation: str
    arrays: dict[str, npt.NDArray[Any]]
    training_seconds: float
    probabilities: FLOATS
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

    def risk(self, name: str) -> FLOATS:
        """Return the risk of each edit by a forecaster or baseline, ``(n,)``."""
        if name == "combined":
            return -self.probabilities[:, GENERALIZED]
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

    def features(self) -> FLOATS:
        """Return the inputs of the package's `OutcomeModel`."""
        logits = (self.logits(name) for name in ("answer_before", "in_context", "optimizer_step"))
        reference = torch.from_numpy(self.arrays["reference"])
        found = outcome_features(*(torch.from_numpy(each) for each in logits), reference)
        return np.asarray(found.numpy())


def load(results: Path) -> list[ForecastRun]:
    """Read all edits that have been forecast."""
    found = []
    for file in sorted(results.glob("*/outcomes_*.npz")):
        method, relation = edits_of(file.stem)
        with np.load(file) as arrays:
            content = {name: arrays[name] for name in arrays.files}
        run = read_numbers(file.with_suffix(".json"))["results"]
        again = file.with_name(file.name.replace("outcomes", "repeated", 1)).with_suffix(".csv")
        repeated = read_outcomes(again) if again.exists() else None
        unknown = np.full((len(content["outcome"]), len(Outcome)), np.nan)
        found.append(
            ForecastRun(
                file.parent.name, method, relation, content, run["seconds"], unknown, repeated
            )
        )
    return with_probabilities(found)


def with_probabilities(runs: Sequence[ForecastRun]) -> list[ForecastRun]:
    """Return the runs with the probabilities of `combined`."""
    return [replace(run, probabilities=combined(run, runs)) for run in runs]


def read_outcomes(cases: Path) -> tuple[FLOATS, npt.NDArray[np.int64]]:
    """Return the log-odds of the reference after each edit, and its outcome."""
    with cases.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    p = np.array([float(row["probability_reference_after"]) for row in rows]).clip(1e-9, 1 - 1e-9)
    outcomes = [Outcome(row["outcome"]).code for row in rows]
    return np.log(p / (1 - p)), np.array(outcomes)


def fit(everything: Sequence[ForecastRun]) -> LogisticRegression:
    """Fit the probabilities of the outcomes on some edits; every run has the same weight.

    Strongly regularized: a prior that helps for one relation misleads for another.
    """
    model = LogisticRegression(C=0.01, max_iter=1000)
    weights = [np.full(len(e.failed), 1 / len(e.failed)) for e in everything]
    return model.fit(
        np.concatenate([e.features() for e in everything]),
        np.concatenate([e.arrays["outcome"] for e in everything]),
        np.concatenate(weights) * 100,
    )


def combined(edits: ForecastRun, everything: Sequence[ForecastRun]) -> FLOATS:
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
    model = fit(others)
    found[:, model.classes_] = model.predict_proba(edits.features())
    return found


def stored_model(everything: Sequence[ForecastRun], method: str) -> dict[str, Any]:
    """Return the model of all edits by a method, as ``outcome_model.json`` holds it."""
    own = [e for e in everything if e.method == method]
    model = fit(own)
    coefficients = np.zeros((len(Outcome), model.coef_.shape[1]))
    intercepts = np.full(len(Outcome), -20.0)  # an outcome that never occurred
    coefficients[model.classes_], intercepts[model.classes_] = model.coef_, model.intercept_
    lms = ", ".join(dict.fromkeys(e.lm for e in own))
    relations = ", ".join(dict.fromkeys(e.relation for e in own))
    return {
        "coefficients": coefficients.round(4).tolist(),
        "intercepts": intercepts.round(4).tolist(),
        "fitted_on": f"{sum(len(e.failed) for e in own)} edits of {relations} on {lms}",
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
