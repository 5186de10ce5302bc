"""The effect of edits of the source on the target: the paper's table 5, on an LM of your own.

    python -m benchmarks.docs_tables.generalization

teaches 150 edits of each relation, one at a time (configs/source_finetune.yaml), and prints the
table that docs/edits.md shows. For a pretrained LM, a smaller learning rate, or LoRA:

    python -m benchmarks.docs_tables.generalization --lm FOLDER --learning_rate 5e-5
    python -m benchmarks.docs_tables.generalization --lm FOLDER --method lora

With several seeds, each share is the mean and its standard deviation over the seeds.
"""

from __future__ import annotations

import tempfile
from statistics import mean, stdev
from typing import Any, Literal

from jsonargparse import auto_cli

from benchmarks.common import arrow, markdown_table, results_of

RELATIONS = (
    "city->country", "country->continent", "country->language", "city->city_es", "ceo->company",
)  # fmt: skip
COLUMNS = (
    "relation", "learned", "generalized", "random", "hallucinated", "unchanged", "color unchanged",
    "gradient r", "auto", "city→color",
)  # fmt: skip
CONFIGS = {
    "full": "configs/source_finetune.yaml",
    "lora": "configs/source_finetune_lora.yaml",
}
FORECASTERS = ("answer_before", "map_0", "map_auto", "optimizer_step")


def run(relation: str, seed: int, config: str, folder: str, options: list[str]) -> dict[str, Any]:
    """Return the results of a fine-tune on one relation."""
    return results_of(
        "fit", "--config", config, f"--data.relation={relation}", f"--data.seed={seed}",
        f"--seed_everything={seed}", f"--trainer.default_root_dir={folder}", *options,
    )  # fmt: skip


def show(values: list[float | None], spec: str) -> str:
    """Return the mean over seeds, with the standard deviation where there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    if len(known) == 1:
        return format(known[0], spec)
    return f"{format(mean(known), spec)} ± {format(stdev(known), spec)}"


def row(runs: list[dict[str, Any]]) -> list[str]:
    """Return a row of the table: one relation, a run for each seed."""
    shares = ("source_learned", "generalized", "random", "hallucinated", "unchanged")
    relation = runs[0]["relation"]

    def gradient(name: str, key: str) -> str:
        return show([results["gradients"][name][key] for results in runs], ".2f")

    return [
        arrow(relation),
        *(show([results[name] for results in runs], ".0%") for name in shares),
        show([results["controls"]["color"]["unchanged"] for results in runs], ".0%"),
        gradient(relation, "gradient_correlation"),
        gradient(relation, "gradient_correlation_auto"),
        gradient("city->color", "gradient_correlation"),
    ]


def forecasts(runs: list[dict[str, Any]]) -> list[str]:
    """Return the AUROC of each forecaster on the edits of one relation."""
    return [
        arrow(runs[0]["relation"]),
        *(show([r["forecast"][name]["auroc"] for r in runs], ".2f") for name in FORECASTERS),
    ]


def main(
    lm: str = "tiny-world",
    n_edits: int = 150,
    relations: tuple[str, ...] = RELATIONS,
    seeds: tuple[int, ...] = (0,),
    method: Literal["full", "lora"] = "full",
    learning_rate: float | None = None,
    steps_per_edit: int | None = None,
    forecast: bool = True,
    output: str | None = None,
    options: tuple[str, ...] = (),
) -> None:
    """Print the table.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world.
        n_edits: Number of edits of each relation.
        relations: Relations to teach.
        seeds: Seeds of the edits; a run for each.
        method: Whether all weights are trained (configs/source_finetune.yaml) or LoRA adapters
            (configs/source_finetune_lora.yaml).
        learning_rate: Learning rate; null for the config's.
        steps_per_edit: Optimizer steps of each edit; null for the config's.
        forecast: Whether to forecast the outcomes and print the second table.
        output: Folder that keeps the runs; null keeps none.
        options: More options of `lincorr fit`, as a list: '["--model.lm.dtype=bfloat16"]'.
    """
    chosen = {"learning_rate": learning_rate, "steps_per_edit": steps_per_edit}
    common = [
        f"--model.lm.name_or_path={lm}", f"--data.n_edits={n_edits}",
        f"--model.forecast={str(forecast).lower()}",
        *(f"--model.{name}={value}" for name, value in chosen.items() if value is not None),
        *options,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or scratch
        found = [
            [run(relation, seed, CONFIGS[method], folder, common) for seed in seeds]
            for relation in relations
        ]
    print(markdown_table(COLUMNS, [row(runs) for runs in found]))
    if forecast:
        print("\nAUROC of the risk that was forecast:\n")
        print(markdown_table(("relation", *FORECASTERS), [forecasts(runs) for runs in found]))


if __name__ == "__main__":
    auto_cli(main)
