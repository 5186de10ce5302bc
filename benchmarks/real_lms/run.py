"""Every study on pretrained LMs of several sizes.

    python -m benchmarks.real_lms.run FOLDER --texts TEXTS

FOLDER holds a folder for each LM. The runs are those of ``runs.yaml``; larger LMs read fewer
subjects and learn fewer edits, so that a CPU can do it. The numbers of each run go to
``benchmarks/results/real_lms/LM/RUN.json`` as soon as it ends; a run that is there is not repeated.
A run that fails leaves its error as its result. ``findings.py``, ``feature_flow.py`` and
``geometry.py`` make the documents' tables of them.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copyfile, copytree, rmtree
from typing import Any, NamedTuple

import torch
import yaml
from jsonargparse import auto_cli
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import QUIET, RESULTS, ROOT, cost_of, lms_in, read_numbers, write_numbers

REAL_LMS = RESULTS / "real_lms"
PLAN: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("runs.yaml").read_text("utf-8"))
KNOWLEDGE = tuple(PLAN["knowledge"])
PAPER_PAIRS = tuple(PLAN["paper_pairs"])
RELATIONS = tuple(PLAN["relations"])


class Run(NamedTuple):
    """A run of `lincorr`: its name and options, and what of it is kept."""

    name: str
    options: tuple[str, ...]
    keep: tuple[str, ...]  #: Keys of results.json.
    figures: tuple[str, ...] = ()
    table: str | None = None
    is_packed: bool = False

    @property
    def file(self) -> str:
        """Name of the file of its numbers."""
        return f"{self.name}.json.gz" if self.is_packed else f"{self.name}.json"


def pair_name(scores: Mapping[str, Any]) -> str:
    """Return the name of a pair of a probe."""
    return f"{scores['source']}->{scores['target']}"


def plan(n_parameters: int, texts: str | None) -> Iterator[Run]:
    """Yield the runs on one LM; those that read texts need a file or folder of them."""
    size = next(size for size in PLAN["sizes"] if n_parameters <= size["n_parameters"])
    paper_knowledge = dict.fromkeys(name for pair in PAPER_PAIRS for name in pair.split("->"))
    values = size | {
        **{name: json.dumps(PLAN[name]) for name in ("knowledge", "paraphrased", "wording")},
        "paper_pairs": json.dumps(PAPER_PAIRS),
        "paper_knowledge": json.dumps([*paper_knowledge, "pet"]),
        "texts_file": texts,
    }
    for name, run in PLAN["runs"].items():
        needs_texts = "{texts_file}" in run["options"]
        if not size.get(run.get("number"), 1) or (needs_texts and texts is None):
            continue
        entries = run.get("each", [""])
        for entry in PLAN.get(entries, ()) if isinstance(entries, str) else entries:
            words = shlex.split(run["options"])
            yield Run(
                name.format(each=str(entry).replace("->", "_to_")),
                tuple(word.format(each=entry, **values) for word in words),
                tuple(run["keep"]),
                tuple(run.get("figures", ())),
                run.get("table"),
                run.get("packed", False),
            )


def execute(run: Run, lm: Path, folder: Path) -> None:
    """Do one run, and write its numbers, or its error."""
    folder.mkdir(parents=True, exist_ok=True)
    # The SAEs stay for another call, outside the results.
    saes = Path(tempfile.gettempdir()) / "lincorr_saes" / lm.name
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            *run.options[:3],
            "--model.lm.dtype=float32",
            *run.options[3:],
            f"--model.lm.name_or_path={lm}",
            *([f"--model.saes={saes}"] if run.name == "feature_flow" else []),
            QUIET,
            f"--trainer.default_root_dir={scratch}",
        ]
        content: dict[str, Any] = {
            # Without the paths of this machine.
            "options": [
                option for option in command if not Path(option.partition("=")[2]).is_absolute()
            ],
            "threads": torch.get_num_threads(),
        }
        errors = Path(scratch) / "stderr"
        try:
            cost = cost_of([sys.executable, "-m", "lincorr_lightning", *command], errors, cwd=ROOT)
        except SystemExit:
            content["error"] = errors.read_text(encoding="utf-8").strip().splitlines()[-1]
        else:
            content["seconds"] = round(cost.wall)
            content["peak_gib"] = round(cost.peak_mib / 2**10, 2)
            (results,) = Path(scratch).glob("*/version_0/results.json")
            content["results"] = shorten(run, read_numbers(results))
            if run.name == "sparse_autoencoders":
                rmtree(saes, ignore_errors=True)
                copytree(results.parent / run.name, saes)
            for figure in run.figures:
                source = results.parent / "figures" / f"{figure}.png"
                copyfile(source, folder / f"{run.name}_{figure}.png")
            if run.table:
                copyfile(results.parent / "tables" / f"{run.table}.csv", folder / f"{run.name}.csv")
    write_numbers(folder / run.file, content)


def shorten(run: Run, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the results that the tables are made of."""
    kept = {key: results[key] for key in (*run.keep, "lm") if key in results}
    kept["lm"] = {**kept["lm"], "name_or_path": Path(kept["lm"]["name_or_path"]).name}
    if "pairs" in kept:
        kept["pairs"] = [short_pair(pair) for pair in kept["pairs"]]
    if "ridge_path" in kept:  # of all pairs it would be most of the file
        kept["ridge_path"] = [path for path in kept["ridge_path"] if pair_name(path) in RELATIONS]
    if "dimension_loss" in kept:
        unshuffled = [row for row in kept["dimension_loss"] if row["shuffle"] == 0]
        kept["dimension_loss"] = [row for row in unshuffled if row["n2"] in PLAN["range_scalings"]]
        for level in kept["shuffles"]:
            dimensions = level["dimension"].items()
            level["dimension"] = {
                n: curve for n, curve in dimensions if int(n) in PLAN["range_scalings"]
            }
            level["overlap"] = {"2": level["overlap"]["2"]}
    return kept


def short_pair(pair: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is kept of a pair; most have no reference, and little is known of them."""
    of_known = PLAN["known_pair_keys"] if pair["precision"] is not None else []
    short = {key: pair[key] for key in (*PLAN["pair_keys"], *of_known) if key in pair}
    return {key: value for key, value in short.items() if value is not None}


def main(
    folder: str,
    texts: str | None = None,
    only: tuple[str, ...] = (),
    output: str = str(REAL_LMS),
) -> None:
    """Make the missing runs.

    Args:
        folder: Folder that holds a folder for each LM.
        texts: File or folder of texts; null leaves out the studies that need them.
        only: Beginnings of names of runs, such as probe; empty makes all.
        output: Folder of the results.
    """
    for n_parameters, lm in sorted((n_parameters_of(lm), lm) for lm in lms_in(folder)):
        for run in plan(n_parameters, texts):
            chosen = not only or run.name.startswith(only)
            if chosen and not (Path(output) / lm.name / run.file).exists():
                print(f"{lm.name}: {run.name}", flush=True)
                execute(run, lm, Path(output) / lm.name)


def n_parameters_of(lm: Path) -> int:
    """Return the number of parameters of an LM, without reading them."""
    config = AutoConfig.from_pretrained(lm)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return int(model.num_parameters())


if __name__ == "__main__":
    auto_cli(main)
