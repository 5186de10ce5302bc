"""Every study on pretrained LMs of several sizes, and tables of them for docs/.

    python -m benchmarks.real_lms.run FOLDER --texts TEXTS
    python -m benchmarks.real_lms.run FOLDER --show true

FOLDER holds a folder for each LM. The numbers of each run go to
``benchmarks/results/real_lms/LM/RUN.json``, its figures to the same folder, as soon as it ends; a
run that is there is not repeated. Larger LMs read fewer subjects and learn fewer edits, so that a
CPU can do it; every file and table says how many. A run that fails leaves its error as its result.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import copyfile, copytree, rmtree
from typing import Any, NamedTuple

import torch
from jsonargparse import auto_cli
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.common import QUIET, ROOT, cost_of, lms_in, read_numbers, write_numbers
from benchmarks.real_lms.tables import (
    EDITED,
    REAL_LMS,
    RELATIONS,
    TABLES,
    edit_run,
)

KNOWLEDGE = (
    "city",
    "country",
    "continent",
    "language",
    "birthplace",
    "landmark",
    "ceo",
    "company",
    "color",
    "pet",
    "gender",
    "sport",
    "food",
    "job",
    "music",
    "city_es",
    "country_es",
    "X+1",
    "X+2",
    "X*2",
)
GEOMETRY_N2 = (2, 8, 32, 128)
# Tables 4, 8 and 14 of the paper.
PAPER_PAIRS = (
    "city->country",
    "ceo->company",
    "city->city_es",
    "city->city_zh",
    "X+1->X+2",
    "X+1->X*2",
    "fruit_color->simile_color",
    "food_taste->simile_taste",
    "gem_color->simile_color",
    "name_country->country",
    "animal_size->simile_size",
    "object_genre->simile_genre",
    "object_heat->simile_heat",
    "object_size->simile_size",
    "object_price->simile_price",
    "object_color->simile_color",
)
PAIR_KEYS = (
    "source",
    "target",
    "label_mean",
    "permuted_label_mean",
    "control_label_mean",
    "excess_error",
    "q",
    "partial_label_mean",
    "n_labels",
    "ridge",
    "precision",
    "baselines",
    "excess_over_random_labels",
    "excess_over_unembedding",
    "decomposition",
)

BALANCED_SEEDS = 1, 2, 3
# No edit has 1000 steps, so that only its end is measured.
OUTCOMES_ONLY = (
    '--trainer.callbacks=[{"class_path": "Generalization", "init_args": '
    '{"controls": ["color", "pet"], "every_n_steps": 1000}}]'
)
# Fused attention is slow at this precision on CPUs.
PRETRAINED = ("--model.lm.attn_implementation=eager", "--matmul_precision=medium")


class Size(NamedTuple):
    """How much an LM can be asked for on a CPU; 0 skips a run."""

    n_parameters: float  #: Largest number of parameters that this is for.
    n_subjects: int
    n_probed: int  #: Subjects of the probe of all pairs.
    n_edits: int  #: Edits of city->country with LoRA, measured at each step; of others, 32 at most.
    n_full: int  #: The same with all weights.
    n_outcomes: int  #: Edits of each relation with LoRA, measured at the end.
    n_full_outcomes: int  #: The same with all weights.
    geometry: int  #: Texts of the token geometry.
    long_geometry: int = 0  #: Texts of 1,024 tokens, as they are and shuffled.
    sae_tokens: int = 0  #: Tokens that SAEs of some layers are trained on, for the feature flow.


SIZES = (
    Size(
        2e8,
        n_subjects=2000,
        n_probed=2000,
        n_edits=150,
        n_full=40,
        n_outcomes=150,
        n_full_outcomes=150,
        geometry=100,
        long_geometry=200,
        sae_tokens=393_216,
    ),
    Size(
        4e8,
        n_subjects=1000,
        n_probed=2000,
        n_edits=64,
        n_full=20,
        n_outcomes=150,
        n_full_outcomes=64,
        geometry=50,
    ),
    Size(
        8e8,
        n_subjects=1000,
        n_probed=2000,
        n_edits=64,
        n_full=0,
        n_outcomes=150,
        n_full_outcomes=32,
        geometry=20,
    ),
    Size(
        1e11,
        n_subjects=1000,
        n_probed=1000,
        n_edits=32,
        n_full=0,
        n_outcomes=64,
        n_full_outcomes=0,
        geometry=10,
    ),
)


class Run(NamedTuple):
    """A run of `lincorr`: its name, command and options, and what of it is kept."""

    name: str
    options: tuple[str, ...]
    keep: tuple[str, ...]  #: Keys of results.json.
    figures: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


def plan(size: Size, texts: str | None) -> Iterator[Run]:
    """Yield the runs on one LM."""
    reading = (
        f"--data.texts={texts}",
        "--data.sample_by=document",
        "--data.skip_tokens=1",
        "--matmul_precision=medium",
    )
    yield Run(
        "probe",
        (
            "fit",
            "--config",
            "configs/linear_probe.yaml",
            "--model.ridge=auto",
            f"--model.knowledge={json.dumps(KNOWLEDGE)}",
            f"--data.n_subjects={size.n_probed}",
            "--model.partial_out=[pet]",
            "--data.batch_size=128",
        ),
        ("n_fit", "n_test", "control", "pairs", "ridge_path"),
        ("correlation_matrix", "random_words_matrix", "nulls", "ridge_path"),
    )
    names = dict.fromkeys(name for pair in PAPER_PAIRS for name in pair.split("->"))
    yield Run(
        "paper_pairs",
        (
            "fit",
            "--config",
            "configs/linear_probe.yaml",
            "--model.ridge=auto",
            f"--model.knowledge={json.dumps([*names, 'pet'])}",
            f"--model.pairs={json.dumps(PAPER_PAIRS)}",
            "--model.partial_out=[pet]",
            f"--data.n_subjects={size.n_subjects}",
            "--data.batch_size=128",
        ),
        ("n_fit", "n_test", "control", "pairs"),
    )
    ablation = ("relation", "mappings", "runs", "embedding", "n_source_labels", "n_target_labels")
    seeds = list(range(5 if size.n_parameters <= 4e8 else 3))
    yield Run(
        "ablation",
        (
            "fit",
            "--config",
            "configs/vocabulary_ablation.yaml",
            f"--model.seeds={seeds}",
            "--matmul_precision=medium",
        ),
        ablation,
        ("training",),
    )
    for seed in range(5):  # each takes minutes to an hour
        yield Run(
            f"ablation_paper_{seed}",
            (
                "fit",
                "--config",
                "configs/vocabulary_ablation_paper.yaml",
                f"--model.seeds=[{seed}]",
                "--matmul_precision=medium",
                "--trainer.precision=bf16-mixed",
            ),
            ablation,
            ("training",) if seed == 0 else (),
        )
    texts_of_length = {
        "": ("--data.n_tokens=256", f"--data.n_texts={size.geometry}", "--data.batch_size=2"),
        "_1024": (
            "--data.n_tokens=1024",
            f"--data.n_texts={size.long_geometry}",
            "--data.batch_size=1",
            "--model.shuffles=[0,1,2,3,4,5]",
        ),
    }
    for name, options in texts_of_length.items() if texts is not None else ():
        if name and not size.long_geometry:
            continue
        yield Run(
            f"token_geometry{name}",
            (
                "test",
                "--config",
                "configs/token_geometry.yaml",
                f"--data.texts={texts}",
                *options,
                "--data.sample_by=document",
                "--matmul_precision=medium",
            ),
            ("n_prompts", "n_tokens", "layers", "shuffles", "dimension_loss"),
            ("profiles", "dimension_loss") if name else ("profiles",),
        )
    if texts is not None and size.sae_tokens:
        yield Run(
            "sparse_autoencoders",
            (
                "fit",
                "--config",
                "configs/sparse_autoencoders.yaml",
                *reading,
                f"--data.n_tokens={size.sae_tokens}",
                "--data.n_held_out=8",
                "--data.eval_batch_size=8",
                "--model.layers=[16,17,18,19,20]",
                "--model.sae.n_features=2048",
                "--model.sae.k=24",
            ),
            ("n_tokens", "n_held_out_tokens", "loss_clean", "hook_points"),
            ("quality",),
        )
        yield Run(
            "feature_flow",
            (
                "test",
                "--config",
                "configs/feature_flow.yaml",
                *reading,
                "--data.n_texts=60",
                "--model.lm.attn_implementation=eager",
                "--model.n_subjects=1000",
                "--model.answer_share=0.05",
                "--model.deactivation.n_cases=400",
                "--model.deactivation.n_losses=0",
                "--model.deactivation.strengths=[0,0.5]",
                # No feature reaches the usual bar of 0.9.
                "--model.steering.n_answers=5",
                "--model.steering.min_auroc=0.8",
                "--model.steering.strategies=[single,constant]",
                "--model.steering.strengths=[0,0.5,1,2,4]",
                "--model.steering.n_texts=8",
                "--model.steering.n_prompts=32",
            ),
            (
                "n_texts",
                "n_tokens",
                "groups",
                "cosine_tests",
                "deactivation",
                "deactivation_layers",
                "relation",
                "steering",
                "saes",
            ),
            ("deactivation", "groups", "relation", "steering", "flow_*"),
            tables=("steering",),
        )
    methods = (
        ("lora", "configs/source_finetune_lora.yaml", size.n_edits, size.n_outcomes, ()),
        (
            "full",
            "configs/source_finetune.yaml",
            size.n_full,
            size.n_full_outcomes,
            # In 10 steps at the paper's 5e-6, the smallest LM hardly learns any edit.
            ("--model.learning_rate=5e-5", "--model.steps_per_edit=10"),
        ),
    )
    outcomes = (
        "relation",
        "n_edits",
        "method",
        "source_learned",
        "generalized",
        "hallucinated",
        "ambiguous_hallucinated",
        "unchanged",
        "random",
        "controls",
        "causes",
        "constant",
        "macro",
        "generalized_of_learned",
        "hallucinated_of_learned",
    )
    for method, config, n_edits, n_outcomes, own in methods:
        for relation in EDITED:
            options = (
                "fit",
                "--config",
                config,
                f"--data.relation={relation}",
                *PRETRAINED,
                *own,
                # 32 edits of the largest LM side by side need more memory than the machine has.
                *(("--model.edits_per_step=8",) if size.n_parameters > 8e8 else ()),
            )
            trainings: dict[str, tuple[str, ...]] = {"outcomes": ()} if n_outcomes else {}
            if n_outcomes and method == "lora" and relation == "city->country":
                for seed in BALANCED_SEEDS:
                    few = "--data.n_edits=60", "--data.max_edits_per_reference=2"
                    trainings[f"balanced{seed}"] = f"--data.seed={seed}", *few
            for name, changed in trainings.items():
                yield Run(
                    f"{name}_{edit_run(method, relation)}",
                    (*options, f"--data.n_edits={n_outcomes}", *changed, OUTCOMES_ONLY),
                    (*outcomes, "seconds"),
                    tables=("cases",),
                )
            if n_edits:
                n = n_edits if relation == EDITED[0] else min(n_edits, 32)
                yield Run(
                    edit_run(method, relation),
                    (*options, f"--data.n_edits={n}"),
                    (*outcomes, "gradient_correlation", "logit_correlation", "gradients"),
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
            (found,) = Path(scratch).glob("*/version_0/results.json")
            content["results"] = shorten(run, read_numbers(found))
            if run.name == "sparse_autoencoders":
                rmtree(saes, ignore_errors=True)
                copytree(found.parent / run.name, saes)
            for figure in run.figures:
                for file in found.parent.glob(f"figures/{figure}.png"):
                    copyfile(file, folder / f"{run.name}_{file.stem}.png")
            for table in run.tables:
                copyfile(found.parent / "tables" / f"{table}.csv", folder / f"{run.name}.csv")
    write_numbers(folder / f"{run.name}.json", content)


def shorten(run: Run, results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of the results that the tables are made of."""
    kept = {key: results[key] for key in (*run.keep, "lm") if key in results}
    kept["lm"] = {**kept["lm"], "name_or_path": Path(kept["lm"]["name_or_path"]).name}
    if "tests" in kept:  # the figure has those of each layer
        kept["tests"] = [test for test in kept["tests"] if test["layer"] == "all"]
    if "pairs" in kept:
        kept["pairs"] = [{key: pair.get(key) for key in PAIR_KEYS} for pair in kept["pairs"]]
    if "ridge_path" in kept:  # of all pairs it would be most of the file
        paths = kept["ridge_path"]
        kept["ridge_path"] = [p for p in paths if f"{p['source']}->{p['target']}" in RELATIONS]
    if "dimension_loss" in kept:
        unshuffled = [row for row in kept["dimension_loss"] if row["shuffle"] == 0]
        kept["dimension_loss"] = [row for row in unshuffled if row["n2"] in GEOMETRY_N2]
        for one in kept["shuffles"]:
            one["dimension"] = {n: x for n, x in one["dimension"].items() if int(n) in GEOMETRY_N2}
            one["overlap"] = {"2": one["overlap"]["2"]}
    return kept


def main(
    folder: str,
    texts: str | None = None,
    only: tuple[str, ...] = (),
    show: bool = False,
    output: str = str(REAL_LMS),
) -> None:
    """Make the missing runs and print the tables.

    Args:
        folder: Folder that holds a folder for each LM.
        texts: File or folder of texts; null leaves out the studies that need them.
        only: Beginnings of names of runs, such as probe; empty makes all.
        show: Whether to print the tables of the runs that there are, and make none.
        output: Folder of the results.
    """
    results = Path(output)
    sized = sorted((n_parameters_of(lm), lm) for lm in lms_in(folder))
    runs: list[tuple[Path, Run]] = []
    for n_parameters, lm in sized if not show else ():
        size = next(size for size in SIZES if n_parameters <= size.n_parameters)
        runs += [(lm, run) for run in plan(size, texts)]
    for lm, run in runs:
        chosen = not only or run.name.startswith(only)
        if chosen and not (results / lm.name / f"{run.name}.json").exists():
            print(f"{lm.name}: {run.name}", flush=True)
            execute(run, lm, results / lm.name)
    for table in TABLES:
        print(f"\n{table([lm.name for _, lm in sized], results)}")


def n_parameters_of(lm: Path) -> int:
    """Return the number of parameters of an LM, without reading them."""
    config = AutoConfig.from_pretrained(lm)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return int(model.num_parameters())


if __name__ == "__main__":
    auto_cli(main)
