"""Forecast of edits before they are trained."""

from typing import Any, Literal

import lightning as L
from transformers import PreTrainedTokenizerBase

from lincorr_lightning.callbacks.relation_callback import MIN_SUBJECTS, RelationCallback
from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditTraining
from lincorr_lightning.finetune.edit_files import named_subjects
from lincorr_lightning.finetune.forecasts import N_SUBJECTS, Forecasts, forecast_edits
from lincorr_lightning.finetune.results import forecast_results
from lincorr_lightning.functional import Outcome
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import write_parts


class Forecast(RelationCallback):
    """Forecasts what each edit will do, before a LightningModule trains it.

    The forecast is that of ``lincorr predict`` (see `forecast_edits`): from W, from the new answer
    stated before the prompt, and from a step along the edit's own first update, which gives the
    probabilities. Each edit is forecast as if it were trained alone. `output` and the table
    ``forecast`` exist when training starts, and are kept on resume. The LM must not be sharded.

    Logs mean probabilities of the outcomes, as ``forecast/hallucinated``.

    Args:
        relation: Relation, as ``city->country``; None takes that of the run's edits.
        edits: Edits of the run, as `Generalization` takes them; None takes the dataset's.
        method: How the edits are trained: ``full``, or ``lora``.
        learning_rate: Learning rate of AdamW.
        n_steps: Optimizer steps of each edit.
        linear_map: Folder of a linear map; None fits maps.
        n_subjects: Number of subjects that maps are fitted on.
        **options: See `RelationCallback`.

    Attributes:
        forecasts: The forecast of each edit, from the start of training on.
        results: As ``results.json`` of ``lincorr predict`` has them.
    """

    study = "forecast"
    is_of_start = True
    kept = (*RelationCallback.kept, "_fields")

    def __init__(
        self, relation: str | None = None, edits: list[dict[str, Any]] | str | None = None,
        method: Literal["full", "lora"] = "full", learning_rate: float = 5e-6, n_steps: int = 10,
        linear_map: str | None = None, n_subjects: int = N_SUBJECTS, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(relation, **options)
        require("Forecast.learning_rate", learning_rate, at_least=0)
        require("Forecast.n_steps", n_steps, at_least=1)
        require("Forecast.n_subjects", n_subjects, at_least=MIN_SUBJECTS)
        self.edits = edits
        self.training = EditTraining(method, learning_rate, n_steps, AdapterSettings())
        self.linear_map, self.n_subjects = linear_map, n_subjects

    def reset(self) -> None:
        super().reset()
        self.forecasts: Forecasts | None = None
        self._fields: dict[str, Any] | None = None  # of `forecasts`, for a checkpoint

    def measured_subjects(self, tokenizer: PreTrainedTokenizerBase, has_edits: bool) -> list[str]:
        return [] if self.edits is None else named_subjects(self.edits)

    def open(self, trainer: L.Trainer) -> None:
        super().open(trainer)
        if self.cache.lm.is_sharded:
            raise ConfigError("Forecast needs the whole LM on each device; this one is sharded.")
        self._edits = self.find_edits(self.edits, trainer)
        if not self._edits:
            raise ConfigError("Forecast has no edits: name some in Forecast.edits.")
        self.declare_measured(f"{edit.subject}: {edit.answer}" for edit in self._edits)

    def start(self, trainer: L.Trainer) -> None:
        if self._fields is None:
            forecasts = forecast_edits(
                self.cache.lm, self._edits, self.tokenized, linear_map=self.linear_map,
                n_subjects=self.n_subjects, training=self.training, reader=self.shared.rows,
            )  # fmt: skip
            self._fields = dict(vars(forecasts))
        self.forecasts = Forecasts(**self._fields)
        self.output = self.finish(trainer)
        self.results = dict(self.output.values)
        means = self.output.values["mean_probability"]
        scalars = {f"{self.name}/{outcome}": means[outcome] for outcome in Outcome}
        self.log_scalars(trainer, scalars, self.step)
        write_parts(trainer, self.output)

    def after_optimizer_step(self, *_: Any) -> None:
        """Do nothing: a forecast is made once."""

    def finish(self, trainer: L.Trainer) -> Results:
        assert self.forecasts is not None
        return forecast_results(self.forecasts, skipped=self.skipped)
