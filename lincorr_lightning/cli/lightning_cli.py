"""The LightningCLI of `lincorr`."""

import logging
import pkgutil
import re
import sys
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from transformers.utils.logging import disable_progress_bar

# Imported, so that their classes can be named without a module path.
from lincorr_lightning import (  # noqa: F401
    ablation,
    callbacks,
    data,
    finetune,
    flow,
    geometry,
    pretraining,
    probe,
)
from lincorr_lightning.callbacks import PredictionWriter
from lincorr_lightning.cli import config as configs
from lincorr_lightning.cli import termination
from lincorr_lightning.cli.checkpoints import SignalCheckpoint, check_checkpoint
from lincorr_lightning.cli.config import SAFE, leaves
from lincorr_lightning.cli.option_errors import explain, one_line, subclasses
from lincorr_lightning.cli.run_errors import run_error
from lincorr_lightning.distributed import exit_with_parent
from lincorr_lightning.errors import ConfigError, LincorrError, OutputError
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.lightning_workarounds import (
    RunLogger,
    after_signal_handlers,
    replace_fit_loop,
    settle_processes,
    write_configs_as_they_are_read,
)
from lincorr_lightning.lm import products
from lincorr_lightning.progress import ProgressLines
from lincorr_lightning.results.run_folder import (
    RunFolder,
    is_dry_run,
    remove_if_empty,
    run_folder,
    study_name,
)
from lincorr_lightning.results.saved_run import describe_run
from lincorr_lightning.sae.module import SparseAutoencoders  # noqa: F401
from lincorr_lightning.study import Study, handed_over
from lincorr_lightning.terminal import write_out
from lincorr_lightning.version import __version__

write_configs_as_they_are_read()
# Arguments of datamodules that a study may hand over, see `handed_over`.
_HANDED_OVER = ("lm", "training", "edits_of_lm", "plan", "training_tokens")
# What a study defines in order to have a command.
_STEPS = {"fit": "training", "validate": "validation", "test": "test", "predict": "predict"}
_NOISE = re.compile("Tip:|[GT]PU available: False")
_CONFIGS_ARE_CODE = (
    f"A config is code: the classes that it names are imported and instantiated. Pass {SAFE} with "
    "a config that you do not trust; it allows only classes of this package, Lightning and torch, "
    "and no code of an LM."
)


class SaveConfig(SaveConfigCallback):
    """Writes ``config.yaml`` into the run's folder, also when there is no logger."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Agree on the folder, on every rank, before the first one writes."""
        run_folder(trainer)
        super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the config that repeats this run, below the command that does so."""
        command = getattr(stage, "value", stage)
        self.parser.dump_header = [
            f"lincorr {command} --config {self.config_filename}",
            f"lincorr-lightning=={__version__}, lightning=={L.__version__}",
        ]
        with atomic_write(run_folder(trainer) / self.config_filename) as path:
            self.parser.save(self.config, path, skip_none=False, overwrite=True)


class LincorrCLI(LightningCLI):
    """One parser for every study; `args` is a command line as `prepare_args` returns it."""

    def __init__(self, args: Sequence[str]) -> None:
        self.is_safe = SAFE in args
        self.args = [argument for argument in args if argument != SAFE]
        options = {"description": _CONFIGS_ARE_CODE, "exit_on_error": False}
        writers = [PredictionWriter()] if self.args[:1] == ["predict"] else []
        try:
            super().__init__(
                L.LightningModule,
                L.LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,
                seed_everything_default=0,
                trainer_defaults={
                    "default_root_dir": "runs",
                    "callbacks": [SignalCheckpoint(), *writers],
                },
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                parser_kwargs={"prog": "lincorr", "exit_on_error": False}
                | dict.fromkeys(self.subcommands(), options),
            )
        except LincorrError as error:
            # Before there is a Trainer, all errors are of the command line and its configs.
            if not hasattr(self, "trainer") and not isinstance(error, OutputError):
                error.exit_status = 2
            raise

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Return the Trainer commands, or only that of the command line: parsers take time."""
        commands = LightningCLI.subcommands()
        return {name: commands[name] for name in self.args[:1] if name in commands} or commands

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``--name``, and give datamodules the LM of the study."""
        parser.add_argument(
            "--name",
            type=str | None,
            default=None,
            help="Folder of the runs below trainer.default_root_dir; null takes the study's name.",
        )
        parser.add_argument(
            "--results.figures",
            type=Literal["main", "all"],
            default="main",
            help="Which figures are drawn: the main ones, at most eight, or all.",
        )
        parser.add_argument(
            "--matmul_precision",
            type=Literal["highest", "high", "medium"] | None,
            default=None,
            help="Precision of products of float32 matrices: highest, high (TensorFloat-32 on "
            "GPUs) or medium (bfloat16 factors, on GPUs and CPUs that have them); null leaves "
            "torch's own, highest, computed by what is fastest.",
        )
        for argument in _HANDED_OVER:
            parser.link_arguments(
                "model",
                f"data.init_args.{argument}",
                compute_fn=partial(handed_over, argument=argument),
                apply_on="instantiate",
            )

    def parse_arguments(self, parser: LightningArgumentParser, args: object) -> None:
        """Parse the command line."""
        try:
            self.config = parser.parse_args(self.args)
        except ArgumentError as error:
            parser = self._subcommand_parsers.get(self.args[0], parser)
            raise ConfigError(explain(error, self.args, parser)) from error

    def _parse_ckpt_path(self) -> None:
        """Do not let hyper-parameters of a checkpoint override the config; studies compare them."""

    def before_instantiate_classes(self) -> None:
        """Check the settings that no study checks, before anything is loaded."""
        config: Namespace = self.config[self.subcommand]
        if self.is_safe:
            configs.check_settings(leaves(config))
        # Lightning would run the code of a checkpoint that it downloads.
        if config.weights_only is None:
            config.weights_only = True
        if config.matmul_precision is not None:
            products.set_precision(config.matmul_precision)
        module = pkgutil.resolve_name(config.model.class_path)
        base = vars(L.LightningModule)
        steps = {verb: f"{name}_step" for verb, name in _STEPS.items()}
        verbs = [verb for verb, step in steps.items() if getattr(module, step) is not base[step]]
        if issubclass(module, Study) and self.subcommand not in verbs:
            ways = " or ".join(f"`lincorr {verb}`" for verb in verbs)
            raise ConfigError(f"{module.__name__} has no `lincorr {self.subcommand}`. Run {ways}.")
        folder = Path(config.name or "")
        if folder.is_absolute() or ".." in folder.parts:
            raise ConfigError(
                f"--name {folder} leads out of trainer.default_root_dir. Pass the name of a folder "
                "below it."
            )
        check_datamodule(module, pkgutil.resolve_name(config.data.class_path))
        if config.get("ckpt_path") is not None:
            check_checkpoint(config.ckpt_path)

    def instantiate_classes(self) -> None:
        """Instantiate the study, its data and the Trainer; their errors are one line."""
        try:
            super().instantiate_classes()
        except Exception as error:
            first: BaseException = error
            while first.__cause__ is not None and not isinstance(first, LincorrError):
                first = first.__cause__
            if isinstance(first, LincorrError):
                raise first from None
            *_, (frame, _) = walk_tb(first.__traceback__)
            if isinstance(first, KeyError) and frame.f_globals["__name__"] == "os":
                raise ConfigError(f"a launcher has not set the variable {first}.") from None
            if frame.f_globals["__name__"].partition(".")[0] not in ("lightning", "jsonargparse"):
                raise  # by a class of the user
            raise ConfigError(one_line(first)) from None

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Log to TensorBoard in a new folder, unless the config names a logger."""
        config = self._get(self.config_init, "trainer")
        _require_accelerator(config["accelerator"])
        root = Path(kwargs.get("default_root_dir") or config["default_root_dir"])
        check_writable(root)
        name = self._get(self.config_init, "name") or study_name(self.model)
        if config["logger"] is None or config["logger"] is True:
            kwargs["logger"] = RunLogger(root, name=name, default_hp_metric=False)
        trainer = super().instantiate_trainer(**kwargs)
        settle_processes(trainer)
        replace_fit_loop(trainer)
        after_signal_handlers(trainer, termination.handle_signals)
        used: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        used.append(RunFolder(name, self._get(self.config_init, "results")["figures"]))
        bar: Any = trainer.progress_bar_callback
        if type(bar) in (RichProgressBar, TQDMProgressBar) and not sys.stderr.isatty():
            used[used.index(bar)] = ProgressLines()
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the study, and describe its folder; errors say what the user can do."""
        is_first = self.trainer.global_rank == 0
        if not is_first:
            exit_with_parent()
        try:
            super()._run_subcommand(subcommand)
        except BaseException as error:
            if is_first:
                remove_if_empty(self.trainer)
            if not isinstance(error, Exception):  # such as a signal
                raise
            path = self.trainer.ckpt_path or self._get(self.config, "ckpt_path")
            explained = run_error(error, path, self.model, self.datamodule)
            if explained is None:
                raise
            raise explained from error
        if is_first and not is_dry_run(self.trainer):
            results = getattr(self.model, "results", None)
            write_out(describe_run(run_folder(self.trainer), results))


def _require_accelerator(name: Any) -> None:
    """Refuse an accelerator that is not there, before Lightning calls it unsupported."""
    known = AcceleratorRegistry.available_accelerators()
    kinds = [kind for kind in ("cuda", "mps") if name == "gpu"] or [k for k in known if k == name]
    if kinds and not any(AcceleratorRegistry[kind]["accelerator"].is_available() for kind in kinds):
        raise ConfigError(
            f"trainer.accelerator is {name}, and torch {torch.__version__} finds none on this "
            "machine. Set it to auto or cpu, or install a torch that is built for it."
        )


def check_datamodule(
    module: type[L.LightningModule], datamodule: type[L.LightningDataModule]
) -> None:
    """Refuse a datamodule whose batches are those of another study, if both have a `batch_type`."""
    wanted, given = (getattr(part, "batch_type", None) for part in (module, datamodule))
    if wanted is None or given is None or issubclass(given, wanted):
        return
    known = subclasses(L.LightningDataModule)
    fitting = (kind.__name__ for kind in known if getattr(kind, "batch_type", None) is wanted)
    raise ConfigError(
        f"{datamodule.__name__} yields {given.__name__}, but {module.__name__} takes "
        f"{wanted.__name__}. Use --data {next(fitting, 'of your own')}."
    )


def run_lightning_cli(args: Sequence[str]) -> LincorrCLI:
    """Parse a command line, without the program's name, and run it; return the CLI object."""
    _silence_expected_warnings()
    # Help texts of settings stand below their fields; to find them, the source is parsed.
    is_help = any(word == "-h" or word.partition("=")[0].endswith("help") for word in args)
    set_parsing_settings(
        docstring_parse_attribute_docstrings=is_help,
        add_print_completion_argument="--print_completion" in " ".join(args),
    )
    if SAFE in args:
        configs.allow_known_classes_only()
    with products.fastest():
        return LincorrCLI(configs.prepare_args(args))


def _silence_expected_warnings() -> None:
    """Silence what nobody can act on: expected warnings, Lightning's tips, and absent devices."""
    disable_progress_bar()  # type: ignore[no-untyped-call]  # of reading weights
    for message in (
        r"Found \d+ module\(s\) in eval mode",  # on purpose: the LM is frozen
        ".*isinstance.treespec, LeafSpec.*",
        "The '.*_dataloader' does not have many workers",  # which cost more than they save
        "It is recommended to use .*sync_dist=True",  # numbers are reduced over ranks before
        "The ``compute`` method of metric .* was called before",  # by a rank without a batch
        "The dirpath has changed from",  # a new run has a folder of its own
        "Couldn't infer the batch indices",  # a forecast names its edits itself
    ):
        warnings.filterwarnings("ignore", message)
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: not _NOISE.search(record.getMessage()))
