"""Tables of groups of features in docs/feature_flow.md, from a run of FeatureFlow or ``run.py``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import markdown_table, read_numbers, two

GROUPS = {
    "none": "From nowhere",
    "residual": "From RES",
    "mlp_out": "From MLP",
    "attention_out": "From ATT",
}


def shared(results: Mapping[str, Any], *layers: int) -> str:
    """Return how many features of a group are in another, too, and how many would be by chance.

    Of some layers, or of all.
    """
    basic, rows = tuple(GROUPS.values()), []
    for layer in (x for x in results["groups"] if not layers or x["layer"] in layers):
        found = {(pair["group"], pair["other"]): pair for pair in layer["pairs"]}
        for group in dict.fromkeys(group for group, _ in found if group in basic):
            pairs = [found.get((group, other), {}) for other in basic]
            cells = ["{share:.0%}, {expected:.0%}".format(**one) if one else "" for one in pairs]
            rows.append([layer["layer"], group, *cells])
    return markdown_table(("layer", "group", *basic), rows)


def cosines(results: Mapping[str, Any]) -> str:
    """Return whether features of one predecessor have higher cosines to it than those of none."""
    rows = [
        [
            test["layer"],
            test["source"].replace("_", " "),
            test["n_other"],
            test["n"],
            two(test["auroc"]),
            f"{test['q']:.1g}",
        ]
        for test in results["cosine_tests"]
        if (test["group"], test["other"]) == (GROUPS["none"], GROUPS[test["source"]])
    ]
    return markdown_table(("layer", "cosine to", "from there", "from nowhere", "AUROC", "q"), rows)


def main(file: Path) -> None:
    """Print the tables of a ``results.json``, or of a file that ``run.py`` wrote."""
    content = read_numbers(file)
    results = content.get("results", content)
    print(shared(results), cosines(results), sep="\n\n")


if __name__ == "__main__":
    auto_cli(main)
