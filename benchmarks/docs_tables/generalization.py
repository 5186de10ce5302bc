"""The effect of edits of the source on the target: the paper's table 5, on an LM of your own.

    python -m benchmarks.docs_tables.generalization

teaches the tiny world 150 edits of each relation, one at a time (configs/source_finetune.yaml), and
puts the table into docs/edits.md. For another LM, whose table is printed alone, take a smaller
learning rate, or LoRA:

    python -m benchmarks.docs_tables.generalization --lm FOLDER \
        --options '["--model.learning_rate=5e-5"]'
    python -m benchmarks.docs_tables.generalization --lm FOLDER \
        --config configs/source_finetune_lora.yaml

With several seeds, means and standard deviations over the seeds are printed, too.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import product

from jsonargparse import auto_cli

from benchmarks import common
from lincorr_lightning.results.table import Table, column

RELATIONS = (
    "city->country",
    "country->continent",
    "country->language",
    "city->city_es",
    "ceo->company",
)


@dataclass(frozen=True)
class Outcomes:
    """What the edits of one relation do."""

    relation: str = column()
    seed: int = column(format="d")
    learned: float = common.scored("source_learned", "", ".0%")
    generalized: float = common.scored("generalized", "", ".0%")
    nearest_word: float = common.scored("nearest.right", "", ".0%")
    auroc: float = common.scored("forecast.causal_inner_product.auroc", "its AUROC")
    hallucinated: float = common.scored("hallucinated", "", ".0%")
    unchanged: float = common.scored("unchanged", "", ".0%")
    color_unchanged: float = common.scored("controls.color.unchanged", "", ".0%")
    gradient_r: float = common.scored("gradient_correlation", "r of the change")
    color_gradient_r: float = common.scored(
        "gradients.city->color.gradient_correlation", "r of the change, city→color"
    )


def main(
    lm: str = "tiny-world",
    n_edits: int = 150,
    relations: tuple[str, ...] = RELATIONS,
    seeds: tuple[int, ...] = (0,),
    config: str = "configs/source_finetune.yaml",
    options: tuple[str, ...] = (),
) -> None:
    """Print the table, and put that of the tiny world into the documents.

    Args:
        lm: A folder, a .gguf file, a hub id or tiny-world.
        n_edits: Number of edits of each relation.
        relations: Relations to teach.
        seeds: Seeds of the edits; a run for each.
        config: Config of the training.
        options: More options of `lincorr fit`, as a list: '["--model.lm.dtype=bfloat16"]'.
    """
    rows = []
    for relation, seed in product(relations, seeds):
        with tempfile.TemporaryDirectory() as folder:
            results = common.results_of(
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
        rows.append(common.record(Outcomes, results, relation=common.arrow(relation), seed=seed))
    table = Table.of("generalization", rows)
    print(table.markdown())
    if len(seeds) > 1:
        print(table.frame.groupby("relation").agg(["mean", "std"]).T.to_string())
    if lm == "tiny-world":
        common.write_table(table, common.RESULTS / "tiny_world")
        columns = [name for name in table.keys if name != "seed"]
        common.place_tables({"table5": common.shown(table, " ".join(columns))})


if __name__ == "__main__":
    auto_cli(main)
