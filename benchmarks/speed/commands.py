"""How long commands take, and how much memory, in fresh processes with one thread.

    python -m benchmarks.speed.commands
    python -m benchmarks.speed.commands --only "[second runs]" --lm FOLDER

runs the groups of ``commands.yaml`` several times, the commands of a group in turn. Medians go to
``benchmarks/results/speed/commands.csv`` and into docs/benchmarks.md. A process's peak memory is
never below that of its parent, so that nothing large is imported here.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import auto_cli

from benchmarks import common
from lincorr_lightning.results.table import Table, column

GROUPS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
PROGRAMS = {"lincorr": [sys.executable, "-m", "lincorr_lightning"], "python": [sys.executable]}


@dataclass(frozen=True)
class Median:
    """What a command takes: medians over its runs."""

    group: str = column()
    command: str = column()
    lm: str = column("LM")
    runs: int = column(format="d")
    processor: float | None = column("processor, s", ".2f")
    wall: float | None = column("wall, s", ".2f")
    peak: float = column("peak, MiB", ",.0f")


def measure(group: str, lm: str) -> list[Median]:
    """Return the medians of a group's commands."""
    repeats = GROUPS[group]["repeats"]
    commands = GROUPS[group]["commands"]
    costs: dict[str, list[common.Cost]] = {name: [] for name in commands}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as shared:
            for name, text in commands.items():
                with tempfile.TemporaryDirectory() as runs:
                    words = [
                        word.format(runs=runs, shared=shared, lm=lm) for word in shlex.split(text)
                    ]
                    if "--config" in words and "default_root_dir" not in text:
                        words.append(f"--trainer.default_root_dir={runs}")
                    command = [*PROGRAMS[words[0]], *words[1:]]
                    costs[name].append(common.cost_of(command, cwd=common.ROOT, env=environment))
    return [
        Median(
            group,
            name,
            Path(lm).name if "{lm}" in commands[name] else "tiny-world",
            repeats,
            statistics.median(cost.processor for cost in found),
            statistics.median(cost.wall for cost in found),
            statistics.median(cost.peak_mib for cost in found),
        )
        for name, found in costs.items()
    ]


def main(only: tuple[str, ...] = tuple(GROUPS), lm: str = "tiny-world") -> None:
    """Measure.

    Args:
        only: Groups of commands.
        lm: The LM of the second runs: a folder, hub id or tiny-world.
    """
    rows = [row for group in only for row in measure(group, lm)]
    table = Table.of("commands", rows)
    print(table.markdown())
    table = common.add_rows(table, ("group", "command", "lm"), common.RESULTS / "speed")
    times = "command processor wall peak"
    common.place_tables(
        {
            "startup": common.shown(table, times, "group in ['startup', 'reproduce']"),
            "studies": common.shown(table, "command peak", "group == 'studies'"),
            "second runs": common.shown(table, times, "group == 'second runs'"),
        }
    )


if __name__ == "__main__":
    auto_cli(main)
