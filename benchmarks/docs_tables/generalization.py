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
    "city->country", "country->continent", "country->language", "city->city_es", "ceo->company",
)  # fmt: skip
COLUMNS = (
    "relation", "learned", "generalized", "vocabulary alone", "hallucinated", "unchanged",
    "color unchanged", "gradient r", "auto", "city→color",
)  # fmt: skip
FORECASTERS = ("answer_before", "vocabulary", "map_0", "map_auto", "optimizer_step")


def show(values: list[float | None], spec: str) -> str:
    """Return the mean over seeds, with the standard deviation where there are several."""
    known = [value for value in values if value is not None]
    spread = f" ± {format(stdev(known), spec)}" if len(known) > 1 else ""
    return f"{format(mean(known), spec)}{spread}" if known else ""


def row(runs: list[dict[str, Any]]) -> list[str]:
    """Return a row of the table: one relation, a run for each seed."""
    shares = ("source_learned", "generalized", "vocabulary", "hallucinated", "unchanged")
    runs = [{**results, "vocabulary": results["vocabulary"]["right"]} for results in runs]
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
    lm: str = "tiny-world", n_edits: int = 150, relations: tuple[str, ...] = RELATIONS,
    seeds: tuple[int, ...] = (0,), config: str = "configs/source_finetune.yaml",
    options: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Print the table, and that of the forecasts.

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
            "fit", "--config", config, f"--data.relation={relation}", f"--data.seed={seed}",
            f"--seed_everything={seed}", f"--model.lm.name_or_path={lm}",
            f"--data.n_edits={n_edits}", f"--trainer.default_root_dir={folder}", *options,
        )  # fmt: skip

    with tempfile.TemporaryDirectory() as folder:
        found = [[teach(relation, seed) for seed in seeds] for relation in relations]
    print(markdown_table(COLUMNS, [row(runs) for runs in found]))
    if found[0][0]["forecast"]:
        print("\nAUROC of the risk that was forecast:\n")
        print(markdown_table(("relation", *FORECASTERS), [forecasts(runs) for runs in found]))


if __name__ == "__main__":
    auto_cli(main)
