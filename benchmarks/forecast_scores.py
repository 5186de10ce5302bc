"""Scores of forecasts against the outcomes of training, from the files of ``forecast.py``.

`combined` is fitted on other relations of other LMs. The one choice made on data that is judged
here is the step's length, on SmolLM2's LoRA edits.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from forecast_baselines import BASELINES
from matplotlib.figure import Figure
from numbers_file import read_numbers
from real_lm_tables import edits_of
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from lincorr_lightning.finetune.optimizer_step import STEP_SCALE
from lincorr_lightning.finetune.outcome_model import outcome_features
from lincorr_lightning.functional import Outcome, risk
from lincorr_lightning.results.style import GREY, finish, new_figure, plain_axes
from lincorr_lightning.results.tables import markdown_table

FLOATS = npt.NDArray[np.float64]
N_RESAMPLES = 1000
OURS = ("map_0", "map_auto", "optimizer_step", "combined")
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
        repeated: The same edits' logit of the reference's probability, and their outcome, in a
            second training from other adapters; None if there was none.
    """

    lm: str
    method: str
    relation: str
    arrays: dict[str, npt.NDArray[Any]]
    training_seconds: float
    repeated: tuple[FLOATS, npt.NDArray[np.int64]] | None = None

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """Whether each edit did not generalize."""
        return np.asarray(self.arrays["outcome"] != GENERALIZED)

    @property
    def is_judged(self) -> bool:
        """Whether enough edits generalized, and did not, for an AUROC to mean something."""
        return bool(MIN_PER_CLASS <= self.failed.sum() <= len(self.failed) - MIN_PER_CLASS)

    def logits(self, name: str) -> FLOATS:
        """Return the target logits that a forecaster predicts, ``(n, n_target)``."""
        key = {"answer_before": "before", "optimizer_step": f"predicted/{STEP}"}.get(name)
        return self.arrays[key or f"predicted/{name}"].astype(float)

    def risk(self, name: str) -> FLOATS:
        """Return the risk of each edit by a forecaster or baseline."""
        if name in BASELINES:
            return self.arrays[f"risk/{name}"].astype(float)
        logits = torch.from_numpy(self.logits(name))
        return np.asarray(risk(logits, torch.from_numpy(self.arrays["reference"])).numpy())

    def accuracy(self, name: str) -> float:
        """Return how often the predicted answer is that after training."""
        return float(np.mean(self.logits(name).argmax(1) == self.arrays["after"]))

    @property
    def most_frequent(self) -> float:
        """Share of the most frequent answer after training."""
        return float(np.bincount(self.arrays["after"]).max() / len(self.failed))

    def features(self) -> FLOATS:
        """Return the inputs of the package's `OutcomeModel`."""
        logits = (self.logits(name) for name in ("answer_before", "map_auto", "optimizer_step"))
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
        found.append(
            ForecastRun(file.parent.name, method, relation, content, run["seconds"], repeated)
        )
    return found


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


def mean_areas(
    failed: Sequence[npt.NDArray[np.bool_]], risks: Sequence[FLOATS]
) -> tuple[float, FLOATS]:
    """Return the AUROC, mean over runs, and those of samples of the edits (bootstrap).

    The samples are the same ones at each call.
    """
    rng = np.random.default_rng(0)
    means = []
    for _ in range(N_RESAMPLES):
        areas = []
        for truth, values in zip(failed, risks, strict=True):
            rows = rng.integers(len(truth), size=len(truth))
            if 0 < truth[rows].sum() < len(rows):
                areas.append(roc_auc_score(truth[rows], values[rows]))
        means.append(np.mean(areas))
    own = np.mean([roc_auc_score(t, r) for t, r in zip(failed, risks, strict=True)])
    return float(own), np.array(means)


def interval(
    failed: Sequence[npt.NDArray[np.bool_]], risks: Sequence[FLOATS]
) -> tuple[float, float, float]:
    """Return the mean AUROC over runs, with its 95 % interval over edits."""
    own, means = mean_areas(failed, risks)
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


def tables(results: Path) -> str:
    """Return all tables."""
    everything = load(results)
    makers = (_relations, _means, answer_table, _repeated, _left_out, _costs, _scales)
    parts = [make(everything) for make in makers]
    return "\n\n".join(parts)


def readme_table(everything: Sequence[ForecastRun]) -> str:
    """Return the AUROC of each risk, mean over relations, with its interval."""
    shown = ("answer_before", "gradient_similarity", "map_0", "map_auto", "optimizer_step",
             "combined")  # fmt: skip
    return _means(everything, shown)


def answer_table(everything: Sequence[ForecastRun]) -> str:
    """Return how often a forecast names the answer after training, and whether it is calibrated.

    The Brier score is that of the probabilities of the three outcomes, ``sum (p - truth)^2``; that
    of the shares is of a forecast that knows how often each outcome occurs.
    """
    names = ("answer_before", "map_0", "map_auto", "optimizer_step")
    rows: list[list[Any]] = []
    for edits in everything:
        p = combined(edits, everything)
        truth = np.eye(3)[edits.arrays["outcome"]]
        scores = [((one - truth) ** 2).sum(1).mean() for one in (p, truth.mean(0))]
        rows.append(
            [edits.lm, edits.method, edits.relation.replace("->", "→"),
             f"{edits.most_frequent:.0%}", *(f"{edits.accuracy(name):.0%}" for name in names),
             *("" if np.isnan(score) else f"{score:.2f}" for score in scores)]
        )  # fmt: skip
    return markdown_table(
        ["LM", "method", "relation", "most_frequent", *names, "Brier, combined",
         "Brier, shares"],
        rows,
    )  # fmt: skip


def reliability_figure(everything: Sequence[ForecastRun]) -> Figure:
    """Draw the share of edits that generalize over the probability that `combined` gives them."""
    figure = new_figure(
        6.4,
        3.2,
        "Reliability of the probability that an edit generalizes",
        "Deciles of the edits of each LM; each LM's are by a fit on other relations of other LMs.",
    )
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=0.8)
    for lm, method in dict.fromkeys((e.lm, e.method) for e in everything):
        own = [e for e in everything if (e.lm, e.method) == (lm, method)]
        p = np.concatenate([combined(e, everything)[:, GENERALIZED] for e in own])
        right = np.concatenate([~e.failed for e in own])[np.isfinite(p)]
        p = p[np.isfinite(p)]
        deciles = np.array_split(p.argsort(), 10)
        if len(p):
            axes.plot(
                [p[rows].mean() for rows in deciles], [right[rows].mean() for rows in deciles],
                marker="o", markersize=3, label=f"{lm}, {method}",
            )  # fmt: skip
    plain_axes(axes, "", "probability", "share that generalized")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    return finish(figure)


def _risks(edits: ForecastRun, everything: Sequence[ForecastRun]) -> dict[str, FLOATS]:
    names = ("answer_before", *BASELINES, *OURS[:-1])
    probabilities = combined(edits, everything)
    return {
        **{name: edits.risk(name) for name in names},
        "combined": -probabilities[:, GENERALIZED],
    }


def _relations(everything: Sequence[ForecastRun]) -> str:
    rows: list[list[Any]] = []
    header: list[str] = []
    for edits in everything:
        risks = _risks(edits, everything)
        header = list(risks)
        cells = [
            f"{roc_auc_score(edits.failed, risk):.2f}"
            if edits.is_judged and np.isfinite(risk).all()
            else ""
            for risk in risks.values()
        ]
        share = 1 - edits.failed.mean()
        rows.append(
            [edits.lm, edits.method, edits.relation.replace("->", "→"), len(edits.failed),
             f"{share:.0%}", *cells]
        )  # fmt: skip
    return markdown_table(["LM", "method", "relation", "edits", "generalized", *header], rows)


def _means(everything: Sequence[ForecastRun], shown: Sequence[str] = ()) -> str:
    rows: list[list[Any]] = []
    header: list[str] = []
    for lm, method in dict.fromkeys((e.lm, e.method) for e in everything):
        own = [e for e in everything if (e.lm, e.method) == (lm, method) and e.is_judged]
        if not own:
            continue
        risks = [_risks(e, everything) for e in own]
        header = [name for name in risks[0] if not shown or name in shown]
        cells = []
        for name in header:
            if not all(np.isfinite(each[name]).all() for each in risks):
                cells.append("")
                continue
            mean, low, high = interval([e.failed for e in own], [each[name] for each in risks])
            cells.append(f"{mean:.2f} ({low:.2f} to {high:.2f})")
        rows.append([lm, method, len(own), sum(len(e.failed) for e in own), *cells])
    return markdown_table(["LM", "method", "relations", "edits", *header], rows)


def _repeated(everything: Sequence[ForecastRun]) -> str:
    """Show how well a second training from other adapters predicts the outcome of the first.

    It knows all of the first but the adapters' weights before it.
    """
    rows: list[list[Any]] = []
    for edits in everything:
        if edits.repeated is None or not edits.is_judged:
            continue
        log_odds, outcomes = edits.repeated
        same = np.mean(outcomes == edits.arrays["outcome"])
        area = roc_auc_score(edits.failed, -log_odds)
        forecast = roc_auc_score(edits.failed, edits.risk("optimizer_step"))
        rows.append(
            [edits.lm, edits.method, edits.relation.replace("->", "→"), len(edits.failed),
             f"{same:.0%}", f"{area:.2f}", f"{forecast:.2f}"]
        )  # fmt: skip
    return markdown_table(
        ["LM", "method", "relation", "edits", "same outcome", "AUROC of the second training",
         "of optimizer_step"],
        rows,
    )  # fmt: skip


def _left_out(everything: Sequence[ForecastRun]) -> str:
    """Show what remains if edits above a risk are left out (``data.max_risk``)."""
    rows: list[list[Any]] = []
    for lm, method in dict.fromkeys((e.lm, e.method) for e in everything):
        own = [e for e in everything if (e.lm, e.method) == (lm, method)]
        p = np.concatenate([combined(e, everything)[:, HALLUCINATED] for e in own])
        if not np.isfinite(p).all():
            continue
        wrong = np.concatenate([e.arrays["outcome"] == HALLUCINATED for e in own])
        cells = [f"{wrong.mean():.0%}"]
        for limit in (0.7, 0.5, 0.3):
            kept = p <= limit
            share = f"{wrong[kept].mean():.0%}" if kept.any() else "-"
            cells.append(f"{share} of {kept.mean():.0%}")
        rows.append([lm, method, len(wrong), *cells])
    columns = ("LM", "method", "edits", "hallucinated", "max_risk .7", ".5", ".3")
    return markdown_table(columns, rows)


def _costs(everything: Sequence[ForecastRun]) -> str:
    """Show the time of forecasts, as shares of the training that they spare."""
    names = ("maps", "step", "gradient_similarity", "activation_similarity")
    rows = [
        [e.lm, e.method, e.relation.replace("->", "→"), len(e.failed),
         f"{e.training_seconds:.0f} s",
         *(f"{float(e.arrays[f'seconds/{name}']) / e.training_seconds:.2f}" for name in names)]
        for e in everything
    ]  # fmt: skip
    return markdown_table(("LM", "method", "relation", "edits", "training", *names), rows)


def _scales(everything: Sequence[ForecastRun]) -> str:
    """Show the length of the step: chosen on one LM, looked up on the others."""
    names = {n for e in everything for n in e.arrays if n.startswith("predicted/step")}
    keys = sorted((n.removeprefix("predicted/") for n in names), key=lambda key: float(key[5:]))
    rows = [
        [e.lm, e.method, e.relation.replace("->", "→"),
         *(f"{roc_auc_score(e.failed, e.risk(key)):.2f}, {e.accuracy(key):.0%}" for key in keys)]
        for e in everything if e.is_judged
    ]  # fmt: skip
    return markdown_table(["LM", "method", "relation", *keys], rows)
