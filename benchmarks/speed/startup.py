"""How long commands take, most of them to start: processor and wall time, in fresh processes.

    python -m benchmarks.speed.startup
    python -m benchmarks.speed.startup --before ../other-checkout
    python -m benchmarks.speed.startup --lm FOLDER --only '["32 LoRA edits"]'

runs each command several times, the commands in turn, and puts the table of medians into
docs/benchmarks.md. The main job, `lincorr fit --config configs/linear_probe.yaml`, is stopped at
its first batch. Importing torch and Lightning alone is measured, too. With the folder of another
checkout, each of its commands runs in turn with ours. 32 LoRA edits with all callbacks and
forecasts need the folder of an LM, and are measured only if they are named.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import auto_cli

from benchmarks.common import (
    RESULTS,
    ROOT,
    Cost,
    cost_of,
    markdown_table,
    place_tables,
    read_numbers,
    write_numbers,
)

RESULT = RESULTS / "startup.json"
EDITS = "32 LoRA edits"
KINDS = ("processor", "wall")
# What the process of a command runs; `{runs}` is a folder for its runs, `{lm}` the LM.
COMMANDS = {
    **{
        f"lincorr {command}": ("-m", "lincorr_lightning", *command.split())
        for command in ("--version", "--help", "report --help", "audit --help", "audit",
                        "fit --help")
    },
    "main job, to its first batch": (
        "-m", "lincorr_lightning", "fit", "--config", "configs/linear_probe.yaml",
        "--trainer.callbacks+=benchmarks.speed.startup.StopAtFirstBatch",
        "--trainer.default_root_dir={runs}",
    ),
    EDITS: (
        "-m", "lincorr_lightning", "fit", "--config", "configs/source_finetune_lora.yaml",
        "--data.n_edits=32", "--model.lm.name_or_path={lm}", "--trainer.default_root_dir={runs}",
    ),
    "import torch": ("-c", "import torch"),
    "import lightning": ("-c", "import lightning"),
}  # fmt: skip


class StopAtFirstBatch(L.Callback):
    """Ends the process, without an error, before the first training batch."""

    def on_train_batch_start(self, *args: Any) -> None:
        """Leave at once; nothing is written."""
        del args
        os._exit(0)


def times_of(command: Sequence[str], checkout: Path, lm: str) -> Cost:
    """Run a command once, with the package of a checkout, and return what it took."""
    # Bytecode is kept between runs, as in an installed package.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (checkout, ROOT)))
    with tempfile.TemporaryDirectory() as runs:
        arguments = [argument.replace("{runs}", runs).replace("{lm}", lm) for argument in command]
        return cost_of([sys.executable, *arguments], cwd=checkout, env=environment)


def table(measured: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> str:
    """Return the table of medians; its columns are those of the checkouts that were measured."""
    checkouts = list(next(iter(measured.values())))
    columns = [f"{kind}, {checkout}" for checkout in checkouts for kind in KINDS]
    rows = []
    for command, times in measured.items():
        seconds = [times[checkout][kind] for checkout in checkouts for kind in KINDS]
        row = [command, *(f"{statistics.median(runs):.2f} s" for runs in seconds)]
        if len(checkouts) > 1:
            before, after = (times[checkout]["processor"] for checkout in checkouts)
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            row.append(f"{statistics.median(ratios):.2f}")
        rows.append(row)
    ratio = ["processor, after / before"] if len(checkouts) > 1 else []
    return markdown_table(["command", *columns, *ratio], rows)


def main(
    n: int = 5,
    before: str | None = None,
    lm: str = "",
    warm_up: bool = True,
    only: tuple[str, ...] = (),
) -> None:
    """Measure.

    Args:
        n: Number of runs of each command that count.
        before: Folder of another checkout, such as a git worktree, whose commands run in turn with
            ours.
        lm: Folder of the LM that is edited.
        warm_up: Whether a run that does not count comes first.
        only: Names of commands; empty takes all but the edits. Numbers of others are kept.
    """
    checkouts = {"before": Path(before).resolve()} if before else {}
    checkouts["after" if before else "now"] = ROOT
    names = only or tuple(name for name in COMMANDS if name != EDITS)
    if EDITS in names and not lm:
        raise SystemExit(f"{EDITS} need an LM: pass --lm FOLDER")
    numbers: dict[str, Any] = {
        name: {where: {kind: [] for kind in KINDS} for where in checkouts} for name in names
    }
    for run, name, where in product(range(n + warm_up), names, checkouts):
        cost = times_of(COMMANDS[name], checkouts[where], lm)
        for kind in KINDS if run >= warm_up else ():
            numbers[name][where][kind].append(getattr(cost, kind))
    known = read_numbers(RESULT) if RESULT.exists() else {}
    kept = {name: each for name, each in known.items() if list(each) == list(checkouts)}
    write_numbers(RESULT, kept | numbers)
    found = table(read_numbers(RESULT))
    print(found)
    place_tables({"startup": found})


if __name__ == "__main__":
    auto_cli(main)
