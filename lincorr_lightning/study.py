"""The base of every study: what it refuses, what its checkpoints hold, where its results go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import lightning as L
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from torch import nn

from lincorr_lightning.errors import CheckpointError, ConfigError, require
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import check_strategy, refuse_sharding
from lincorr_lightning.results.results import Results
from lincorr_lightning.results.run_folder import (
    collect_callback_results,
    is_dry_run,
    prepare_run_folder,
    run_folder,
    run_settings,
    write_parts,
)

T = TypeVar("T")

_START_ANEW = "Use the settings of the run that wrote it (its config.yaml), or start a new run."


def as_settings(kind: type[T], value: T | Mapping[str, Any]) -> T:
    """Return settings that may come as a mapping, as a checkpoint's hyper-parameters do."""
    return kind(**value) if isinstance(value, Mapping) else value


def plain(value: Any) -> Any:
    """Return hyper-parameters as plain data, which is all that torch loads from a checkpoint."""
    if is_dataclass(value):
        return asdict(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, (list, tuple)) else value


class PlainHyperparameters(HyperparametersMixin):
    """Keeps a constructor's arguments as plain data, whatever they are."""

    free_settings: ClassVar[frozenset[str]] = frozenset()
    """Arguments that a resumed run may change."""

    @property
    def fixed_settings(self) -> dict[str, Any]:
        """The arguments that a resumed run must not change."""
        names = self.hparams.keys() - self.free_settings
        return {
            name: self.hparams[name] for name in sorted(names) if name[0] != "_"
        }  # of Lightning

    def _set_hparams(self, hp: Any) -> None:  # of Lightning
        super()._set_hparams(plain(hp))


class Study(PlainHyperparameters, L.LightningModule):
    """A study: a LightningModule that yields `Results`.

    A subclass keeps its options as attributes, calls ``self.save_hyperparameters(logger=False)``,
    and overrides `build_results`; where it has them, also `write_artifacts`, `checkpoint_state` and
    `restore`. All of these but `write_artifacts` run on all ranks.
    """

    study: ClassVar[str]
    """Name of the study in ``results.json`` and of its run folders."""
    batch_type: ClassVar[type]
    """Class of the batches that the study takes, from any DataLoader."""
    shards_lm: ClassVar[bool] = False
    """Whether the study can run with an LM that is sharded over devices."""

    results: Results | None = None
    """Results of the last run; None before."""
    lm_info: Mapping[str, Any] = MappingProxyType({})
    """Name, data type, fingerprint and size of the LM, once it is loaded."""
    _started: float | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds since the fit began, rounded; None without a fit."""
        return None if self._started is None else round(monotonic() - self._started, 1)

    def setup(self, stage: str) -> None:
        """Refuse settings that give wrong numbers or lose them, before hours are spent."""
        check_strategy(self.trainer)
        if not self.shards_lm:
            refuse_sharding(self.trainer, type(self).__name__)
        prepare_run_folder(self.trainer)

    def on_fit_start(self) -> None:
        """Start the clock."""
        self._started = monotonic()

    def build_results(self) -> Results | None:
        """Return the results at the end of a run, if any; `finish` adds settings and LM."""
        return None

    def write_artifacts(self, folder: Path) -> None:
        """Write the study's own files to the run's folder, before the results; on rank 0."""

    def finish(self) -> None:
        """Write and log the results; all ranks call it at the end of a run."""
        results = self.build_results()
        writes = self.trainer.is_global_zero and not is_dry_run(self.trainer)
        if writes:
            self.write_artifacts(run_folder(self.trainer))
        if results is not None:
            self.results = replace(
                results,
                settings=plain(run_settings(self.trainer)),
                lm=results.lm or dict(self.lm_info),
                included=results.included or collect_callback_results(self.trainer),
            )
            write_parts(self.trainer, self.results)
            if writes:  # last, so that an interrupted run has none
                self.results.write_values(run_folder(self.trainer))

    def on_train_end(self) -> None:
        """Finish the run."""
        self.finish()

    def on_validation_end(self) -> None:
        """Finish the run, unless this is the validation of a fit."""
        if self.trainer.state.fn == "validate":
            self.finish()

    def on_test_end(self) -> None:
        """Finish the run."""
        self.finish()

    def on_predict_end(self) -> None:
        """Finish the run."""
        self.finish()

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside parameters and settings, as plain data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a `checkpoint_state`, before the parameters, or raise a `CheckpointError`."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the study's name and state."""
        checkpoint["study"] = {"name": self.study, **self.checkpoint_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another study or other settings, and restore the study's state."""
        stored = checkpoint.get("study", {})
        if stored.get("name") != self.study:
            raise CheckpointError(
                f"Not a {type(self).__name__} checkpoint, but of {stored.get('name')}."
            )
        if self._trainer is not None and self.trainer.state.fn == "fit":
            self.require_same_settings(checkpoint, self.fixed_settings)
        try:
            self.restore(stored)
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint has no {error}: another version wrote it. {_START_ANEW}"
            ) from error

    def require_same_settings(self, checkpoint: Mapping[str, Any], names: Iterable[str]) -> None:
        """Refuse a checkpoint whose study had other values for these options."""
        then = checkpoint.get("hyper_parameters", {})
        known = sorted(then.keys() & set(names) - {"lm"})  # which is known by its fingerprint
        require_same({name: then[name] for name in known}, self.hparams, "model.")


def require_same(stored: Mapping[str, Any], now: Mapping[str, Any], owner: str = "") -> None:
    """Refuse a checkpoint of other settings or data; `owner` is their prefix, as ``data.``."""
    for name, value in stored.items():
        if value != now[name]:
            raise CheckpointError(
                f"the checkpoint was written with {owner}{name} {value}, this run has "
                f"{now[name]}. {_START_ANEW}"
            )


def require_one_epoch(trainer: L.Trainer, epochs: str, steps: str) -> None:
    """Refuse other lengths of a run, and of its steps, than the study's own settings say."""
    if trainer.max_epochs not in (1, None) and not is_dry_run(trainer):
        raise ConfigError(
            f"trainer.max_epochs is {trainer.max_epochs}; it must be 1. For longer runs, set "
            f"{epochs}."
        )
    if trainer.accumulate_grad_batches != 1:
        raise ConfigError(f"trainer.accumulate_grad_batches must be 1; set {steps} instead.")


def require_batch(study: Study, batch: object, *kinds: type) -> None:
    """Refuse a batch of another study."""
    if not isinstance(batch, kinds):
        names, given = " or ".join(kind.__name__ for kind in kinds), type(batch).__name__
        raise ConfigError(f"{type(study).__name__} takes batches of {names}, not {given}.")


def require_one_pass(trainer: L.Trainer) -> None:
    """Refuse to repeat for ever what is done in one epoch."""
    if trainer.max_epochs == trainer.max_steps == -1:
        raise ConfigError("trainer.max_epochs is -1, so the run would never end. Set it to 1.")


class LMStudy(Study):
    """A study of an LM, which it reads or trains.

    Checkpoints hold what is trained, and the LM's fingerprint in place of frozen weights.
    """

    trains_lm: ClassVar[bool] = False
    """Whether the LM's own weights, or adapters in it, are trained."""

    def __init__(self, lm: LMConfig | Mapping[str, Any]) -> None:
        super().__init__()
        self.lm = LanguageModel(as_settings(LMConfig, lm))
        # `on_load_checkpoint` checks the keys, of which those of frozen weights are missing.
        self.strict_loading = False
        self.register_load_state_dict_post_hook(_forget_missing_lm)  # type: ignore[no-untyped-call]

    @property
    def language_model(self) -> LanguageModel:
        """The LM, for callbacks."""
        return self.lm

    def setup(self, stage: str) -> None:
        """Refuse settings under which statistics of an LM would be wrong."""
        if not self.trains_lm and self.trainer.precision != "32-true":
            raise ConfigError(
                f"trainer.precision is {self.trainer.precision}: it would round the statistics. "
                "Leave it at 32-true and set model.lm.dtype for the LM."
            )
        if not self.trains_lm and self.trainer.strategy.root_device.type == "mps":
            raise ConfigError("mps has no float64. Run with --trainer.accelerator cpu.")
        super().setup(stage)

    def configure_model(self) -> None:
        """Load the LM's weights and prepare them; Lightning moves them, or they are sharded."""
        if self.lm_info:
            return
        self.lm.load()
        self.lm_info = dict(self.lm.info)
        self.prepare_lm()
        self.lm.shard(self.device_mesh)

    def prepare_lm(self) -> None:
        """Add adapters, or choose the weights that are trained; the LM is loaded and whole."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave frozen weights of the LM out, and note which LM it was."""
        super().on_save_checkpoint(checkpoint)
        state, kept = checkpoint["state_dict"], self._kept_keys(checkpoint["state_dict"])
        checkpoint["state_dict"] = {key: value for key, value in state.items() if key in kept}
        checkpoint["lm"] = {
            "name_or_path": self.lm.config.name_or_path,
            "fingerprint": dict(self.lm_info["fingerprint"]),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another LM, or with other parameters than this study has."""
        super().on_load_checkpoint(checkpoint)
        self._check_lm(checkpoint["lm"])
        # Absent where Lightning loads the parameters of a sharded module by itself.
        if "state_dict" in checkpoint:
            own, stored = self._kept_keys(self.state_dict()), set(checkpoint["state_dict"])
            if own != stored:
                raise CheckpointError(
                    f"the checkpoint does not fit these settings: missing {sorted(own - stored)}, "
                    f"unexpected {sorted(stored - own)}. {_START_ANEW}"
                )

    def _kept_keys(self, keys: Iterable[str]) -> set[str]:
        """Return those keys of a state that belong to a checkpoint."""
        trained = {
            name for name, p in self.named_parameters(remove_duplicate=False) if p.requires_grad
        }
        return {key for key in keys if not key.startswith("lm.") or key in trained}

    def _check_lm(self, stored: Mapping[str, Any]) -> None:
        if not self.lm_info:
            self.lm_info = dict(self.lm.load().info)
        for part, own in self.lm_info["fingerprint"].items():
            if (other := stored["fingerprint"].get(part)) != own:
                raise CheckpointError(
                    f"the checkpoint is of {stored['name_or_path']}, whose {part} ({other}) "
                    f"differs from that of {self.lm.config.name_or_path} ({own}). Pass the LM that "
                    "it was written with as --model.lm.name_or_path, with --model.lm.dtype "
                    f"{stored['fingerprint'].get('dtype')}, or start a new run."
                )


class StudyData(PlainHyperparameters, L.LightningDataModule):
    """Data of a study, the same on all ranks; `lm` is for data of its vocabulary or tokens."""

    batch_type: ClassVar[type]
    """Class of the batches."""

    def __init__(self, lm: LanguageModel | None = None) -> None:
        super().__init__()
        self._lm = lm

    @property
    def language_model(self) -> LanguageModel:
        """The LM of the study; a `ConfigError` if there is none."""
        if self._lm is None:
            raise ConfigError(f"{type(self).__name__} needs an LM. Pass lm=module.lm.")
        return self._lm

    def require_at_least(self, *may_be_none: str, **least: float) -> None:
        """Refuse arguments, which are saved as hyper-parameters, that are less than these."""
        for name, bound in least.items():
            if self.hparams[name] is not None or name not in may_be_none:
                require(f"data.{name}", self.hparams[name], at_least=bound)


def _forget_missing_lm(module: nn.Module, keys: Any) -> None:
    """Drop the LM's weights from the missing keys, of which Lightning would warn."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith("lm.")]
