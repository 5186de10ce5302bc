r"""The numbers in docs/geometry.md of the geometry of the tiny world, from the folders of two runs.

    lincorr test --config configs/token_geometry.yaml
    lincorr test --config configs/knowledge_geometry.yaml
    python -m benchmarks.docs_tables.geometry runs/token_geometry/version_0 \
        runs/knowledge_geometry/version_0

prints the tables, and puts the figure of closeness into benchmarks/figures.
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


def levels(results: dict[str, Any]) -> str:
    """Return the table of shuffling levels: ID by layer, last overlap and cosine."""
    rows = []
    for level in results["shuffles"]:
        blocks = f"{4 ** level['shuffle']} blocks" if level["shuffle"] else "unshuffled"
        dimensions = " / ".join(map(two, level["dimension"]["2"]))
        last = map(two, (level["overlap"]["2"][-1], level["cosine_mean"][-1]))
        loss, entropy = two(level["loss"]), two(level["entropy"])
        rows.append([level["shuffle"], blocks, loss, entropy, dimensions, *last])
    columns = ("S", "", "loss", "entropy", "ID (2NN) by layer", "overlap (k = 2)", "cosine")
    return markdown_table(columns, rows)


def dimension_and_loss(results: dict[str, Any]) -> str:
    """Return the table of log ID and log loss in the last layer, unshuffled."""
    rows = [
        [entry["n2"], two(entry["pearson"]), f"{two(entry['low'])} to {two(entry['high'])}",
         _short(f"{entry['pearson_p']:.3f}")]
        for entry in results["dimension_loss"]
        if entry["shuffle"] == 0 and entry["layer"] == results["layers"][-1]
    ]  # fmt: skip
    return markdown_table(("n2", "r of log ID and log loss", "95%", "p"), rows)


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


def main(token_geometry: str, knowledge_geometry: str) -> None:
    """Print the tables and copy the figure.

    Args:
        token_geometry: Folder of a run of TokenGeometry.
        knowledge_geometry: Folder of a run of KnowledgeGeometry.
    """
    folders = Path(token_geometry), Path(knowledge_geometry)
    tokens, knowledge = (read_numbers(folder / "results.json") for folder in folders)
    print(levels(tokens), dimension_and_loss(tokens), closeness(knowledge), sep="\n\n")
    shutil.copy(folders[1] / "figures" / "closeness.png", FIGURES / "knowledge_geometry.png")


if __name__ == "__main__":
    auto_cli(main)
