"""The program `lincorr`: the Trainer commands of LightningCLI, and a few commands beside them."""

import errno
import gc
import importlib
import importlib.resources
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any

from lincorr_lightning.errors import ConfigError, LanguageModelError, LincorrError
from lincorr_lightning.termination import exit_at_signals, tell
from lincorr_lightning.version import __version__

# Commands that are no Trainer method, each a function of that name in a module, and their help.
_MODULES = {"audit": "knowledge.audit", "report": "results.report", "compare": "results.compare",
            "weights": "weights", "cache": "state_folder", "reproduce": "reproduce"}  # fmt: skip
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

_LOST_RANK = ("closed by peer", "reset by peer", "remote process exited")


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
        return _import("lincorr_lightning.lightning_cli").run_lightning_cli(argv)
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
    if name in ("report", "compare", "weights", "reproduce"):  # with parsers of their own
        return command(args)
    # Imported here: jsonargparse takes a while to import.
    from jsonargparse import ArgumentError, ArgumentParser

    from lincorr_lightning.option_errors import explain

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


class _Stream(io.FileIO):
    """Standard output or error, without which a run goes on: its results are in files."""

    is_within_line = False
    """Whether what was written last goes on, as a progress bar does."""

    def write(self, data: Any, /) -> int:
        """Write bytes; if they cannot be written, drop them and all that follow."""
        self.is_within_line = bytes(data[-1:]) != b"\n"
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(nowhere := os.open(os.devnull, os.O_WRONLY), self.fileno())
            os.close(nowhere)
            if error.errno != errno.EPIPE:  # else the reader has seen enough, as with `| head`
                tell(f"lincorr: warning: the run goes on without output: {error.strerror}.")
            return len(data)


def _outlive_streams() -> None:
    """Let no closed or full standard output or error end this process."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the next file would get this number, and all that is printed
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            of = ("encoding", "errors", "line_buffering", "write_through")
            options = {option: getattr(stream, option) for option in of}
            setattr(sys, name, io.TextIOWrapper(raw, **options))


def console() -> None:
    """Run the program: errors that the user can mend are one line, without a traceback."""
    _outlive_streams()
    # Tokenizers would warn of forked processes.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        with exit_at_signals():
            main()
    except LincorrError as error:
        sys.stderr.write(f"lincorr: error: {error}\n")
        sys.exit(error.exit_status)
    except RuntimeError as error:
        # Messages of gloo and NCCL about another process; its own error is on the screen.
        if not any(sign in str(error) for sign in _LOST_RANK):
            raise
        sys.stderr.write("lincorr: error: another process of this run failed; see its error.\n")
        sys.exit(1)
