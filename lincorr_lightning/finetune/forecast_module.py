"""Foretells what edits will do to the target, without training anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lincorr_lightning.errors import ConfigError
from lincorr_lightning.finetune.datamodule import EditsDataModule
from lincorr_lightning.finetune.forecasts import LEAD, RIDGES, EditForecasts
from lincorr_lightning.frozen_lm import FrozenLMModule
from lincorr_lightning.io import write_json
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import refuse_sharding
from lincorr_lightning.results.run_folder import is_dry_run, run_folder


class EditForecast(FrozenLMModule):
    """For each planned edit: what will the target be, and how great is the risk?

    ``lincorr predict`` asks the LM what it says of each subject, raises the source logit of the
    new answer until it leads, carries the change through W (ridge by ridge), and, for comparison,
    follows the gradient of the edit's own loss to first order. ``tables/forecast.csv`` has a row
    an edit, ``figures/forecast.png`` shows the risks.

    Args:
        lm: The LM that is to be taught.
        ridges: Ridge strengths of the maps, ``auto`` among them if wanted.
        linear_map: Folder of a linear map to use instead of fitting some.
        n_subjects: Subjects that the maps are fitted on, as far as the vocabulary has so many.
        first_order: Whether to forecast from the gradient as well; it costs one backward pass an
            edit.
        lead: How far, in logits, the answer must lead after the step of ``virtual_step``.

    Raises:
        LanguageModelError: The LM cannot be read.
    """

    def __init__(
        self,
        lm: LMConfig = LMConfig(),  # noqa: B008 (frozen)
        ridges: list[float | str] = list(RIDGES),  # noqa: B006 (never changed)
        linear_map: str | None = None,
        n_subjects: int = 2000,
        first_order: bool = True,
        lead: float = LEAD,
    ) -> None:
        lm = LMConfig(**lm) if isinstance(lm, Mapping) else lm
        super().__init__(lm)
        self.save_hyperparameters(
            {
                "lm": asdict(lm), "ridges": ridges, "linear_map": linear_map,
                "n_subjects": n_subjects, "first_order": first_order, "lead": lead,
            },
            logger=False,
        )  # fmt: skip

    @property
    def language_model(self) -> LanguageModel:
        """The LM, for the DataModule."""
        return self.lm

    def setup(self, stage: str) -> None:
        """Refuse an LM in pieces, of which no gradient is followed.

        Raises:
            ConfigError: The strategy splits the LM, or what every study of a frozen LM refuses.
            OutputError: The run's folder cannot be written.
        """
        super().setup(stage)
        refuse_sharding(self.trainer, "EditForecast")

    def on_predict_start(self) -> None:
        """Forecast all edits."""
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, EditsDataModule):
            raise ConfigError(
                f"EditForecast foretells edits of an EditsDataModule; data is "
                f"{type(data).__name__}. Pass --data EditsDataModule."
            )
        forecasts = EditForecasts.make(
            self.lm,
            data,
            self.hparams["ridges"],
            self.hparams["linear_map"],
            self.hparams["n_subjects"],
            self.hparams["first_order"],
            self.hparams["lead"],
        )
        if not self.trainer.is_global_zero or is_dry_run(self.trainer):
            return
        folder = run_folder(self.trainer)
        told = forecasts.write(folder, None)
        write_json(
            folder / "results.json",
            {
                "study": "forecast",
                "relation": data.relation.name,
                "n_edits": len(data.edits),
                "lm": self.lm.config.name_or_path,
                **told,
            },
        )

    def predict_step(self, batch: Any, batch_idx: int) -> list[Any]:
        """Nothing is left to do; of None, Lightning would ask whether it is on purpose."""
        del batch, batch_idx
        return []
