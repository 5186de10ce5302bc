"""The page of a reproduction: tables and figures of the paper beside those of LMs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pandas import DataFrame, concat
from scipy.stats import binomtest

from lincorr_lightning.functional import Outcome
from lincorr_lightning.io import write_csv
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.linear_map import LinearMap
from lincorr_lightning.probe.results import top_influences
from lincorr_lightning.reproduce.measured import (
    NOT_MEASURED,
    LMRuns,
    Row,
    agreement_tables,
    agreements,
    shared_labels,
)
from lincorr_lightning.reproduce.plan import Item, plan_data, relation_probe
from lincorr_lightning.reproduce.settings import Settings
from lincorr_lightning.results.paper import (
    PaperInfluences,
    PaperNumber,
    differing_settings,
    paper_influences,
    paper_numbers,
    quantities,
)
from lincorr_lightning.results.plots import BLUE, GREY, correlation_heatmap, curves
from lincorr_lightning.results.report import PageSection, over_sizes, write_page
from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.table import Table, show

_ENGLISH = "en"
_PROBE, _AFTER = "probe_attribute", "after_attribute"
_WHEN = {"before": GREY, "after": BLUE}
_N_CASES = 4
# The paper has these as the r of the logits, once.
_REPEATED = ("Table 4", "label_mean")
_CASES = {
    "source_answer": "city", "reference": "reference", "answer_after": "answer given",
    "outcome": "outcome", "weight_reference": "W of the reference",
    "weight_answer": "W of the answer given", "weight_max": "maximum of W",
}  # fmt: skip


def write_reproduction(
    items: Sequence[Item], lms: Sequence[LMRuns], settings: Settings, folder: Path
) -> Path:
    """Write ``report.html``, tables as ``.md`` and ``.tex``, and the influences of all pairs."""
    agreement: list[Row] = []
    shared: list[Row] = []
    sections = [_section(item, lms, agreement, shared) for item in items]
    sections.append(PageSection("Runs", "runs", tables=[runs_table(lms)]))
    overview = agreement_tables(agreement, shared, settings.size)
    for lm in lms:
        for name in set(plan_data("groups")["PROBES"]) & lm.linear_maps.keys():
            write_csv(
                folder / f"influences_{lm.name}_{name.removeprefix('probe_')}.csv",
                ("pair", "direction", "label", "tokens"),
                influence_rows(lm.linear_maps[name], settings.top),
            )
    title = f"The paper on {', '.join(lm.name for lm in lms)}"
    return write_page(folder, title, overview, sections, sum(len(lm.runs) for lm in lms))


def _section(
    item: Item, lms: Sequence[LMRuns], agreement: list[Row], shared: list[Row]
) -> PageSection:
    """Return the section of an item; how its tables agree is added to `agreement` and `shared`."""
    tables: list[Table] = []
    needed = item.lacks(any(lm.plan.after for lm in lms), len(lms))
    reason = f"it needs {needed}" if needed else _reasons(item.runs, lms)
    if not needed and any(name in lm.runs for lm in lms for name in item.runs):
        run = item.figure.partition("/")[0]
        without = [lm for lm in lms if run and run not in lm.runs]
        reason = _reasons([run], without) if without else ""
        for place in item.places:
            if numbers := table_numbers(place):
                tables.append(compare(place, item, lms))
                agreement += agreements(numbers, lms)
        for printed in (each for each in paper_influences() if each.place == item.places[0]):
            for lm in lms:
                compared = compare_influences(lm, printed)
                if compared is not None:
                    tables.append(compared[0])
                    shared += [compared[1]] if compared[1] is not None else []
        if item.places[0] == "Table 6":
            tables += [table for table in map(cases_table, lms) if table is not None]
    figures = list(_figures(item, lms)) if not needed else []
    note = f"Not measured: {reason}." if reason else ""
    return PageSection(item.heading, item.keys[0], (), tables, figures, note)


def _reasons(runs: Sequence[str], lms: Sequence[LMRuns]) -> str:
    """Return why LMs lack runs."""
    missing = [(lm.name, lm.missing_reason([run])) for lm in lms for run in runs]
    reasons = dict.fromkeys(f"{lm}: {reason}" for lm, reason in missing if reason != NOT_MEASURED)
    return "; ".join(reasons) or "runs are not finished"


# -- numbers beside the paper's --------------------------------------------------------------------


def table_numbers(place: str) -> list[PaperNumber]:
    """Return the numbers of a table of the paper that have a column beside LMs."""
    return [
        number
        for number in paper_numbers()
        if number.place == place and (place, number.quantity.name) != _REPEATED
    ]


def compare(place: str, item: Item, lms: Sequence[LMRuns]) -> Table:
    """Lay a table of the paper, as ``Table 5`` of an item, beside the numbers of LMs.

    A row per relation (or answer) has each quantity in the paper, here, and the difference.
    """
    numbers = table_numbers(place)
    paper = {(each.relation, each.answer, each.quantity): each for each in numbers}
    rows = list(dict.fromkeys((each.relation, each.answer) for each in numbers))
    kinds = list(dict.fromkeys(each.quantity for each in numbers))
    # Group and heading -> cells.
    labels = [answer or relation for relation, answer in rows]
    columns = {("", "answer" if numbers[0].answer else "relation"): labels}
    for kind in kinds:
        printed = [paper.get((*row, kind)) for row in rows]
        cells = [kind.show(None if each is None else each.value) for each in printed]
        columns[f"paper, {numbers[0].lm}", kind.heading] = cells
    reasons: list[list[str]] = [[] for _ in rows]
    has_gaps = False
    for lm in lms:
        measured = {key: lm.number(number) for key, number in paper.items()}
        for kind in kinds:
            cells = [_beside(measured.get((*row, kind)), paper.get((*row, kind))) for row in rows]
            columns[lm.name, kind.heading] = cells
        further = [dict(_further_cells(item, lm, relation)) for relation, _ in rows]
        for heading in dict.fromkeys(heading for cells in further for heading in cells):
            columns[lm.name, heading] = [cells.get(heading, "") for cells in further]
        for row, why in zip(rows, reasons, strict=True):
            missing = [measured[*row, kind] is None for kind in kinds if (*row, kind) in measured]
            has_gaps |= any(missing) and not all(missing)
            if all(missing):
                reason = _reason(lm, row[0], row[1], item.runs)
                why.append(f"{lm.name}: {reason}" if len(lms) > 1 else reason)
    if any(reasons):
        columns["", "left out"] = ["; ".join(why) for why in reasons]
    gaps = "Cells are empty where no label or edit is of that kind." if has_gaps else ""
    return Table(
        place,
        DataFrame(columns, dtype=object),
        f"{place} of the paper and the same here",
        " ".join(filter(None, (_lm_note(numbers, lms, item.runs), item.note, gaps))),
        headline=True,
        formats={heading: ".2f" for group, heading in columns if group},
    )


def _beside(value: float | None, number: PaperNumber | None) -> str:
    """Return a number, and in brackets its difference from the paper's."""
    if value is None or number is None:
        return ""
    difference = number.quantity.difference(value - number.value).removesuffix(" points")
    return f"{number.quantity.show(value)} ({difference})"


def _further_cells(item: Item, lm: LMRuns, relation: str) -> Iterator[tuple[str, str]]:
    """Yield the headings and texts of the cells beside those that the paper has, too."""
    for name in item.further:
        if name == "random_hits":
            for way, rates in lm.random_hits(relation).items():
                yield f"random {way} @1 @3 @5", " ".join(show(rate, ".2f") for rate in rates)
        elif name == "generalized_interval":
            n, share = lm.find("n_edits", relation), lm.find("generalized", relation)
            if n and share is not None:
                low, high = binomtest(round(share * n), int(n)).proportion_ci(method="wilson")
                yield "generalized, 95 %", f"{low:.0%} to {high:.0%}"
        elif name == "gradient_interval":
            r = lm.find("gradient_correlation", relation)
            # Edits that are trained together are no sample: they have no error.
            error = lm.find("gradient_correlation_error", relation)
            if r is not None and error is not None:
                low, high = r - 1.96 * error, min(r + 1.96 * error, 1)
                yield "gradient r, 95 %", f"{show(low, '.2f')} to {show(high, '.2f')}"
        elif (value := lm.find(name, relation)) is not None:
            yield quantities()[name].heading, quantities()[name].show(value)


def _reason(lm: LMRuns, relation: str, answer: str, runs: Sequence[str]) -> str:
    """Return why an LM has no number in a row."""
    families = {Catalogue.load()[end].family for end in relation.split("->")}
    parts = (relation, *sorted(families))
    names = [f"{kind}_{part}" for part in parts for kind in ("edits", "ablation", "probe", "after")]
    reason = lm.missing_reason([name for name in names if name in runs], relation)
    if answer and reason == NOT_MEASURED:
        return f"{answer} is no label of the vocabulary, or no edit is about it"
    return reason


def _lm_note(numbers: Sequence[PaperNumber], lms: Sequence[LMRuns], runs: Sequence[str]) -> str:
    """Return sentences on whether LMs and settings are the paper's."""
    is_after = any(run.startswith("after") for run in runs)
    parts = []
    for lm in lms:
        name = (is_after and lm.plan.after) or lm.plan.lm
        is_same = any(number.is_about(name) for number in numbers)
        parts.append(f"{lm.name}: {'' if is_same else 'another LM than '}the paper's")
    used = [run for lm in lms for name, run in lm.runs.items() if name in runs]
    for study in dict.fromkeys(number.quantity.study for number in numbers):
        of_study = [run for run in used if run.study == study]
        if differ := dict.fromkeys(part for run in of_study for part in differing_settings(run)):
            parts.append(f"{study}: {', '.join(differ)}")
    return f"{'; '.join(parts)}. In brackets: here minus paper; of percentages, in points."


def runs_table(lms: Sequence[LMRuns]) -> Table:
    """Return all runs: what they measured, how long they took, and where they are."""
    rows = [
        {
            "LM": lm.name, "run": name,
            "subjects to fit": run.values.get("n_fit"), "to test": run.values.get("n_test"),
            "edits": run.values.get("n_edits"), "dtype": run.lm.get("dtype"),
            "seconds": lm.seconds.get(name), "folder": str(run.folder),
        }
        for lm in lms
        for name, run in lm.runs.items()
    ]  # fmt: skip
    total = sum(seconds for lm in lms for seconds in lm.seconds.values())
    note = f"{total / 60:,.0f} minutes in all. `lincorr report` makes a page of each run."
    formats = dict.fromkeys(("subjects to fit", "to test", "edits", "seconds"), ",.0f")
    return Table.of("runs", rows, (), "Runs", note, headline=True, formats=formats)


def cases_table(lm: LMRuns) -> Table | None:
    """Return cases as in table 6: edits that generalized, and edits that hallucinated."""
    run = lm.runs.get("edits_city->country")
    if run is None or not any(table.name == "cases" for table in run.tables):
        return None
    cases = run.table("cases").frame
    outcomes = (Outcome.GENERALIZED, Outcome.HALLUCINATED)
    shown = concat([cases[cases["outcome"] == outcome].head(_N_CASES) for outcome in outcomes])
    note = f"The first {_N_CASES} edits of each outcome, of {len(cases)}."
    formats = {name: ".2f" for name in _CASES if name.startswith("weight")}
    frame = shown[list(_CASES)]
    return Table("cases", frame, f"Cases of {lm.name}", note, True, _CASES, formats)


# -- influences ------------------------------------------------------------------------------------


def _strongest(weights: LinearMap, pair: str, n: int) -> dict[str, dict[str, list[str]]]:
    """Return direction (see `Influence`) -> label -> the `n` labels with the highest weights."""
    source, target = ([text.strip() for text in weights.labels(end)] for end in pair.split("->"))
    strongest: dict[str, dict[str, list[str]]] = {}
    for influence in top_influences(weights.weight(pair).numpy(), source, target, n=n):
        labels = strongest.setdefault(influence.direction, {})
        labels.setdefault(influence.label, []).append(influence.token)
    return strongest


def compare_influences(lm: LMRuns, printed: PaperInfluences) -> tuple[Table, Row | None] | None:
    """Lay the paper's labels with the highest weights beside those here (tables 3, 15 to 17).

    Returns:
        A row per label of the paper that is a label here, and how many labels are shared (None
        without rows); None if the LM lacks the relation.
    """
    weights = lm.linear_maps.get(relation_probe(printed.relation) or "")
    if weights is None or printed.relation not in weights.pairs:
        return None
    ends = printed.relation.split("->")
    label, token = ends if printed.direction == "influenced" else reversed(ends)
    n = printed.n
    strongest = _strongest(weights, printed.relation, n)[printed.direction]
    here = {name: strongest[name] for name in printed.labels if name in strongest}
    rows = []
    for name, labels in here.items():
        paper = printed.labels[name]
        rows.append([name, ", ".join(paper), ", ".join(labels), len({*paper} & {*labels})])
    note = f"{len(rows)} of the paper's {len(printed.labels)} labels are labels of {lm.name}."
    known = [text.strip() for text in weights.labels(token)]
    shared = shared_labels(printed, lm.name, here, known) if here else None
    table = Table.of(
        "influences", rows, [label, f"paper, {printed.lm}", lm.name, "shared"],
        f"{printed.relation} in {lm.name}: the {n} labels of {token} with the highest weights",
        note, headline=True, formats={"shared": "d"},
    )  # fmt: skip
    return table, shared


def influence_rows(weights: LinearMap, n: int) -> Iterator[list[str]]:
    """Yield pair, direction, label, and the `n` labels with the highest weights, of all pairs."""
    for pair in weights.pairs:
        for direction, labels in _strongest(weights, pair, n).items():
            for label, tokens in labels.items():
                yield [pair, direction, label, ", ".join(tokens)]


# -- figures ---------------------------------------------------------------------------------------


def _figures(item: Item, lms: Sequence[LMRuns]) -> Iterator[Figure]:
    """Yield the figures of a section: those of runs, or one of all LMs."""
    run, _, name = item.figure.partition("/")
    for lm in lms:
        for figure in lm.runs[run].figures if run in lm.runs else ():
            if figure.name == name:
                yield replace(figure, caption=f"{item.numbers}, {lm.name}: {figure.caption}")
    match item.places[0]:
        case "Figure 4":
            yield from over_sizes([lm.runs[_PROBE] for lm in lms if _PROBE in lm.runs])
        case "Figure 20":
            yield from _resilience_over_sizes(lms)
        case "Figure 22":
            for lm in lms:
                yield from _languages(lm)


def _languages(lm: LMRuns) -> Iterator[Figure]:
    """Yield the mean label-wise r between languages of an LM (figure 22), if it has some."""
    catalogue, run = Catalogue.load(), lm.runs.get("probe_cross_language")
    pairs = DataFrame(run.values["pairs"] if run is not None else [])
    if pairs.empty or pairs["label_mean"].isna().all():
        return
    for end in ("source", "target"):
        pairs[end] = [catalogue[name].language for name in pairs[end]]
    frame = pairs.astype({"label_mean": float}).pivot_table("label_mean", "source", "target")
    names = [_ENGLISH, *sorted({*frame.index, *frame.columns} - {_ENGLISH})]
    title = f"Mean label-wise r between languages in {lm.name}"
    note = "mean over kinds of knowledge; source in rows, target in columns"
    frame = frame.reindex(names, columns=names)
    draw = partial(correlation_heatmap, frame, title, note, value_label="Pearson r")
    yield Figure("languages", f"Figure 22, {lm.name}: {title}.", draw)


def _resilience_over_sizes(lms: Sequence[LMRuns]) -> Iterator[Figure]:
    """Yield the mean r of the maps before and after post-training, by LM (figure 20)."""
    rows = []
    both = [lm for lm in lms if {_PROBE, _AFTER} <= lm.runs.keys()]
    for lm in sorted(both, key=lambda lm: lm.runs[_AFTER].n_parameters or 0):
        probe, after = (DataFrame(lm.runs[name].values["pairs"]) for name in (_PROBE, _AFTER))
        r = probe[["source", "target", "label_mean"]].merge(after[["source", "target", "after"]])
        means = r[["label_mean", "after"]].dropna().astype(float).mean()
        if means.notna().all():
            name = f"{lm.name} ({lm.runs[_AFTER].size})"
            rows += [(name, when, value) for when, value in zip(_WHEN, means, strict=True)]
    if len(rows) < 2 * len(_WHEN):
        return
    draw = partial(
        curves, DataFrame(rows, columns=["LM", "when", "r"]), "LM", "r", "when", colours=_WHEN,
        title="Label-wise r after post-training", labels=("", "mean label-wise r"),
    )  # fmt: skip
    caption = "Figure 20: mean label-wise r of attributes, before and after post-training."
    yield Figure("resilience", caption, draw)
