"""Forecasts of a run's edits, made before training and judged after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.first_order import virtual_edits
from lincorr_lightning.functional import (
    auroc,
    forecast_from_direction,
    forecast_from_map,
    risk,
)
from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.linear_map.artifact import LinearMap
from lincorr_lightning.linear_map.fitting import fit_linear_maps
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.vocabulary import sample_subjects, usable_strings

if TYPE_CHECKING:
    from lincorr_lightning.finetune.forecast_results import ForecastReport
    from lincorr_lightning.finetune.results import EditReport

RIDGES: tuple[float | str, ...] = (0.0, "auto", 1.0, 10.0, 100.0, 1000.0)
N_INPUTS = 2000
LEAD = 12.0
"""Chosen on edits of another seed than the config's (``benchmarks/forecast_lead.py``)."""


@dataclass(frozen=True)
class EditForecasts:
    """What each forecaster says the target's logits will be.

    Attributes:
        relation: As ``city->country``.
        edits: Subject, source answer and reference of each edit.
        labels: Of the target.
        before: Target logits before the edits, ``(n, n_target)``.
        right: Which labels are right then, ``(n, n_target)`` bool.
        predicted: By forecaster, target logits, ``(n, n_target)``: ``map_0``, ``map_auto``, ... by
            W of that ridge; ``first_order`` along the gradient of each edit's own loss;
            ``virtual_step`` after a step along it that is long enough to teach the answer.
    """

    relation: str
    edits: Sequence[tuple[str, str, str]]
    labels: Sequence[str]
    before: Tensor
    right: Tensor
    predicted: Mapping[str, Tensor]

    @classmethod
    def make(
        cls,
        lm: LanguageModel,
        data: EditsDataModule,
        ridges: Sequence[float | str] = RIDGES,
        linear_map: str | None = None,
        n_subjects: int = N_INPUTS,
        first_order: bool = True,
        lead: float = LEAD,
    ) -> EditForecasts:
        """Forecast edits from the LM as it is now.

        Args:
            lm: As it is before the edits.
            data: The edits.
            ridges: Of the maps that are fitted, ``auto`` among them if wanted.
            linear_map: Folder of a map to use instead.
            n_subjects: Subjects that maps are fitted on, as far as the vocabulary has so many.
            first_order: Whether to follow the gradient as well.
            lead: How far, in logits, the answer must lead after ``virtual_step``.

        Raises:
            LinearMapError: The folder's map is of other labels.
        """
        edits = data.prepare_edits(lm)
        asked = data.asked
        subjects = [edit.subject for edit in edits]
        source_prompts, target_prompts = (
            asked.source_prompts(subjects),
            asked.target_prompts(subjects),
        )
        source = lm.domain_logits(source_prompts, asked.source.token_ids).cpu()
        target = lm.domain_logits(target_prompts, asked.target.token_ids).cpu()
        answer = torch.tensor([edit.label for edit in edits])
        right = torch.zeros(len(edits), target.shape[1], dtype=torch.bool)
        for row, edit in enumerate(edits):
            right[row, list(edit.rights)] = True
        if linear_map is not None:
            maps = {"map": LinearMap.from_pretrained(linear_map, lm)}
        else:
            n = min(n_subjects, len(usable_strings(lm.tokenizer)))
            fitted = fit_linear_maps(lm, asked, sample_subjects(lm.tokenizer, n), ridges)
            maps = dict(zip(map(_map_name, ridges), fitted, strict=True))
        predicted = {
            name: forecast_from_map(source, target, answer, each.weight(asked.name).cpu())
            for name, each in maps.items()
        }
        if first_order:
            tried = virtual_edits(
                lm,
                lm.rows(source_prompts),
                [edit.tokens for edit in edits],
                lm.rows(target_prompts),
                asked.source.token_ids,
                asked.target.token_ids,
                [edit.label for edit in edits],
                update="gradient",
                lead=lead,
            )
            predicted["first_order"] = forecast_from_direction(
                source, target, tried.d_source, tried.d_target, answer
            )
            predicted["virtual_step"] = tried.target
        texts = asked.target.texts
        described = [
            (edit.subject, edit.answer, "|".join(texts[i] for i in edit.rights)) for edit in edits
        ]
        return cls(asked.name, described, texts, target, right, predicted)

    # -- judging ---------------------------------------------------------------------------------

    def scores(
        self, after: Sequence[str], outcomes: Sequence[str]
    ) -> dict[str, dict[str, float | None]]:
        """How good each forecaster was, beside two that need no forecast.

        Args:
            after: Label that each target has after its edit.
            outcomes: What became of each, as in `Outcome`.

        Returns:
            By forecaster, ``accuracy`` of the answer foreseen, and ``auroc`` of the risk against
            not generalizing (None if all or none did). ``answer_before`` foresees what the LM says
            already, and takes the reference's distance there for the risk; ``most_frequent``
            foresees the commonest answer after, whatever the edit.
        """
        failed = torch.tensor([outcome != Outcome.GENERALIZED for outcome in outcomes])
        scores = {
            name: self._score(logits, after, failed)
            for name, logits in (*self.predicted.items(), ("answer_before", self.before))
        }
        (_, commonest), *_ = Counter(after).most_common(1)
        scores["most_frequent"] = {"accuracy": commonest / len(after), "auroc": 0.5}
        return scores

    def _score(
        self, logits: Tensor, after: Sequence[str], failed: Tensor
    ) -> dict[str, float | None]:
        said = [self.labels[i] for i in logits.argmax(1).tolist()]
        hits = [ours == theirs for ours, theirs in zip(said, after, strict=True)]
        area = auroc(risk(logits, self.right), failed)
        return {
            "accuracy": sum(hits) / len(hits),
            "auroc": None if area != area else area,
        }

    def write(self, folder: Path, report: EditReport | None) -> dict[str, Any]:
        """Write the table and the picture.

        Args:
            folder: The run's.
            report: What became of the same edits; None before that is known.

        Returns:
            Numbers for ``results.json``.
        """
        told = self.told(report)
        told.write(folder)
        if told.scores:
            return dict(told.scores)
        return {
            "foreseen": {
                name: {
                    outcome.value: told.foreseen(name).count(outcome) / len(self.edits)
                    for outcome in Outcome
                }
                for name in self.predicted
            }
        }

    def told(self, report: EditReport | None) -> ForecastReport:
        """The forecasts as they are shown.

        Args:
            report: What became of the same edits; None before that is known.
        """
        from lincorr_lightning.finetune.forecast_results import Forecast, ForecastReport

        forecasts = {
            name: Forecast(
                [self.labels[i] for i in logits.argmax(1).tolist()],
                risk(logits, self.right).tolist(),
            )
            for name, logits in self.predicted.items()
        }
        # Watched may be other edits than those that were trained, or not all of them.
        cases = () if report is None else report.cases
        taught = [(subject, answer) for subject, answer, _ in self.edits]
        known = taught == [(case.subject, case.source_answer) for case in cases]
        after = [case.answer_after for case in cases] if known else None
        outcomes = [str(case.outcome) for case in cases] if known else None
        scores = self.scores(after, outcomes) if after and outcomes else {}
        subjects, answers, references = zip(*self.edits, strict=True)
        return ForecastReport(
            relation=self.relation,
            subjects=subjects,
            source_answers=answers,
            references=references,
            answers_before=[self.labels[i] for i in self.before.argmax(1).tolist()],
            forecasts=forecasts,
            outcomes=outcomes,
            answers_after=after,
            scores=scores,
        )

    # -- checkpoints -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return {
            "relation": self.relation,
            "edits": [list(edit) for edit in self.edits],
            "labels": list(self.labels),
            "before": self.before,
            "right": self.right,
            "predicted": dict(self.predicted),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> EditForecasts:
        """The forecasts of a checkpoint."""
        edits = [(subject, answer, reference) for subject, answer, reference in state["edits"]]
        return cls(**{**state, "edits": edits})


def _map_name(ridge: float | str) -> str:
    return f"map_{ridge}" if isinstance(ridge, str) else f"map_{ridge:g}"
