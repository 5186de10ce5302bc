"""How long commands take, and how much memory: processor and wall time, in fresh processes.

    python -m benchmarks.speed.startup
    python -m benchmarks.speed.startup --before ../other-checkout
    python -m benchmarks.speed.startup --lm FOLDER --only '["32 LoRA edits", "reproduce"]'

runs each command several times, the commands in turn, and puts the table of medians into
docs/benchmarks.md. The wall time of a run ends with its results.json, and that of a page with its
process. Importing torch and Lightning alone is measured, too. With the folder of another checkout,
each of its commands runs in turn with ours. A process's peak memory is never below that of its
parent, so that nothing large is imported here. Commands of an LM, such as 32 LoRA edits with all
callbacks, need its folder, and are measured only if they are named.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from shutil import copytree
from typing import Any

from jsonargparse import auto_cli

from benchmarks import common

RESULT = common.RESULTS / "startup.json"
KINDS = {"processor": "s", "wall": "s", "peak_mib": "MiB"}
LINCORR = ("-m", "lincorr_lightning")
FIT, TO = (*LINCORR, "fit", "--config"), "--trainer.default_root_dir={runs}"  # after the config
PAGE = (*LINCORR, "reproduce", "--size=quick", "--output={runs}/page")
# What the process of a command runs: `{runs}` is a folder for its runs, `{lm}` the LM, `{probe}`
# a finished main job.
COMMANDS = {
    **{
        f"lincorr {command}": (*LINCORR, *command.split())
        for command in (
            "--version",
            "--help",
            "report --help",
            "audit --help",
            "compare --help",
            "audit",
            "fit --help",
        )
    },
    "lincorr weights": (*LINCORR, "weights", "{probe}", "city->country", "Rome"),
    "lincorr cache": (*LINCORR, "cache", "{runs}"),
    "lincorr report": (*LINCORR, "report", "{probe}", "--output={runs}/report"),
    "lincorr compare": (*LINCORR, "compare", "{probe}", "{probe}/../version_1"),
    "main job, to its first batch": (
        *FIT,
        "configs/linear_probe.yaml",
        TO,
        "--trainer.callbacks+=benchmarks.speed.first_batch.StopAtFirstBatch",
    ),
    "main job": (*FIT, "configs/linear_probe.yaml", TO),
    "import torch": ("-c", "import torch"),
    "import lightning": ("-c", "import lightning"),
    "reproduce, tiny world": PAGE,
    "reproduce": (*PAGE, "--lm={lm}"),
    "32 LoRA edits": (
        *FIT,
        "configs/source_finetune_lora.yaml",
        TO,
        "--data.n_edits=32",
        "--model.lm.name_or_path={lm}",
    ),
}
ALL = tuple(name for name, command in COMMANDS.items() if "{lm}" not in " ".join(command))


def times_of(command: Sequence[str], checkout: Path, lm: str, probe: str) -> common.Cost:
    """Run a command once, with the package of a checkout, and return what it took."""
    # Bytecode is kept between runs, as in an installed package.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (checkout, common.ROOT)))
    with tempfile.TemporaryDirectory() as runs:
        arguments = [argument.format(runs=runs, lm=lm, probe=probe) for argument in command]
        start = time.time()
        cost = common.cost_of([sys.executable, *arguments], cwd=checkout, env=environment)
        ends = [path.stat().st_mtime for path in Path(runs).rglob("results.json")]
        return cost._replace(wall=ends[0] - start) if len(ends) == 1 else cost


def table(measured: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> str:
    """Return the table of medians; its columns are those of the checkouts that were measured."""
    checkouts = list(next(iter(measured.values())))
    columns = [f"{kind.replace('_mib', '')}, {where}" for where in checkouts for kind in KINDS]
    rows = []
    for command, times in measured.items():
        each = [(times[where][kind], unit) for where in checkouts for kind, unit in KINDS.items()]
        row = [
            command,
            *(
                f"{statistics.median(runs):.{(unit == 's') * 2}f} {unit}" if runs else ""
                for runs, unit in each
            ),
        ]
        for kind in ("processor", "wall") if len(checkouts) > 1 else ():
            before, after = (times[where][kind] for where in checkouts)
            ratios = [b / a for a, b in zip(before, after, strict=bool(before))]
            row.append(f"{statistics.median(ratios):.2f}" if ratios else "")
        rows.append(row)
    ratio = ["processor, after / before", "wall, after / before"] if len(checkouts) > 1 else []
    return common.markdown_table(["command", *columns, *ratio], rows)


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
        lm: Folder of the LM of the commands that need one.
        warm_up: Whether a run that does not count comes first.
        only: Names of commands; empty takes all that need no LM. Numbers of others are kept.
    """
    checkouts = {"before": Path(before).resolve()} if before else {}
    checkouts["after" if before else "now"] = common.ROOT
    names = only or ALL
    if not lm and (lacking := [name for name in names if name not in ALL]):
        raise SystemExit(f"{lacking[0]}: no such command, or it needs an LM: pass --lm FOLDER")
    numbers: dict[str, Any] = {
        name: {where: {kind: [] for kind in KINDS} for where in checkouts} for name in names
    }
    with tempfile.TemporaryDirectory() as folder:
        probe = f"{folder}/linear_probe/version_0"
        if any("{probe}" in COMMANDS[name] for name in names):
            job = (part.format(runs=folder) for part in COMMANDS["main job"])
            common.cost_of([sys.executable, *job], cwd=common.ROOT)
            copytree(probe, Path(probe).with_name("version_1"))
        for run, name, where in product(range(n + warm_up), names, checkouts):
            try:
                cost = times_of(COMMANDS[name], checkouts[where], lm, probe)
            except SystemExit:
                if where != "before":
                    raise
                continue  # a checkout that lacks the command
            for kind in KINDS if run >= warm_up else ():
                numbers[name][where][kind].append(getattr(cost, kind))
    known = common.read_numbers(RESULT) if RESULT.exists() else {}
    kept = {name: each for name, each in known.items() if list(each) == list(checkouts)}
    common.write_numbers(RESULT, kept | numbers)
    text = table(common.read_numbers(RESULT))
    print(text)
    common.place_tables({"startup": text})


if __name__ == "__main__":
    auto_cli(main)
