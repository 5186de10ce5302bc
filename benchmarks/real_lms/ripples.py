"""Edits of pretrained LMs, step by step: the runs of ``ripples.yaml``.

    python -m benchmarks.real_lms.ripples FOLDER [--only "[lora]"] [--lms "[smollm2-135m]"]

FOLDER holds a folder for each LM. Each run leaves two files, see `EditRecorder`, in
``benchmarks/results/real_lms/LM/ripples``; a run that has them is not repeated.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import auto_cli

from benchmarks.common import QUIET, ROOT, cost_of, lms_in
from benchmarks.real_lms.edit_recorder import CHANGES, read_arrays, write_arrays
from benchmarks.real_lms.ripple_controls import MAKERS
from benchmarks.real_lms.run import REAL_LMS

PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("ripples.yaml").read_text("utf-8"))


class Ripples(NamedTuple):
    """Edits of one relation on one LM."""

    name: str
    lm: str
    relation: str
    seed: int
    options: tuple[str, ...]

    @property
    def path(self) -> Path:
        """File of the arrays, in a folder of results."""
        relation = self.relation.replace("->", "_to_")
        return Path(self.lm, "ripples", f"{self.name}_{relation}_{self.seed}.npz")


def plan() -> Iterator[Ripples]:
    """Yield all runs, in the order in which they are made."""
    for name, run in PLAN["runs"].items():
        for seed in run["seeds"]:
            for relation in run["relations"]:
                for lm in run["lms"]:
                    n_edits = PLAN["n_edits"].get(f"{lm} {relation}", 60)
                    values = {
                        "last": PLAN["steps"][-1],
                        "n_edits": run.get("n_edits", n_edits),
                        "side_by_side": PLAN["side_by_side"].get(lm, 30),
                        "seed": seed,
                        "relation": relation,
                    }
                    options = PLAN["options"].format(**values), run.get("options", "")
                    words = [word for part in options for word in shlex.split(part)]
                    yield Ripples(name, lm, relation, seed, tuple(words))


def measure(run: Ripples, lm: Path, path: Path) -> None:
    """Train the edits of a run, and write its files."""
    about = {"name": run.name, "lm": run.lm, "seed": run.seed, "options": [*run.options]}
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / path.name
        make = MAKERS.get(run.name)
        options = (
            (f"--model.lm.name_or_path={lm}",)
            if make is None
            else make(lm, run.seed, Path(scratch))
        )
        recorder = {
            "path": str(made),
            "steps": PLAN["steps" if run.name in PLAN["all_steps"] else "few_steps"],
            "kept": PLAN["kept"],
            "seed": run.seed,
            "others_kind": PLAN["runs"][run.name].get("people", "names"),
            "about": about,
        }
        callback = {
            "class_path": "benchmarks.real_lms.edit_recorder.EditRecorder",
            "init_args": recorder,
        }
        errors = Path(tempfile.gettempdir()) / f"{run.lm}_{path.stem}.log"
        command = [
            *(sys.executable, "-m", "lincorr_lightning", *run.options, *options),
            f"--trainer.callbacks={json.dumps([callback])}",
            f"--trainer.default_root_dir={scratch}/runs",
            QUIET,
        ]
        cost = cost_of(command, errors, cwd=ROOT)
        print(f"{path.stem}: {cost.wall:.0f} s, {cost.peak_mib / 1024:.1f} GiB", flush=True)
        if run.name not in PLAN["explained"]:
            arrays = read_arrays(made)
            write_arrays(made, {key: x for key, x in arrays.items() if key not in CHANGES})
        path.parent.mkdir(parents=True, exist_ok=True)
        for file in (made.with_suffix(".json"), made):  # the arrays last: they count as done
            path.with_suffix(file.suffix).write_bytes(file.read_bytes())
        errors.unlink()


def main(
    folder: str,
    only: tuple[str, ...] = (),
    lms: tuple[str, ...] = (),
    relations: tuple[str, ...] = (),
    output: str = str(REAL_LMS),
) -> None:
    """Make the missing runs.

    Args:
        folder: Folder that holds a folder for each LM.
        only: Names of runs; empty makes all.
        lms: Names of LMs; empty takes all of the folder.
        relations: Relations; empty takes all.
        output: Folder of the results.
    """
    folders = {path.name: path for path in lms_in(folder)}
    for run in plan():
        path = Path(output) / run.path
        is_chosen = all(
            not some or one in some
            for some, one in ((only, run.name), (lms, run.lm), (relations, run.relation))
        )
        if is_chosen and run.lm in folders and not path.exists():
            measure(run, folders[run.lm], path)


if __name__ == "__main__":
    auto_cli(main)
