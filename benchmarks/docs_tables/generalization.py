"""The effect of edits of the source on the target: the paper's table 5, on an LM of your own.

    python -m benchmarks.docs_tables.generalization

teaches 150 edits of each relation, one at a time (configs/source_finetune.yaml), and prints the
table that docs/edits.md shows. For a pretrained LM, a smaller learning rate, or LoRA:

    python -m benchmarks.docs_tables.generalization --options '["--model.learning_rate=5e-5"]'
    python -m benchmarks.docs_tables.generalization --config configs/source_finetune_lora.yaml

With several seeds, each share is the mean and its standard deviation over the seeds.
"""

from __future__ import annotations

import tempfile
from statistics import mean, stdev
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import arrow, markdown_table, results_of

RELATIONS = (
    "city->country",
    "country->continent",
    "country->language",
    "city->city_es",
    "ceo->company",
)
COLUMNS = (
    "relation",
    "learned",
    "generalized",
    "vocabulary alone",
    "its AUROC",
    "hallucinated",
    "unchanged",
    "color unchanged",
    "gradient r",
    "auto",
    "city→color",
)


def show(values: list[float | None], spec: str) -> str:
    """Return the mean over seeds, with the standard deviation where there are several."""
    known = [value for value in values if value is not None]
    spread = f" ± {format(stdev(known), spec)}" if len(known) > 1 else ""
    return f"{format(mean(known), spec)}{spread}" if known else ""


def row(runs: list[dict[str, Any]]) -> list[str]:
    """Return a row of the table: one relation, a run for each seed."""
    relation = runs[0]["relation"]

    def shares(*names: str) -> list[str]:
        return [show([results[name] for results in runs], ".0%") for name in names]

    def gradient(name: str, key: str) -> str:
        return show([results["gradients"][name][key] for results in runs], ".2f")

    return [
        arrow(relation),
        *shares("source_learned", "generalized"),
        show([results["vocabulary"]["right"] for results in runs], ".0%"),
        show([results["forecast"]["vocabulary"]["auroc"] for results in runs], ".2f"),
        *shares("hallucinated", "unchanged"),
        show([results["controls"]["color"]["unchanged"] for results in runs], ".0%"),
        gradient(relation, "gradient_correlation"),
        gradient(relation, "gradient_correlation_auto"),
        gradient("city->color", "gradient_correlation"),
    ]


def main(
    lm: str = "tiny-world",
    n_edits: int = 150,
    relations: tuple[str, ...] = RELATIONS,
    seeds: tuple[int, ...] = (0,),
    config: str = "configs/source_finetune.yaml",
    options: tuple[str, ...] = (),
) -> None:
    """Print the table.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world.
        n_edits: Number of edits of each relation.
        relations: Relations to teach.
        seeds: Seeds of the edits; a run for each.
        config: Config of the training.
        options: More options of `lincorr fit`, as a list: '["--model.lm.dtype=bfloat16"]'.
    """

    def teach(relation: str, seed: int) -> dict[str, Any]:
        return results_of(
            "fit",
            "--config",
            config,
            f"--data.relation={relation}",
            f"--data.seed={seed}",
            f"--seed_everything={seed}",
            f"--model.lm.name_or_path={lm}",
            f"--data.n_edits={n_edits}",
            f"--trainer.default_root_dir={folder}",
            *options,
        )

    with tempfile.TemporaryDirectory() as folder:
        found = [[teach(relation, seed) for seed in seeds] for relation in relations]
    print(markdown_table(COLUMNS, [row(runs) for runs in found]))


if __name__ == "__main__":
    auto_cli(main)
