"""The documents' tables of linear probes, from the folders of three runs.

    lincorr fit --config configs/linear_probe.yaml
    lincorr fit --config configs/correlation_matrix.yaml --model.knowledge "[city, city_es, ...]"
    lincorr fit --config configs/correlation_matrix.yaml --model.partial_out "[pet]"
    python -m benchmarks.docs_tables.probe runs/linear_probe/version_0 \
        runs/linear_probe/version_1 runs/linear_probe/version_2

(the second one as docs/tiny_world.md has it)

puts them between their markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import arrow, markdown_table, place_tables, read_numbers

SHOWN = ("city", "country", "continent", "language", "ceo", "company", "color", "pet", "gender")
FAMILIES = (
    "city",
    "city_es",
    "city_zh",
    "country",
    "country_es",
    "country_zh",
    "job",
    "job_zh",
    "object_color",
    "simile_color",
    "X+1",
    "X+2",
    "X*2",
)
RANKED = (
    ("country", "food"),
    ("city", "country"),
    ("country", "city"),
    ("ceo", "company"),
    ("color", "personality"),
    ("city", "color"),
    ("city", "gender"),
    ("color", "sport"),
)
COMPOSED = (
    ("city", "country", "continent"),
    ("city", "country", "language"),
    ("country", "language", "continent"),
)
RIDGES = (0.0, 1.0, 10.0, 100.0, 1000.0, 10000.0)
FINDING = 0.01  # adjusted p-value of a pair above its control


def two(value: float | None) -> str:
    """Return a number with two digits, as the paper writes them."""
    return "" if value is None else f"{value:.2f}".replace("0.", ".", 1).replace("-.00", ".00")


def matrix(results: dict[str, Any], shown: Sequence[str] = SHOWN) -> str:
    """Return the label-wise r of some pairs: source row, target column."""
    r = {(pair["source"], pair["target"]): pair["label_mean"] for pair in results["pairs"]}
    rows = [
        [source, *(two(r[source, t]) if source != t else "–" for t in shown)] for source in shown
    ]
    return markdown_table(["", *shown], rows)


def nulls(results: dict[str, Any]) -> str:
    """Return related and unrelated pairs beside their nulls."""
    rows = []
    for pair in results["pairs"]:
        name = f"{pair['source']}->{pair['target']}"
        if name in ("city->country", "country->continent", "ceo->company", "city->color"):
            shown = (pair["label_mean"], pair["permuted_label_mean"], pair["control_label_mean"])
            rows.append([arrow(name), *map(two, shown)])
    return markdown_table(["pair", "r", "permuted", "control"], rows)


def ridge_path(results: dict[str, Any]) -> str:
    """Return the correlation and Hit@1 of city->country along the ridge."""
    (path,) = (
        entry["path"]
        for entry in results["ridge_path"]
        if (entry["source"], entry["target"]) == ("city", "country")
    )
    points = [min(path, key=lambda p: abs(p["ridge"] - ridge)) for ridge in RIDGES]
    header = ["city→country, ridge", *(f"{point['ridge']:g}" for point in points)]
    rows = [
        ["label-wise r", *(two(point["label_mean"]) for point in points)],
        ["Hit@1 influenced", *(two(point["influenced"]["1"]) for point in points)],
        ["Hit@1 influencing", *(two(point["influencing"]["1"]) for point in points)],
    ]
    return markdown_table(header, rows)


def ranking(results: dict[str, Any]) -> str:
    """Return the number of pairs above their control, and some of them with standard errors."""
    found = [pair for pair in results["pairs"] if pair["q"] <= FINDING]
    rows = []
    for pair in results["pairs"]:
        if (pair["source"], pair["target"]) in RANKED:
            error = f"{two(pair['excess'])} ± {two(pair['excess_error'])}"
            given = (pair["partial_label_mean"], pair["through_given"])
            rows.append(
                [
                    f"{pair['source']}→{pair['target']}",
                    two(pair["label_mean"]),
                    error,
                    "< 1e-9" if pair["q"] < 1e-9 else f"{pair['q']:.1g}",
                    *map(two, given),
                ]
            )
    table = markdown_table(
        ["pair", "r", "above control", "adjusted p", "partial r (pet)", "share through pet"], rows
    )
    n = len(results["pairs"])
    return f"{len(found)} of {n} pairs are above their control:\n\n{table}"


def transitivity(results: dict[str, Any]) -> str:
    """Return the composed maps beside the map of the pair."""
    rows = [
        [
            f"{one['source']}→{one['via']}→{one['target']}",
            *(two(one[key]) for key in ("direct", "composed", "elsewhere")),
        ]
        for one in results["transitivity"]
        if (one["source"], one["via"], one["target"]) in COMPOSED
    ]
    header = ["source→via→target", "direct map", "composed maps", "through others, median"]
    return markdown_table(header, rows)


def tables(
    results: dict[str, Any], families: dict[str, Any], attributes: dict[str, Any]
) -> dict[str, str]:
    """Return every table by its marker."""
    matrix_note = (
        f"Label-wise r on {results['n_test']:,} held-out subjects, source row → target column:"
    )
    null_note = "and beside its nulls:"
    return {
        "probe": f"{matrix_note}\n\n{matrix(results)}\n\n{null_note}\n\n{nulls(results)}",
        "path": ridge_path(results),
        "families": matrix(families, FAMILIES),
        "ranking": ranking(attributes),
        "transitivity": transitivity(attributes),
    }


def main(run: Path, families_run: Path, attributes_run: Path) -> None:
    """Write the tables.

    Args:
        run: Folder of a run of configs/linear_probe.yaml.
        families_run: Folder of a run of configs/correlation_matrix.yaml over all families.
        attributes_run: Folder of a run of it over all attributes, with pet partialled out.
    """
    runs = (run, families_run, attributes_run)
    place_tables(tables(*(read_numbers(folder / "results.json") for folder in runs)))


if __name__ == "__main__":
    auto_cli(main)
