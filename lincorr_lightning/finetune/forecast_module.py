"""Forecast: predicts what edits will do to the target, without training anything."""

from __future__ import annotations

from typing import Any, Literal

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.forecasts import N_SUBJECTS, RIDGES, Forecasts, forecast_edits
from lincorr_lightning.finetune.optimizer_step import EditTraining
from lincorr_lightning.finetune.results import forecast_results
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.results.results import Results
from lincorr_lightning.study import LMStudy, as_settings


class EditForecast(LMStudy):
    """Forecasts the target of each planned edit, and the risk that it does not generalize.

    ``lincorr predict`` reads the LM's logits for each subject, raises the source logit of the new
    answer until it leads, and carries the change through W (for each ridge). It also reads the
    target where the new answer is stated before it, and makes a step along the first update of the
    edit's optimizer, which depends on how the edit is to be trained: set `method`, `adapter`,
    `learning_rate` and `steps_per_edit` as in `SourceFinetune`. From that step it gives the
    probability of each outcome, see `OutcomeModel`. ``tables/forecast.csv`` has a row per edit, and
    says which are above ``data.max_risk``, ``tables/riskiest.csv`` has those that are most likely
    to hallucinate, and ``figures/forecast.png`` shows the risks.

    It predicts on any DataLoader over an `EditDataset`, such as that of `EditsDataModule`.

    Args:
        lm: The LM before the edits.
        ridges: Ridges of the fitted maps; ``auto`` chooses one on held-out subjects. An empty list
            fits none; there are then no causes.
        linear_map: Folder of a linear map to use instead of fitting maps.
        n_subjects: Subjects that maps are fitted on; fewer if the vocabulary has fewer.
        optimizer_step: Whether to forecast from the gradient as well, which probabilities need; it
            costs one backward pass per edit.
        method: ``full``, or ``lora`` for one adapter per edit.
        adapter: Rank, alpha, target modules and seed of the adapters.
        steps_per_edit: Optimizer steps of each edit.
        learning_rate: Learning rate of AdamW.

    Attributes:
        edit_training: How the edits are to be trained.
        forecasts: The forecasts, after a prediction.
    """

    study = "forecast"
    batch_type = EditBatch

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        ridges: list[float | str] = list(RIDGES),  # noqa: B006 (never changed)
        linear_map: str | None = None,
        n_subjects: int = N_SUBJECTS,
        optimizer_step: bool = True,
        method: Literal["full", "lora"] = "full",
        adapter: AdapterSettings = AdapterSettings(),  # noqa: B008 (frozen)
        steps_per_edit: int = 10,
        learning_rate: float = 5e-6,
    ) -> None:
        super().__init__(lm)
        for ridge in ridges:
            if not isinstance(ridge, str):
                require("model.ridges", ridge, at_least=0)
            elif ridge != "auto":
                raise ConfigError(f"model.ridges has {ridge!r}; each is a number or auto.")
        self.save_hyperparameters(logger=False)
        self.edit_training = EditTraining(
            method, learning_rate, steps_per_edit, as_settings(AdapterSettings, adapter)
        )
        self.ridges, self.linear_map, self.n_subjects = ridges, linear_map, n_subjects
        self._stepped = self.edit_training if optimizer_step else None
        self.forecasts: Forecasts | None = None

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        """Do nothing: the forecast of all edits is at the end. Lightning warns of a None."""
        del batch, batch_idx
        return []

    def build_results(self) -> Results:
        """Forecast all edits at once: they share the maps and the passes of the LM."""
        dataset = getattr(self.trainer.predict_dataloaders, "dataset", None)
        if not isinstance(dataset, EditDataset):
            raise ConfigError(
                f"EditForecast forecasts the edits of an EditDataset, not of "
                f"{type(dataset).__name__}. Pass --data EditsDataModule, or a DataLoader over an "
                "EditDataset."
            )
        if dataset.max_risk is not None and self._stepped is None:
            raise ConfigError(
                "data.max_risk needs the probabilities, which need model.optimizer_step true. Set "
                "it, or set data.max_risk to null."
            )
        self.forecasts = forecast_edits(
            self.lm, dataset.edits, dataset.relation, self.ridges, self.linear_map,
            self.n_subjects, self._stepped,
        )  # fmt: skip
        return forecast_results(self.forecasts, dataset.max_risk)
