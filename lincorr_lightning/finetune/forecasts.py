"""Forecasts of edits, made before training and scored after it (paper, section 4.1)."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from lincorr_lightning import functional
from lincorr_lightning.finetune import edits as resolving
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.edit_files import SEPARATOR
from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.optimizer_step import logits_after_step
from lincorr_lightning.finetune.stacked_lora import StackedLoRA
from lincorr_lightning.functional import Outcome, auroc, auroc_within, risk
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map import artifact
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.layout import RowReader, relation_logits
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.results.table import number

RIDGES: tuple[float | Literal["auto"], ...] = (0.0, "auto")
N_SUBJECTS = 2000


@dataclass(frozen=True)
class Forecasts:
    """What each forecaster predicts for the target of each edit.

    The forecasters are ``map_0``, ``map_auto``, ...: W of that ridge (``map`` for a given W);
    ``in_context``: the LM as it is, with the new answer stated before the target prompt; and
    ``optimizer_step``: the LM after a step along the first update of the edit's optimizer.

    A cause is why an edit is not expected to generalize: ``imprecise W`` or ``low prior``, see
    `Cause`, or ``ambiguous reference`` if the expected answer may mean something right; empty if it
    is expected to generalize. Without a map there are none.
    """

    relation: str
    subjects: Sequence[str]
    source_answers: Sequence[str]
    references: Sequence[str]  #: Target labels of each edit's reference, joined by ``|``.
    labels: Sequence[str]  #: The n_target target labels.
    before: Tensor  #: Target logits before the edits, ``(n, n_target)``.
    reference_mask: Tensor  #: Target labels in each edit's reference, ``(n, n_target)`` bool.
    predicted: Mapping[str, Tensor]  #: Target logits by forecaster, ``(n, n_target)``.
    probabilities: Tensor | None = None  #: ``(n, n_outcomes)``, by an `OutcomeModel`.
    probabilities_from: str = ""  #: What that was fitted on, and how these edits differ.
    causes: Sequence[str] = ()
    reference_weights: Tensor | None = None  #: Of the first map, ``(n,)``, as in the table cases.
    vocabulary_risks: Tensor | None = None  #: ``(n,)``, as in the table cases.

    @property
    def default(self) -> str:
        """Name of the forecaster whose answers are shown first, the best one."""
        return "optimizer_step" if "optimizer_step" in self.predicted else "in_context"

    def leading(self, logits: Tensor) -> list[str]:
        """Return the target label that leads in each row of `before` or of predicted logits."""
        return [self.labels[i] for i in logits.argmax(1).tolist()]

    def risks(self, name: str) -> list[float]:
        """Return a forecaster's risk of each edit: how far a wrong label is ahead, in logits."""
        return risk(self.predicted[name], self.reference_mask).tolist()

    @property
    def baselines(self) -> dict[str, list[float]]:
        """Risks of each edit that use no forecast.

        ``same_reference`` is the number of edits that share its reference; ``vocabulary`` how much
        nearer a wrong label is in the LM's head than a right one; and, with a map,
        ``minus_reference_weight`` minus W of the reference (paper, figure 5).
        """
        counts = Counter(self.references)
        risks: dict[str, list[float]] = {"same_reference": [counts[one] for one in self.references]}
        if self.vocabulary_risks is not None:
            risks["vocabulary"] = self.vocabulary_risks.tolist()
        if self.reference_weights is not None:
            risks["minus_reference_weight"] = (-self.reference_weights).tolist()
        return risks

    def probability(self, outcome: Outcome) -> list[float]:
        """Return the probability of an outcome of each edit."""
        assert self.probabilities is not None
        return self.probabilities[:, outcome.code].tolist()

    def outcomes(self, name: str) -> list[Outcome]:
        """Return the outcome that a forecaster predicts for each edit."""
        leading = self.predicted[name].argmax(1)
        codes = functional.outcome_codes(self.before.argmax(1), leading, self.reference_mask)
        return [list(Outcome)[code] for code in codes.tolist()]

    def scores(
        self, answers_after: Sequence[str], outcomes: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Score the forecasters, and baselines that use no forecast.

        By forecaster, ``accuracy`` is that of the predicted answer, and ``auroc`` that of its risk
        against not generalizing (None if all or no edits generalized), ``auroc_within`` the same
        among edits of one reference; ``brier`` is the mean square error of the probabilities,
        summed over the outcomes. ``answer_before`` predicts the answer before the edit, with the
        risk there; ``most_frequent`` always the most frequent answer; `baselines` no answer.
        """
        failed = torch.tensor([outcome != Outcome.GENERALIZED for outcome in outcomes])
        n = len(answers_after)
        scores: dict[str, dict[str, float | None]] = {}

        def areas(risks: Tensor) -> dict[str, float | None]:
            within = auroc_within(risks, failed, self.references)
            return {"auroc": number(auroc(risks, failed)), "auroc_within": number(within)}

        for name, logits in {**self.predicted, "answer_before": self.before}.items():
            answers = zip(self.leading(logits), answers_after, strict=True)
            hits = sum(one == after for one, after in answers)
            scores[name] = {"accuracy": hits / n, **areas(risk(logits, self.reference_mask))}
        for name, risks in self.baselines.items():
            scores[name] = {"accuracy": None, **areas(torch.tensor(risks, dtype=torch.double))}
        if self.probabilities is not None:
            codes = torch.tensor([Outcome(outcome).code for outcome in outcomes])
            errors = self.probabilities - one_hot(codes, len(Outcome))
            scores["optimizer_step"]["brier"] = number(errors.square().sum(1).mean().item())
        (_, most_frequent), *_ = Counter(answers_after).most_common(1)
        alike = areas(torch.zeros(n))
        scores["most_frequent"] = {"accuracy": most_frequent / n, **alike, "auroc": 0.5}
        return scores


def forecast_edits(
    lm: LanguageModel, edits: Sequence[Edit], relation: TokenizedRelation,
    ridges: Sequence[float | str] = RIDGES, linear_map: str | None = None,
    n_subjects: int = N_SUBJECTS, training: EditTraining | None = None,
    adapters: StackedLoRA | None = None, reader: RowReader | None = None,
) -> Forecasts:  # fmt: skip
    """Forecast edits from the LM as it is now.

    A map is fitted for each of `ridges` (``auto`` chooses one on held-out subjects) on `n_subjects`
    other subjects than the edits', or read from the folder `linear_map`. `training`, how the edits
    are to be trained, is for ``optimizer_step`` and the probabilities; None leaves both out.
    `adapters` are those of that step, see `logits_after_step`; `reader` keeps the LM's joint rows
    that others have read.
    """
    subjects = [edit.subject for edit in edits]
    source, target = relation_logits(lm, relation, subjects)
    labels = torch.tensor([edit.label for edit in edits])
    mask, texts = resolving.reference_mask(edits, target.shape[1]), relation.target.texts
    maps: dict[str, LinearMap] = {}
    if linear_map is not None:
        maps = {"map": LinearMap.from_pretrained(linear_map, lm)}
        maps["map"].check_domains([relation.source, relation.target], lm)
        artifact.warn_of_fit_subjects(linear_map, subjects)
    elif ridges:
        others = artifact.sample_fitted_subjects(lm.tokenizer, n_subjects, subjects)
        names = [f"map_{one}" if isinstance(one, str) else f"map_{one:g}" for one in ridges]
        fitted = artifact.fit_linear_maps(lm, relation, others, ridges, reader=reader)
        maps = dict(zip(names, fitted, strict=True))
    weights = {name: one.weight(relation.name).cpu() for name, one in maps.items()}
    predicted = {
        name: functional.forecast_from_map(source, target, labels, weight)
        for name, weight in weights.items()
    }
    predicted["in_context"] = logits_in_context(lm, edits, relation)
    probabilities, origin = None, ""
    if training is not None:
        predicted["optimizer_step"] = logits_after_step(lm, edits, relation, training, adapters)
        model = outcome_model(training.method)
        stepped = predicted["optimizer_step"]
        probabilities = model.probabilities(outcome_features(target, stepped, mask))
        origin = model.describe(relation.name, training.summary)
    nearness = resolving.vocabulary_nearness(lm, relation)
    forecasts = Forecasts(
        relation.name, subjects, [edit.answer for edit in edits],
        [SEPARATOR.join(texts[i] for i in edit.reference) for edit in edits],
        texts, target, mask, predicted, probabilities, origin,
        vocabulary_risks=None if nearness is None else risk(nearness.T[labels], mask),
    )  # fmt: skip
    if not weights:
        return forecasts
    first, learned = next(iter(weights.values())), torch.ones(len(edits), dtype=torch.bool)
    chosen = weights.get("map_auto", first)
    causes = [*map(str, functional.attribute_causes(chosen, labels, mask, learned))]
    for i, answer in enumerate(predicted[forecasts.default].argmax(1).tolist()):
        if answer in edits[i].reference:
            causes[i] = ""
        elif relation.ambiguous_mask[answer, edits[i].label]:
            causes[i] = "ambiguous reference"
    of_reference = first.T[labels].masked_fill(~mask, -torch.inf).amax(1)
    return replace(forecasts, causes=causes, reference_weights=of_reference)


def logits_in_context(
    lm: LanguageModel, edits: Sequence[Edit], relation: TokenizedRelation
) -> Tensor:
    """Return the target logits when the new answer stands before the prompt, ``(n, n_target)``."""
    prompts = resolving.prompts_in_context(edits, relation)
    return lm.domain_logits(prompts, relation.target.token_ids).cpu()


@dataclass(frozen=True)
class OutcomeModel:
    """Predicts the probabilities of an edit's outcomes from where a step of its optimizer leads.

    A multinomial logistic regression, fitted on edits of several pretrained LMs
    (``benchmarks.real_lms.forecast --fit true``, which writes ``outcome_model.json``). Its inputs
    are probabilities, which mean the same on every LM and for every relation, where logits do not.
    """

    coefficients: Sequence[Sequence[float]]  #: A row of 2 for each outcome.
    intercepts: Sequence[float]
    n_edits: int
    lms: Sequence[str]
    relations: Sequence[str]
    training: str  #: How its edits were trained, see `EditTraining.summary`.
    step_scale: float  #: Length of the step, see ``STEP_SCALE``.

    def probabilities(self, features: Tensor) -> Tensor:
        """Return the probability of each outcome, ``(n, n_outcomes)``, from `outcome_features`."""
        coefficients, intercepts = map(features.new_tensor, (self.coefficients, self.intercepts))
        fitted = (features @ coefficients.T + intercepts).softmax(1)
        # An outcome that it was not fitted on has probability 0.
        return pad(fitted, (0, len(Outcome) - fitted.shape[1]))

    def describe(self, relation: str, training: str) -> str:
        """Say what the model was fitted on, and how other edits differ from that."""
        relations, lms = ", ".join(self.relations), ", ".join(self.lms)
        text = f"fitted on {self.n_edits} edits of {relations} on {lms}, trained by {self.training}"
        if relation not in self.relations:
            text += f"; {relation} is not among them"
        if training != self.training:
            text += f"; these are trained by {training}"
        return text


@cache
def outcome_model(method: str) -> OutcomeModel:
    """Return the model of edits that were trained by ``full`` or ``lora``."""
    file = files("lincorr_lightning.finetune") / "outcome_model.json"
    return OutcomeModel(**json.loads(file.read_text(encoding="utf-8"))[method])


def outcome_features(before: Tensor, by_step: Tensor, reference_mask: Tensor) -> Tensor:
    """Return the inputs of an `OutcomeModel`, ``(n, 2)``: log-odds after the optimizer's step.

    They are those of the reference, and of the answer before the edit; the target logits before and
    `by_step`, and the labels in each reference (bool), are ``(n, n_target)``.
    """
    p = by_step.softmax(1)
    of_answer_before = p.gather(1, before.argmax(1, keepdim=True))[:, 0]
    both = torch.stack([(p * reference_mask).sum(1), of_answer_before], 1)
    # Extreme log-odds would dominate the regression.
    return both.double().clamp(1e-6, 1 - 1e-6).logit()
