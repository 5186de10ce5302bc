"""The tables of docs/feature_flow.md: SAEs, deactivation, groups, cuts and steering of SmolLM2.

    python -m benchmarks.real_lms.feature_flow

reads the files of ``run.py``, writes all tables to ``benchmarks/results/real_lms/tables`` and some
of their rows between the document's markers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from benchmarks import common
from benchmarks.common import Estimate, record, scored
from benchmarks.real_lms.run import REAL_LMS
from benchmarks.real_lms.tables import load
from lincorr_lightning.results.table import Table, column

LM = "smollm2-135m"
GROUPS = {
    "none": "From nowhere",
    "residual": "From RES",
    "mlp_out": "From MLP",
    "attention_out": "From ATT",
}


def over(values: Series) -> Estimate:
    """Return the mean of some numbers with their range."""
    return Estimate(values.mean(), values.min(), values.max())


@dataclass(frozen=True)
class SAE:
    """Quality of an SAE on held-out tokens."""

    hook_point: str = scored("hook_point", "", "")
    features: int = scored("n_features", "features", "d")
    explained_variance: float = scored("explained_variance")
    l0: float = scored("l0", "L0", ".1f")
    dead: float = scored("dead")
    loss_recovered: float = scored("loss_recovered")


@dataclass(frozen=True)
class Deactivation:
    """Share of features that are off when their matched predecessors are removed."""

    layer: int = scored("layer", "", "d")
    method: str = scored("method", "predecessors removed", "")
    cases: int = scored("n", "cases", "d")
    matched: float = scored("matched_success", "switched off", ".0%")
    random: float = scored("random_success", "random control", ".0%")
    times: float = scored("times_random", "times", ".1f")


@dataclass(frozen=True)
class SharedFeatures:
    """Share of the features of a group that are in another one, too, at other tokens."""

    layer: int = column(format="d")
    group: str = scored("group", "", "")
    other: str = scored("other", "are in, too", "")
    features: int = scored("n", "features", "d")
    share: float = scored("share", "", ".0%")
    expected: float = scored("expected", "by chance", ".0%")


@dataclass(frozen=True)
class Cosines:
    """Whether features that mostly come from a predecessor have higher cosines to it."""

    layer: int = scored("layer", "", "d")
    source: str = scored("source", "cosine to", "")
    there: int = scored("n_other", "from there", "d")
    nowhere: int = scored("n", "from nowhere", "d")
    auroc: float = scored("auroc", "AUROC")
    q: float = scored("q", "", ".1g")


def group_tables(results: Mapping[str, Any]) -> list[Table]:
    """Return the overlaps of groups of one predecessor, and tests of them against those of none."""
    names = set(GROUPS.values())
    shared = [
        record(SharedFeatures, pair, layer=layer["layer"])
        for layer in results["groups"]
        for pair in layer["pairs"]
        if {pair["group"], pair["other"]} <= names
    ]
    cosines = [
        record(Cosines, test)
        for test in results["cosine_tests"]
        if (test["group"], test["other"]) == (GROUPS["none"], GROUPS[test["source"]])
    ]
    return [Table.of("flow_groups", shared), Table.of("flow_cosines", cosines)]


@dataclass(frozen=True)
class Cuts:
    """r of city→country with features removed; of controls the mean and range of draws."""

    removed: str = column()
    draws: int = column(format="d")
    features: int = column(format="d")
    r: Estimate = column("r", ".2f")
    target_only: Estimate = column("r, removed in the target alone", ".2f")
    refitted: Estimate = column("r, fitted again", ".2f")


def cuts(results: Mapping[str, Any]) -> Iterator[Cuts]:
    """Yield the cuts and their controls."""
    rows = DataFrame(results["relation"]["cuts"])
    for (name, control), draws in rows.groupby(["cut", "control"], sort=False):
        yield Cuts(
            f"as many others as {name}" if control else name,
            len(draws),
            draws["n_features"].iloc[0],
            *(over(draws[score]) for score in ("fixed", "target_only", "refitted")),
        )


@dataclass(frozen=True)
class Steering:
    """What steering does, means over answers; perplexities have a geometric mean."""

    strategy: str = column()
    strength: float = column(format="g")
    control: bool = column("other features")
    answers: int = column(format="d")
    probability: float = column("P(answer)", ".3f")
    coherence: float = column(format=".3f")
    named: float = column("texts that name it", ".1%")
    perplexity: float = column(format=",.0f")


def steering(points: DataFrame) -> Iterator[Steering]:
    """Yield the means of each strategy and strength, and those of its control."""
    for about, rows in points.groupby(["strategy", "strength", "control"], sort=False):
        means = rows[["behaviour", "coherence", "named"]].mean()
        yield Steering(*about, len(rows), *means, float(np.exp(np.log(rows["perplexity"]).mean())))


def tables(results: Path) -> list[Table]:
    """Return the tables of SmolLM2."""
    flow = load(LM, "feature_flow", results)
    points = load(LM, "sparse_autoencoders", results)["hook_points"]
    return [
        Table.of("flow_saes", [record(SAE, point) for point in points]),
        Table.of(
            "flow_deactivation", [record(Deactivation, row) for row in flow["deactivation_layers"]]
        ),
        *group_tables(flow),
        Table.of("flow_cuts", cuts(flow)),
        Table.of("flow_steering", steering(common.read_csv(results / LM / "feature_flow.csv"))),
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
