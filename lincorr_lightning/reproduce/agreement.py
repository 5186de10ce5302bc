"""Whether an LM agrees with the paper: the overview at the head of a reproduction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from lincorr_lightning.reproduce.items import edit_run
from lincorr_lightning.reproduce.lm_runs import LMRuns
from lincorr_lightning.results.paper import PaperInfluences, PaperNumber
from lincorr_lightning.results.table import Table, column

_MIN_RANKED = 5
_SIGNIFICANT = 0.05
_N_PERMUTATIONS = 9999
_RANKS = ("1", "3", "5")
Row = tuple[str, str]
"""Relation and answer of a row; the answer is empty for most."""


@dataclass(frozen=True)
class Agreement:
    """How a table's numbers agree with the paper's: a row of the overview.

    Attributes:
        place: The table.
        quantity: What is compared.
        paper_lm: LM of the paper.
        lm: LM here.
        n: Number of relations that both have.
        p: One-sided p-value of `rho`, by permutation; None for fewer than five relations.
        rho: Spearman's rank correlation over relations.
        difference: Mean difference, here minus paper.
        above_null: Number of relations whose number here exceeds its null, of those with a null.
    """

    place: str = column("table")
    quantity: str = column()
    paper_lm: str = column("LM of the paper")
    lm: str = column("LM here")
    n: int = column("rows", "d")
    p: float | None = column("p of ρ", ".4f")
    rho: float | None = column("ρ", "+.2f")
    difference: str = column("mean difference")
    above_null: str = column("above null")


@dataclass(frozen=True)
class SharedLabels:
    """How many of the paper's labels with the highest weights have the highest weights here.

    Attributes:
        place: The table.
        pair: The pair, and the length of the paper's lists.
        paper_lm: LM of the paper.
        lm: LM here.
        n: Number of lists that are compared.
        p: One-sided p-value of `mean`, by permutation of the lists; None for fewer than five.
        mean: Mean number of shared labels.
        others: The same, with the paper's lists of other labels.
        chance: The same, expected of labels in random order.
    """

    place: str = column("table")
    pair: str = column()
    paper_lm: str = column("LM of the paper")
    lm: str = column("LM here")
    n: int = column("lists", "d")
    p: float | None = column("p of shared", ".4f")
    mean: float = column("shared", ".1f")
    others: float | None = column("with other lists", ".1f")
    chance: float = column("by chance", ".1f")


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
            nulls = [value > null for value, _, null in both if null is not None]
            rho, p = rank_correlation(here, paper)
            yield Agreement(
                place, number.quantity.heading, number.lm, lm.name, len(both), p, rho,
                number.quantity.difference(float((here - paper).mean())),
                f"{sum(nulls)} of {len(nulls)}" if nulls else "",
            )  # fmt: skip


def rank_correlation(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """Return Spearman's ρ and its one-sided p-value from permutations.

    Args:
        x: Numbers, ``(n,)``.
        y: Likewise.

    Returns:
        None for both where there are fewer than five numbers, or where all are equal.
    """
    if len(x) < _MIN_RANKED or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None, None
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
    others = float((shared.sum() - np.trace(shared)) / (n * (n - 1))) if n > 1 else None
    p = None
    if n >= _MIN_RANKED:
        rng = np.random.default_rng(0)
        rows = np.arange(n)
        drawn = [shared[rows, rng.permutation(n)].mean() for _ in range(_N_PERMUTATIONS)]
        p = (1 + sum(one >= mean for one in drawn)) / (1 + _N_PERMUTATIONS)
    pair = f"{printed.relation}, of {printed.n}"
    return SharedLabels(printed.place, pair, printed.lm, lm, n, p, mean, others, chance)


def agreement_tables(
    found: Sequence[Agreement], shared: Sequence[SharedLabels], size: str
) -> list[Table]:
    """Return the overview: where do LMs agree with the paper?"""
    tested = [one.p for one in found if one.p is not None]
    n_same = sum(p < _SIGNIFICANT for p in tested)
    numbers = Table.of(
        "agreement", found, Agreement, "Agreement with the paper: numbers",
        f"Same order as in the paper: {n_same} of {len(tested)} comparisons, where the rank "
        "correlation ρ over a table's rows is positive with p < .05 (one-sided permutation test; "
        "none for fewer than five rows, or where all are equal). The comparisons share "
        "relations, and p is not corrected for their number. Above null: rows whose number here "
        "exceeds its null, without a test (r of a probe: of the control prompt; gradients: of a "
        "permuted W; Hit@N: of weights in random order; edits: of random answers). Settings here: "
        f"those of size {size}; each table says how they differ.",
    )  # fmt: skip
    labels = Table.of(
        "shared_labels", shared, SharedLabels,
        "Agreement with the paper: labels with the highest weights",
        "Mean number of labels that lists here share with the paper's: with the list of the same "
        "label, with those of other labels, and expected of labels in random order. p: of as "
        "many shared labels, by permutation of the lists; none for fewer than five lists.",
    )  # fmt: skip
    return [table for table in (numbers, labels) if len(table)]
