"""Forecasts of edits, made before training and scored after it (paper, section 4.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lincorr_lightning.finetune.edits import Edit
from lincorr_lightning.finetune.first_order import LEAD, virtual_edits
from lincorr_lightning.functional import (
    Outcome,
    auroc,
    forecast_from_direction,
    forecast_from_map,
    outcome_codes,
    risk,
)
from lincorr_lightning.knowledge import TokenizedRelation
from lincorr_lightning.linear_map.artifact import LinearMap, warn_of_fit_subjects
from lincorr_lightning.linear_map.fitting import fit_linear_maps
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_up_to
from lincorr_lightning.results.numbers import number

RIDGES: tuple[float | str, ...] = (0.0, "auto", 1.0, 10.0, 100.0, 1000.0)
N_SUBJECTS = 2000
DEFAULT_FORECASTER = "map_auto"
"""The forecaster to rely on: its ridge is chosen on the LM at hand, so nothing of it is tuned."""


@dataclass(frozen=True)
class Forecasts:
    """What each forecaster predicts for the target of each edit.

    Attributes:
        relation: Name of the relation, as ``city->country``.
        subjects: Subject of each of the n edits.
        source_answers: New source answer of each edit.
        references: Target labels that are right for it, joined by ``|``.
        labels: The n_target target labels.
        before: Target logits before the edits, ``(n, n_target)``.
        reference_mask: Target labels that are right for each edit, ``(n, n_target)`` bool.
        predicted: Target logits by forecaster, ``(n, n_target)``: ``map_0``, ``map_auto``, ... by W
            of that ridge (``map`` for a given W); ``first_order`` along the gradient of each edit's
            loss; ``virtual_step`` after a step along it that is long enough to teach the answer.
    """

    relation: str
    subjects: Sequence[str]
    source_answers: Sequence[str]
    references: Sequence[str]
    labels: Sequence[str]
    before: Tensor
    reference_mask: Tensor
    predicted: Mapping[str, Tensor]

    @property
    def default(self) -> str:
        """Name of the forecaster to rely on; the first one if there is no `DEFAULT_FORECASTER`."""
        names = list(self.predicted)
        return DEFAULT_FORECASTER if DEFAULT_FORECASTER in names else names[0]

    @property
    def answers_before(self) -> list[str]:
        """Target label that leads before each edit."""
        return self._leading(self.before)

    def answers(self, name: str) -> list[str]:
        """Return the target label that a forecaster predicts for each edit."""
        return self._leading(self.predicted[name])

    def risks(self, name: str) -> list[float]:
        """Return a forecaster's risk of each edit: how far a wrong label is ahead, in logits."""
        return risk(self.predicted[name], self.reference_mask).tolist()

    def outcomes(self, name: str) -> list[Outcome]:
        """Return the outcome that a forecaster predicts for each edit."""
        leading = self.predicted[name].argmax(1)
        codes = outcome_codes(self.before.argmax(1), leading, self.reference_mask)
        return [list(Outcome)[code] for code in codes.tolist()]

    def _leading(self, logits: Tensor) -> list[str]:
        return [self.labels[i] for i in logits.argmax(1).tolist()]

    def scores(
        self, answers_after: Sequence[str], outcomes: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """Score the forecasters, and two baselines that use no forecast.

        Returns:
            By forecaster, ``accuracy`` of the predicted answer, and ``auroc`` of its risk against
            not generalizing (None if all or no edits generalized). The baseline ``answer_before``
            predicts the answer before the edit, and its risk is how far the reference's logit is
            behind there; ``most_frequent`` always predicts the most frequent answer.
        """
        failed = torch.tensor([outcome != Outcome.GENERALIZED for outcome in outcomes])
        n = len(answers_after)
        scores: dict[str, dict[str, float | None]] = {}
        for name, logits in (*self.predicted.items(), ("answer_before", self.before)):
            pairs = zip(self._leading(logits), answers_after, strict=True)
            hits = sum(predicted == after for predicted, after in pairs)
            # Not torchmetrics' AUROC: its sigmoid makes large risks equal, and it returns 0 where
            # all edits end alike.
            area = auroc(risk(logits, self.reference_mask), failed)
            scores[name] = {"accuracy": hits / n, "auroc": number(area)}
        (_, most_frequent), *_ = Counter(answers_after).most_common(1)
        scores["most_frequent"] = {"accuracy": most_frequent / n, "auroc": 0.5}
        return scores


def forecast_edits(
    lm: LanguageModel,
    edits: Sequence[Edit],
    relation: TokenizedRelation,
    ridges: Sequence[float | str] = RIDGES,
    linear_map: str | None = None,
    n_subjects: int = N_SUBJECTS,
    first_order: bool = True,
    lead: float = LEAD,
) -> Forecasts:
    """Forecast edits from the LM as it is now.

    Args:
        lm: The LM before the edits.
        edits: The edits.
        relation: The relation that they are about.
        ridges: Ridges of the fitted maps; ``auto`` chooses one on held-out subjects.
        linear_map: Folder of a linear map to use instead of fitting maps.
        n_subjects: Subjects that maps are fitted on, those of the edits excluded; fewer if the
            vocabulary has fewer.
        first_order: Whether to use the gradient of each edit's loss as well.
        lead: Lead of the answer after the step of ``virtual_step``, in logits.

    Raises:
        LinearMapError: The linear map of the folder has other labels.
        NonFiniteError: A loss, gradient or logit is NaN or infinite; the message names the edit.
    """
    subjects = [edit.subject for edit in edits]
    source_ids, target_ids = relation.source.token_ids, relation.target.token_ids
    source_prompts = relation.source_prompts(subjects)
    target_prompts = relation.target_prompts(subjects)
    source = lm.domain_logits(source_prompts, source_ids).cpu()
    target = lm.domain_logits(target_prompts, target_ids).cpu()
    labels = torch.tensor([edit.label for edit in edits])
    mask = torch.zeros(len(edits), target.shape[1], dtype=torch.bool)
    for row, edit in enumerate(edits):
        mask[row, list(edit.reference)] = True
    if linear_map is not None:
        maps = {"map": LinearMap.from_pretrained(linear_map, lm)}
        warn_of_fit_subjects(linear_map, subjects)
    else:
        others = sample_up_to(lm.tokenizer, n_subjects, excluding=subjects)
        fitted = fit_linear_maps(lm, relation, others, ridges)
        names = [f"map_{one}" if isinstance(one, str) else f"map_{one:g}" for one in ridges]
        maps = dict(zip(names, fitted, strict=True))
    predicted = {
        name: forecast_from_map(source, target, labels, one.weight(relation.name).cpu())
        for name, one in maps.items()
    }
    if first_order:
        virtual = virtual_edits(
            lm,
            lm.rows(source_prompts),
            [edit.tokens for edit in edits],
            lm.rows(target_prompts),
            source_ids,
            target_ids,
            labels.tolist(),
            lead=lead,
        )
        predicted["first_order"] = forecast_from_direction(
            source, target, virtual.d_source, virtual.d_target, labels
        )
        predicted["virtual_step"] = virtual.target
    texts = relation.target.texts
    return Forecasts(
        relation=relation.name,
        subjects=subjects,
        source_answers=[edit.answer for edit in edits],
        references=["|".join(texts[i] for i in edit.reference) for edit in edits],
        labels=texts,
        before=target,
        reference_mask=mask,
        predicted=predicted,
    )
