"""The finished runs of an LM, their numbers, and whether these agree with the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.functional import random_hit_rates
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.reproduce.plan import LINEAR_MAP, LMPlan, plan_data, tables_served
from lincorr_lightning.results.paper import PaperInfluences, PaperNumber, quantities
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table

NOT_MEASURED = "not measured"
Row = dict[str, Any]
"""Cells of a row of the overview, by heading."""
_NULLS = {
    "label_mean": ("control_label_mean", "random_label_mean"),
    "influenced_1": ("best_baseline_1",),
    "gradient_correlation": ("permuted_gradient_correlation",),
    "generalized": ("random",),
}
_RANKS = ("1", "3", "5")
_MIN_RANKED = 5
_SIGNIFICANT = 0.05
_N_PERMUTATIONS = 9999


@dataclass(frozen=True)
class LMRuns:
    """The finished runs of an LM, why others are missing, and how long they took, by name."""

    plan: LMPlan
    runs: Mapping[str, SavedRun]
    errors: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the LM."""
        return self.plan.name

    @cached_property
    def linear_maps(self) -> dict[str, LinearMap]:
        """Maps of the probes by run, read once; those that cannot be read are left out."""
        maps = {}
        for name, run in self.runs.items():
            with suppress(LinearMapError):
                if run.study == "linear_probe":
                    maps[name] = LinearMap.from_pretrained(run.folder / LINEAR_MAP)
        return maps

    def missing_reason(self, runs: Sequence[str], relation: str = "") -> str:
        """Return why runs, or the numbers of a relation in them, are missing."""
        ends = relation.split("->") if relation else ()
        for reasons in (self.errors, self.plan.left_out):
            for name in (*runs, *ends):
                if name in reasons:
                    prefix = f"{name}: " if name in ends else ""
                    return prefix + reasons[name].rstrip(".")
        return NOT_MEASURED

    def find(self, quantity: str, relation: str, answer: str = "", place: str = "") -> float | None:
        """Return a quantity of ``paper.yaml`` as measured here; None if it was not.

        `place` is the table of the paper that shows it: some have runs of their own.
        """
        tables = tables_served()
        own_table = place if place in tables.values() else None
        for name, run in self.runs.items():
            value = quantities()[quantity].of(run, relation, answer)
            if value is not None and tables.get(name) == own_table:
                return value
        return None

    def number(self, number: PaperNumber) -> float | None:
        """Return a number of the paper as measured here; None if it was not."""
        return self.find(number.quantity.name, number.relation, number.answer, number.place)

    def null(self, quantity: str, relation: str) -> float | None:
        """Return the strongest null of a quantity as measured here; None if it has none."""
        if quantity in _NULLS:
            values = [self.find(null, relation) for null in _NULLS[quantity]]
            return max((value for value in values if value is not None), default=None)
        # Of Hit@N, it is that of weights in random order.
        direction, _, rank = quantity.rpartition("_")
        hits = self.random_hits(relation).get(direction)
        return hits[_RANKS.index(rank)] if hits and rank in _RANKS else None

    def random_hits(self, relation: str) -> dict[str, list[float]]:
        """Return Hit@1, 3 and 5 of weights in random order by direction, with a reference only."""
        if self.plan.tokenizer is None or self.find("influenced_1", relation) is None:
            return {}
        tokenized = TokenizedRelation.of(relation, Catalogue.load(), self.plan.tokenizer)
        rates = random_hit_rates(torch.from_numpy(tokenized.reference_mask))
        ways = ("influenced", "influencing")
        return {way: rate.rates.tolist() for way, rate in zip(ways, rates, strict=True)}


def agreements(numbers: Iterable[PaperNumber], lms: Sequence[LMRuns]) -> Iterator[Row]:
    """Yield how each quantity of a table agrees with that of each LM: rows of the overview."""
    by_quantity: dict[str, list[PaperNumber]] = {}
    for number in numbers:
        if number.quantity.name != "random":  # follows from the number of labels
            by_quantity.setdefault(number.quantity.name, []).append(number)
    for lm in lms:
        for name, printed in by_quantity.items():
            rows = [
                (value, number.value, None if number.answer else lm.null(name, number.relation))
                for number in printed
                if (value := lm.number(number)) is not None
            ]
            if not rows:
                continue
            measured, paper = (np.array([row[i] for row in rows], dtype=float) for i in (0, 1))
            above = [value > null for value, _, null in rows if null is not None]
            rho, p = rank_correlation(measured, paper)
            yield {
                "table": printed[0].place,
                "quantity": printed[0].quantity.heading,
                "LM of the paper": printed[0].lm,
                "LM here": lm.name,
                "rows": len(rows),
                "p of ρ": p,
                "ρ": rho,
                "mean difference": printed[0].quantity.difference(float((measured - paper).mean())),
                "above null": f"{sum(above)} of {len(above)}" if above else "",
            }


def rank_correlation(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """Return Spearman's ρ of numbers, ``(n,)`` each, and its one-sided p-value by permutation.

    Both are None where there are fewer than five numbers, or where all are equal.
    """
    if len(x) < _MIN_RANKED or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None, None
    ranks, others = (rankdata(each) - (len(each) + 1) / 2 for each in (x, y))
    rng = np.random.default_rng(0)
    drawn = rng.permuted(np.tile(ranks, (_N_PERMUTATIONS, 1)), axis=1) @ others
    measured = float(ranks @ others)
    p = (1 + int((drawn >= measured - 1e-9).sum())) / (1 + _N_PERMUTATIONS)
    return measured / float(np.sqrt((ranks @ ranks) * (others @ others))), p


def shared_labels(
    printed: PaperInfluences, lm: str, here: Mapping[str, Sequence[str]], known: Sequence[str]
) -> Row:
    """Count the labels that lists share with the paper's: a row of the overview.

    Args:
        printed: The paper's lists.
        lm: LM here.
        here: The lists here, of labels that the paper prints, at least one.
        known: All labels that could be in a list here.
    """
    paper = [set(printed.labels[name]) for name in here]
    shared = np.array([[len(set(labels) & each) for each in paper] for labels in here.values()])
    n = len(shared)
    mean = float(np.diag(shared).mean())
    # Labels of the paper that are missing here never match.
    share = min(printed.n / len(known), 1)
    chance = float(np.mean([len(labels & set(known)) for labels in paper]) * share)
    others = float((shared.sum() - np.trace(shared)) / (n * (n - 1))) if n > 1 else None
    p = None
    if n >= _MIN_RANKED:
        rng = np.random.default_rng(0)
        rows = np.arange(n)
        drawn = [shared[rows, rng.permutation(n)].mean() for _ in range(_N_PERMUTATIONS)]
        p = (1 + sum(value >= mean for value in drawn)) / (1 + _N_PERMUTATIONS)
    return {
        "table": printed.place,
        "pair": f"{printed.relation}, of {printed.n}",
        "LM of the paper": printed.lm,
        "LM here": lm,
        "lists": n,
        "p of shared": p,
        "shared": mean,
        "with other lists": others,
        "by chance": chance,
    }


def agreement_tables(agreement: Sequence[Row], shared: Sequence[Row], size: str) -> list[Table]:
    """Return the overview: where do LMs agree with the paper?"""
    tested = [row["p of ρ"] for row in agreement if row["p of ρ"] is not None]
    n_same = sum(p < _SIGNIFICANT for p in tested)
    tables = []
    for (name, texts), rows in zip(plan_data("overview").items(), (agreement, shared), strict=True):
        note = texts["note"].format(n_same=n_same, n_tested=len(tested), size=size)
        formats = texts["formats"]
        tables.append(Table.of(name, rows, (), texts["caption"], note, True, formats=formats))
    return [table for table in tables if len(table)]
