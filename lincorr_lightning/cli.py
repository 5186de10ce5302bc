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
    "audit": (
        "lincorr_lightning.knowledge.audit",
        "audit",
        "Show which answers an LM's tokenizer can speak of.",
    ),
    "report": (
        "lincorr_lightning.results.report",
        "report",
        "Write one HTML page of finished runs, with LaTeX and Markdown tables.",
    ),
}
TRAINER_COMMANDS = {
    "fit": "Run a study: read the LM, fit, score the held-out half, write tables and figures.",
    "validate": "Score a checkpoint again.",
    "test": "Score a checkpoint again.",
    "predict": "Write what a checkpoint predicts for some X's.",
}


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
    if argv in ([], ["-h"], ["--help"]):
        # Without Lightning, whose import alone takes seconds.
        sys.stdout.write(overview())
        return None
    if argv[0] not in {*TRAINER_COMMANDS, *COMMANDS} and not argv[0].startswith("-"):
        sys.stderr.write(f"lincorr: error: there is no command {argv[0]!r}.\n\n{overview()}")
        raise SystemExit(2)
    if argv[0] in COMMANDS:
        from jsonargparse import auto_cli

        args = argv[1:]
        if argv[0] == "report":
            from lincorr_lightning.results.report.command import gather

            # A shell's `*` gives many folders; jsonargparse takes one word for a list.
            args = gather(args)
        return auto_cli(_command(argv[0]), args=args, prog=f"lincorr {argv[0]}")
    from lincorr_lightning.lightning_cli import run_lightning_cli

    return run_lightning_cli([_find_packaged(argument) for argument in argv])


def overview() -> str:
    """What ``lincorr --help`` says: the commands, and the studies there are configs for."""
    commands = TRAINER_COMMANDS | {name: text for name, (_, _, text) in COMMANDS.items()}
    configs = importlib.resources.files("lincorr_lightning.configs")
    studies = sorted(file.name for file in configs.iterdir() if file.name.endswith(".yaml"))
    lines = [
        "usage: lincorr COMMAND [options]",
        "",
        "Measure, watch and explain the linear correlation between the pieces of knowledge in a",
        "language model.",
        "",
        "commands:",
        *(f"  {name:<9} {text}" for name, text in commands.items()),
        "",
        "studies (copy and change them, or lay options over them):",
        *(f"  --config configs/{name}" for name in studies),
        "",
        "examples:",
        "  lincorr fit --config configs/linear_probe.yaml",
        "  lincorr fit --config configs/linear_probe.yaml --model.lm.name_or_path MY/CHECKPOINT",
        "  lincorr fit --model.help LinearProbe",
        "",
        "`lincorr COMMAND --help` lists the options, `lincorr --version` tells the version.",
    ]
    return "\n".join(lines) + "\n"


def _command(name: str) -> Callable[..., Any]:
    module, function, _ = COMMANDS[name]
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def _find_packaged(argument: str) -> str:
    """Let ``--config configs/linear_probe.yaml`` name the packaged file if no such file is."""
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
    except RuntimeError as error:
        # gloo's and NCCL's words for a process that is gone; its own error is on the screen.
        if not any(sign in str(error) for sign in ("closed by peer", "remote process exited")):
            raise
        sys.stderr.write("lincorr: error: another process of this run failed; see its error.\n")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.stderr.write("lincorr: interrupted\n")
        sys.exit(130)
