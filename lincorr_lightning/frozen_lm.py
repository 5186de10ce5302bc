"""What every study of a frozen LM shares: loading, refusals, and checkpoints without the LM."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from lincorr_lightning.errors import ConfigError, LinearMapError
from lincorr_lightning.io import check_writable, write_json
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import check_strategy, is_sharded, shard_lm
from lincorr_lightning.results.provenance import versions
from lincorr_lightning.results.run_folder import is_dry_run, run_folder


class StudyReport(Protocol):
    """What a study found, and all the forms in which it is handed over."""

    def results(self) -> dict[str, Any]:
        """What ``results.json`` says."""

    def write(self, folder: Path) -> None:
        """Write tables and figures."""

    def show(self, trainer: L.Trainer) -> None:
        """Add them to TensorBoard."""


class FrozenLMModule(L.LightningModule):
    """A study that asks an LM and does not change it.

    Args:
        lm: The LM that is asked.

    Raises:
        LanguageModelError: The LM cannot be read.
    """

    def __init__(self, lm: LMConfig) -> None:
        super().__init__()
        self.lm = LanguageModel(lm)

    def configure_model(self) -> None:
        """Load the LM's weights; Lightning places them, or they are split over the processes."""
        self.lm.load()
        shard_lm(self.lm, self.device_mesh)

    def setup(self, stage: str) -> None:
        """Refuse what would give wrong numbers or lose them, before hours are spent on it.

        Raises:
            ConfigError: A precision or device that rounds the statistics, or a strategy that
                cannot split an LM.
            OutputError: The run's folder cannot be written.
        """
        del stage
        check_strategy(self.trainer)
        # Into an LM in pieces Lightning loads by itself, not by `load_state_dict`, which knows that
        # the LM is no part of a checkpoint.
        self.strict_loading = not is_sharded(self.trainer)
        if self.trainer.precision != "32-true":
            raise ConfigError(
                f"trainer.precision is {self.trainer.precision}: it would round the statistics. "
                "Leave it at 32-true and set model.lm.dtype for the LM."
            )
        if self.trainer.strategy.root_device.type == "mps":
            raise ConfigError(
                "Apple's mps device has no float64, which the statistics need. "
                "Run with --trainer.accelerator cpu."
            )
        if not is_dry_run(self.trainer):
            folder = run_folder(self.trainer)
            if self.trainer.is_global_zero:
                check_writable(folder)

    def teardown(self, stage: str) -> None:
        """Say how the LM was asked."""
        del stage
        if self.lm.reads_prompts is not None:
            rank_zero_info(
                f"{self.lm.config.name_or_path} read the prompts of an X {self.lm.reads_prompts}"
            )

    def write_study(self, report: StudyReport | None, **more: Any) -> None:
        """Write a study's numbers with settings and versions, its tables and its figures.

        Args:
            report: What was found; with None, in a dry run, and on other processes than the first,
                nothing is written.
            **more: What else ``results.json`` says.

        Raises:
            OutputError: It cannot be written.
        """
        if is_dry_run(self.trainer) or not self.trainer.is_global_zero or report is None:
            return
        folder = run_folder(self.trainer)
        data = getattr(self.trainer, "datamodule", None)
        results = {
            **report.results(),
            **more,
            "settings": {**self.hparams, "data": dict(getattr(data, "hparams", {}))},
            "versions": versions(),
        }
        write_json(folder / "results.json", results)
        report.write(folder)
        report.show(self.trainer)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load everything but the LM, which comes from its own home.

        Raises:
            LinearMapError: `strict`, and the rest does not match.
        """
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        missing = [key for key in keys.missing_keys if not key.startswith("lm.")]
        if strict and (missing or keys.unexpected_keys):
            raise LinearMapError(
                f"the checkpoint does not fit {type(self).__name__} as it is set up: "
                f"missing {missing}, unexpected {keys.unexpected_keys}. Use the settings of the "
                "run that wrote it (its config.yaml), or fit again."
            )
        return type(keys)(missing, keys.unexpected_keys)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the LM out, and say which one it was."""
        state = checkpoint["state_dict"]
        for key in [key for key in state if key.startswith("lm.")]:
            del state[key]
        checkpoint["lm"] = {
            "name_or_path": self.lm.config.name_or_path,
            "fingerprint": dict(self.lm.fingerprint),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another LM.

        Raises:
            LinearMapError: It says which LM, and what of it differs.
        """
        stored = checkpoint.get("lm")
        if stored is None:
            raise LinearMapError(
                f"this checkpoint does not say which LM it belongs to, so it is none of "
                f"{type(self).__name__}. Pass one that `lincorr fit` wrote with this study."
            )
        self.lm.load()
        for part, ours in self.lm.fingerprint.items():
            if stored["fingerprint"].get(part) != ours:
                if part == "dtype":
                    raise LinearMapError(
                        f"the checkpoint was fitted in {stored['fingerprint'][part]}, this run "
                        f"reads the LM in {ours}. Pass --model.lm.dtype "
                        f"{stored['fingerprint'][part]}, or fit again."
                    )
                raise LinearMapError(
                    f"the checkpoint was fitted on {stored['name_or_path']}, whose {part} differs "
                    f"from that of {self.lm.config.name_or_path}: its numbers would be of another "
                    "LM. Fit again, or pass the LM it was fitted on as model.lm.name_or_path."
                )
