"""The program `lincorr`: LightningCLI over every study, and a few commands beside it."""

from __future__ import annotations

import importlib
import importlib.resources
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lincorr_lightning.errors import LincorrError
from lincorr_lightning.version import __version__

# Commands that are no Trainer method: name -> (module, function, help).
COMMANDS = {
    "audit": ("lincorr_lightning.knowledge.audit", "audit", "what a tokenizer keeps of a domain"),
}
DEFAULT_ROOT_DIR = "runs"


def main(args: Sequence[str] | None = None) -> Any:
    """Run one command of `lincorr`.

    Args:
        args: Command line without the program's name; None takes this process's own.

    Returns:
        The LightningCLI object after a Trainer command, else what the command returns.

    Raises:
        LincorrError: Whatever goes wrong for a reason that the user can do something about.
        SystemExit: The command line cannot be parsed.
    """
    argv = list(sys.argv[1:] if args is None else args)
    if argv[:1] == ["--version"]:
        sys.stdout.write(f"lincorr {__version__}\n")
        return None
    if argv and argv[0] in COMMANDS:
        from jsonargparse import auto_cli

        return auto_cli(_command(argv[0]), args=argv[1:], prog=f"lincorr {argv[0]}")
    from lincorr_lightning.lightning_cli import run_lightning_cli

    epilog = "other commands: " + ", ".join(f"{n} ({text})" for n, (_, _, text) in COMMANDS.items())
    return run_lightning_cli([_find_packaged(argument) for argument in argv], epilog)


def _command(name: str) -> Callable[..., Any]:
    module, function, _ = COMMANDS[name]
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _find_packaged(argument: str) -> str:
    """Let ``--config configs/linear_probe.yaml`` name the packaged file where no such file is."""
    prefix, equals, value = argument.rpartition("=")
    path = Path(value)
    if path.suffix != ".yaml" or (equals and prefix != "--config") or path.exists():
        return argument
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    packaged = importlib.resources.files("lincorr_lightning.configs").joinpath(*parts)
    return f"{prefix}{equals}{packaged}" if packaged.is_file() else argument


def console() -> None:
    """Entry point: what the user can mend is told in one line, without a traceback."""
    # A frozen LM is asked in large matrix products; forked tokenizer threads only warn.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        main()
    except LincorrError as error:
        sys.stderr.write(f"lincorr: error: {error}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("lincorr: interrupted\n")
        sys.exit(130)
