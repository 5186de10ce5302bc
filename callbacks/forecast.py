"""Forecast of edits before they are trained."""

from dataclasses import asdict
from typing import Any

import lightning as L
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.callbacks.relation_callback import RelationCallback
from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.edit_files import named_subjects
from lincorr_lightning.finetune.forecasts import NearestWord, forecast_edits, forecast_results
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import write_parts


class Forecast(RelationCallback):
    """Forecasts whether the target of each edit will follow, before a LightningModule trains it.

    The forecast is that of ``lincorr predict``: whether the target label nearest to the new answer
    in the LM's head is a right one (see `forecast_edits`). `output` and the table ``forecast``
    exist when training starts, and are kept on resume.

    Logs the share of edits whose nearest word is right, as ``forecast/right``.

    Args:
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        edits: Edits of the run, as `Generalization` takes them; None takes the dataset's.
        **options: See `RelationCallback`.

    Attributes:
        results: As ``results.json`` of ``lincorr predict`` has them.
    """

    study = "forecast"
    is_of_start = True
    kept = (*RelationCallback.kept, "_rows")

    def __init__(
        self,
        relation: str | None = None,
        edits: list[dict[str, Any]] | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(relation, **options)
        self.edits = edits

    def reset(self) -> None:
        super().reset()
        self._rows: list[dict[str, Any]] | None = None  # of `forecasts`, for a checkpoint

    @property
    def forecasts(self) -> list[NearestWord]:
        """The forecast of each edit, from the start of training on."""
        return [NearestWord(**row) for row in self._rows or ()]

    def measured_subjects(self, tokenizer: PreTrainedTokenizerBase, has_edits: bool) -> list[str]:
        return [] if self.edits is None else named_subjects(self.edits)

    def open(self, trainer: L.Trainer) -> None:
        super().open(trainer)
        self._edits = self.find_edits(self.edits, trainer)
        if not self._edits:
            raise ConfigError("Forecast has no edits: name some in Forecast.edits.")
        self.declare_measured(f"{edit.subject}: {edit.answer}" for edit in self._edits)

    def start(self, trainer: L.Trainer) -> None:
        if self._rows is None:
            words = forecast_edits(self.cache.lm, self._edits, self.tokenized)
            self._rows = [asdict(word) for word in words]
        self.output = self.finish(trainer)
        self.results = dict(self.output.values)
        right = self.results["nearest"]["right"]
        self.log_scalars(trainer, {f"{self.name}/right": right}, self.step)
        write_parts(trainer, self.output)

    def after_optimizer_step(self, *_: Any) -> None:
        """Do nothing: a forecast is made once."""

    def finish(self, trainer: L.Trainer) -> Results:
        return forecast_results(self.forecasts, self.tokenized.name, self.skipped)
