"""The paper's tables with an LM's numbers beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pandas import DataFrame, MultiIndex
from scipy.stats import binomtest

from lincorr_lightning.functional import Outcome
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.probe.results import top_influences
from lincorr_lightning.reproduce.agreement import (
    Agreement,
    SharedLabels,
    agreements,
    shared_labels,
)
from lincorr_lightning.reproduce.items import CITY, ablation_run, after_run, edit_run, probe_run
from lincorr_lightning.reproduce.lm_runs import NOT_MEASURED, LMRuns, probe_of
from lincorr_lightning.results.paper import (
    PaperInfluences,
    PaperNumber,
    Quantity,
    paper_numbers,
    paper_settings,
)
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table, show

_N_CASES = 4
# The paper has these as the r of the logits, once.
_REPEATED = ("Table 4", "label_mean")
_MEANINGS = {
    "r, control": "control: r of a prompt without knowledge in place of the source's",
    "r, permuted baseline": "permuted baseline: r of a map that is fitted on permuted targets",
    "gradient r, permuted W": "permuted W: r with the rows of W permuted",
    "gradient r, 95 %": "95 %: r ± 1.96 standard errors over edits",
    "generalized, 95 %": "95 %: Wilson's interval over edits",
    "learned": "learned: edits whose source is the new answer afterwards",
    "color unchanged": "unchanged: edits that leave other knowledge as it was",
    "random influencing @1 @3 @5": "random: Hit@1, 3 and 5 of weights in random order",
}
_WEIGHTS = ("reference", "answer", "max")


# -- numbers beside the paper's --------------------------------------------------------------------


class _Columns(NamedTuple):
    """Neighboring columns of a comparison: those of the paper, or of an LM.

    Attributes:
        heading: Heading of all.
        headings: Heading of each.
        rows: Cells of each row.
        are_numbers: Whether the cells are numbers.
    """

    heading: str
    headings: list[str]
    rows: list[list[str]]
    are_numbers: bool = True


def compare(
    place: str,
    lms: Sequence[LMRuns],
    runs: Sequence[str],
    more: Callable[[LMRuns, str], Mapping[str, str]] | None = None,
) -> tuple[Table, list[Agreement]]:
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
    numbers = [
        number
        for number in paper_numbers()
        if number.place == place and (place, number.quantity.name) != _REPEATED
    ]
    quantities = {number.quantity.name: number.quantity for number in numbers}
    by_row: dict[tuple[str, str], dict[str, PaperNumber]] = {}
    for number in numbers:
        by_row.setdefault((number.relation, number.answer), {})[number.quantity.name] = number
    found = {
        lm.name: {
            key: {n: lm.find(own[n].quantity, own[n]) for n in own} for key, own in by_row.items()
        }
        for lm in lms
    }
    columns = [
        _Columns(
            "", ["answer" if numbers[0].answer else "relation"],
            [[answer or relation] for relation, answer in by_row], are_numbers=False,
        ),
        _Columns(
            f"paper, {numbers[0].lm}", [one.heading for one in quantities.values()],
            [[_show(q, own.get(n)) for n, q in quantities.items()] for own in by_row.values()],
        ),
        *(_lm_columns(lm, quantities, by_row, found[lm.name], more) for lm in lms),
    ]  # fmt: skip
    reasons = [
        "; ".join(
            f"{lm.name}: {reason}" if len(lms) > 1 else reason
            for lm in lms
            if all(value is None for value in found[lm.name][relation, answer].values())
            for reason in (_reason(lm, relation, answer, runs),)
        )
        for relation, answer in by_row
    ]
    if any(reasons):
        columns.append(_Columns("", ["left out"], [[one] for one in reasons], are_numbers=False))
    headings = [(part.heading, heading) for part in columns for heading in part.headings]
    note = _lm_note(numbers, lms, runs)
    meanings = [_MEANINGS[h] for h in dict.fromkeys(h for _, h in headings) if h in _MEANINGS]
    note += f" {'; '.join(meanings)}." * bool(meanings)
    if any(
        0 < sum(value is None for value in here.values()) < len(here)
        for own in found.values()
        for here in own.values()
    ):
        note += " Cells are empty where no label or edit is of that kind."
    cells = [list(chain(*row)) for row in zip(*(part.rows for part in columns), strict=True)]
    table = Table(
        place,
        DataFrame(cells, columns=MultiIndex.from_tuples(headings), dtype=object),
        f"{place} of the paper and the same here",
        note,
        headline=True,
        formats={one: ".2f" for part in columns if part.are_numbers for one in part.headings},
    )
    return table, list(agreements(place, lms, found, by_row))


def _lm_columns(
    lm: LMRuns,
    quantities: Mapping[str, Quantity],
    by_row: Mapping[tuple[str, str], Mapping[str, PaperNumber]],
    found: Mapping[tuple[str, str], Mapping[str, float | None]],
    more: Callable[[LMRuns, str], Mapping[str, str]] | None,
) -> _Columns:
    """Return an LM's numbers beside the paper's, and its further cells."""
    further = {relation: more(lm, relation) if more else {} for relation, _ in by_row}
    extra = list(dict.fromkeys(heading for cells in further.values() for heading in cells))
    rows = [
        [
            *(_beside(q, found[key].get(n), own.get(n)) for n, q in quantities.items()),
            *(further[key[0]].get(heading, "") for heading in extra),
        ]
        for key, own in by_row.items()
    ]
    return _Columns(lm.name, [*(one.heading for one in quantities.values()), *extra], rows)


def _reason(lm: LMRuns, relation: str, answer: str, runs: Sequence[str]) -> str:
    """Return why an LM has no number in a row."""
    reason = lm.missing_reason(relation, _runs_of(relation, runs))
    if answer and reason == NOT_MEASURED:
        return f"{answer} is no label of the vocabulary, or no edit is about it"
    return reason


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
    return quantity.show(None if number is None else number.value)


def _beside(quantity: Quantity, value: float | None, number: PaperNumber | None) -> str:
    """Return a number, and in brackets its difference from the paper's."""
    if value is None or number is None:
        return ""
    difference = quantity.difference(value - number.value).removesuffix(" points")
    return f"{quantity.show(value)} ({difference})"


def runs_table(lms: Sequence[LMRuns]) -> Table:
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
                [lm.name, name, ", ".join(sizes), str(run.lm.get("dtype") or ""), seconds,
                 str(run.folder)]
            )  # fmt: skip
    total = sum(seconds for lm in lms for seconds in lm.seconds.values())
    return Table.of(
        "runs", rows, ["LM", "run", "size", "dtype", "seconds", "folder"], "Runs",
        f"{total / 60:,.0f} minutes in all. `lincorr report` makes a page of each run.",
        headline=True, formats={"seconds": ",.0f"},
    )  # fmt: skip


def correlation_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cells of the tables of r: control prompt, and permuted baseline."""
    pair = lm.probed_pair(relation)
    keys = {"r, control": "control_label_mean", "r, permuted baseline": "permuted_label_mean"}
    return {heading: _text(pair.get(key)) for heading, key in keys.items() if pair}


def precision_cells(lm: LMRuns, relation: str) -> dict[str, str]:
    """Return the further cells of table 2: Hit@N of weights in random order."""
    return {
        f"random {way} @1 @3 @5": " ".join(map(_text, rates))
        for way, rates in lm.random_hits(relation).items()
    }


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
    found = lm.gradients(relation)
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


def cases_table(lm: LMRuns) -> Table | None:
    """Return cases as in table 6: edits that generalized, and edits that hallucinated."""
    run = lm.runs.get(edit_run(CITY))
    table = next((t for t in run.tables if t.name == "cases"), None) if run is not None else None
    if table is None:
        return None
    cases = table.frame.astype(object).where(table.frame.notna(), None).to_dict("records")
    rows = []
    for outcome in (Outcome.GENERALIZED, Outcome.HALLUCINATED):
        own = [case for case in cases if case["outcome"] == outcome]
        for case in own[:_N_CASES]:
            weights = (case[f"weight_{name}"] for name in _WEIGHTS)
            rows.append(
                [case["source_answer"], case["reference"], case["answer_after"], outcome, *weights]
            )
    headings = ["city", "reference", "answer given", "outcome", "W of the reference",
                "W of the answer given", "maximum of W"]  # fmt: skip
    return Table.of(
        "cases", rows, headings, f"Cases of {lm.name}",
        f"The first {_N_CASES} edits of each outcome, of {len(cases)}.", headline=True,
        formats=dict.fromkeys(headings[4:], ".2f"),
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
) -> tuple[Table, SharedLabels | None] | None:
    """Lay the paper's labels with the highest weights beside those here (tables 3, 15 to 17).

    Args:
        lm: The LM.
        printed: What the paper prints.

    Returns:
        A row per label of the paper that is a label here, and how many labels are shared (None
        without rows); None if the LM lacks the relation.
    """
    weights = lm.linear_maps.get(probe_of(printed.relation))
    if weights is None or printed.relation not in weights.pairs:
        return None
    ends = printed.relation.split("->")
    label, token = ends if printed.direction == "influenced" else reversed(ends)
    n = printed.n
    found = strongest(weights, printed.relation, n)[printed.direction]
    here = {name: found[name] for name in printed.labels if name in found}
    rows = [
        [name, ", ".join(theirs), ", ".join(own), len(set(theirs) & set(own))]
        for name, own in here.items()
        for theirs in (printed.labels[name],)
    ]
    note = f"{len(rows)} of the paper's {len(printed.labels)} labels are labels of {lm.name}."
    known = [x.strip() for x in weights.labels(token)]
    shared = shared_labels(printed, lm.name, here, known) if here else None
    table = Table.of(
        "influences", rows, [label, f"paper, {printed.lm}", lm.name, "shared"],
        f"{printed.relation} in {lm.name}: the {n} labels of {token} with the highest weights",
        note, headline=True, formats={"shared": "d"},
    )  # fmt: skip
    return table, shared


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
    return show(value, ".2f")
