"""A second probe of the same LM with a cache of its states, with other options, against the first.

    python -m benchmarks.speed.second_runs --lm FOLDER --n 5

runs four probes in turn, each in a process of its own: without a cache; with an empty one; the same
again, whose numbers must be equal to the last bit; and with another ridge and one kind of knowledge
more, whose new prompts are read without the others. The medians go into docs/benchmarks.md, and how
far the last run's numbers are from those without a cache.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from safetensors.numpy import load_file

from benchmarks.common import QUIET, ROOT, cost_of, markdown_table, place_tables, read_numbers

KINDS = "city, country, continent, language, ceo, company, color, pet, gender, sport"
SAME = (f"--model.knowledge=[{KINDS}]", "--model.lm.state_cache={folder}/states")
MORE = (f"--model.knowledge=[{KINDS}, job]", "--model.ridge=auto", SAME[1])
FORMATS = "{:.1f} s", "{:.1f} s", "{:.2f}", "{:.2f}", "{:.0f} MiB"
RUNS = {
    "without a cache": SAME[:1],
    "first": SAME,
    "the same again": SAME,
    "another ridge, one kind more": MORE,
}


def probe(lm: str, n_subjects: int, options: tuple[str, ...], folder: str) -> tuple[Any, ...]:
    """Return what a probe takes, its numbers and its maps' weights."""
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        command = [
            sys.executable,
            "-m",
            "lincorr_lightning",
            "fit",
            "--config=linear_probe.yaml",
            QUIET,
            f"--model.lm.name_or_path={lm}",
            f"--data.n_subjects={n_subjects}",
            f"--trainer.default_root_dir={runs}",
            "--model.ridge=0",
            *(option.replace("{folder}", folder) for option in options),
        ]
        cost = cost_of(command, cwd=ROOT)
        (results,) = Path(runs).rglob("results.json")
        weights = load_file(results.parent / "linear_map" / "linear_map.safetensors")
        return cost, read_numbers(results)["pairs"], weights


def difference(one: tuple[Any, ...], other: tuple[Any, ...]) -> str:
    """Return how far two runs' numbers are apart, at most over pairs."""
    pairs = list(zip(one[1], other[1], strict=True))
    r = max(abs(a["label_mean"] - b["label_mean"]) for a, b in pairs)
    hits = [[p["precision"]["influenced"]["1"] for p in pair if p["precision"]] for pair in pairs]
    hit = max(max(each) - min(each) for each in hits if each)
    w = max(abs(m - other[2][key]).max() / abs(m).max() for key, m in one[2].items())
    return f"r {r:.0e}, Hit@1 {hit:.0e}, weights {w:.0e} of the largest"


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
            turns.append([cost for cost, *_ in made])
            assert made[0][1] == made[1][1] == made[2][1], "the cache changes numbers"
            if len(turns) == n:
                alone = probe(lm, n_subjects, MORE[:-1], folder)
    rows = []
    for i, name in enumerate(RUNS):
        costs = [statistics.median(kind) for kind in zip(*(t[i] for t in turns), strict=True)]
        ratios = [statistics.median(t[i][kind] / t[1][kind] for t in turns) for kind in (0, 1)]
        numbers = zip(FORMATS, [*costs[:2], *ratios, costs[2]], strict=True)
        rows.append([name, *(form.format(number) for form, number in numbers)])
    columns = ["run", "wall", "processor", "wall / first", "processor / first", "peak memory"]
    apart = f"The last run is from itself without a cache, at most: {difference(made[-1], alone)}."
    found = f"{markdown_table(columns, rows)}\n\n{apart}"
    print(f"{lm}, {n_subjects:,} subjects, {n} turns\n\n{found}")
    place_tables({"second runs": found})


if __name__ == "__main__":
    auto_cli(main)
