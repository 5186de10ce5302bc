"""The table of closeness in docs/geometry.md, of the tiny world, from the folder of a run.

    lincorr test --config configs/knowledge_geometry.yaml
    python -m benchmarks.docs_tables.geometry runs/knowledge_geometry/version_0

prints it, and puts the figure of closeness into benchmarks/figures.
"""

import shutil
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import FIGURES, markdown_table, read_numbers


def two(value: float | None) -> str:
    """Return a number with two digits, as the page writes them."""
    return "" if value is None else _short(f"{value:.2f}")


def _short(text: str) -> str:
    sign, digits = ("−", text[1:]) if text.startswith("-") else ("", text)
    return sign + (digits[1:] if digits.startswith("0.") else digits)


def closeness(results: dict[str, Any]) -> str:
    """Return the table of closeness against r and Hit@1, over pairs."""
    names = {"overlap": "overlap of neighborhoods", "dimension_difference": "difference of log ID",
             "wording": "wording of the prompts (null)"}  # fmt: skip
    shown = (("r", None), ("random_label_mean", None), ("excess_over_random", None),
             ("r", "wording"), ("hit1", None), ("best_baseline_1", None))  # fmt: skip
    found: dict[str, dict[tuple[str, str | None], str]] = {}
    for test in results["tests"]:
        if test["layer"] == "all" and test["setting"] in ("", "k=2", "k=10", "n2=2", "n2=8"):
            name = f"{names[test['closeness']]} {test['setting'].replace('=', ' = ')}".strip()
            p = _short(f"{test['p']:.4f}")
            cell = f"{two(test['spearman'])} (p {p}, {test['n_pairs']} pairs)"
            found.setdefault(name, {})[test["against"], test["given"]] = cell
    rows = [[name, *(cells.get(which, "") for which in shown)] for name, cells in found.items()]
    columns = ("over pairs", "ρ with r", "of random words", "above random words", "given wording",
               "ρ with Hit@1", "of the strongest baseline")  # fmt: skip
    return markdown_table(columns, rows)


def main(run: Path) -> None:
    """Print the table and copy the figure.

    Args:
        run: Folder of a run of KnowledgeGeometry.
    """
    print(closeness(read_numbers(run / "results.json")))
    shutil.copy(run / "figures" / "closeness.png", FIGURES / "knowledge_geometry.png")


if __name__ == "__main__":
    auto_cli(main)
