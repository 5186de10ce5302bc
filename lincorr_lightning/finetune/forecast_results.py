"""What was foreseen of edits, and once they are made, how well."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lincorr_lightning.functional.outcomes import Outcome
from lincorr_lightning.io import write_csv
from lincorr_lightning.results.base import Drawings, Pictured
from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.tables import markdown_table


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one forecaster foresees, edit by edit.

    Attributes:
        answers: The target's label after the edit.
        risks: How far the best wrong label is ahead of the best right one, in logits.
    """

    answers: Sequence[str]
    risks: Sequence[float]


@dataclass(frozen=True)
class ForecastReport(Pictured):
    """All forecasts of some edits.

    Attributes:
        relation: As ``city->country``.
        subjects: X of each edit.
        source_answers: What each is to be taught.
        references: Labels that are then right in the target, joined by ``|``.
        answers_before: The target's label before the edit.
        forecasts: By the forecaster's name.
        outcomes: What became of each edit, as in `Outcome`; None before that is known.
        answers_after: The target's label after it, likewise.
        scores: ``accuracy`` and ``auroc`` of forecasters and baselines, by name; an AUROC is None
            where there is none. Empty before outcomes are known.
    """

    relation: str
    subjects: Sequence[str]
    source_answers: Sequence[str]
    references: Sequence[str]
    answers_before: Sequence[str]
    forecasts: Mapping[str, Forecast]
    outcomes: Sequence[str] | None
    answers_after: Sequence[str] | None
    scores: Mapping[str, Mapping[str, float | None]]

    def write(self, folder: str | Path) -> None:
        """Write ``tables/forecast.csv`` and ``figures/forecast.png``.

        Args:
            folder: The run's folder.

        Raises:
            OutputError: It cannot be written.
        """
        folder = Path(folder)
        columns = self._columns()
        rows = zip(*columns.values(), strict=True)
        write_csv(folder / "tables" / "forecast.csv", list(columns), rows)
        self.write_pictures(folder)

    def _columns(self) -> dict[str, Sequence[Any]]:
        columns: dict[str, Sequence[Any]] = {
            "subject": self.subjects,
            "source_answer": self.source_answers,
            "reference": self.references,
            "answer_before": self.answers_before,
        }
        for name, forecast in self.forecasts.items():
            columns[f"{name}_answer"] = forecast.answers
            columns[f"{name}_risk"] = [number(risk) for risk in forecast.risks]
        if self.answers_after is not None:
            columns["answer_after"] = self.answers_after
        if self.outcomes is not None:
            columns["outcome"] = self.outcomes
        return columns

    def drawings(self) -> Drawings:
        """The figure, by its file name without suffix."""
        from lincorr_lightning.finetune import figures as edit_figures

        draw = edit_figures.risk_figure if self.outcomes is None else edit_figures.forecast_figure
        return {"forecast": partial(draw, self)}

    def foreseen(self, name: str) -> list[Outcome]:
        """What a forecaster says will become of each edit.

        Args:
            name: The forecaster's.
        """
        forecast = self.forecasts[name]
        return [
            Outcome.GENERALIZED
            if risk <= 0
            else Outcome.UNCHANGED
            if answer == before
            else Outcome.HALLUCINATED
            for risk, answer, before in zip(
                forecast.risks, forecast.answers, self.answers_before, strict=True
            )
        ]

    def markdown(self, limit: int = 30) -> str:
        """Scores, if there are any, and the edits of the highest risk.

        Args:
            limit: How many edits are shown at most.
        """
        parts = []
        if self.scores:
            parts.append(
                markdown_table(
                    ("forecaster", "accuracy of the answer", "AUROC of the risk"),
                    ((name, *_both(score)) for name, score in self.scores.items()),
                )
            )
        columns = self._columns()
        rows = list(zip(*columns.values(), strict=True))
        if self.forecasts:
            risks = next(iter(self.forecasts.values())).risks
            order = sorted(range(len(rows)), key=lambda i: (math.isnan(risks[i]), -risks[i]))
            rows = [rows[i] for i in order]
        parts.append(markdown_table([c.replace("_", " ") for c in columns], rows[:limit]))
        if len(rows) > limit:
            parts.append(f"{limit} of {len(rows)} edits; all: tables/forecast.csv")
        return "\n\n".join(parts)


def _both(score: Mapping[str, float | None]) -> tuple[float | None, float | None]:
    return number(score.get("accuracy")), number(score.get("auroc"))
