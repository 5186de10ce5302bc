"""The paper's tables with an LM's numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import binomtest, spearmanr

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.functional import Outcome
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.reproduce.items import CITY, SUBWORD_EDITS, SUBWORD_PROBE, edit_run
from lincorr_lightning.reproduce.plan import LINEAR_MAP, LMPlan
from lincorr_lightning.results.paper import PaperNumber, Quantity, paper_numbers
from lincorr_lightning.results.report.text import PageTable
from lincorr_lightning.results.results import Column
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.style import short_name

# Cases of table 3.
_INFLUENCED = {
    CITY: ("Shanghai", "NYC", "Oslo", "Seattle", "Indianapolis"),
    "X+1->X+2": ("1", "2", "3", "4", "5"),
}
_N_INFLUENCED, _N_CASES = 5, 4
_WEIGHTS = ("reference", "answer", "max")


@dataclass(frozen=True)
class LMRuns:
    """The finished runs of an LM.

    Attributes:
        plan: Its plan.
        runs: Its runs by name.
        errors: Why runs are missing, by name.
    """

    plan: LMPlan
    runs: Mapping[str, SavedRun]
    errors: Mapping[str, str]

    @property
    def name(self) -> str:
        """Name of the LM."""
        return self.plan.name

    def why_missing(self, relation: str) -> str:
        """Return why there are no numbers of a relation; empty if nothing is known."""
        for name in (relation, *relation.split("->")):
            for key, reason in {**self.plan.left_out, **self.errors}.items():
                if key == name or key.partition("_")[2] == name:
                    return f"{name}: {reason}" if name != relation else reason
        return ""

    def find(self, quantity: Quantity, number: PaperNumber) -> float | None:
        """Return a number of the paper as measured here; None if it was not."""
        for name, run in self.runs.items():
            # Their labels are others than the paper's.
            if run.study != quantity.study or name in (SUBWORD_PROBE, SUBWORD_EDITS):
                continue
            value = quantity.of(run, number.relation, number.answer)
            if value is not None:
                return value
        return None


class Agreement(NamedTuple):
    """How a table's numbers agree with the paper's.

    Attributes:
        place: The table.
        quantity: What is compared.
        paper_lm: LM of the paper.
        lm: LM here.
        n: Number of relations that both have.
        rho: Spearman's rank correlation over relations; NaN for fewer than three.
        difference: Mean difference, here minus paper.
    """

    place: str
    quantity: Quantity
    paper_lm: str
    lm: str
    n: int
    rho: float
    difference: float


# -- numbers beside the paper's --------------------------------------------------------------------


def compare(
    place: str,
    lms: Sequence[LMRuns],
    more: Callable[[LMRuns, str], Mapping[str, str]] | None = None,
) -> tuple[PageTable, list[Agreement]]:
    """Lay a table of the paper beside the numbers of LMs.

    Args:
        place: The table, as ``Table 5``.
        lms: The LMs.
        more: Function that returns further cells of an LM and relation, by heading.

    Returns:
        A row per relation (or answer) with paper, here and difference of each quantity; and how
        well they agree.
    """
    numbers = [number for number in paper_numbers() if number.place == place]
    quantities = list(dict.fromkeys(number.quantity.name for number in numbers))
    by_row: dict[tuple[str, str], dict[str, PaperNumber]] = {}
    for number in numbers:
        by_row.setdefault((number.relation, number.answer), {})[number.quantity.name] = number
    column = {number.quantity.name: number.quantity for number in numbers}
    headings, groups = ["answer" if numbers[0].answer else "relation"], [("", 1)]
    headings += [column[name].heading for name in quantities]
    groups.append((f"paper, {numbers[0].lm}", len(quantities)))
    extra = {lm.name: _headings(lm, by_row, more) for lm in lms}
    for lm in lms:
        for group, names in (
            (lm.name, [column[name].heading for name in quantities] + extra[lm.name]),
            (f"{lm.name}, difference", [column[name].heading for name in quantities]),
        ):
            headings += names
            groups.append((group, len(names)))
    rows, notes = [], []
    for (relation, answer), own in by_row.items():
        row = [answer or relation]
        row += [_show(column[name], own.get(name)) for name in quantities]
        for lm in lms:
            found = {n: lm.find(column[n], own[n]) for n in quantities if n in own}
            row += [column[n].column.show(found.get(n)) for n in quantities]
            cells = more(lm, relation) if more is not None else {}
            row += [cells.get(heading, "") for heading in extra[lm.name]]
            row += [_difference(column[n], found.get(n), own.get(n)) for n in quantities]
            reason = lm.why_missing(relation)
            if all(value is None for value in found.values()) and (reason or not answer):
                notes.append(
                    f"{lm.name} has no {relation}: {(reason or 'not measured').rstrip('.')}."
                )
        rows.append(row)
    table = PageTable(
        f"{place} of the paper and the same here",
        headings,
        [False] + [True] * (len(headings) - 1),
        rows,
        " ".join([_whose(numbers, lms), *dict.fromkeys(notes)]),
        groups,
    )
    return table, list(_agreements(place, lms, by_row, column))


def _whose(numbers: Sequence[PaperNumber], lms: Sequence[LMRuns]) -> str:
    """Say whether the LMs are the paper's."""
    same = [lm.name for lm in lms if any(number.is_about(lm.plan.lm) for number in numbers)]
    others = [lm.name for lm in lms if lm.name not in same]
    parts = [f"{', '.join(same)}: the paper's LM"] if same else []
    parts += [f"{', '.join(others)}: another LM than the paper's"] if others else []
    return f"{'; '.join(parts)}. Difference: here minus paper."


def _headings(
    lm: LMRuns,
    by_row: Mapping[tuple[str, str], object],
    more: Callable[[LMRuns, str], Mapping[str, str]] | None,
) -> list[str]:
    if more is None:
        return []
    return list(dict.fromkeys(key for relation, _ in by_row for key in more(lm, relation)))


def _show(quantity: Quantity, number: PaperNumber | None) -> str:
    return quantity.column.show(None if number is None else number.value)


def _difference(quantity: Quantity, value: float | None, number: PaperNumber | None) -> str:
    if value is None or number is None:
        return ""
    text = Column("", format=f"+{quantity.format}").show(value - number.value)
    return text.replace("%", " points")  # the difference of two shares is no share


def _agreements(
    place: str,
    lms: Sequence[LMRuns],
    by_row: Mapping[tuple[str, str], Mapping[str, PaperNumber]],
    column: Mapping[str, Quantity],
) -> Iterator[Agreement]:
    for lm in lms:
        for name, quantity in column.items():
            if name == "random":  # follows from the number of labels
                continue
            numbers = [own[name] for own in by_row.values() if name in own]
            found = [(lm.find(quantity, number), number.value) for number in numbers]
            pairs = [(here, paper) for here, paper in found if here is not None]
            if not pairs:
                continue
            here, paper = np.array(pairs).T
            varies = len(pairs) > 2 and np.ptp(here) > 0 and np.ptp(paper) > 0
            rho = float(spearmanr(here, paper).statistic) if varies else math.nan
            difference = float((here - paper).mean())
            yield Agreement(place, quantity, numbers[0].lm, lm.name, len(pairs), rho, difference)


def agreement_table(agreements: Sequence[Agreement], quick: bool) -> PageTable:
    """Return an overview: in which tables do LMs agree with the paper?"""
    rows = [
        [one.place, one.quantity.heading, one.paper_lm, one.lm, str(one.n),
         Column("", format="+.2f").show(None if math.isnan(one.rho) else one.rho),
         _difference_text(one)]
        for one in agreements
    ]  # fmt: skip
    note = "ρ: rank correlation over the table's rows; 1 if LM and paper order them in one way."
    if quick:
        note += " Here with fewer subjects than the paper, and edits with LoRA (size quick)."
    return PageTable(
        "Agreement with the paper",
        ["table", "quantity", "LM of the paper", "LM here", "n", "ρ", "mean difference"],
        [False, False, False, False, True, True, True],
        rows,
        note,
    )


def _difference_text(one: Agreement) -> str:
    text = Column("", format=f"+{one.quantity.format}").show(one.difference)
    return text.replace("%", " points")


def edit_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cells of table 5: edits, their interval, and what they learned."""
    run = lm.runs.get(edit_run(relation))
    if run is None:
        return {}
    n, share = int(run.values["n_edits"]), float(run.values["generalized"])
    low, high = binomtest(round(share * n), n).proportion_ci(method="wilson")
    return {
        "edits": str(n),
        "generalized, 95 %": f"{low:.0%} to {high:.0%}",
        "learned": f"{run.values['source_learned']:.0%}",
        "hallucinated": f"{run.values['hallucinated']:.0%}",
    }


def gradient_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cell of table 4: the gradient r of a permuted W."""
    run = lm.runs.get(edit_run(relation))
    gradients = run.values.get("gradients") if run is not None else None
    value = ((gradients or {}).get(relation) or {}).get("permuted_gradient_correlation")
    return {} if value is None else {"gradient r, permuted W": f"{value:.2f}"}


def cases_table(lm: LMRuns) -> PageTable | None:
    """Return cases as in table 6: edits that generalized, and edits that hallucinated."""
    run = lm.runs.get(edit_run(CITY))
    table = next((t for t in run.tables if t.name == "cases"), None) if run is not None else None
    if table is None:
        return None
    cases = [dict(zip(table.keys, row, strict=True)) for row in table.rows]
    rows = []
    for outcome in (Outcome.GENERALIZED, Outcome.HALLUCINATED):
        own = [case for case in cases if case["outcome"] == outcome]
        for case in own[:_N_CASES]:
            weights = (_text(case[f"weight_{name}"], ".2f") for name in _WEIGHTS)
            rows.append(
                [case["source_answer"], case["reference"], case["answer_after"], outcome, *weights]
            )
    headings = ["city taught", "reference", "answer given", "outcome", "W of the reference",
                "W of the answer given", "maximum of W"]  # fmt: skip
    return PageTable(
        f"Cases of {lm.name}", headings, [False] * 4 + [True] * 3, rows,
        f"The first {_N_CASES} edits of each outcome, of {len(cases)}.",
    )  # fmt: skip


# -- influences ------------------------------------------------------------------------------------


def influenced_labels(lm: LMRuns, probes: Mapping[str, str]) -> Iterator[PageTable]:
    """Yield table 3: the targets with the highest weights of some sources.

    Args:
        lm: The LM.
        probes: The probe's run of each relation.
    """
    for relation, run in probes.items():
        found = _read_map(lm, run)
        if found is None or relation not in found.pairs:
            continue
        source, target = relation.split("->")
        weights, labels = found.weight(relation), [x.strip() for x in found.labels(source)]
        targets = [label.strip() for label in found.labels(target)]
        rows = []
        for label in _INFLUENCED[relation]:
            if label in labels:
                order = weights[:, labels.index(label)].argsort(descending=True)
                rows.append([label, ", ".join(targets[i] for i in order[:_N_INFLUENCED].tolist())])
        lacking = [x for x in _INFLUENCED[relation] if x not in labels]
        note = f"Not a label of {lm.name}: {', '.join(lacking)}." if lacking else ""
        yield PageTable(
            f"{relation} in {lm.name}: if {source} is …, then {target} is …",
            [source, target], [False, False], rows, note,
        )  # fmt: skip


def influencing_labels(
    lm: LMRuns, run: str, relation: str, top: int, limit: int = 60
) -> PageTable | None:
    """Return tables 15 to 17: for each target label, the sources with the highest weights."""
    found = _read_map(lm, run)
    if found is None or relation not in found.pairs:
        return None
    source, target = relation.split("->")
    weights = found.weight(relation)
    sources = [label.strip() for label in found.labels(source)]
    order = weights.argsort(1, descending=True)[:, :top].tolist()
    rows = [
        [label.strip(), ", ".join(sources[i] for i in best)]
        for label, best in zip(found.labels(target), order, strict=True)
    ]
    more = f" The first {limit} of {len(rows)}." if len(rows) > limit else ""
    return PageTable(
        f"{relation} in {lm.name}: the {top} labels of {source} with the highest weights",
        [target, source], [False, False], rows[:limit], more.strip(),
    )  # fmt: skip


def _read_map(lm: LMRuns, run: str) -> LinearMap | None:
    if run not in lm.runs:
        return None
    try:
        return LinearMap.from_pretrained(lm.runs[run].folder / LINEAR_MAP)
    except LinearMapError:
        return None


# -- completeness ----------------------------------------------------------------------------------

# Table 18 of the paper: r, Hit@5 influenced, generalized.
_COMPLETENESS = {
    "whole": (0.85, 0.49, 0.5567), "phrase": (0.86, 0.10, 0.02), "subword": (0.87, 0.0, 0.0),
}  # fmt: skip


def completeness_table(lm: LMRuns) -> PageTable | None:
    """Return table 18: scores by how much of a word the answer's token is."""
    probe, edits = lm.runs.get(SUBWORD_PROBE), lm.runs.get(SUBWORD_EDITS)
    if probe is None:
        return None
    pair = next(iter(probe.values["pairs"]))
    measured: Mapping[str, Any] = pair.get("completeness") or {}
    outcomes: Mapping[str, Any] = (edits.values.get("completeness") or {}) if edits else {}
    rows = []
    for kind, (r, hit, share) in _COMPLETENESS.items():
        own, taught = measured.get(kind) or {}, outcomes.get(kind) or {}
        hits = (own.get("influenced") or {}).get("5")
        rows.append(
            [kind, f"{r:.2f}", _text(own.get("label_mean"), ".2f"), f"{hit:.2f}",
             _text(hits, ".2f"), f"{share:.0%}", _text(taught.get("generalized"), ".0%"),
             str(taught.get("n_edits", "")), str(own.get("n_labels", ""))]
        )  # fmt: skip
    return PageTable(
        f"Table 18 of the paper (llama-3-8b) and the same for {short_name(lm.plan.lm)}",
        ["token", "r, paper", "r", "Hit@5, paper", "Hit@5", "generalized, paper", "generalized",
         "edits", "labels"],
        [False] + [True] * 8,
        rows,
        "whole: the token is the whole answer; phrase: a word of it; subword: a part of a word.",
    )  # fmt: skip


def _text(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
