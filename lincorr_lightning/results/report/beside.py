"""A run's numbers beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from lincorr_lightning.results.paper import (
    PaperNumber,
    is_of,
    is_share,
    paper_numbers,
    quantity_name,
)
from lincorr_lightning.results.report.document import Column, Part, Table, tell
from lincorr_lightning.results.report.runs import Run

Numbers = Callable[[Run], Iterable[tuple[str, str, float | None]]]


def beside_paper(runs: Sequence[Run], numbers: Numbers) -> list[Part]:
    """Two tables: numbers beside the paper's for the same LM, and the paper's for other LMs.

    Args:
        runs: Of one study.
        numbers: Relation, quantity and value of all that the paper may have too.
    """
    rows, others = [], []
    for run in runs:
        found = {(relation, what): v for relation, what, v in numbers(run) if v is not None}
        for number in paper_numbers({relation for relation, _ in found}):
            value = found.get((number.relation, number.quantity))
            if value is None:
                continue
            if is_of(number, run.lm.name):
                rows.append(_row(run, value, number))
            else:
                others.append(number)
    own = {(row[0], row[1]) for row in rows}
    parts: list[Part] = []
    if rows:
        parts.append(
            Table(
                "Beside the paper",
                [Column("relation"), Column("what"), Column("here"),
                 Column("paper"), Column("difference"), Column("where in the paper"), Column("LM")],
                rows,
            )
        )  # fmt: skip
    # Once, however many runs there are.
    rest = [
        number
        for number in dict.fromkeys(others)
        if (number.relation, quantity_name(number.quantity)) not in own
    ]
    if rest:
        names = ", ".join(dict.fromkeys(run.lm.label for run in runs))
        parts.append(
            Table(
                "What the paper has for other LMs",
                [Column("relation"), Column("what"), Column("LM of the paper"), Column("paper"),
                 Column("where in the paper")],
                list(_told(rest)),
                f"The paper has no such numbers for {names}: these are no yardstick, but the "
                "nearest there is.",
                exported=False,
                folded=True,
            )
        )  # fmt: skip
    return parts


def _row(run: Run, value: float, number: PaperNumber) -> list[str]:
    difference = value - number.value
    return [
        number.relation,
        quantity_name(number.quantity),
        _number(value, number.quantity),
        _number(number.value, number.quantity),
        f"{tell(difference, 'points')} points"
        if is_share(number.quantity)
        else tell(difference, "signed"),
        number.place,
        run.lm.label,
    ]


def _told(numbers: Iterable[PaperNumber]) -> Iterator[list[str]]:
    for number in numbers:
        yield [
            number.relation,
            quantity_name(number.quantity),
            number.lm,
            _number(number.value, number.quantity),
            number.place,
        ]


def _number(value: float, quantity: str) -> str:
    # The paper tells shares in hundredths of a percent.
    return f"{value:.2%}" if is_share(quantity) else tell(value, "r")
