"""The base of every study that reads an LM and does not change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lincorr_lightning.errors import ConfigError, LinearMapError
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import check_strategy
from lincorr_lightning.results.run_folder import prepare_run_folder


class FrozenLMModule(L.LightningModule):
    """A study that reads an LM and does not change it: the LM is not part of its checkpoints.

    Args:
        lm: The LM, or its settings as a mapping.

    Raises:
        LanguageModelError: The LM cannot be read.
    """

    def __init__(self, lm: LMConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.lm = LanguageModel(lm if isinstance(lm, LMConfig) else LMConfig(**lm))
        # Lightning would miss the LM's weights in the checkpoint; `on_load_checkpoint` checks the
        # other keys.
        self.strict_loading = False
        self.register_load_state_dict_post_hook(_forget_missing_lm)  # type: ignore[no-untyped-call]

    def configure_model(self) -> None:
        """Load the LM's weights; Lightning moves them to the device, or they are sharded."""
        self.lm.load()
        self.lm.shard(self.device_mesh)

    def setup(self, stage: str) -> None:
        """Refuse settings that give wrong numbers or lose them, before hours are spent."""
        del stage
        check_strategy(self.trainer)
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
        prepare_run_folder(self.trainer)

    def teardown(self, stage: str) -> None:
        """Log how the LM read its prompts."""
        del stage
        if self.lm.reads_prompts is not None:
            rank_zero_info(
                f"{self.lm.config.name_or_path} read the prompts of a subject "
                f"{self.lm.reads_prompts}"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the LM out, and note which one it was."""
        state = checkpoint["state_dict"]
        for key in [key for key in state if key.startswith("lm.")]:
            del state[key]
        checkpoint["lm"] = {
            "name_or_path": self.lm.config.name_or_path,
            "fingerprint": dict(self.lm.fingerprint),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another LM, or with other parameters than this study has."""
        self._check_lm(checkpoint)
        self.restore(checkpoint)
        # Absent where Lightning loads the parameters of a sharded module by itself.
        if "state_dict" in checkpoint:
            self._check_keys(checkpoint["state_dict"])

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Read what the study keeps in a checkpoint beside its parameters; nothing by default.

        Args:
            checkpoint: The checkpoint, of this LM; its parameters are not loaded yet.

        Raises:
            LinearMapError: The checkpoint does not fit the study.
        """

    def _check_lm(self, checkpoint: Mapping[str, Any]) -> None:
        stored = checkpoint.get("lm")
        if stored is None:
            raise LinearMapError(
                f"this checkpoint does not name its LM, so it is not one of "
                f"{type(self).__name__}. Pass one that `lincorr fit` wrote with this study."
            )
        self.lm.load()
        for part, ours in self.lm.fingerprint.items():
            theirs = stored["fingerprint"].get(part)
            if theirs == ours:
                continue
            if part == "dtype":
                raise LinearMapError(
                    f"the checkpoint was fitted in {theirs}, this run reads the LM in {ours}. "
                    f"Pass --model.lm.dtype {theirs}, or fit again."
                )
            raise LinearMapError(
                f"the checkpoint was fitted on {stored['name_or_path']}, whose {part} differs "
                f"from that of {self.lm.config.name_or_path}: its numbers would be of another "
                "LM. Fit again, or pass the LM it was fitted on as model.lm.name_or_path."
            )

    def _check_keys(self, state: Mapping[str, Any]) -> None:
        own, stored = (
            {key for key in keys if not key.startswith("lm.")}
            for keys in (self.state_dict(), state)
        )
        if own != stored:
            raise LinearMapError(
                f"the checkpoint does not fit {type(self).__name__} as it is set up: "
                f"missing {sorted(own - stored)}, unexpected {sorted(stored - own)}. Use the "
                "settings of the run that wrote it (its config.yaml), or fit again."
            )


def _forget_missing_lm(module: nn.Module, keys: Any) -> None:
    """Drop the LM's weights from the missing keys, of which Lightning would warn."""
    del module
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith("lm.")]
