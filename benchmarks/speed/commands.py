"""How long commands take, and how much memory, in fresh processes with one thread.

    python -m benchmarks.speed.commands
    python -m benchmarks.speed.commands --only "[second runs, real LM]" --lm FOLDER

runs the groups of ``commands.yaml`` several times, the commands of a group in turn. Medians go to
``benchmarks/results/speed/commands.csv`` and into docs/benchmarks.md. A process's peak memory is
never below that of its parent, so that nothing large is imported here.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator
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


def words_of(text: str, **values: str) -> list[str]:
    """Return a command line of the plan as words, for `common.cost_of`."""
    program, *words = [word.format(**values) for word in shlex.split(text)]
    if "--config" in words and "default_root_dir" not in text:
        words.append(f"--trainer.default_root_dir={values['runs']}")
    return [*PROGRAMS[program], *words]


def measure(group: str, lm: str) -> Iterator[Median]:
    """Yield the medians of a group's commands."""
    plan = GROUPS[group]
    commands = {name: plan.get("prefix", "") + text for name, text in plan["commands"].items()}
    costs: dict[str, list[common.Cost]] = {name: [] for name in commands}
    options: dict[str, Any] = {"cwd": common.ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    for _ in range(plan["repeats"]):
        with tempfile.TemporaryDirectory() as shared:
            if "before" in plan:
                common.cost_of(words_of(plan["before"], shared=shared), **options)
            for name, text in commands.items():
                with tempfile.TemporaryDirectory() as runs:
                    words = words_of(text, runs=runs, shared=shared, lm=lm)
                    costs[name].append(common.cost_of(words, **options))
    for name, found in costs.items():
        of_lm = re.search(r"name_or_path=(\S+)", commands[name])
        about = Path(of_lm[1].format(lm=lm, shared="")).name if of_lm else "tiny-world"
        wall, processor, peak = map(statistics.median, zip(*found, strict=True))
        yield Median(group, name, about, plan["repeats"], processor, wall, peak)


def main(only: tuple[str, ...] = tuple(GROUPS), lm: str = "tiny-world") -> None:
    """Measure.

    Args:
        only: Groups of commands.
        lm: The LM of the groups that take one: a folder, hub id or tiny-world.
    """
    rows = [row for group in only for row in measure(group, lm)]
    table = Table.of("commands", rows)
    table = common.add_rows(table, "group", "command", "lm")
    times = "command processor wall peak"
    growing = "('subjects', 'labels', 'kinds', 'LM', 'real LM')"
    ends = "command in ['1,000', '10,000', '20', '2', '67', '15M', '1.5B', 'ten kinds']"
    common.place_tables(
        {
            "startup": common.shown(table, times, "group in ['startup', 'reproduce']"),
            "studies": common.shown(table, "command peak", "group == 'studies'"),
            "second runs": common.shown(table, times, "group == 'second runs'"),
            "growth": common.shown(
                table, "group command lm processor peak", f"group in {growing} and {ends}"
            ),
        }
    )


if __name__ == "__main__":
    auto_cli(main)
