"""Whether the numbers of LMs agree with the paper's."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.lm.config import TINY_WORLD
from lincorr_lightning.probe.results import top_influences
from lincorr_lightning.reproduce.plan import LMRuns, plan_data, relation_probe
from lincorr_lightning.results import paper as the_paper
from lincorr_lightning.results.paper import PaperInfluences, PaperNumber
from lincorr_lightning.results.table import Table

_FLOATS = npt.NDArray[np.float64]
Row = dict[str, Any]  #: Cells of a row of the overview, by heading.
_REPEATED = ("Table 4", "label_mean")  # which the paper has as the r of the logits, once
_MIN_RANKED, _SIGNIFICANT, _N_PERMUTATIONS = 5, 0.05, 9999


def table_numbers(place: str) -> list[PaperNumber]:
    """Return the numbers of a table of the paper that have a column beside LMs."""
    here = (number for number in the_paper.paper_numbers() if number.place == place)
    return [number for number in here if (place, number.quantity.name) != _REPEATED]


def agreements(numbers: Iterable[PaperNumber], lms: Sequence[LMRuns]) -> Iterator[Row]:
    """Yield how each quantity of a table agrees with that of each LM: rows of the overview."""
    by_quantity: dict[str, list[PaperNumber]] = {}
    for number in numbers:
        if number.quantity.name != "random":  # follows from the number of labels
            by_quantity.setdefault(number.quantity.name, []).append(number)
    for lm, (name, printed) in product(lms, by_quantity.items()):
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
        quantity, difference = printed[0].quantity, float((measured - paper).mean())
        yield {
            "table": printed[0].place,
            "quantity": quantity.heading,
            "LM of the paper": printed[0].lm,
            "LM here": lm.name,
            "rows": len(rows),
            "p of ρ": p,
            "ρ": rho,
            "mean difference": quantity.difference(difference),
            "above null": f"{sum(above)} of {len(above)}" if above else "",
        }


def rank_correlation(x: _FLOATS, y: _FLOATS) -> tuple[float | None, float | None]:
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


def strongest(weights: LinearMap, pair: str, n: int) -> dict[str, dict[str, list[str]]]:
    """Return direction (see `Influence`) -> label -> the `n` labels with the highest weights."""
    source, target = ([text.strip() for text in weights.labels(end)] for end in pair.split("->"))
    found: dict[str, dict[str, list[str]]] = {}
    for one in top_influences(weights.weight(pair).numpy(), source, target, n=n):
        found.setdefault(one.direction, {}).setdefault(one.label, []).append(one.token)
    return found


def lists_here(
    lm: LMRuns, printed: PaperInfluences
) -> tuple[dict[str, list[str]] | None, Sequence[str]]:
    """Return an LM's lists of the labels that the paper prints, and all labels that they can have.

    The lists are None if the LM lacks the relation.
    """
    weights = lm.linear_maps.get(relation_probe(printed.relation) or "")
    if weights is None or printed.relation not in weights.pairs:
        return None, ()
    lists = strongest(weights, printed.relation, printed.n)[printed.direction]
    known = weights.labels(printed.relation.split("->")[printed.direction == "influenced"])
    here = {name: lists[name] for name in printed.labels if name in lists}
    return here, [text.strip() for text in known]


def shared_labels(
    printed: PaperInfluences, lm: str, here: Mapping[str, Sequence[str]], known: Sequence[str]
) -> Row:
    """Count the labels that lists share with the paper's: a row of the overview.

    `here` are the lists of the LM of labels that the paper prints, at least one, and `known` all
    labels that could be in them.
    """
    paper = [set(printed.labels[name]) for name in here]
    shared = np.array([[len(set(labels) & each) for each in paper] for labels in here.values()])
    n, mean = len(shared), float(np.diag(shared).mean())
    share = min(printed.n / len(known), 1)  # labels of the paper that are missing here never match
    chance = float(np.mean([len(labels & set(known)) for labels in paper]) * share)
    others = float((shared.sum() - np.trace(shared)) / (n * (n - 1))) if n > 1 else None
    p, rng = None, np.random.default_rng(0)
    if n >= _MIN_RANKED:
        drawn = [shared[range(n), rng.permutation(n)].mean() for _ in range(_N_PERMUTATIONS)]
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


def synthetic_note(rows: Iterable[Row]) -> str:
    """Return what a reproduction on the tiny world can show, from rows of the overview."""
    counts = [map(int, row["above null"].split(" of ")) for row in rows if row["above null"]]
    above, n = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    return plan_data("tiny_world")["note"].format(above=above, n=n)


def agreement_tables(places: Sequence[str], lms: Sequence[LMRuns], size: str) -> list[Table]:
    """Return the overview: where do LMs agree with some tables of the paper?"""
    agreement = [row for place in places for row in agreements(table_numbers(place), lms)]
    of_places = [printed for printed in the_paper.paper_influences() if printed.place in places]
    shared = [
        shared_labels(printed, lm.name, here, known)
        for printed, lm in product(of_places, lms)
        for here, known in [lists_here(lm, printed)]
        if here
    ]
    tested = [row["p of ρ"] for row in agreement if row["p of ρ"] is not None]
    n_same = sum(p < _SIGNIFICANT for p in tested)
    tables = []
    for (name, texts), rows in zip(plan_data("overview").items(), (agreement, shared), strict=True):
        note = texts["note"].format(n_same=n_same, n_tested=len(tested), size=size)
        if name == "agreement" and any(lm.lm == TINY_WORLD for lm in lms):
            note = f"{synthetic_note(agreement)} {note}"
        formats = texts["formats"]
        tables.append(Table.of(name, rows, (), texts["caption"], note, True, formats=formats))
    return [table for table in tables if len(table)]
