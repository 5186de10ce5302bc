"""Forecast: predicts what edits will do to the target, without training anything."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.batches import EditBatch, EditDataset
from lincorr_lightning.finetune.first_order import LEAD
from lincorr_lightning.finetune.forecasts import N_SUBJECTS, RIDGES, Forecasts, forecast_edits
from lincorr_lightning.finetune.results import forecast_results
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.results.run_folder import run_settings, write_results


class EditForecast(FrozenLMModule):
    """Forecasts the target of each planned edit, and the risk that it does not generalize.

    ``lincorr predict`` reads the LM's logits for each subject, raises the source logit of the new
    answer until it leads, carries the change through W (for each ridge), and, for comparison,
    follows the gradient of the edit's own loss to first order. ``tables/forecast.csv`` has a row
    per edit, ``figures/forecast.png`` shows the risks.

    It predicts on any DataLoader over an `EditDataset`, such as that of `EditsDataModule`.

    Args:
        lm: The LM that is to be taught.
        ridges: Ridges of the fitted maps; ``auto`` chooses one on held-out subjects.
        linear_map: Folder of a linear map to use instead of fitting maps.
        n_subjects: Subjects that maps are fitted on; fewer if the vocabulary has fewer.
        first_order: Whether to forecast from the gradient as well; it costs one backward pass per
            edit.
        lead: Lead of the answer, in logits, after the step of ``virtual_step``.

    Attributes:
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
        first_order: bool = True,
        lead: float = LEAD,
    ) -> None:
        super().__init__(lm)
        self.save_hyperparameters(ignore=["lm"], logger=False)
        # After the call that ignores it.
        self.save_hyperparameters({"lm": asdict(self.lm.config)}, logger=False)
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
        self.forecasts = forecast_edits(
            self.lm,
            dataset.edits,
            dataset.relation,
            self.hparams["ridges"],
            self.hparams["linear_map"],
            self.hparams["n_subjects"],
            self.hparams["first_order"],
            self.hparams["lead"],
        )
        results = forecast_results(self.forecasts, self.lm.info, run_settings(self.trainer))
        write_results(self.trainer, results)

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        """Do nothing: all edits are forecast at once. Lightning warns of a None."""
        del batch, batch_idx
        return []
