"""The commands and code blocks of README.md and docs/."""

import re
import shlex
from importlib.resources import files
from pathlib import Path

from benchmarks.common import all_text
from lincorr_lightning.cli import main

TEXT = all_text()


def blocks(language: str) -> list[str]:
    """Code blocks of the documents in one language."""
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def lincorr_commands() -> list[list[str]]:
    """Arguments of every `lincorr` in the shell blocks."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part)[1:] for part in parts if part.startswith("lincorr ")]


def config_of(command: list[str]) -> str:
    """Name of the study's config; empty if the command has none."""
    return Path(command[2]).stem if command[1] == "--config" else ""


def needs_other_files(command: list[str]) -> bool:
    """Whether a command reads files that are not here, or starts processes itself."""
    return any(
        "configs/lm/" in part
        or "texts.txt" in part
        or "rivers.yaml" in part
        or "smollm2-135m" in part
        or "edited_lms" in part
        or part == "configs/trainer/ddp_cpu.yaml"
        for part in command
    )


def with_own_files(command: list[str]) -> list[str]:
    """Replace the paths that stand for the reader's own files."""
    saes = "runs/sparse_autoencoders/version_0/sparse_autoencoders"
    lm = files("lincorr_lightning.lm")
    paths = {
        "path/to/checkpoint": str(lm.joinpath("tiny_world")),
        "path/to/base": str(lm.joinpath("tiny_world")),
        "path/to/edited": str(lm.joinpath("tiny_world_edited")),
        "path/to/edits.jsonl": str(lm.joinpath("tiny_world_edited", "edits.csv")),
        "folder/of/one": f"{saes}/residual.0",
        "folder/of/another": f"{saes}/mlp_out.0",
        # In its small form feature flow takes these, too, and trains none.
        "runs/feature_flow/version_0/sparse_autoencoders": saes,
    }
    for name, path in paths.items():
        command = [part.replace(name, path) for part in command]
    return command


def run_folder_of(command: list[str]) -> Path | None:
    """Run a command and return its run folder, if it has one."""
    trainer = getattr(main(command), "trainer", None)
    found = trainer is not None and trainer.log_dir is not None
    return Path(trainer.log_dir).absolute() if found else None
