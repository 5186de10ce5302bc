"""Whether an LM agrees with the paper: the overview at the head of a reproduction."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from lincorr_lightning.reproduce.items import edit_run
from lincorr_lightning.reproduce.lm_runs import LMRuns
from lincorr_lightning.results.paper import PaperInfluences, PaperNumber, Quantity
from lincorr_lightning.results.report.text import PageTable
from lincorr_lightning.results.table import Column

_MIN_RANKED = 5
_SIGNIFICANT = 0.05
_N_PERMUTATIONS = 9999
_RANKS = ("1", "3", "5")
Row = tuple[str, str]
"""Relation and answer of a row; the answer is empty for most."""


class Agreement(NamedTuple):
    """How a table's numbers agree with the paper's.

    Attributes:
        place: The table.
        quantity: What is compared.
        paper_lm: LM of the paper.
        lm: LM here.
        n: Number of relations that both have.
        rho: Spearman's rank correlation over relations; NaN for fewer than five.
        p: Its one-sided p-value; NaN likewise.
        difference: Mean difference, here minus paper.
        n_above: Number of relations whose number here exceeds its null.
        n_nulls: Number of relations that have a null.
    """

    place: str
    quantity: Quantity
    paper_lm: str
    lm: str
    n: int
    rho: float
    p: float
    difference: float
    n_above: int
    n_nulls: int


class SharedLabels(NamedTuple):
    """How many of the paper's labels with the highest weights have the highest weights here.

    Attributes:
        printed: What the paper prints.
        lm: LM here.
        n: Number of lists that are compared.
        mean: Mean number of shared labels.
        chance: The same, expected of labels in random order.
        others: The same, with the paper's lists of other labels.
        p: One-sided p-value of a permutation of the paper's lists; NaN for fewer than five.
    """

    printed: PaperInfluences
    lm: str
    n: int
    mean: float
    chance: float
    others: float
    p: float


def null_of(lm: LMRuns, relation: str, quantity: str) -> float | None:
    """Return the null of a number of the paper as measured here; None if it has none.

    The r of a probe has that of the control prompt, the r of gradients that of a permuted W, Hit@N
    that of weights in random order, and a share of edits that of random answers.
    """
    if quantity == "label_mean":
        value = lm.probed_pair(relation).get("control_label_mean")
    elif quantity == "gradient_correlation":
        value = lm.gradients(relation).get("permuted_gradient_correlation")
    elif quantity == "generalized":
        run = lm.runs.get(edit_run(relation))
        value = None if run is None else run.values.get("random")
    else:
        way, _, n = quantity.rpartition("_")
        hits = lm.random_hits(relation).get(way)
        value = hits[_RANKS.index(n)] if hits and n in _RANKS else None
    return None if value is None else float(value)


def agreements(
    place: str,
    lms: Sequence[LMRuns],
    found: Mapping[str, Mapping[Row, Mapping[str, float | None]]],
    by_row: Mapping[Row, Mapping[str, PaperNumber]],
) -> Iterator[Agreement]:
    """Compare the rows of a table.

    Args:
        place: The table.
        lms: The LMs.
        found: LM -> row -> quantity -> number here.
        by_row: Row -> quantity -> number of the paper.
    """
    numbers = {name: number for own in by_row.values() for name, number in own.items()}
    for lm in lms:
        for name, number in numbers.items():
            if name == "random":  # follows from the number of labels
                continue
            both = [
                (value, own[name].value, null_of(lm, key[0], name) if not key[1] else None)
                for key, own in by_row.items()
                if name in own and (value := found[lm.name][key][name]) is not None
            ]
            if not both:
                continue
            here, paper = (np.array([one[i] for one in both], dtype=float) for i in (0, 1))
            rho = p = math.nan
            if len(both) >= _MIN_RANKED and np.ptp(here) > 0 and np.ptp(paper) > 0:
                rho, p = rank_correlation(here, paper)
            nulls = [value > null for value, _, null in both if null is not None]
            yield Agreement(
                place, number.quantity, number.lm, lm.name, len(both), rho, p,
                float((here - paper).mean()), sum(nulls), len(nulls),
            )  # fmt: skip


def rank_correlation(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return Spearman's ρ, and its one-sided p-value from permutations.

    Args:
        x: Numbers, ``(n,)``, not all equal.
        y: Likewise.
    """
    ranks, others = (rankdata(one) - (len(one) + 1) / 2 for one in (x, y))
    rng = np.random.default_rng(0)
    drawn = rng.permuted(np.tile(ranks, (_N_PERMUTATIONS, 1)), axis=1) @ others
    measured = float(ranks @ others)
    p = (1 + int((drawn >= measured - 1e-9).sum())) / (1 + _N_PERMUTATIONS)
    return measured / float(np.sqrt((ranks @ ranks) * (others @ others))), p


def shared_labels(
    printed: PaperInfluences, lm: str, here: Mapping[str, Sequence[str]], known: Sequence[str]
) -> SharedLabels:
    """Count the labels that lists here share with the paper's.

    Args:
        printed: The paper's lists.
        lm: LM here.
        here: The lists here, of labels that the paper prints, at least one.
        known: All labels that could be in a list here.
    """
    theirs = [set(printed.labels[name]) for name in here]
    shared = np.array([[len(set(own) & one) for one in theirs] for own in here.values()])
    n = len(shared)
    mean = float(np.diag(shared).mean())
    # Labels of the paper that are missing here never match.
    share = min(printed.n / len(known), 1)
    chance = float(np.mean([len(one & set(known)) for one in theirs]) * share)
    others = float((shared.sum() - np.trace(shared)) / (n * (n - 1))) if n > 1 else math.nan
    p = math.nan
    if n >= _MIN_RANKED:
        rng = np.random.default_rng(0)
        rows = np.arange(n)
        drawn = [shared[rows, rng.permutation(n)].mean() for _ in range(_N_PERMUTATIONS)]
        p = (1 + sum(one >= mean for one in drawn)) / (1 + _N_PERMUTATIONS)
    return SharedLabels(printed, lm, n, mean, chance, others, p)


def agreement_tables(
    found: Sequence[Agreement], shared: Sequence[SharedLabels], size: str
) -> list[PageTable]:
    """Return the overview: where do LMs agree with the paper?"""
    tables = []
    if found:
        rows = [
            [one.place, one.quantity.heading, one.paper_lm, one.lm, str(one.n), _verdict(one.p),
             _signed(one.rho), one.quantity.difference(one.difference),
             f"{one.n_above} of {one.n_nulls}" if one.n_nulls else ""]
            for one in found
        ]  # fmt: skip
        tested = [one.p for one in found if not math.isnan(one.p)]
        yes = sum(p < _SIGNIFICANT for p in tested)
        note = (
            f"Same order as in the paper: {yes} of {len(tested)} comparisons. Yes: the rank "
            "correlation ρ over a table's rows is positive with p < .05 (one-sided permutation "
            "test); nothing for fewer than five rows, or where all are equal. The comparisons "
            "share relations, and p is not corrected for their number. Above null: rows whose "
            "number here exceeds its null, without a test (r of a probe: of the control prompt; "
            "gradients: of a permuted W; Hit@N: of weights in random order; edits: of random "
            f"answers). Settings here: those of size {size}; each table says how they differ."
        )
        tables.append(
            PageTable(
                "Agreement with the paper: numbers",
                ["table", "quantity", "LM of the paper", "LM here", "rows", "same order", "ρ",
                 "mean difference", "above null"],
                [False] * 4 + [True, False, True, True, False], rows, note,
            )
        )  # fmt: skip
    if shared:
        rows = [
            [one.printed.place, f"{one.printed.relation}, of {one.printed.n}", one.printed.lm,
             one.lm, str(one.n), _verdict(one.p), f"{one.mean:.1f}",
             "" if math.isnan(one.others) else f"{one.others:.1f}", f"{one.chance:.1f}"]
            for one in shared
        ]  # fmt: skip
        note = (
            "Mean number of labels that lists here share with the paper's: with the list of the "
            "same label, with those of other labels, and expected of labels in random order. Yes: "
            "more with that of the same label, with p < .05 (permutation of the lists); nothing "
            "for fewer than five lists."
        )
        tables.append(
            PageTable(
                "Agreement with the paper: labels with the highest weights",
                ["table", "pair", "LM of the paper", "LM here", "lists", "agree", "shared",
                 "with other lists", "by chance"],
                [False] * 4 + [True, False, True, True, True], rows, note,
            )
        )  # fmt: skip
    return tables


def _verdict(p: float) -> str:
    return "" if math.isnan(p) else "yes" if p < _SIGNIFICANT else "no"


def _signed(value: float) -> str:
    return Column("", format="+.2f").show(None if math.isnan(value) else value)
