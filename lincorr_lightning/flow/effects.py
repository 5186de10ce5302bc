"""Effects and those of their controls, side by side, as means over cases, answers or draws."""

from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame, concat

from lincorr_lightning.flow.deactivation import CutEffect
from lincorr_lightning.flow.steering import SteeringPoint
from lincorr_lightning.results.table import columns_of

EFFECTS = tuple(columns_of(CutEffect)[2])  #: Names of the numbers of a `CutEffect`.
SCORES = tuple(columns_of(SteeringPoint)[2])  #: Names of the numbers of a `SteeringPoint`.


def beside_controls(
    frame: DataFrame, by: Sequence[str], column: str, prefixes: Mapping[Any, str]
) -> DataFrame:
    """Return rows that are equal in the columns `by` as one row.

    They differ in a column: the names of the others get the prefix of its value, such as
    ``control_`` of True. A row without control has none of its numbers.
    """
    changed, control = (
        frame[frame[column] == value].drop(columns=column).set_index([*by]).add_prefix(prefix)
        for value, prefix in prefixes.items()
    )
    return changed.join(control).reset_index()


def compare_cuts(cuts: DataFrame, *by: str) -> DataFrame:
    """Return mean effects over cases at the lowest r, where 0 removes, beside random controls.

    A row per combination of values in the columns `by` of `CutEffect` has r, the number n of cases,
    ``matched_success``, ``random_success`` and so on.
    """
    lowest = cuts[cuts["r"] == cuts["r"].min()]
    effects = lowest[[*EFFECTS]].astype(float)
    weights = effects.notna().mul(lowest["n"], axis=0)
    keys = [lowest[name] for name in (*by, "cut")]
    sums, totals, n = (
        frame.groupby(keys, sort=False).sum() for frame in (effects * weights, weights, lowest["n"])
    )
    means = (sums / totals).assign(n=n).reset_index()
    prefixes = {"matched": "matched_", "random": "random_"}
    return beside_controls(means, [*by, "n"], "cut", prefixes).assign(r=lowest["r"].min())


def summarize_cuts(cuts: DataFrame, *by: str) -> DataFrame:
    """Return `compare_cuts` over all groups, with the ratio to the random control."""
    effects = compare_cuts(cuts[cuts["group"] == "all"], *by)
    random = effects["random_success"].astype(float)
    return effects.assign(times_random=effects["matched_success"] / random.where(random > 0))


def best_steering(points: DataFrame) -> DataFrame:
    """Return the means at each strategy's best strength, its control's, and those of strength 0.

    The best has the highest mean score over the answers; ``none`` is the strategy of strength 0.
    """
    groups = points.groupby(["strategy", "control", "strength"], sort=False)
    means = groups.agg(n_answers=("score", "size"), **{name: (name, "mean") for name in SCORES})
    keys = ["strategy", "strength", "n_answers"]
    means = beside_controls(means.reset_index(), keys, "control", {False: "", True: "control_"})
    best = means.loc[means.groupby("strategy", sort=False)["score"].idxmax()]
    none = means[means["strength"] == 0].head(1).assign(strategy="none")
    return concat([none[[name for name in none if "control" not in name]], best])
