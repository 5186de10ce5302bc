"""The LightningCLI of `lincorr`."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

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
from lincorr_lightning.errors import ConfigError, LanguageModelError, LincorrError
from lincorr_lightning.failure_callbacks import AbortOnRankFailure, OOMHint, memory_note
from lincorr_lightning.finetune.batches import EditSchedule
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.lm import LanguageModel
from lincorr_lightning.option_errors import OptionParser
from lincorr_lightning.results.console import describe_run
from lincorr_lightning.results.run_folder import (
    RunLogger,
    is_dry_run,
    run_folder,
    set_run_name,
    study_name,
)
from lincorr_lightning.version import __version__


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

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--name``, and give datamodules the LM of the study."""
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Folder of the runs below trainer.default_root_dir; null takes the study's name.",
        )
        parser.set_defaults({"trainer.default_root_dir": "runs"})
        # A datamodule that samples subjects or tokenizes texts takes the LM as `lm`.
        parser.link_arguments(
            "model", "data.init_args.lm", compute_fn=_language_model, apply_on="instantiate"
        )
        # EditsDataModule distributes edits over steps as the study trains them.
        parser.link_arguments(
            "model", "data.init_args.schedule", compute_fn=_edit_schedule, apply_on="instantiate"
        )
        # One that makes the texts of several seeds and phases takes the study's plan.
        parser.link_arguments(
            "model", "data.init_args.plan", compute_fn=_training_plan, apply_on="instantiate"
        )
        # TextsDataModule adds training steps where the study trains SAEs first.
        parser.link_arguments(
            "model", "data.init_args.training_tokens", compute_fn=_training_tokens,
            apply_on="instantiate",
        )  # fmt: skip

    def before_instantiate_classes(self) -> None:
        """Look for the checkpoint before anything is loaded."""
        path = self._get(self.config, "ckpt_path")
        is_file = path and path not in ("best", "last", "hpc") and "://" not in path
        if is_file and not Path(path).exists():
            raise ConfigError(f"--ckpt_path {path} does not exist.")

    def _parse_ckpt_path(self) -> None:
        """Do not let the checkpoint's hyper-parameters override the config.

        Lightning would replace even `model.lm` by the checkpoint's. The studies refuse a checkpoint
        that does not fit the config.
        """

    def instantiate_classes(self) -> None:
        """Make the study and its data, with their own error messages."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause: BaseException | None = error
            while cause is not None:
                if isinstance(cause, LincorrError):
                    raise cause from None
                cause = cause.__cause__
            raise

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Log to TensorBoard in a new folder, unless the config names a logger."""
        config = self._get(self.config_init, "trainer")
        config["callbacks"] = [*(config["callbacks"] or []), AbortOnRankFailure(), OOMHint()]
        if self.subcommand == "predict":
            config["callbacks"].append(PredictionWriter())
        root = Path(kwargs.get("default_root_dir") or config["default_root_dir"])
        check_writable(root)
        name = self._get(self.config_init, "name") or study_name(self.model)
        if config["logger"] is None or config["logger"] is True:
            kwargs["logger"] = RunLogger(root, name=name, default_hp_metric=False)
        trainer = super().instantiate_trainer(**kwargs)
        set_run_name(trainer, name)
        return trainer

    def _describe(self) -> None:
        if self.trainer.is_global_zero and not is_dry_run(self.trainer):
            sys.stdout.write(describe_run(run_folder(self.trainer)))

    after_fit = after_validate = after_test = after_predict = _describe


def _language_model(module: L.LightningModule) -> LanguageModel | None:
    lm = getattr(module, "lm", None)
    return lm if isinstance(lm, LanguageModel) else None


def _edit_schedule(module: L.LightningModule) -> EditSchedule | None:
    schedule = getattr(module, "edit_schedule", None)
    return schedule if isinstance(schedule, EditSchedule) else None


def _training_plan(module: L.LightningModule) -> TrainingPlan | None:
    plan = getattr(module, "plan", None)
    return plan if isinstance(plan, TrainingPlan) else None


def _training_tokens(module: L.LightningModule) -> int:
    return module.training_tokens if isinstance(module, lincorr_lightning.flow.FeatureFlow) else 0


def run_lightning_cli(args: list[str]) -> LincorrCLI:
    """Parse a command line and run it.

    Returns:
        The CLI object after the run.

    Raises:
        LanguageModelError: A training step does not fit the memory.
        LincorrError: Error of the study.
        SystemExit: The command line cannot be parsed.
    """
    _silence_expected_warnings()
    # The help texts of settings such as those of the LM stand below their fields.
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    args = lm_files_as_config(nulls_as_config(args))
    # Launchers start the other processes of a run with this process's command line.
    own, sys.argv = sys.argv, [sys.argv[0], *args]
    try:
        return LincorrCLI(
            L.LightningModule,
            L.LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            parser_class=OptionParser,
            seed_everything_default=0,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            parser_kwargs={"prog": "lincorr"},
        )
    except (RuntimeError, MemoryError) as error:
        note = memory_note(error)
        if note is None:
            raise
        raise LanguageModelError(note) from error
    finally:
        sys.argv = own


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
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"the LM's file {path} cannot be read: {error}.") from error
    found = content
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
