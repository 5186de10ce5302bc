"""The commands of `lincorr`: those of the Trainer, by LightningCLI, and others beside them."""

import gc
import importlib
import importlib.resources
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from textwrap import wrap
from types import ModuleType
from typing import Any

from lincorr_lightning.cli.termination import exit_at_signals
from lincorr_lightning.errors import ConfigError, LincorrError, ReportError
from lincorr_lightning.terminal import make_messages_printable, show_error
from lincorr_lightning.version import __version__

# Commands that are no Trainer method, each a function of that name in a module, and their help.
_MODULES = {
    "audit": "knowledge.audit",
    "report": "results.report",
    "compare": "cli.compare",
    "weights": "linear_map.weights",
    "cache": "lm.state_folder",
    "reproduce": "reproduce",
}
_OWN_PARSER = ("report", "compare", "weights", "reproduce")
COMMANDS = {
    "audit": "Show which answers are labels of an LM, and why others are not.",
    "report": "Write an HTML page of finished runs, and Markdown tables.",
    "compare": "Show finished runs of one study as a table, or two with differences and errors.",
    "weights": "Show the highest weights of a label in W, and another label's rank.",
    "cache": "Show or clear the states of LMs that model.lm.state_cache keeps.",
    "reproduce": "Write one page of all tables and figures of the paper on your LM.",
}
# Variables that launchers set and Lightning reads as numbers, some when it is imported.
_OF_LAUNCHERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "JSM_NAMESPACE_RANK"),
    *("WORLD_SIZE", "MASTER_PORT", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"),
)
# Messages of gloo and NCCL about another process.
_LOST_RANK = ("closed by peer", "reset by peer", "remote process exited")
TRAINER_COMMANDS = {
    "fit": "Run a study that fits maps or trains; writes tables and figures.",
    "validate": "Score a checkpoint of fit on the subjects that were held out.",
    "test": "Run a study that only reads LMs, or score a checkpoint of fit.",
    "predict": "Write what a checkpoint of fit predicts, or a forecast of edits.",
}


def console() -> None:
    """Run the program: errors that the user can mend are one line, without a traceback."""
    # Tokenizers would warn of forked processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["MPLBACKEND"] = "agg"  # with one that is not installed, matplotlib has no import
    make_messages_printable()
    try:
        with exit_at_signals():
            main()
            sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except LincorrError as error:
        show_error(error)
        sys.exit(error.exit_status)
    except Warning as error:
        show_error(f"-W or PYTHONWARNINGS made a warning an error; leave it out. {error}")
        sys.exit(1)
    except RuntimeError as error:
        # The error of the other process is on the screen.
        if not any(sign in str(error) for sign in _LOST_RANK):
            raise
        show_error("another process of this run failed; see its error.")
        sys.exit(1)


def main(args: Sequence[str] | None = None) -> Any:
    """Run one command, without the program's name; None is the process's own command line.

    Returns the LightningCLI object after a Trainer command, else what the command returns. What the
    user can mend is a `LincorrError`.
    """
    argv = list(sys.argv[1:] if args is None else args)
    if argv[:1] == ["--version"]:
        sys.stdout.write(f"lincorr {__version__}\n")
        return None
    if argv in ([], ["-h"], ["--help"]):
        # Importing Lightning takes seconds.
        sys.stdout.write(overview())
        return None
    if argv[0] not in {*TRAINER_COMMANDS, *COMMANDS} and not argv[0].startswith("-"):
        names = ", ".join([*TRAINER_COMMANDS, *COMMANDS])
        raise ConfigError(f"there is no command {argv[0]!r}. The commands are {names}.")
    for name in _OF_LAUNCHERS:
        if not re.fullmatch(r"\s*[+-]?\d+\s*", value := os.environ.get(name, "0")):
            raise ConfigError(f"the variable {name} of the environment is {value!r}; unset it.")
    with _own_torch_settings():
        if argv[0] in COMMANDS:
            return _run_command(argv[0], argv[1:])
        return _import_lightning_cli().run_lightning_cli(argv)


def _import_lightning_cli() -> Any:
    """Import what runs the Trainer's commands, which takes longer than many of them.

    Until Lightning is imported, no garbage is collected, and scipy.signal, of which torchmetrics
    looks for one name, is a placeholder.
    """
    name = "lincorr_lightning.cli.lightning_cli"
    if name in sys.modules or "scipy.signal" in sys.modules:
        return importlib.import_module(name)
    placeholder = sys.modules["scipy.signal"] = _Later("scipy.signal")
    gc.disable()
    try:
        module = importlib.import_module(name)
        gc.freeze()  # what is imported stays: later collections need not search it
    finally:
        gc.enable()
        if sys.modules["scipy.signal"] is placeholder:
            del sys.modules["scipy.signal"]
    return module


class _Later(ModuleType):
    """A module that is imported once a name of it is needed, but for those here."""

    hamming = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks all modules for some
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _own_torch_settings() -> AbstractContextManager[object]:
    if "torch" not in sys.modules:  # nobody has changed them, and importing it takes seconds
        return nullcontext()
    from lincorr_lightning.lm.modes import own_torch_settings

    return own_torch_settings()


def overview() -> str:
    """Return the text of ``lincorr --help``: the commands, and a command for each study."""
    commands = TRAINER_COMMANDS | COMMANDS
    lines = [
        "usage: lincorr COMMAND [options]\n",
        "Measure, watch and explain the linear correlation between pieces of knowledge",
        "in a language model.\n\ncommands:",
        *(f"  {name:<9} {text}" for name, text in commands.items()),
        "\nstudies (copy and change the configs, or override them with options):",
    ]
    for command, about in study_commands().items():
        lines += [f"  {command}", *(f"      {line}" for line in wrap(about, 74))]
    lines += [
        "\nexamples:",
        "  lincorr fit --config configs/linear_probe.yaml --model.lm.name_or_path MY/LM",
        "  lincorr fit --model.help LinearProbe\n",
        "`lincorr COMMAND --help` lists the options, `lincorr --version` the version.",
    ]
    return "\n".join(lines) + "\n"


def study_commands() -> dict[str, str]:
    """Return the command of each packaged config and what it does, from the comment at its head."""
    from lincorr_lightning.results.saved_run import config_verb

    configs = importlib.resources.files("lincorr_lightning.configs").iterdir()
    texts = {file.name: file.read_text("utf-8") for file in configs if file.name.endswith(".yaml")}
    commands = {}
    for name, text in sorted(texts.items()):
        head = text.partition("\n#\n")[0].removeprefix("# ").replace("\n# ", " ")
        command = f"lincorr {config_verb(text)} --config configs/{name}"
        commands[command] = re.split(r"(?<=[.?]) ", head)[0]
    return commands


def _run_command(name: str, args: Sequence[str]) -> Any:
    module = importlib.import_module(f"lincorr_lightning.{_MODULES[name]}")
    command = getattr(module, name)
    if name in _OWN_PARSER:
        try:
            return command(args)
        except OSError as error:
            if error.filename is None:  # such as of a pipe that was closed
                raise
            raise ReportError(f"cannot read {error.filename}: {error.strerror}.") from error
    # Imported here: jsonargparse takes a while to import.
    from jsonargparse import ArgumentError, ArgumentParser

    from lincorr_lightning.cli.option_errors import explain

    parser = ArgumentParser(prog=f"lincorr {name}", exit_on_error=False)
    parser.add_function_arguments(command, as_positional=True)
    try:
        return command(**parser.parse_args(args).as_dict())
    except ArgumentError as error:
        raise ConfigError(explain(error, args, parser)) from error
