"""The LightningCLI of `lincorr`."""

from __future__ import annotations

import errno
import json
import logging
import pkgutil
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)

# Imported, so that their classes can be named without a module path.
import lincorr_lightning.ablation
import lincorr_lightning.callbacks
import lincorr_lightning.data
import lincorr_lightning.finetune
import lincorr_lightning.flow
import lincorr_lightning.geometry
import lincorr_lightning.pretraining
import lincorr_lightning.probe
import lincorr_lightning.sae.module
from lincorr_lightning.ablation.batches import TrainingPlan
from lincorr_lightning.callbacks import PredictionWriter
from lincorr_lightning.checkpoints import check_checkpoint, restoring_error, set_up_checkpoints
from lincorr_lightning.config_files import check_configs, read_config, use_checked_loader
from lincorr_lightning.errors import (
    CheckpointError,
    ConfigError,
    LanguageModelError,
    LincorrError,
    OutputError,
    require,
)
from lincorr_lightning.failure_callbacks import (
    AbortOnRankFailure,
    OOMHint,
    SignalCheckpoint,
    memory_note,
)
from lincorr_lightning.finetune.batches import EditSchedule
from lincorr_lightning.finetune.optimizer_step import EditTraining
from lincorr_lightning.io import as_output_error, atomic_write, check_writable
from lincorr_lightning.lm import LanguageModel
from lincorr_lightning.option_errors import HelpParser, OptionParser, explain, sections_of
from lincorr_lightning.results.console import describe_run
from lincorr_lightning.results.run_folder import (
    RunLogger,
    is_dry_run,
    run_folder,
    set_run_name,
    study_name,
)
from lincorr_lightning.safe_configs import allow_known_classes_only, check_settings
from lincorr_lightning.version import __version__

# Ranges of Trainer settings that Lightning does not check.
_TRAINER_RANGES: dict[str, dict[str, float]] = {
    "accumulate_grad_batches": {"at_least": 1},
    "check_val_every_n_epoch": {"at_least": 1},
    "gradient_clip_val": {"at_least": 0},
    "log_every_n_steps": {"at_least": 0},
    "min_epochs": {"at_least": 0},
    "min_steps": {"at_least": 0},
    "val_check_interval": {"above": 0},
}
SAFE = "--safe"
_CONFIGS_ARE_CODE = (
    f"A config is code: the classes that it names are imported and instantiated. Pass {SAFE} with "
    "a config that you do not trust; it allows only classes of this package, Lightning and torch, "
    "and no code of an LM."
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder, also when there is no logger."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Agree on the folder, on every rank, before the first one writes."""
        run_folder(trainer)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the config that repeats this run, below the command that does so."""
        command = {"fit": "fit", "validate": "validate", "test": "test"}.get(stage, "predict")
        self.parser.dump_header = [
            f"lincorr {command} --config {self.config_filename}",
            f"lincorr-lightning=={__version__}, lightning=={L.__version__}",
        ]
        with atomic_write(run_folder(trainer) / self.config_filename) as path:
            self.parser.save(self.config, path, skip_none=False, overwrite=True)


class LincorrCLI(LightningCLI):
    """One parser for every study: ``--model NAME --data NAME --trainer...``."""

    launched_with: list[str] | None = None
    """Command line of the other processes of a run; None for that of this one."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the Trainer commands, or only the one that the command line begins with.

        Each has a parser, whose making takes a quarter of a second.
        """
        known = LightningCLI.subcommands()
        return {name: known[name] for name in sys.argv[1:2] if name in known} or known

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--name``, and give datamodules the LM of the study."""
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Folder of the runs below trainer.default_root_dir; null takes the study's name.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=Literal["highest", "high", "medium"] | None,
            default=None,
            help="Precision of products of float32 matrices: highest, high (TensorFloat-32 on "
            "GPUs) or medium (bfloat16 factors, on GPUs and CPUs that have them); null leaves "
            "torch's own, highest.",
        )
        parser.set_defaults({"trainer.default_root_dir": "runs"})
        for argument, (attribute, kind) in _FROM_STUDY.items():
            parser.link_arguments(
                "model", f"data.init_args.{argument}", compute_fn=_attribute(attribute, kind),
                apply_on="instantiate",
            )  # fmt: skip
        # TextsDataModule adds training steps where the study trains SAEs first.
        parser.link_arguments(
            "model", "data.init_args.training_tokens", compute_fn=_training_tokens,
            apply_on="instantiate",
        )  # fmt: skip

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line without `--safe`, which takes effect before parsing."""
        del args
        arguments = [argument for argument in sys.argv[1:] if argument != SAFE]
        sections = set().union(*map(sections_of, self._subcommand_parsers.values()))
        check_configs(arguments, sections | LightningCLI.subcommands().keys())
        self.config = parser.parse_args(arguments)

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if not isinstance(seed, bool):
            require("seed_everything", seed, at_least=0, at_most=2**32 - 1)
        super()._set_seed()

    def before_instantiate_classes(self) -> None:
        """Check the settings that no study checks, before anything is loaded."""
        config = self._get_config()
        settings = list(_leaves(config))
        if SAFE in sys.argv:
            check_settings(settings)
        # Lightning would run the code of a checkpoint that it downloads.
        if config.weights_only is None:
            config.weights_only = True
        if config.matmul_precision is not None:
            torch.set_float32_matmul_precision(config.matmul_precision)
        for key, value in settings:
            if key.rpartition(".")[2] in ("seed", "seeds"):
                _require_seeds(key, value)
        for name, allowed in _TRAINER_RANGES.items():
            value = config.trainer.get(name)
            if isinstance(value, (int, float)):
                require(f"trainer.{name}", value, **allowed)
        check_subcommand(_class_of(config.model), str(self.subcommand))
        limits = (config.trainer.max_epochs, config.trainer.max_time, self.subcommand == "fit")
        if limits == (None, None, True) and config.trainer.max_steps == -1:
            raise ConfigError("trainer.max_epochs is null, which means 1,000. Set a number.")
        self._check_folders(config)
        check_datamodule(_class_of(config.model), _class_of(config.data))
        path = config.get("ckpt_path")
        if path == "":
            raise ConfigError("--ckpt_path is empty. Pass the file of a checkpoint.")
        if path == "best":
            raise ConfigError("--ckpt_path best has no meaning in a new run. Pass the file.")
        if path:
            names = vars(config.model.get("init_args", {}))
            try:
                check_checkpoint(path, _class_of(config.model).__name__, names, config.weights_only)
            except CheckpointError as error:
                error.exit_status = 2
                raise

    def _get_config(self) -> Namespace:
        """Return the settings of the command."""
        config: Namespace = self.config[self.subcommand]
        return config

    @staticmethod
    def _check_folders(config: Namespace) -> None:
        name, root = Path(config.name or ""), config.trainer.default_root_dir
        if name.is_absolute() or ".." in name.parts:
            raise ConfigError(f"--name {name} leaves trainer.default_root_dir. Pass a plain name.")
        if "\0" in f"{name}{root}":
            raise ConfigError("--name or trainer.default_root_dir has a null character.")

    def _parse_ckpt_path(self) -> None:
        """Do not let the checkpoint's hyper-parameters override the config.

        Lightning would replace even `model.lm` by the checkpoint's. The studies refuse a checkpoint
        that does not fit the config.
        """

    def instantiate_classes(self) -> None:
        """Instantiate the study, its data and the Trainer, with their own error messages.

        Raises:
            LincorrError: A setting is wrong.
        """
        try:
            super().instantiate_classes()
        except Exception as error:
            refused = next((e for e in _causes(error) if isinstance(e, LincorrError)), None)
            if refused is None and _is_raised_by_library(error):
                *_, first = _causes(error)
                refused = ConfigError(explain(str(first), ()))
            if refused is None:
                raise
            if not isinstance(refused, OutputError):
                refused.exit_status = 2
            raise refused from None

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Log to TensorBoard in a new folder, unless the config names a logger."""
        config = self._get(self.config_init, "trainer")
        callbacks = config["callbacks"] or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        config["callbacks"] = [*callbacks, AbortOnRankFailure(), OOMHint(), SignalCheckpoint()]
        if self.subcommand == "predict":
            config["callbacks"].append(PredictionWriter())
        root = Path(kwargs.get("default_root_dir") or config["default_root_dir"])
        check_writable(root)
        name = self._get(self.config_init, "name") or study_name(self.model)
        if config["logger"] is None or config["logger"] is True:
            kwargs["logger"] = RunLogger(root, name=name, default_hp_metric=False)
        trainer = super().instantiate_trainer(**kwargs)
        set_up_checkpoints(trainer)
        set_run_name(trainer, name)
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the study; errors while a checkpoint is restored name the checkpoint."""
        if self.launched_with is not None:
            sys.argv = [sys.argv[0], *self.launched_with]
        try:
            super()._run_subcommand(subcommand)
        except Exception as error:
            path = self.trainer.ckpt_path or self._get_config().get("ckpt_path")
            explained = restoring_error(error, path, type(self.model).__name__)
            if explained is None:
                raise
            raise explained from error

    def _describe(self) -> None:
        if self.trainer.is_global_zero and not is_dry_run(self.trainer):
            sys.stdout.write(describe_run(run_folder(self.trainer)))

    after_fit = after_validate = after_test = after_predict = _describe


_STEPS = {
    "fit": "training_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def check_subcommand(module: type[L.LightningModule], subcommand: str) -> None:
    """Refuse a study without the step of the subcommand.

    Raises:
        ConfigError: The study has no such step; the message names the subcommands that it has.
    """

    def has(step: str) -> bool:
        return getattr(module, step) is not getattr(L.LightningModule, step)

    # Lightning's own predict_step calls forward.
    if has(_STEPS[subcommand]) or (subcommand == "predict" and has("forward")):
        return
    others = [f"`lincorr {name}`" for name, step in _STEPS.items() if has(step)]
    raise ConfigError(
        f"{module.__name__} has no {_STEPS[subcommand]}, which `lincorr {subcommand}` runs. Use "
        f"{' or '.join(others) or 'another study'}."
    )


def check_datamodule(
    module: type[L.LightningModule], datamodule: type[L.LightningDataModule]
) -> None:
    """Refuse a datamodule whose batches are those of another study.

    Studies and datamodules of this package have their batch's class as `batch_type`. Those without
    one are not checked.

    Raises:
        ConfigError: The batches differ; the message names a datamodule that fits.
    """
    wanted, given = (getattr(part, "batch_type", None) for part in (module, datamodule))
    if wanted is None or given is None or issubclass(given, wanted):
        return
    fitting = next(
        (d.__name__ for d in L.LightningDataModule.__subclasses__()
         if getattr(d, "batch_type", None) is wanted),
        f"one that yields {wanted.__name__}",
    )  # fmt: skip
    raise ConfigError(
        f"{datamodule.__name__} yields {given.__name__}, but {module.__name__} takes "
        f"{wanted.__name__}. Use --data {fitting}."
    )


def _class_of(config: Namespace) -> type[Any]:
    kind: type[Any] = pkgutil.resolve_name(config.class_path)
    return kind


def _leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of a config with their keys, such as ``data.seed``."""
    if isinstance(config, Namespace):
        config = vars(config)
    if isinstance(config, Mapping):
        for name, value in config.items():
            # On the command line, keys have no init_args.
            yield from _leaves(value, prefix if name == "init_args" else f"{prefix}.{name}")
    elif isinstance(config, list) and any(isinstance(each, Namespace) for each in config):
        for each in config:
            yield from _leaves(each, prefix)
    else:
        yield prefix.removeprefix("."), config


def _require_seeds(key: str, value: Any) -> None:
    for seed in value if isinstance(value, list) else [value]:
        if isinstance(seed, int) and not isinstance(seed, bool):
            require(key, seed, at_least=0, at_most=2**63 - 1)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _is_raised_by_library(error: BaseException) -> bool:
    """Return whether Lightning or jsonargparse raised an error, and not a class of the user."""
    *_, first = _causes(error)
    *_, (frame, _) = walk_tb(first.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] in ("lightning", "jsonargparse")


_FROM_STUDY = {
    "lm": ("lm", LanguageModel),
    # How EditsDataModule distributes edits over steps, and forecasts them to leave risky ones out.
    "schedule": ("edit_schedule", EditSchedule),
    "training": ("edit_training", EditTraining),
    # The seeds and phases that a datamodule makes texts of.
    "plan": ("plan", TrainingPlan),
}
"""What a datamodule takes from the study: argument -> attribute of the study, and its type."""


def _attribute(name: str, kind: type[Any]) -> Callable[[L.LightningModule], Any]:
    """Return a function that takes an attribute of a study, None if it has none of the type."""

    def take(module: L.LightningModule) -> Any:
        value = getattr(module, name, None)
        return value if isinstance(value, kind) else None

    return take


def _training_tokens(module: L.LightningModule) -> int:
    return module.training_tokens if isinstance(module, lincorr_lightning.flow.FeatureFlow) else 0


def run_lightning_cli(args: list[str], launched_with: list[str] | None = None) -> LincorrCLI:
    """Parse a command line and run it.

    Args:
        args: The command line, without the program's name.
        launched_with: Command line of the other processes of a run; None for the same.

    Returns:
        The CLI object after the run.

    Raises:
        LanguageModelError: A training step does not fit the memory.
        ConfigError: A config cannot be read, or Lightning refuses a setting.
        OutputError: The disk is full, or the user's quota is used up.
        LincorrError: Error of the study.
        SystemExit: The command line cannot be parsed.
    """
    _silence_expected_warnings()
    # Help texts of settings such as those of the LM stand below their fields; reading them takes
    # a third of a second.
    shows_help = any(re.search("^-h$|help|print_config", argument) for argument in args)
    set_parsing_settings(docstring_parse_attribute_docstrings=shows_help)
    use_checked_loader()
    args = lm_files_as_config(nulls_as_config(args))
    if SAFE in args:
        allow_known_classes_only()
    # Launchers start the other processes of a run with this process's command line.
    own, sys.argv = sys.argv, [sys.argv[0], *args]
    LincorrCLI.launched_with = launched_with
    hook, threading.excepthook = threading.excepthook, _report_thread
    precision = torch.get_float32_matmul_precision()
    try:
        return LincorrCLI(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=HelpParser if shows_help else OptionParser,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            parser_kwargs={"prog": "lincorr"}
            | {name: {"description": _CONFIGS_ARE_CODE} for name in LincorrCLI.subcommands()},
        )
    except (RuntimeError, MemoryError) as error:
        note = memory_note(error)
        if note is None:
            raise
        raise LanguageModelError(note) from error
    except MisconfigurationException as error:
        raise ConfigError(explain(str(error), ())) from error
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        with as_output_error(Path(str(error.filename or "a file of the run"))):
            raise
    finally:
        sys.argv = own
        LincorrCLI.launched_with = None
        threading.excepthook = hook
        torch.set_float32_matmul_precision(precision)


def _report_thread(args: threading.ExceptHookArgs) -> None:
    """Print the traceback of a thread, except of a full disk, which the main thread reports."""
    if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in _DISK_FULL):
        threading.__excepthook__(args)


_NULLS = {"null", "Null", "NULL", "~"}


def nulls_as_config(args: Sequence[str]) -> list[str]:
    """Return a command line that passes null settings of model and data as config.

    jsonargparse parses the null of ``--model.lm.add_bos null`` as the text ``None``: it refuses it
    or, where a text is allowed, accepts it as that text.

    Example:
        >>> nulls_as_config(["fit", "--data.subjects", "null", "--data.seed=1"])
        ['fit', '--config', '{"data": {"init_args": {"subjects": null}}}', '--data.seed=1']
    """
    return _replace_options(args, _null_setting)


def _null_setting(key: str, value: str) -> Any:
    group, _, name = key.partition(".")
    path = name.removeprefix("init_args.").split(".")
    if group not in ("--model", "--data") or not name or path[0] in ("help", "dict_kwargs"):
        return None
    if value not in _NULLS:
        return None
    piece: Any = None
    for part in reversed([group.removeprefix("--"), "init_args", *path]):
        piece = {part: piece}
    return piece


def lm_files_as_config(args: Sequence[str]) -> list[str]:
    """Return a command line that passes ``--model.lm FILE`` and ``--model.before FILE`` as config.

    A file of ``configs/lm/`` has an LM below ``model.init_args.lm``; this way, it can describe the
    other LM of a study, too.

    Raises:
        ConfigError: The file cannot be read, or describes no LM.
    """
    return _replace_options(args, _lm_of_file)


def _lm_of_file(key: str, value: str) -> Any:
    names = ("--model.lm", "--model.before")
    if key.replace(".init_args", "") not in names or not value.endswith((".yaml", ".yml")):
        return None
    return {"model": {"init_args": {key.rpartition(".")[2]: _read_lm_file(value)}}}


def _replace_options(args: Sequence[str], convert: Callable[[str, str], Any]) -> list[str]:
    """Return a command line in which some options, with their values, are config.

    Args:
        args: The command line.
        convert: Function from an option and its value to the config that replaces them; None leaves
            them as they are.
    """
    passed: list[str] = []
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        key, equals, value = argument.partition("=")
        piece = convert(key, value if equals or not rest else rest[0])
        if piece is None:
            passed.append(argument)
            continue
        if not equals:
            rest.pop(0)
        passed += ["--config", json.dumps(piece)]
    return passed


def _read_lm_file(path: str) -> Mapping[str, Any]:
    found: Any = read_config(path)
    for key in ("model", "init_args", "lm"):
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{path} has no model.init_args.lm, so it describes no LM. Pass a file such as those "
            "of configs/lm/."
        )
    return found


def _silence_expected_warnings() -> None:
    """Silence expected warnings and Lightning's tips."""
    # The LM is frozen and read in eval mode on purpose.
    warnings.filterwarnings("ignore", r"Found \d+ module\(s\) in eval mode")
    warnings.filterwarnings("ignore", ".*isinstance.treespec, LeafSpec.*")
    # Subjects are short strings: a worker process costs more than it saves.
    warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
    # Numbers logged at the end of an epoch are reduced over all ranks before.
    warnings.filterwarnings("ignore", "It is recommended to use .*sync_dist=True")
    # A rank without a batch takes part in the reduction all the same.
    warnings.filterwarnings("ignore", "The ``compute`` method of metric .* was called before")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())
