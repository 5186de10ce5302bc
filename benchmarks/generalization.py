"""The effect of edits of the source on the target: the paper's table 5, on an LM of your own.

    python benchmarks/generalization.py

teaches 150 edits of each relation, one at a time (configs/source_finetune.yaml), and prints the
table that README.md shows; `--lm FOLDER` takes another LM.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from lincorr_lightning.cli import main as lincorr
from lincorr_lightning.results.tables import markdown_table

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
    "random",
    "hallucinated",
    "unchanged",
    "color unchanged",
    "gradient r",
    "auto",
    "city→color",
)
FORECASTERS = ("answer_before", "map_0", "map_auto", "first_order", "virtual_step")


def taught(relation: str, lm: str, n_edits: int, folder: str) -> dict[str, Any]:
    """Return the numbers of a fine-tune on one relation."""
    cli = lincorr(
        ["fit", "--config", "configs/source_finetune.yaml", f"--data.relation={relation}",
         f"--data.n_edits={n_edits}", f"--model.lm.name_or_path={lm}",
         f"--trainer.default_root_dir={folder}", "--trainer.enable_progress_bar=false"]
    )  # fmt: skip
    results = Path(cli.trainer.log_dir) / "results.json"
    found: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
    return found


def row(results: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    shares = ("source_learned", "generalized", "random", "hallucinated", "unchanged")
    gradients = results["gradients"]
    auto = gradients[results["relation"]]["gradient_correlation_auto"]
    control = gradients["city->color"]["gradient_correlation"]
    return [
        results["relation"].replace("->", "→"),
        *(f"{results[name]:.0%}" for name in shares),
        f"{results['controls']['color']['unchanged']:.0%}",
        f"{results['gradient_correlation']:.2f}",
        f"{auto:.2f}",
        "" if control is None else f"{control:.2f}",
    ]


def forecasts(results: dict[str, Any]) -> list[str]:
    """Return the AUROC of each forecaster on the edits of one relation."""
    scores = [results["forecast"][name]["auroc"] for name in FORECASTERS]
    return [
        results["relation"].replace("->", "→"),
        *("" if score is None else f"{score:.2f}" for score in scores),
    ]


def main(lm: str = "tiny-world", n_edits: int = 150) -> None:
    """Print the table.

    Args:
        lm: A folder, a hub id or tiny-world.
        n_edits: Number of edits of each relation.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = [taught(relation, lm, n_edits, folder) for relation in RELATIONS]
    print(markdown_table(COLUMNS, [row(results) for results in found]))
    print("\nAUROC of the risk that was forecast:\n")
    print(markdown_table(("relation", *FORECASTERS), [forecasts(results) for results in found]))


if __name__ == "__main__":
    auto_cli(main)
