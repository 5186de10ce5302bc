"""A second probe of the same LM with a cache of its states, with other options, against the first.

    python -m benchmarks.speed.second_runs --lm FOLDER --n 5

runs four probes in turn, each in a process of its own: without a cache; with an empty one; the same
again, whose numbers must be equal to the last bit; and with another ridge and one kind of knowledge
more. The medians go into docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import QUIET, ROOT, Cost, cost_of, markdown_table, place_tables, read_numbers

KINDS = "city, country, continent, language, ceo, company, color, pet, gender, sport"
SAME = (f"--model.knowledge=[{KINDS}]", "--model.lm.state_cache={folder}/states")
RUNS = {
    "without a cache": SAME[:1],
    "first": SAME,
    "the same again": SAME,
    "another ridge, one kind more": (f"--model.knowledge=[{KINDS}, job]", "--model.ridge=auto",
                                     *SAME[1:]),
}  # fmt: skip


def probe(lm: str, n_subjects: int, options: tuple[str, ...], folder: str) -> tuple[Cost, Any]:
    """Return what a probe takes, and its numbers."""
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        command = [
            sys.executable, "-m", "lincorr_lightning", "fit", "--config=linear_probe.yaml", QUIET,
            f"--model.lm.name_or_path={lm}", f"--data.n_subjects={n_subjects}",
            f"--trainer.default_root_dir={runs}", *(o.replace("{folder}", folder) for o in options),
        ]  # fmt: skip
        cost = cost_of(command, cwd=ROOT)
        (results,) = Path(runs).rglob("results.json")
        return cost, read_numbers(results)["pairs"]


def main(lm: str = "tiny-world", n_subjects: int = 2000, n: int = 5) -> None:
    """Measure, and put the table into the documents.

    Args:
        lm: The LM, a folder, hub id or tiny-world.
        n_subjects: Number of subjects.
        n: Number of turns, each of which begins with an empty cache.
    """
    turns = []
    for _ in range(n):
        with tempfile.TemporaryDirectory() as folder:
            made = [probe(lm, n_subjects, options, folder) for options in RUNS.values()]
        turns.append([cost for cost, _ in made])
        if made[1][1] != made[0][1] or made[2][1] != made[0][1]:
            raise SystemExit("the cache changes numbers")
    rows = []
    for i, name in enumerate(RUNS):
        wall, processor, mib = (
            statistics.median(kind) for kind in zip(*(t[i] for t in turns), strict=True)
        )
        ratios = [[t[i][kind] / t[1][kind] for t in turns] for kind in (0, 1)]
        rows.append(
            [
                name,
                f"{wall:.1f} s",
                f"{processor:.1f} s",
                *(f"{statistics.median(each):.2f}" for each in ratios),
                f"{mib:.0f} MiB",
            ]
        )
    columns = ["run", "wall", "processor", "wall / first", "processor / first", "peak memory"]
    found = markdown_table(columns, rows)
    print(f"{lm}, {n_subjects:,} subjects, {n} turns\n\n{found}")
    place_tables({"second runs": found})


if __name__ == "__main__":
    auto_cli(main)
