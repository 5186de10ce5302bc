"""The commands of `lincorr`: those of the Trainer, by LightningCLI, and others beside them."""

import gc
import importlib
import importlib.resources
import re
import sys
from collections.abc import Sequence
from textwrap import wrap
from types import ModuleType
from typing import Any

from lincorr_lightning.errors import ConfigError, LanguageModelError
from lincorr_lightning.version import __version__

# Commands that are no Trainer method, each a function of that name in a module, and their help.
_MODULES = {
    "audit": "knowledge.audit",
    "report": "results.report",
    "compare": "results.compare",
    "weights": "linear_map.weights",
    "cache": "lm.state_folder",
    "reproduce": "reproduce",
}
_OWN_PARSER = ("report", "compare", "weights", "reproduce")
COMMANDS = {
    "audit": "Show which answers are labels of an LM, and why others are not.",
    "report": "Write an HTML page of finished runs, and LaTeX and Markdown tables.",
    "compare": "Show two finished runs of one study side by side, with errors.",
    "weights": "Show the highest weights of a label in W, and another label's rank.",
    "cache": "Show or clear the states of LMs that model.lm.state_cache keeps.",
    "reproduce": "Write one page of all tables and figures of the paper on your LM.",
}
TRAINER_COMMANDS = {
    "fit": "Run a study that fits maps or trains; writes tables and figures.",
    "validate": "Score a checkpoint of fit on the subjects that were held out.",
    "test": "Run a study that only reads LMs, or score a checkpoint of fit.",
    "predict": "Write what a checkpoint of fit predicts, or a forecast of edits.",
}


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
    try:
        if argv[0] in COMMANDS:
            return _run_command(argv[0], argv[1:])
        return _import("lincorr_lightning.cli.lightning_cli").run_lightning_cli(argv)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of the library tokenizers, in Rust
            raise
        raise LanguageModelError(
            f"the LM's tokenizer fails: {' '.join(str(error).split())[:200]}. A pattern in its "
            "tokenizer.json may be wrong, or take too long. Copy the file again, or pass another "
            "tokenizer as model.lm.tokenizer."
        ) from None


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
    texts = {one.name: one.read_text("utf-8") for one in configs if one.name.endswith(".yaml")}
    commands = {}
    for name, text in sorted(texts.items()):
        head = text.partition("\n#\n")[0].removeprefix("# ").replace("\n# ", " ")
        command = f"lincorr {config_verb(text)} --config configs/{name}"
        commands[command] = re.split(r"(?<=[.?]) ", head)[0]
    return commands


def _run_command(name: str, args: Sequence[str]) -> Any:
    command = getattr(_import(f"lincorr_lightning.{_MODULES[name]}"), name)
    if name in _OWN_PARSER:
        return command(args)
    # Imported here: jsonargparse takes a while to import.
    from jsonargparse import ArgumentError, ArgumentParser

    from lincorr_lightning.cli.option_errors import explain

    parser = ArgumentParser(prog=f"lincorr {name}", exit_on_error=False)
    parser.add_function_arguments(command, as_positional=True)
    try:
        return command(**parser.parse_args(args).as_dict())
    except ArgumentError as error:
        raise ConfigError(explain(error, args, parser)) from error


def _import(name: str) -> Any:
    """Import a module without what makes importing Lightning slow.

    That is garbage collection, and scipy.signal, of which torchmetrics looks for one name.
    """
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    signal = sys.modules.setdefault("scipy.signal", _Later("scipy.signal"))
    try:
        module = importlib.import_module(name)
        gc.freeze()  # what is imported stays: later collections need not search it
    finally:
        gc.enable()
        if sys.modules["scipy.signal"] is signal and isinstance(signal, _Later):
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
