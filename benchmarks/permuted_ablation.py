"""Why a network between token embeddings also learns permuted pairs: labels against texts.

    python benchmarks/permuted_ablation.py --lm FOLDER --output FILE.json

runs configs/vocabulary_ablation.yaml with other numbers of source labels, and with other numbers of
paired subjects, and prints what is generalized under the reference and under a permuted mapping.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from numbers_file import read_numbers, write_numbers

from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.results.tables import markdown_table

MAPPINGS = ("reference", "permuted")


def ablate(lm: str, n_labels: int | None, n_paired: int, seeds: list[int]) -> dict[str, Any]:
    """Run the ablation and return what is generalized under both mappings."""
    with tempfile.TemporaryDirectory() as folder:
        cli = lincorr(
            ["fit", "--config", "configs/vocabulary_ablation.yaml",
             f"--model.lm.name_or_path={lm}", f"--model.mapping=[{', '.join(MAPPINGS)}]",
             "--model.skip_compose_baseline=false", f"--model.seeds={seeds}",
             f"--data.max_source_labels={'null' if n_labels is None else n_labels}",
             f"--data.n_paired={n_paired}", f"--trainer.default_root_dir={folder}",
             "--trainer.enable_progress_bar=false"]
        )  # fmt: skip
        results = read_numbers(Path(cli.trainer.log_dir) / "results.json")
    found = {one["mapping"]: one for one in results["mappings"]}
    return {
        "n_source_labels": results["n_source_labels"],
        "n_target_labels": results["n_target_labels"],
        "n_paired": n_paired,
        "seeds": len(seeds),
        **{
            name: {k: found[name][k] for k in ("generalized", "std", "random")} for name in MAPPINGS
        },
    }


def main(
    lm: str = "tiny-world",
    labels: tuple[int | None, ...] = (5, 10, 20, 40, 80, None),
    paired: tuple[int, ...] = (128, 256, 512, 2048),
    n_seeds: int = 2,
    output: str | None = None,
) -> None:
    """Print the table.

    Args:
        lm: LM whose vocabulary is used: a folder, a .gguf file, a hub id or tiny-world.
        labels: Numbers of source labels with 1,024 paired subjects; null takes all.
        paired: Numbers of paired subjects with 20 source labels.
        n_seeds: Number of runs of each mapping.
        output: File of the numbers, JSON; null writes none.
    """
    seeds = list(range(n_seeds))
    settings = [(n_labels, 1024) for n_labels in labels] + [(20, n_paired) for n_paired in paired]
    found: list[dict[str, Any]] = []
    for n_labels, n_paired in settings:
        found.append(ablate(lm, n_labels, n_paired, seeds))
        if output is not None:
            write_numbers(output, found)
    rows = [
        [
            f"{one['n_source_labels']} / {one['n_target_labels']}",
            f"{one['n_paired']:,}",
            f"{one['n_paired'] / one['n_source_labels']:.0f}",
            *(f"{one[m]['generalized']:.0%} ± {100 * (one[m]['std'] or 0):.0f}" for m in MAPPINGS),
            f"{one['reference']['random']:.0%}",
        ]
        for one in found
    ]
    columns = ("source / target labels", "paired subjects", "per label", *MAPPINGS, "chance")
    print(f"{Path(lm).name}, {n_seeds} seeds\n\n{markdown_table(columns, rows)}")


if __name__ == "__main__":
    auto_cli(main)
