"""The documents' tables of linear probes, from the folders of three runs.

    lincorr fit --config configs/linear_probe.yaml
    lincorr fit --config configs/correlation_matrix.yaml --model.knowledge "[city, city_es, ...]"
    lincorr fit --config configs/correlation_matrix.yaml --model.partial_out "[pet]"
    python -m benchmarks.docs_tables.probe runs/linear_probe/version_0 \
        runs/linear_probe/version_1 runs/linear_probe/version_2

(the second one as docs/tiny_world.md has it) puts them between their markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

from benchmarks.common import markdown_table, place_tables, read_numbers

SHOWN = ("city", "country", "continent", "language", "ceo", "company", "color", "pet", "gender")
FAMILIES = ("city", "city_es", "country", "country_zh", "X+1", "X*2")
NULLS = ("city→country", "country→continent", "ceo→company", "city→color")
RANKED = (
    "country→food",
    "city→country",
    "country→city",
    "ceo→company",
    "color→personality",
    "city→color",
    "city→gender",
    "color→sport",
)
RIDGES = (0.0, 1.0, 10.0, 100.0, 1000.0, 10000.0)
FINDING = 0.01  # adjusted p-value of a pair above random words

Rows = list[dict[str, Any]]


def two(value: float | None) -> str:
    """Return a number with two digits, as the paper writes them."""
    return "" if value is None else f"{value:.2f}".replace("0.", ".", 1).replace("-.00", ".00")


def chosen(rows: Rows, keys: Sequence[str], names: Sequence[str]) -> Rows:
    """Return the rows whose values of some keys make one of some names, as city→country."""
    named = [{"name": "→".join(row[key] for key in keys), **row} for row in rows]
    return [row for row in named if row["name"] in names]


def numbers_table(columns: Sequence[str], rows: Rows, keys: Sequence[str]) -> str:
    """Return a table of the names of rows, and numbers of some keys with two digits."""
    return markdown_table(columns, [[row["name"], *(two(row[k]) for k in keys)] for row in rows])


def matrix(results: dict[str, Any], shown: Sequence[str] = SHOWN) -> str:
    """Return r per answer of some pairs: source row, target column."""
    r = {(pair["source"], pair["target"]): pair["label_mean"] for pair in results["pairs"]}
    rows = [
        [source, *(two(r[source, t]) if source != t else "–" for t in shown)] for source in shown
    ]
    return markdown_table(["", *shown], rows)


def ridge_path(results: dict[str, Any]) -> str:
    """Return the correlation and right answers of city->country along the ridge."""
    (path,) = chosen(results["ridge_path"], ("source", "target"), ("city→country",))
    points = [min(path["path"], key=lambda point: abs(point["ridge"] - r)) for r in RIDGES]
    rows = [
        ["r", *(two(point["label_mean"]) for point in points)],
        ["right country for a city", *(two(point["influenced"]["1"]) for point in points)],
        ["right city for a country", *(two(point["influencing"]["1"]) for point in points)],
    ]
    return markdown_table(
        ["city→country, ridge", *(f"{point['ridge']:g}" for point in points)], rows
    )


def ranking(pairs: Rows) -> str:
    """Return the number of pairs above random words, and some of them with intervals."""
    rows = []
    for pair in chosen(pairs, ("source", "target"), RANKED):
        above = pair["excess_over_random_labels"]
        rows.append(
            [
                pair["name"],
                two(pair["label_mean"]),
                f"{two(above['mean'])} ({two(above['low'])} to {two(above['high'])})",
                "< 1e-9" if pair["q"] < 1e-9 else f"{pair['q']:.1g}",
                two(pair["partial_label_mean"]),
                two(pair["through_given"]),
            ]
        )
    columns = ["pair", "r", "above random words", "adjusted p", "partial r (pet)"]
    n_above = sum(pair["q"] <= FINDING for pair in pairs)
    table = markdown_table([*columns, "share through pet"], rows)
    return f"{n_above} of {len(pairs)} pairs are above random words:\n\n{table}"


def tables(
    results: dict[str, Any], families: dict[str, Any], attributes: dict[str, Any]
) -> dict[str, str]:
    """Return every table by its marker."""
    nulls = numbers_table(
        ["pair", "r", "random words", "above random words", "unrelated prompt", "permuted"],
        chosen(results["pairs"], ("source", "target"), NULLS),
        (
            "label_mean",
            "random_label_mean",
            "excess_over_random",
            "control_label_mean",
            "permuted_label_mean",
        ),
    )
    caption = (
        f"r per answer on {results['n_test']:,} held-out subjects, source row → target column:"
    )
    return {
        "probe": f"{caption}\n\n{matrix(results)}\n\nand beside its nulls:\n\n{nulls}",
        "path": ridge_path(results),
        "families": matrix(families, FAMILIES),
        "ranking": ranking(attributes["pairs"]),
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
