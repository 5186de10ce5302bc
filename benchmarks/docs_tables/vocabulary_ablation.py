"""How much of the correlations comes from the vocabulary alone: the paper's table 7.

    python -m benchmarks.docs_tables.vocabulary_ablation [--lm FOLDER]

runs configs/vocabulary_ablation.yaml for each relation and prints the table that
docs/vocabulary_ablation.md shows.
"""

from __future__ import annotations

import tempfile
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import arrow, markdown_table, results_of
from lincorr_lightning.errors import DomainError

RELATIONS = ("city->country", "country->continent", "ceo->company", "X+1->X+2")
MAPPINGS = ("reference", "permuted", "letters")
COLUMNS = (
    "relation",
    "sources / targets",
    "reference",
    "permuted",
    "letters",
    "nearest",
    "compose skipped",
    "reference, of all candidates",
    "chance",
    "paper",
)


def ablated(relation: str, lm: str, most: int | None, seeds: list[int]) -> dict[str, Any]:
    """Run the ablation and return its results."""
    size = "null" if most is None else most
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "fit",
            "--config",
            "configs/vocabulary_ablation.yaml",
            f"--data.relation={relation}",
            f"--model.lm.name_or_path={lm}",
            f"--model.seeds={seeds}",
            f"--data.max_source_labels={size}",
            f"--trainer.default_root_dir={folder}",
        ]
        try:
            return results_of(*options)
        except DomainError:  # the vocabulary has no tokens for letters
            return results_of(*options, "--model.mapping=[reference, permuted]")


def row(results: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    rows = {found["mapping"]: found for found in results["mappings"]}

    def share(mapping: str, what: str = "generalized") -> str:
        found = rows.get(mapping)
        if found is None or found[what] is None:
            return "–"
        spread = f" ± {100 * found['std']:.0f}" if what == "generalized" and found["std"] else ""
        return f"{100 * found[what]:.0f}{spread}"

    return [
        arrow(results["relation"]),
        f"{results['n_source_labels']} / {results['n_target_labels']}",
        *(share(mapping) for mapping in MAPPINGS),
        share("reference", "nearest"),
        share("reference", "uncomposed"),
        share("reference", "unrestricted"),
        share("reference", "random"),
        share("reference", "paper"),
    ]


def main(
    lm: str = "tiny-world",
    most: int | None = 20,
    n_seeds: int = 5,
    relations: list[str] | None = None,
) -> None:
    """Print the table.

    Args:
        lm: LM whose vocabulary is used: a folder, a hub id or tiny-world.
        most: Number of source labels of the first relation; null takes all.
        n_seeds: Number of runs of each mapping.
        relations: As city->country; null takes those of the paper's table 7.
    """
    rows = []
    for relation in relations or RELATIONS:
        limit = most if relation == RELATIONS[0] else None
        rows.append(row(ablated(relation, lm, limit, list(range(n_seeds)))))
    print(markdown_table(COLUMNS, rows))


if __name__ == "__main__":
    auto_cli(main)
