"""The documents' tables of linear probes, from the folders of three runs.

    lincorr fit --config configs/linear_probe.yaml
    lincorr fit --config configs/correlation_matrix.yaml --model.knowledge "[city, city_es, ...]"
    lincorr fit --config configs/correlation_matrix.yaml --model.partial_out "[pet]"
    python -m benchmarks.docs_tables.probe runs/linear_probe/version_0 \
        runs/linear_probe/version_1 runs/linear_probe/version_2

(the second one as docs/tiny_world.md has it) puts them between their markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli
from pandas import DataFrame

from benchmarks.common import markdown_frame, place_tables, read_numbers

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

NUMBERS = {
    "label_mean": "r",
    "random_label_mean": "random words",
    "excess_over_random": "above random words",
    "control_label_mean": "unrelated prompt",
    "permuted_label_mean": "permuted",
    "partial_label_mean": "partial r (pet)",
    "through_given": "share through pet",
}


def two(value: float) -> str:
    """Return a number with two digits, as the paper writes them."""
    if np.isnan(value):
        return ""
    return f"{value:.2f}".replace("0.", ".", 1).replace("-.00", ".00")


def named(entries: Iterable[Mapping[str, Any]]) -> DataFrame:
    """Return entries about pairs as rows with their names, as city→country."""
    frame = DataFrame(entries)
    return frame.set_index(frame["source"] + "→" + frame["target"])


def matrix(results: dict[str, Any], shown: Sequence[str] = SHOWN) -> str:
    """Return r per answer of some pairs: source row, target column."""
    r = DataFrame(results["pairs"]).pivot(index="source", columns="target", values="label_mean")
    cells = r.reindex(index=shown, columns=shown).map(two).replace("", "–")
    return markdown_frame(cells, "")


def ridge_path(results: dict[str, Any]) -> str:
    """Return the correlation and right answers of city->country along the ridge."""
    path = named(results["ridge_path"])["path"]["city→country"]
    points = [min(path, key=lambda point: abs(point["ridge"] - ridge)) for ridge in RIDGES]
    scores = {
        f"{point['ridge']:g}": {
            "r": two(point["label_mean"]),
            "right country for a city": two(point["influenced"]["1"]),
            "right city for a country": two(point["influencing"]["1"]),
        }
        for point in points
    }
    return markdown_frame(DataFrame(scores), "city→country, ridge")


def ranking(pairs: DataFrame) -> str:
    """Return the number of pairs above random words, and some of them with intervals."""
    shown = pairs[pairs.index.isin(RANKED)]
    above = [
        f"{two(each['mean'])} ({two(each['low'])} to {two(each['high'])})"
        for each in shown["excess_over_random_labels"]
    ]
    table = shown[["label_mean", "partial_label_mean", "through_given"]].map(two)
    table.insert(1, "above random words", above)
    table.insert(2, "adjusted p", ["< 1e-9" if q < 1e-9 else f"{q:.1g}" for q in shown["q"]])
    n_above = (pairs["q"] <= FINDING).sum()
    text = markdown_frame(table.rename(columns=NUMBERS), "pair")
    return f"{n_above} of {len(pairs)} pairs are above random words:\n\n{text}"


def tables(
    results: dict[str, Any], families: dict[str, Any], attributes: dict[str, Any]
) -> dict[str, str]:
    """Return every table by its marker."""
    pairs = named(results["pairs"])
    nulls = pairs.loc[pairs.index.isin(NULLS), [*NUMBERS][:5]].map(two).rename(columns=NUMBERS)
    caption = (
        f"r per answer on {results['n_test']:,} held-out subjects, source row → target column:"
    )
    beside = f"and beside its nulls:\n\n{markdown_frame(nulls, 'pair')}"
    return {
        "probe": f"{caption}\n\n{matrix(results)}\n\n{beside}",
        "path": ridge_path(results),
        "families": matrix(families, FAMILIES),
        "ranking": ranking(named(attributes["pairs"])),
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
