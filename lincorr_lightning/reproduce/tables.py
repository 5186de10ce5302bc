"""The paper's tables with an LM's numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest, spearmanr

from lincorr_lightning.errors import LinearMapError
from lincorr_lightning.functional import Outcome, random_hit_rates
from lincorr_lightning.knowledge import Catalogue, TokenizedRelation
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.probe.results import top_influences
from lincorr_lightning.reproduce.items import (
    CITY,
    PLACES,
    ablation_run,
    after_run,
    edit_run,
    probe_run,
)
from lincorr_lightning.reproduce.plan import LINEAR_MAP, LMPlan, relation_probe
from lincorr_lightning.results.paper import (
    PaperInfluences,
    PaperNumber,
    Quantity,
    paper_numbers,
    paper_settings,
)
from lincorr_lightning.results.report.text import PageTable
from lincorr_lightning.results.results import Column
from lincorr_lightning.results.saved_run import SavedRun

_N_CASES, _MIN_RANKED = 4, 5
NOT_MEASURED = "not measured"
_WEIGHTS = ("reference", "answer", "max")


@dataclass(frozen=True)
class LMRuns:
    """The finished runs of an LM.

    Attributes:
        plan: Its plan.
        runs: Its runs by name.
        errors: Why runs are missing, by name.
        seconds: How long runs took, by name.
    """

    plan: LMPlan
    runs: Mapping[str, SavedRun]
    errors: Mapping[str, str]
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the LM."""
        return self.plan.name

    @cached_property
    def linear_maps(self) -> dict[str, LinearMap]:
        """Maps of the probes by run, read once; those that cannot be read are left out."""
        found = {}
        for name, run in self.runs.items():
            with suppress(LinearMapError):
                if run.study == "linear_probe":
                    found[name] = LinearMap.from_pretrained(run.folder / LINEAR_MAP)
        return found

    def missing_reason(self, relation: str, runs: Sequence[str]) -> str:
        """Return why there are no numbers of a relation.

        Args:
            relation: The relation, as ``city->country``.
            runs: Names of the runs that measure it.
        """
        ends = relation.split("->")
        reasons = [(f"{end}: " if end in ends else "") + reasons[end]
                   for reasons in (self.errors, self.plan.left_out)
                   for end in (*runs, *ends) if end in reasons]  # fmt: skip
        return reasons[0].rstrip(".") if reasons else NOT_MEASURED

    def find(self, quantity: Quantity, number: PaperNumber) -> float | None:
        """Return a number of the paper as measured here; None if it was not."""
        for name, run in self.runs.items():
            serves = number.place in PLACES.values()
            if run.study != quantity.study or (PLACES.get(name) == number.place) != serves:
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
        rho: Spearman's rank correlation over relations; NaN for fewer than five.
        difference: Mean difference, here minus paper.
    """

    place: str
    quantity: Quantity
    paper_lm: str
    lm: str
    n: int
    rho: float
    difference: float


class SharedLabels(NamedTuple):
    """How many of the paper's labels with the highest weights have the highest weights here.

    Attributes:
        printed: What the paper prints.
        lm: LM here.
        n: Number of lists that are compared.
        mean: Mean number of shared labels.
        chance: The same, expected of labels in random order.
    """

    printed: PaperInfluences
    lm: str
    n: int
    mean: float
    chance: float


# -- numbers beside the paper's --------------------------------------------------------------------


def compare(
    place: str,
    lms: Sequence[LMRuns],
    runs: Sequence[str],
    more: Callable[[LMRuns, str], Mapping[str, str]] | None = None,
) -> tuple[PageTable, list[Agreement]]:
    """Lay a table of the paper beside the numbers of LMs.

    Args:
        place: The table, as ``Table 5``.
        lms: The LMs.
        runs: Names of the runs that the table needs.
        more: Function that returns further cells of an LM and relation, by heading.

    Returns:
        A row per relation (or answer) with each quantity in the paper, here, and the difference;
        and how well they agree.
    """
    numbers = [number for number in paper_numbers() if number.place == place]
    quantities = list(dict.fromkeys(number.quantity.name for number in numbers))
    by_row: dict[tuple[str, str], dict[str, PaperNumber]] = {}
    for number in numbers:
        by_row.setdefault((number.relation, number.answer), {})[number.quantity.name] = number
    column = {number.quantity.name: number.quantity for number in numbers}
    shown = [column[name].heading for name in quantities]
    headings, groups = ["answer" if numbers[0].answer else "relation", *shown], [("", 1)]
    groups.append((f"paper, {numbers[0].lm}", len(quantities)))
    found = {
        lm.name: {
            key: {n: lm.find(own[n].quantity, own[n]) for n in own} for key, own in by_row.items()
        }
        for lm in lms
    }
    cells = {lm.name: {r: more(lm, r) for r, _ in by_row} if more else {} for lm in lms}
    extra = {name: list(dict.fromkeys(h for one in own.values() for h in one))
             for name, own in cells.items()}  # fmt: skip
    for lm in lms:
        headings += [*shown, *extra[lm.name]]
        groups.append((lm.name, len(quantities) + len(extra[lm.name])))
    rows, reasons = [], []
    for (relation, answer), own in by_row.items():
        row = [answer or relation, *(_show(column[name], own.get(name)) for name in quantities)]
        lacking = []
        for lm in lms:
            here = found[lm.name][relation, answer]
            row += [_beside(column[n], here.get(n), own.get(n)) for n in quantities]
            row += [cells[lm.name][relation].get(heading, "") for heading in extra[lm.name]]
            if all(value is None for value in here.values()):
                reason = lm.missing_reason(relation, _runs_of(relation, runs))
                if answer and reason == NOT_MEASURED:
                    reason = f"{answer} is not among the edits, or no label"
                lacking.append(f"{lm.name}: {reason}" if len(lms) > 1 else reason)
        rows.append(row)
        reasons.append("; ".join(lacking))
    is_number = [False] + [True] * (len(headings) - 1)
    if any(reasons):
        headings, is_number = [*headings, "left out"], [*is_number, False]
        groups.append(("", 1))
        rows = [[*row, reason] for row, reason in zip(rows, reasons, strict=True)]
    note = _lm_note(numbers, lms, runs)
    if any(
        0 < sum(value is None for value in here.values()) < len(here)
        for own in found.values()
        for here in own.values()
    ):
        note += " Cells are empty where no label or edit is of that kind."
    caption = f"{place} of the paper and the same here"
    table = PageTable(caption, headings, is_number, rows, note, groups)
    return table, list(_agreements(place, found, by_row, column))


def _runs_of(relation: str, runs: Sequence[str]) -> list[str]:
    """Return those of some runs that measure a relation."""
    catalogue = Catalogue.load()
    families = {catalogue[end].family for end in relation.split("->")}
    probed = [name(family) for family in sorted(families) for name in (probe_run, after_run)]
    own = (edit_run(relation), ablation_run(relation), *probed)
    return [name for name in own if name in runs]


def _lm_note(numbers: Sequence[PaperNumber], lms: Sequence[LMRuns], runs: Sequence[str]) -> str:
    """Return sentences on whether LMs and settings are the paper's."""
    is_after = any(run.startswith("after") for run in runs)
    same = [
        lm.name
        for lm in lms
        if any(number.is_about((is_after and lm.plan.after) or lm.plan.lm) for number in numbers)
    ]
    others = [lm.name for lm in lms if lm.name not in same]
    parts = [f"{', '.join(same)}: the paper's LM"] if same else []
    parts += [f"{', '.join(others)}: another LM than the paper's"] if others else []
    studies = list(dict.fromkeys(number.quantity.study for number in numbers))
    found = [run for lm in lms for name, run in lm.runs.items() if name in runs]
    for study in studies:
        here = list(dict.fromkeys(settings_of(run) for run in found if run.study == study))
        if any(here) and here != [paper_settings(study)]:
            parts.append(f"{study}: {' or '.join(here)}, in the paper {paper_settings(study)}")
    return f"{'; '.join(parts)}. In brackets: here minus paper; of percentages, in points."


def settings_of(run: SavedRun) -> str:
    """Return the settings of a run, in the words of `paper_settings`; empty for other studies."""
    values, settings = run.values, run.values.get("settings") or {}
    if run.study == "linear_probe" and "n_fit" in values:
        ridge = settings["ridge"] if settings["ridge"] == "auto" else f"{settings['ridge']:g}"
        return f"{values['n_fit']:,} subjects to fit, ridge {ridge}"
    if run.study == "source_finetune":
        method = "all weights" if values["method"] == "full" else "LoRA"
        return f"{method}, {settings['learning_rate']:g}"
    if run.study == "vocabulary_ablation":
        return f"{settings['compose']['epochs']:,} and {settings['learn']['epochs']:,} epochs"
    return ""


def _show(quantity: Quantity, number: PaperNumber | None) -> str:
    return quantity.column.show(None if number is None else number.value)


def _beside(quantity: Quantity, value: float | None, number: PaperNumber | None) -> str:
    """Return a number, and in brackets its difference from the paper's."""
    if value is None or number is None:
        return ""
    difference = quantity.difference(value - number.value).removesuffix(" points")
    return f"{quantity.column.show(value)} ({difference})"


def _agreements(
    place: str,
    found: Mapping[str, Mapping[tuple[str, str], Mapping[str, float | None]]],
    by_row: Mapping[tuple[str, str], Mapping[str, PaperNumber]],
    column: Mapping[str, Quantity],
) -> Iterator[Agreement]:
    for lm, values in found.items():
        for name, quantity in column.items():
            if name == "random":  # follows from the number of labels
                continue
            numbers = [own[name] for own in by_row.values() if name in own]
            both = [(values[key][name], own[name].value)
                    for key, own in by_row.items() if name in own]  # fmt: skip
            pairs = [(here, paper) for here, paper in both if here is not None]
            if not pairs:
                continue
            here, paper = np.array(pairs).T
            varies = len(pairs) >= _MIN_RANKED and np.ptp(here) > 0 and np.ptp(paper) > 0
            rho = float(spearmanr(here, paper).statistic) if varies else math.nan
            difference = float((here - paper).mean())
            yield Agreement(place, quantity, numbers[0].lm, lm, len(pairs), rho, difference)


def runs_table(lms: Sequence[LMRuns]) -> PageTable:
    """Return all runs: what they measured, how long they took, and where they are."""
    rows = []
    for lm in lms:
        for name, run in lm.runs.items():
            values = run.values
            sizes = [
                f"{values[key]:,} {what}"
                for key, what in (("n_fit", "subjects to fit"), ("n_test", "to test"),
                                  ("n_edits", "edits"))
                if isinstance(values.get(key), int)
            ]  # fmt: skip
            seconds = lm.seconds.get(name)
            rows.append(
                [lm.name, name, ", ".join(sizes), str(run.lm.get("dtype") or ""),
                 "" if seconds is None else f"{seconds:,.0f}", str(run.folder)]
            )  # fmt: skip
    total = sum(seconds for lm in lms for seconds in lm.seconds.values())
    return PageTable(
        "Runs", ["LM", "run", "size", "dtype", "seconds", "folder"],
        [False, False, False, False, True, False], rows,
        f"{total / 60:,.0f} minutes in all. `lincorr report` makes a page of each run.",
    )  # fmt: skip


def agreement_table(
    agreements: Sequence[Agreement], shared: Sequence[SharedLabels], size: str
) -> PageTable:
    """Return an overview: in which tables do LMs agree with the paper?"""
    rows = [
        [one.place, one.quantity.heading, one.paper_lm, one.lm, str(one.n),
         Column("", format="+.2f").show(None if math.isnan(one.rho) else one.rho),
         one.quantity.difference(one.difference)]
        for one in agreements
    ]  # fmt: skip
    rows += [
        [one.printed.place, f"{one.printed.relation}: labels shared of {one.printed.n}",
         one.printed.lm, one.lm, str(one.n), "", f"{one.mean:.1f}, by chance {one.chance:.1f}"]
        for one in shared
    ]  # fmt: skip
    note = "ρ: rank correlation over the table's rows; 1 if LM and paper order them in one way."
    note += f" Settings here: those of size {size}, see the settings of the runs."
    return PageTable(
        "Agreement with the paper",
        ["table", "quantity", "LM of the paper", "LM here", "n", "ρ", "mean difference, or mean"],
        [False, False, False, False, True, True, True],
        rows,
        note,
    )


def correlation_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cells of the tables of r: control prompt, and permuted baseline."""
    pair = _probed_pair(lm, relation)
    keys = {"r, control": "control_label_mean", "r, permuted baseline": "permuted_label_mean"}
    return {heading: _text(pair.get(key)) for heading, key in keys.items() if pair}


def precision_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cells of table 2: Hit@N of weights in random order."""
    if not (_probed_pair(lm, relation).get("precision") and lm.plan.tokenizer):
        return {}
    tokenized = TokenizedRelation.of(relation, Catalogue.load(), lm.plan.tokenizer)
    rates = random_hit_rates(torch.from_numpy(tokenized.reference_mask))
    return {
        f"random {way} @1 @3 @5": " ".join(_text(rate) for rate in one.rates.tolist())
        for way, one in zip(("influenced", "influencing"), rates, strict=True)
    }


def _probe_of(relation: str) -> str:
    """Return the name of the probe that has a relation's map; empty if there is none."""
    return relation_probe(relation, Catalogue.load()) or ""


def _probed_pair(lm: LMRuns, relation: str) -> Mapping[str, Any]:
    """Return a relation's entry in the results of its probe; empty if there is none."""
    run = lm.runs.get(_probe_of(relation))
    pairs = run.values["pairs"] if run is not None else ()
    return next((one for one in pairs if f"{one['source']}->{one['target']}" == relation), {})


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
        **{
            f"{name} unchanged": f"{control['unchanged']:.0%}"
            for name, control in (run.values["controls"] or {}).items()
        },
    }


def gradient_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cells of table 4: r's interval over edits, and r of a permuted W."""
    run = lm.runs.get(edit_run(relation))
    gradients = run.values.get("gradients") if run is not None else None
    found = (gradients or {}).get(relation) or {}
    value, error = (found.get(f"gradient_correlation{x}") for x in ("", "_error"))
    if run is None or value is None:
        return {}
    low, high = (value + sign * 1.96 * (error or 0) for sign in (-1, 1))
    return {
        "edits": str(run.values["n_edits"]),
        # Edits that are trained together are no sample: they have no error.
        "gradient r, 95 %": "" if error is None else f"{_text(low)} to {_text(min(high, 1))}",
        "gradient r, permuted W": _text(found.get("permuted_gradient_correlation")),
        **correlation_cells(lm, relation),
    }


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
            weights = (_text(case[f"weight_{name}"]) for name in _WEIGHTS)
            rows.append(
                [case["source_answer"], case["reference"], case["answer_after"], outcome, *weights]
            )
    headings = ["city", "reference", "answer given", "outcome", "W of the reference",
                "W of the answer given", "maximum of W"]  # fmt: skip
    return PageTable(
        f"Cases of {lm.name}", headings, [False] * 4 + [True] * 3, rows,
        f"The first {_N_CASES} edits of each outcome, of {len(cases)}.",
    )  # fmt: skip


# -- influences ------------------------------------------------------------------------------------


def strongest(weights: LinearMap, pair: str, n: int) -> dict[str, dict[str, list[str]]]:
    """Return the labels with the highest weights of each label of a pair.

    Args:
        weights: The linear map.
        pair: The pair, as ``city->country``.
        n: Number of labels.

    Returns:
        Direction (see `Influence`) -> label -> the labels at the other end.
    """
    source, target = ([x.strip() for x in weights.labels(end)] for end in pair.split("->"))
    found: dict[str, dict[str, list[str]]] = {}
    for one in top_influences(weights.weight(pair).numpy(), source, target, n=n):
        found.setdefault(one.direction, {}).setdefault(one.label, []).append(one.token)
    return found


def compare_influences(
    lm: LMRuns, printed: PaperInfluences
) -> tuple[PageTable, SharedLabels | None] | None:
    """Lay the paper's labels with the highest weights beside those here (tables 3, 15 to 17).

    Args:
        lm: The LM.
        printed: What the paper prints.

    Returns:
        A row per label of the paper that is a label here, and how many labels are shared (None
        without rows); None if the LM lacks the relation.
    """
    weights = lm.linear_maps.get(_probe_of(printed.relation))
    if weights is None or printed.relation not in weights.pairs:
        return None
    ends = printed.relation.split("->")
    label, token = ends if printed.direction == "influenced" else reversed(ends)
    n = printed.n
    found = strongest(weights, printed.relation, n)[printed.direction]
    rows, shared = [], []
    for name, theirs in printed.labels.items():
        if name in found:
            shared.append(len(set(theirs) & set(found[name])))
            rows.append([name, ", ".join(theirs), ", ".join(found[name]), str(shared[-1])])
    # Expected overlap if our n labels were drawn at random; labels of the paper that are missing
    # here never match.
    known = {x.strip() for x in weights.labels(token)}
    by_chance = [sum(x in known for x in printed.labels[row[0]]) * n / len(known) for row in rows]
    note = f"{len(rows)} of the paper's {len(printed.labels)} labels are labels of {lm.name}."
    found_shared = None
    if rows:
        mean, chance = float(np.mean(shared)), float(np.mean(by_chance))
        found_shared = SharedLabels(printed, lm.name, len(rows), mean, chance)
    table = PageTable(
        f"{printed.relation} in {lm.name}: the {n} labels of {token} with the highest weights",
        [label, f"paper, {printed.lm}", lm.name, "shared"], [False, False, False, True], rows, note,
    )  # fmt: skip
    return table, found_shared


def influence_rows(lm: LMRuns, run: str, top: int) -> list[list[str]]:
    """Return the highest weights of every label of all pairs of a probe, in both directions.

    Returns:
        Rows of pair, direction (see `Influence`), label, and the labels at the other end.
    """
    weights = lm.linear_maps.get(run)
    if weights is None:
        return []
    return [
        [pair, direction, label, ", ".join(tokens)]
        for pair in weights.pairs
        for direction, found in strongest(weights, pair, top).items()
        for label, tokens in found.items()
    ]


def _text(value: float | None) -> str:
    return Column("", format=".2f").show(value)
