"""The base of every study: what it refuses, what its checkpoints hold, where its results go."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, is_dataclass, replace
from functools import wraps
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import lightning as L
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from lincorr_lightning.distributed import data_shard, gather
from lincorr_lightning.errors import CheckpointError, ConfigError, NonFiniteError, require
from lincorr_lightning.lightning_workarounds import return_attributes
from lincorr_lightning.lm import products
from lincorr_lightning.lm.config import LMConfig
from lincorr_lightning.lm.fingerprint import fingerprint_data
from lincorr_lightning.lm.language_model import LanguageModel
from lincorr_lightning.lm.sharding_strategy import check_strategy, refuse_sharding
from lincorr_lightning.results import run_folder as runs
from lincorr_lightning.results.results import Results

return_attributes()
T = TypeVar("T")

_START_ANEW = "Use the settings of the run that wrote it (its config.yaml), or start a new run."
# Settings of the Trainer that change a study's numbers; devices, loggers and callbacks do not.
_TRAINER_SETTINGS = (
    "precision",
    "max_steps",
    "overfit_batches",
    "limit_train_batches",
    "limit_val_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "accumulate_grad_batches",
)
_EPOCHS = "trainer.max_epochs"
# They look for weights before the LM is loaded, train a part of the run first, or change a step.
_REFUSED: tuple[type[callbacks.Callback], ...] = (
    callbacks.BaseFinetuning,
    callbacks.BatchSizeFinder,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.StochasticWeightAveraging,
)
FIXED_TRAINING: tuple[type[callbacks.Callback], ...] = (callbacks.Timer, callbacks.WeightAveraging)
"""Callbacks that studies whose steps are fixed cannot take: they end early, or change weights."""


def as_settings(kind: type[T], value: T | Mapping[str, Any] | str) -> T:
    """Return settings that may come as a mapping, as a checkpoint's do, or as the first of them."""
    if isinstance(value, str):
        return kind(value)  # type: ignore[call-arg]
    return kind(**value) if isinstance(value, Mapping) else value


def takes_live_lm(init: Callable[..., None]) -> Callable[..., None]:
    """Let a study's constructor take an LM in memory, with its `tokenizer`."""

    @wraps(init)
    def __init__(
        self: Any, lm: Any = LMConfig(), *args: Any, tokenizer: Any = None, **options: Any
    ) -> None:
        if isinstance(lm, nn.Module):
            lm = LanguageModel.of(lm, tokenizer, options.get("prefix", ""))
        init(self, lm, *args, **options)

    return __init__


def without_chat(lm: LMConfig | Mapping[str, Any]) -> LMConfig:
    """Return the LM's settings for a study without prompts, which refuses a chat template."""
    config = as_settings(LMConfig, lm)
    if config.chat_template:
        raise ConfigError("model.lm.chat_template is true, but this study reads no prompts.")
    return config


def plain(value: Any) -> Any:
    """Return hyper-parameters as plain data, which is all that torch loads from a checkpoint."""
    value = value.config if isinstance(value, LanguageModel) else value
    if is_dataclass(value):
        return asdict(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {key: plain(member) for key, member in value.items()}
    return [plain(member) for member in value] if isinstance(value, (list, tuple)) else value


def handed_over(module: Any, argument: str) -> Any:
    """Return what a module hands over for an argument of its datamodule; None if nothing.

    A module that does has ``data_arguments()``, which returns values by the arguments' names.
    """
    return module.data_arguments().get(argument) if hasattr(module, "data_arguments") else None


class PlainHyperparameters(HyperparametersMixin):
    """Keeps a constructor's arguments as plain data, whatever they are."""

    free_settings: ClassVar[frozenset[str]] = frozenset()
    """Arguments that a resumed run may change, since they change no number."""
    settings_per_rank: ClassVar[frozenset[str]] = frozenset()
    """Arguments that count on each rank; a resumed run keeps their sum over ranks."""

    def fixed_settings(self, owner: str, trainer: L.Trainer | None) -> dict[str, Any]:
        """Return the arguments that a resumed run must not change, as options of `owner`."""
        fixed = {}
        for name, value in self.hparams.items():
            if name in self.settings_per_rank:
                fixed[f"{owner}.{name} of all ranks"] = value * data_shard(trainer).n
            # Keys with an underscore are Lightning's; an LM is known by its fingerprint.
            elif name[0] != "_" and name not in {"lm", *self.free_settings}:
                fixed[f"{owner}.{name}"] = value
        return fixed

    def _set_hparams(self, hp: Any) -> None:  # of Lightning
        super()._set_hparams(plain(hp))


class Study(PlainHyperparameters, L.LightningModule):
    """A study: a LightningModule that yields `Results`.

    A subclass keeps its options as attributes, calls ``self.save_hyperparameters(logger=False)``,
    and overrides `build_results`; where it has them, also `write_artifacts`, `checkpoint_state` and
    `restore`. All of these but `write_artifacts` run on all ranks.
    """

    study: ClassVar[str]  #: Name of the study in ``results.json`` and of its run folders.
    batch_type: ClassVar[type]  #: Class of the batches that the study takes, from any DataLoader.
    shards_lm: ClassVar[bool] = False
    """Whether the study can run with an LM that is sharded over devices."""
    float32_only: ClassVar[bool] = True
    """Whether what is trained is in float32 whatever ``trainer.precision`` is."""
    step_setting: str | None = None
    """Setting of the size of a step, if gradients must not be accumulated over batches."""
    refused_callbacks: tuple[type[callbacks.Callback], ...] = ()
    """Callbacks of Lightning that the study cannot be trained with, beside those that none can."""

    returned: ClassVar[tuple[str, ...]] = ("results",)
    """Attributes that come back from the process of a spawned run."""

    results: Results | None = None  #: Results of the last run; None before.
    lm_info: Mapping[str, Any] = MappingProxyType({})
    """Name, data type, fingerprint and size of the LM, once it is loaded."""
    _started: float | None = None
    _is_trained = False

    @property
    def seconds(self) -> float | None:
        """Seconds since the fit began, rounded; None without a fit."""
        return None if self._started is None else round(monotonic() - self._started, 1)

    def setup(self, stage: str) -> None:
        """Refuse settings that give wrong numbers or lose them, before hours are spent."""
        check_strategy(self.trainer)
        _require_own_settings(self.trainer.strategy.root_device.type)
        if not self.shards_lm:
            refuse_sharding(self.trainer, type(self).__name__)
        precision = str(self.trainer.precision)
        if self.float32_only and precision.endswith("-true") and precision != "32-true":
            raise ConfigError(
                f"trainer.precision is {precision}, and what is trained is in float32. Set it to "
                "32-true, or to bf16-mixed, which computes in bfloat16."
            )
        if stage == "fit":
            self._check_training()
        loops = {"validate": "limit_val_batches", "test": "limit_test_batches"}
        if stage in loops and not getattr(self.trainer, loops[stage]):
            raise ConfigError(f"trainer.{loops[stage]} is 0: nothing would be read. Raise it.")
        runs.prepare_run_folder(self.trainer)

    def _check_training(self) -> None:
        n_batches = self.trainer.accumulate_grad_batches
        if self.step_setting and n_batches != 1:
            raise ConfigError(
                f"trainer.accumulate_grad_batches is {n_batches}; it must be 1: set "
                f"{self.step_setting} instead."
            )
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, (*_REFUSED, *self.refused_callbacks)):
                raise ConfigError(
                    f"{type(self).__name__} cannot be trained with {type(callback).__name__}: its "
                    "results would be of other weights or steps. Remove it from trainer.callbacks, "
                    "or trainer.max_time."
                )

    def on_fit_start(self) -> None:
        self._started = monotonic()
        self._is_trained = False

    def build_results(self) -> Results | None:
        """Return the results at the end of a run, if any; `finish` adds settings and LM."""
        return None

    def write_artifacts(self, folder: Path) -> None:
        """Write the study's own files to the run's folder, before the results; on rank 0."""

    def finish(self) -> None:
        """Write and log the results; all ranks call it at the end of a run."""
        results = self.build_results()
        writes = self.trainer.is_global_zero and not runs.is_dry_run(self.trainer)
        lms = [part for part in self.modules() if isinstance(part, LanguageModel)]
        for lm in lms:
            lm.require_unchanged()
        if results is not None:
            results = self.results = replace(
                results,
                settings=plain(runs.run_settings(self.trainer)),
                lm=results.lm or dict(self.lm_info),
                included=results.included or runs.collect_callback_results(self.trainer),
            )
            runs.write_parts(self.trainer, results)
        for lm in lms:
            self._log_states_found(lm)
        if writes:
            folder = runs.run_folder(self.trainer)
            self.write_artifacts(folder)
            if results is not None:  # last, so that an interrupted run has none
                results.write_values(folder)

    def _log_states_found(self, lm: LanguageModel) -> None:
        """Log how many prompts were in the cache of states; on all ranks."""
        if (cache := lm.state_cache) is None:
            return
        n_found, n = (sum(gather(own)) for own in (cache.n_found, cache.n_requested))
        cache.n_found = cache.n_requested = 0
        if n:
            where = f"{lm.config.name_or_path} were in {lm.config.state_cache}"
            rank_zero_info(f"{n_found:,} of {n:,} prompts of {where}")

    def trained_norm(self) -> Tensor:
        """Return the norm of what is trained, which is finite if all weights are; on all ranks."""
        norm = get_total_norm([p for p in self.parameters() if p.requires_grad])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def on_train_end(self) -> None:
        if not self.trained_norm().isfinite():
            raise NonFiniteError(
                f"a weight is NaN or infinite after step {self.trainer.global_step}. Lower the "
                "learning rate, or train in float32."
            )
        self._is_trained = True
        self.finish()

    def on_fit_end(self) -> None:
        """Refuse to end without results, as Lightning does where nothing is to be trained."""
        if not self._is_trained:
            names = "max_epochs", "max_steps", "limit_train_batches"
            given = ", ".join(f"{name} {getattr(self.trainer, name)}" for name in names)
            raise ConfigError(
                f"nothing was trained. Raise what is 0 of trainer.max_time, {given}, or give data."
            )

    def on_validation_end(self) -> None:
        if self.trainer.state.fn == "validate":
            self.finish()

    def on_test_end(self) -> None:
        self.finish()

    on_predict_end = on_test_end

    def checkpoint_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps beside parameters and settings, as plain data."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a `checkpoint_state`, before the parameters, or raise a `CheckpointError`."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        settings = self._run_settings()
        checkpoint["study"] = {"name": self.study, "settings": settings, **self.checkpoint_state()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another study or other settings, and restore the study's state."""
        stored = checkpoint.get("study", {})
        if stored.get("name") != self.study:
            raise CheckpointError(
                f"Not a {type(self).__name__} checkpoint, but of "
                f"{stored.get('name') or 'another module'}. Pass one that `lincorr fit` wrote with "
                "this study."
            )
        try:
            if self._trainer is not None and self._trainer.state.fn == "fit":
                self._require_same_run(stored["settings"], checkpoint)
            self.restore(stored)
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint has no {error}: another version wrote it. {_START_ANEW}"
            ) from error

    def _run_settings(self) -> dict[str, Any]:
        """Return what a resumed run must not change, apart from its data."""
        trainer: Any = self.trainer
        return {
            **self.fixed_settings("model", trainer),
            _EPOCHS: trainer.max_epochs,
            # As texts: 1 and 1.0 batches are one and all of them.
            **{f"trainer.{name}": str(getattr(trainer, name)) for name in _TRAINER_SETTINGS},
            "matmul_precision": products.precision(),
            "data": type(getattr(trainer, "datamodule", None)).__qualname__,
            "seed_everything": os.environ.get("PL_GLOBAL_SEED"),
        }

    def _require_same_run(self, stored: dict[str, Any], checkpoint: Mapping[str, Any]) -> None:
        """Refuse to resume a run of other settings or data; more epochs may follow."""
        now = self._run_settings()
        before, epochs = stored[_EPOCHS], now[_EPOCHS]
        if before != epochs and (epochs == -1 or -1 < before < epochs):
            now[_EPOCHS] = before
            rank_zero_warn(
                f"the checkpoint was written with {_EPOCHS} {before}, this run has {epochs}: what "
                "follows from a run's length, such as learning rates that decrease, is from here "
                "on that of the longer run."
            )
        require_same(stored, now)
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, StudyData):  # before parameters that do not fit are loaded
            data.load_state_dict(checkpoint[type(data).__qualname__])


def require_same(stored: Mapping[str, Any], now: Mapping[str, Any], owner: str = "") -> None:
    """Refuse a checkpoint of other settings or data; `owner` is their prefix, as ``data.``."""
    for name, value in stored.items():
        if value != now.get(name, value):
            raise CheckpointError(
                f"the checkpoint was written with {owner}{name} {value}, this run has "
                f"{now[name]}. {_START_ANEW}"
            )


def _require_own_settings(device: str) -> None:
    """Refuse to run inside of settings of torch that change dtypes, places or gradients."""
    dtype, place = torch.get_default_dtype(), torch.get_default_device()
    in_force = {
        "autocast": torch.is_autocast_enabled(device),
        "inference_mode": torch.is_inference_mode_enabled(),
        f"set_default_dtype({dtype})": dtype != torch.float32,
        f"set_default_device({place})": place.type != "cpu",
    }
    if names := " and ".join(f"torch.{name}" for name, holds in in_force.items() if holds):
        raise ConfigError(
            f"the Trainer is called under {names}; its numbers would be others. Call it outside."
        )


def require_one_epoch(trainer: L.Trainer, epochs: str) -> None:
    """Refuse other lengths of a run than the study's own settings say."""
    if trainer.max_epochs not in (1, None) and not runs.is_dry_run(trainer):
        raise ConfigError(
            f"trainer.max_epochs is {trainer.max_epochs}; it must be 1. For longer runs, set "
            f"{epochs}."
        )


def require_batch(study: Study, batch: object, *kinds: type) -> None:
    """Refuse a batch of another study."""
    if not isinstance(batch, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        given = type(batch).__name__
        raise ConfigError(f"{type(study).__name__} takes batches of {names}, not {given}.")


class LMStudy(Study):
    """A study of an LM, which it reads or trains.

    Checkpoints hold what is trained, and the LM's fingerprint in place of frozen weights. The
    `prefix` is that of `LanguageModel`, for studies that read prompts. A `LanguageModel` that is
    loaded is only read: it is no part of the module, and so not moved, sharded or saved.
    """

    lm: LanguageModel

    trains_lm: ClassVar[bool] = False
    """Whether the LM's own weights, or adapters in it, are trained."""

    def __init__(
        self, lm: LMConfig | Mapping[str, Any] | str | LanguageModel, prefix: str = ""
    ) -> None:
        super().__init__()
        language_model = LanguageModel.of(lm, prefix=prefix)
        if language_model.is_loaded:
            if self.trains_lm:
                raise ConfigError(f"{type(self).__name__} trains its LM. Pass a name or folder.")
            self.__dict__["lm"] = language_model
        else:
            self.lm = language_model
        # `on_load_checkpoint` checks the keys, of which those of frozen weights are missing.
        self.strict_loading = False
        self.register_load_state_dict_post_hook(_forget_missing_lm)  # type: ignore[no-untyped-call]

    def other_lm(self, lm: LMConfig | Mapping[str, Any]) -> LanguageModel:
        """Return the LM before or after, with the same prefix; refuse it with other prompts."""
        config = as_settings(LMConfig, lm)
        if config.chat_template != self.lm.config.chat_template:
            raise ConfigError(
                "only one of model.lm.chat_template and model.before.chat_template is true, so "
                "that prompts would differ. Set both to true, or both to false."
            )
        return LanguageModel(config, self.lm.prompt_prefix)

    @property
    def language_model(self) -> LanguageModel:
        """The LM, for callbacks."""
        return self.lm

    def data_arguments(self) -> dict[str, Any]:
        """Return the LM, whose vocabulary the data may need."""
        return {"lm": self.lm}

    def setup(self, stage: str) -> None:
        """Refuse settings under which statistics of an LM would be wrong."""
        if not self.trains_lm and self.trainer.precision != "32-true":
            raise ConfigError(
                f"trainer.precision is {self.trainer.precision}: it would round the statistics. "
                "Leave it at 32-true and set model.lm.dtype for the LM."
            )
        if not self.trains_lm and self.trainer.strategy.root_device.type == "mps":
            raise ConfigError("mps has no float64. Run with --trainer.accelerator cpu.")
        if "lm" in self.__dict__:
            refuse_sharding(self.trainer, f"{type(self).__name__} of an LM in memory")
        super().setup(stage)

    def configure_model(self) -> None:
        """Load the LM's weights and prepare them; Lightning moves them, or they are sharded."""
        if self.lm_info:
            return
        self.lm.load()
        self.lm_info = dict(self.lm.info)
        with torch.device("cpu"):  # not on the Trainer's device, which draws other numbers
            self.prepare_lm()
        self.lm.shard(self.device_mesh)

    def prepare_lm(self) -> None:
        """Add adapters, or choose the weights that are trained; the LM is loaded and whole."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave frozen weights of the LM out, and note which LM it was."""
        super().on_save_checkpoint(checkpoint)
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {key: state[key] for key in self._kept_keys(state)}
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
            expected = set(self._kept_keys(self.state_dict()))
            stored = set(checkpoint["state_dict"])
            if expected != stored:
                raise CheckpointError(
                    "the checkpoint does not fit these settings: missing "
                    f"{sorted(expected - stored)}, unexpected {sorted(stored - expected)}. "
                    f"{_START_ANEW}"
                )

    def _kept_keys(self, keys: Iterable[str]) -> list[str]:
        """Return those keys of a state that belong to a checkpoint, in their order."""
        named = self.named_parameters(remove_duplicate=False)
        trained = {name for name, parameter in named if parameter.requires_grad}
        return [key for key in keys if not key.startswith("lm.") or key in trained]

    def _check_lm(self, stored: Mapping[str, Any]) -> None:
        if not self.lm_info:
            self.lm_info = dict(self.lm.load().info)
        for part, value in self.lm_info["fingerprint"].items():
            other = stored["fingerprint"].get(part)
            if other != value:
                raise CheckpointError(
                    f"the checkpoint is of {stored['name_or_path']}, whose {part} ({other}) "
                    f"differs from that of {self.lm.config.name_or_path} ({value}). Pass the LM "
                    "that it was written with as --model.lm.name_or_path, with its prefix, chat "
                    f"template and --model.lm.dtype {stored['fingerprint'].get('dtype')}, or start "
                    "a new run."
                )


class StudyData(PlainHyperparameters, L.LightningDataModule):
    """Data of a study, the same on all ranks; `lm` is for data of its vocabulary or tokens."""

    batch_type: ClassVar[type]  #: Class of the batches.

    def __init__(self, lm: LanguageModel | None = None) -> None:
        super().__init__()
        self._lm = lm
        self._contents: dict[str, str] = {}

    @property
    def language_model(self) -> LanguageModel:
        """The LM of the study; a `ConfigError` if there is none."""
        if self._lm is None:
            raise ConfigError(f"{type(self).__name__} needs an LM. Pass lm=module.lm.")
        return self._lm

    def keep_contents(self, **contents: Any) -> None:
        """Keep hashes of what the files that settings name say, for checkpoints; in ``setup``."""
        hashes = {name: fingerprint_data(value) for name, value in contents.items()}
        self._contents = {f"data.{name} (contents)": value for name, value in hashes.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what the data follow from."""
        return {"determined_by": self.fixed_settings("data", self.trainer) | self._contents}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse to resume a fit with other data."""
        if self.trainer is None or self.trainer.state.fn == "fit":
            require_same(state_dict["determined_by"], StudyData.state_dict(self)["determined_by"])

    def require_at_least(self, *may_be_none: str, **least: float) -> None:
        """Refuse arguments, which are saved as hyper-parameters, that are less than these."""
        for name, bound in least.items():
            if self.hparams[name] is not None or name not in may_be_none:
                require(f"data.{name}", self.hparams[name], at_least=bound)


def _forget_missing_lm(module: nn.Module, keys: Any) -> None:
    """Drop the LM's weights from the missing keys, of which Lightning would warn."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.startswith("lm.")]
