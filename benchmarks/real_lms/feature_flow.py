"""The tables of docs/feature_flow.md: SAEs, deactivation, groups, cuts and steering of SmolLM2.

    python -m benchmarks.real_lms.feature_flow

reads the files of ``run.py``, writes all tables to ``benchmarks/results/real_lms/tables`` and some
of their rows between the document's markers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from benchmarks import common
from benchmarks.common import Estimate, picked
from benchmarks.real_lms.run import REAL_LMS
from benchmarks.real_lms.tables import load
from lincorr_lightning.results.table import Table

LM = "smollm2-135m"
GROUPS = {
    "none": "From nowhere",
    "residual": "From RES",
    "mlp_out": "From MLP",
    "attention_out": "From ATT",
}
HEADINGS = {
    "method": "predecessors removed",
    "matched": "switched off",
    "random": "random control",
    "expected": "by chance",
    "target_only": "r, removed in the target alone",
    "refitted": "r, fitted again",
}
FORMATS = {
    **dict.fromkeys(("layer", "cases", "features", "draws"), "d"),
    **dict.fromkeys(("matched", "random", "share", "expected"), ".0%"),
    **dict.fromkeys(("r", "target_only", "refitted"), ".2f"),
    "times": ".1f",
}


def group_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the overlaps of groups of one predecessor, and tests of them against those of none.

    An overlap is the share of a group's features that are in the other one at other tokens; tests
    are of cosines to the predecessor.
    """
    names = set(GROUPS.values())
    shared = [
        {"layer": layer["layer"], **pair}
        for layer in results["groups"]
        for pair in layer["pairs"]
        if {pair["group"], pair["other"]} <= names
    ]
    tests = [
        test
        for test in results["cosine_tests"]
        if (test["group"], test["other"]) == (GROUPS["none"], GROUPS[test["source"]])
    ]
    groups = picked(shared, "layer group other features=n share expected")
    return [
        Table("flow_groups", groups, headings=HEADINGS, formats=FORMATS),
        Table("flow_cosines", picked(tests, "layer source there=n_other nowhere=n auroc q")),
    ]


def cuts(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield r of city→country with features removed; of controls the mean and range of draws."""

    def over(values: Series) -> Estimate:
        return Estimate(values.mean(), values.min(), values.max())

    rows = DataFrame(results["relation"]["cuts"])
    for (name, control), draws in rows.groupby(["cut", "control"], sort=False):
        yield {
            "removed": f"as many others as {name}" if control else name,
            "draws": len(draws),
            "features": draws["n_features"].iloc[0],
            "r": over(draws["fixed"]),
            "target_only": over(draws["target_only"]),
            "refitted": over(draws["refitted"]),
        }


def steering(points: DataFrame) -> DataFrame:
    """Return means over answers by strategy and strength; perplexities have a geometric mean."""
    grouped = points.groupby(["strategy", "strength", "control"], sort=False)
    return grouped.agg(
        answers=("behaviour", "size"),
        probability=("behaviour", "mean"),
        coherence=("coherence", "mean"),
        named=("named", "mean"),
        perplexity=("perplexity", lambda values: np.exp(np.log(values).mean())),
    ).reset_index()


def tables(results: Path) -> list[Table]:
    """Return the tables of SmolLM2."""
    flow = load(LM, "feature_flow", results)
    saes = load(LM, "sparse_autoencoders", results)["hook_points"]
    quality = "hook_point features=n_features explained_variance l0 dead loss_recovered"
    off = "layer method cases=n matched=matched_success random=random_success times=times_random"
    deactivated = picked(flow["deactivation_layers"], off)
    points = common.read_csv(results / LM / "feature_flow.csv")
    return [
        Table("flow_saes", picked(saes, quality)),
        Table("flow_deactivation", deactivated, headings=HEADINGS, formats=FORMATS),
        *group_tables(flow),
        Table.of("flow_cuts", cuts(flow), headings=HEADINGS, formats=FORMATS),
        Table("flow_steering", steering(points)),
    ]


def documented(found: list[Table]) -> dict[str, str]:
    """Return what the document shows of the tables, by their markers."""
    _, deactivated, groups, _, of_cuts, _ = found
    return {
        "flow_deactivation": common.shown(deactivated, rows="method != 'one-to-one'"),
        "flow_groups": common.shown(
            groups, "group features share expected", "layer == 18 and other == 'From nowhere'"
        ),
        "flow_cuts": of_cuts.markdown(),
    }


def main() -> None:
    """Write the tables, and put them into the document."""
    found = tables(REAL_LMS)
    for table in found:
        common.write_table(table, REAL_LMS / "tables")
    common.place_tables(documented(found))


if __name__ == "__main__":
    main()
