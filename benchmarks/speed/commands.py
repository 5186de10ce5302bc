"""How long commands take, and how much memory, in fresh processes with one thread.

    python -m benchmarks.speed.commands
    python -m benchmarks.speed.commands --only "[second runs, real LM]" --lm FOLDER
    python -m benchmarks.speed.commands --only "[startup]" --earlier CHECKOUT

runs the groups of ``commands.yaml`` several times, the commands of a group in turn. Medians go to
``benchmarks/results/speed/commands.csv`` and into docs/benchmarks.md. With the checkout of an
earlier version, each command is run with both in turn, and the ratios go to ``versions.csv``. A
process's peak memory is never below that of its parent, so that nothing large is imported here.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
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


@dataclass(frozen=True)
class Ratio:
    """A command before and after: medians over its runs, and of the ratios of runs in turn."""

    group: str = column()
    command: str = column()
    lm: str = column("LM")
    threads: int = column(format="d")
    runs: int = column(format="d")
    processor: float = column("processor, s", ".2f")
    processor_ratio: float = column("processor, ratio to before", ".2f")
    wall: float = column("wall, s", ".2f")
    wall_ratio: float = column("wall, ratio to before", ".2f")
    peak: float = column("peak, MiB", ",.0f")
    peak_before: float = column("before, MiB", ",.0f")


def costs_of(
    plan: Mapping[str, Any],
    commands: Mapping[str, str],
    lm: str,
    checkouts: Sequence[Path],
    threads: int = 1,
) -> dict[str, list[list[common.Cost]]]:
    """Return, by command, what each run of it took with each checkout, in turn."""
    costs: dict[str, list[list[common.Cost]]] = {name: [] for name in commands}
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    for repeat in range(plan["repeats"]):
        with ExitStack() as folders:
            shared = [folders.enter_context(tempfile.TemporaryDirectory()) for _ in checkouts]
            if "before" in plan:
                for folder in shared:
                    words = words_of(plan["before"], shared=folder)
                    common.cost_of(words, cwd=common.ROOT, env=env)
            # Each checkout is the first in half of the repeats.
            turns = list(zip(shared, checkouts, strict=True))[:: -1 if repeat % 2 else 1]
            for name, text in commands.items():
                found = {}
                for folder, checkout in turns:
                    with tempfile.TemporaryDirectory() as runs:
                        words = words_of(text, runs=runs, shared=folder, lm=lm)
                        found[checkout] = common.cost_of(words, cwd=checkout, env=env)
                costs[name].append([found[checkout] for checkout in checkouts])
    return costs


def measure(
    group: str,
    plan: Mapping[str, Any],
    lm: str,
    earlier: Path | None = None,
    threads: int = 1,
    commands: Collection[str] = (),
) -> Iterator[Median | Ratio]:
    """Yield the medians of a group's commands, or their ratios to an earlier checkout."""
    texts = {
        name: plan.get("prefix", "") + text
        for name, text in plan["commands"].items()
        if not commands or name in commands
    }
    checkouts = [common.ROOT] if earlier is None else [common.ROOT, earlier]
    for name, found in costs_of(plan, texts, lm, checkouts, threads).items():
        of_lm = re.search(r"(?:name_or_path|--lm)=(\S+)", texts[name])
        about = Path(of_lm[1].format(lm=lm, shared="")).name if of_lm else "tiny-world"
        here, *others = zip(*found, strict=True)
        wall, processor, peak = map(statistics.median, zip(*here, strict=True))
        if not others:
            yield Median(group, name, about, len(here), processor, wall, peak)
            continue
        ratios = [(a.wall / b.wall, a.processor / b.processor, b.peak_mib) for a, b in found]
        wall_ratio, ratio, before = map(statistics.median, zip(*ratios, strict=True))
        yield Ratio(
            *(group, name, about, threads, len(here)),
            *(processor, ratio, wall, wall_ratio, peak, before),
        )


def main(
    only: tuple[str, ...] = tuple(GROUPS),
    lm: str = "tiny-world",
    earlier: Path | None = None,
    threads: int = 1,
    commands: tuple[str, ...] = (),
    repeats: int | None = None,
) -> None:
    """Measure.

    Args:
        only: Groups of commands.
        lm: The LM of the groups that take one: a folder, hub id or tiny-world.
        earlier: A checkout of an earlier version, beside which this one is measured.
        threads: Of each process; the table of medians is of one.
        commands: Commands of these groups; none takes all.
        repeats: How often each is run; null is the plan's.
    """
    if missing := {*commands}.difference(*(GROUPS[group]["commands"] for group in only)):
        raise SystemExit(f"none of the groups has the commands {sorted(missing)}")
    lm = str(Path(lm).resolve()) if Path(lm).exists() else lm  # checkouts are other folders
    rows = []
    for group in only:
        plan = GROUPS[group] | ({} if repeats is None else {"repeats": repeats})
        rows += measure(group, plan, lm, earlier, threads, commands)
    if earlier is not None:
        table = common.add_rows(Table.of("versions", rows), "group", "command", "lm", "threads")
        common.place_tables({"versions": common.shown(table)})
        return
    table = Table.of("commands", rows)
    table = common.add_rows(table, "group", "command", "lm")
    times = "command processor wall peak"
    growing = "('subjects', 'labels', 'kinds', 'LM', 'real LM')"
    ends = "group == 'real LM' or command in ['1,000', '10,000', '20', '2', '67', '15M', '1.5B']"
    common.place_tables(
        {
            "startup": common.shown(
                table, "command lm processor wall peak", "group in ['startup', 'reproduce']"
            ),
            "studies": common.shown(table, "command peak", "group == 'studies'"),
            "second runs": common.shown(table, times, "group == 'second runs'"),
            "growth": common.shown(
                table, "group command lm processor peak", f"group in {growing} and ({ends})"
            ),
        }
    )


if __name__ == "__main__":
    auto_cli(main)
