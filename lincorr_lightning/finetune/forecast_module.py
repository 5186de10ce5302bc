"""Forecast: predicts what edits will do to the target, without training anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from lincorr_lightning.errors import ConfigError, require
from lincorr_lightning.finetune.adapters import AdapterSettings
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.forecasts import N_SUBJECTS, RIDGES, Forecasts, forecast_edits
from lincorr_lightning.finetune.optimizer_step import EditTraining
from lincorr_lightning.finetune.results import forecast_results
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.results.run_folder import run_settings, write_results


class EditForecast(FrozenLMModule):
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
        forecasts: The forecasts, once prediction has started.

    Raises:
        LanguageModelError: The LM cannot be read.
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
        # A mapping comes from a checkpoint's hyper-parameters.
        adapter = AdapterSettings(**adapter) if isinstance(adapter, Mapping) else adapter
        training = EditTraining(method, learning_rate, steps_per_edit, adapter)
        for ridge in ridges:
            if not isinstance(ridge, str):
                require("model.ridges", ridge, at_least=0)
            elif ridge != "auto":
                raise ConfigError(f"model.ridges has {ridge!r}; each is a number or auto.")
        self.save_hyperparameters(ignore=["lm", "adapter"], logger=False)
        # As mappings; after the call that ignores them.
        plain = {"lm": asdict(self.lm.config), "adapter": asdict(adapter)}
        self.save_hyperparameters(plain, logger=False)
        self.edit_training = training
        self.forecasts: Forecasts | None = None

    def setup(self, stage: str) -> None:
        """Refuse a sharded LM, which has no gradient of its own on each rank."""
        super().setup(stage)
        refuse_sharding(self.trainer, "EditForecast")

    def on_predict_start(self) -> None:
        """Forecast all edits, and write the results."""
        dataset = getattr(self.trainer.predict_dataloaders, "dataset", None)
        if not isinstance(dataset, EditDataset):
            raise ConfigError(
                f"EditForecast forecasts the edits of an EditDataset, not of "
                f"{type(dataset).__name__}. Pass --data EditsDataModule, or a DataLoader over an "
                "EditDataset."
            )
        if dataset.max_risk is not None and not self.hparams["optimizer_step"]:
            raise ConfigError(
                "data.max_risk needs the probabilities, which need model.optimizer_step true. Set "
                "it, or set data.max_risk to null."
            )
        self.forecasts = forecast_edits(
            self.lm,
            dataset.edits,
            dataset.relation,
            self.hparams["ridges"],
            self.hparams["linear_map"],
            self.hparams["n_subjects"],
            self.edit_training if self.hparams["optimizer_step"] else None,
        )
        results = forecast_results(
            self.forecasts, self.lm.info, run_settings(self.trainer), dataset.max_risk
        )
        write_results(self.trainer, results)

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        """Do nothing: all edits are forecast at once. Lightning warns of a None."""
        del batch, batch_idx
        return []
