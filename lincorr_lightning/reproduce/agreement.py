"""Whether the numbers of LMs agree with the paper's."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from lincorr_lightning.lm.config import TINY_WORLD
from lincorr_lightning.reproduce.plan import LMRuns, plan_data
from lincorr_lightning.results.paper import PaperNumber, paper_numbers
from lincorr_lightning.results.table import Table, column

_FLOATS = npt.NDArray[np.float64]
_REPEATED = ("Table 4", "label_mean")  # which the paper has as the r of the logits, once
_MIN_RANKED = 5
_SIGNIFICANT = 0.05
_N_PERMUTATIONS = 9999


@dataclass(frozen=True)
class Agreement:
    """How a quantity of a table agrees with that of an LM: a row of the overview."""

    table: str
    quantity: str
    paper_lm: str = column("LM of the paper")
    lm: str = column("LM here")
    rows: int = column(format="d")
    p: float | None = column("p of ρ", ".4f")
    rho: float | None = column("ρ", "+.2f")
    difference: str = column("mean difference")
    above_null: str = column()


def table_numbers(place: str) -> list[PaperNumber]:
    """Return the numbers of a table of the paper that have a column beside LMs."""
    here = (number for number in paper_numbers() if number.place == place)
    return [number for number in here if (place, number.quantity.name) != _REPEATED]


def agreements(numbers: Iterable[PaperNumber], lms: Sequence[LMRuns]) -> Iterator[Agreement]:
    """Yield how each quantity of a table agrees with that of each LM."""
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
        quantity = printed[0].quantity
        yield Agreement(
            printed[0].place,
            quantity.heading,
            printed[0].lm,
            lm.name,
            len(rows),
            p,
            rho,
            quantity.difference(float((measured - paper).mean())),
            f"{sum(above)} of {len(above)}" if above else "",
        )


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


def agreement_tables(places: Sequence[str], lms: Sequence[LMRuns], size: str) -> list[Table]:
    """Return the overview, if any: where do LMs agree with some tables of the paper?"""
    rows = [row for place in places for row in agreements(table_numbers(place), lms)]
    if not rows:
        return []
    texts = plan_data()["agreement"]
    tested = [row.p for row in rows if row.p is not None]
    n_same = sum(p < _SIGNIFICANT for p in tested)
    note = texts["note"].format(n_same=n_same, n_tested=len(tested), size=size)
    if any(lm.lm == TINY_WORLD for lm in lms):
        counts = [map(int, row.above_null.split(" of ")) for row in rows if row.above_null]
        above, n = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
        note = f"{texts['tiny_world'].format(above=above, n=n)} {note}"
    return [Table.of("agreement", rows, Agreement, texts["caption"], note, headline=True)]
