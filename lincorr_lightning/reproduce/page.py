"""The page of a reproduction: tables and figures of the paper beside those of LMs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pandas import DataFrame, concat
from scipy.stats import binomtest

from lincorr_lightning.functional import Outcome
from lincorr_lightning.knowledge import Catalogue
from lincorr_lightning.reproduce.agreement import agreement_tables, table_numbers
from lincorr_lightning.reproduce.plan import (
    Item,
    LMRuns,
    Settings,
    left_out,
    plan_data,
)
from lincorr_lightning.results.paper import (
    PaperInfluences,
    PaperNumber,
    differing_settings,
    paper_influences,
    quantities,
    size_figure,
)
from lincorr_lightning.results.plots import BLUE, GREY, curves, pairs_heatmap
from lincorr_lightning.results.report import Page, PageSection
from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.table import Table, clean, show

_ENDS = ["source", "target"]
_PROBE, _AFTER = "probe_attribute", "after_attribute"
_WHEN = {"before": GREY, "after": BLUE}
_N_CASES = 4
_MAX_PANELS = 6
_WHY = "the end of the page says why"


def write_reproduction(
    items: Sequence[Item], lms: Sequence[LMRuns], settings: Settings, folder: Path
) -> Path:
    """Write ``report.html``, and tables as ``.md``; return the page."""
    sections = [_section(item, lms) for item in items]
    sections.append(PageSection("Runs", "runs", tables=[runs_table(lms)]))
    if rows := [[lm.name, *row] for lm in lms for row in left_out(lm, items, len(lms))]:
        columns = ["LM", "run or knowledge", "of", "why"]
        table = Table.of("left_out", rows, columns, "What was not measured", headline=True)
        sections.append(PageSection("Left out", "left_out", tables=[table]))
    places = [place for item in items for place in item.places]
    title = f"The paper on {', '.join(lm.name for lm in lms)}"
    overview = agreement_tables(places, lms, settings.size)
    return Page(title, overview, sections, sum(len(lm.finished) for lm in lms)).write(folder)


def _section(item: Item, lms: Sequence[LMRuns]) -> PageSection:
    needed = item.lacks(any(lm.after for lm in lms), len(lms))
    if needed or not any(name in lm.finished for lm in lms for name in item.runs):
        note = f"Not measured: {f'it needs {needed}' if needed else _WHY}."
        return PageSection(item.heading, item.keys[0], note=note)
    tables = [compare(place, item, lms) for place in item.places if table_numbers(place)]
    printed = (each for each in paper_influences() if each.place == item.places[0])
    tables += filter(None, (compare_influences(lm, each) for each in printed for lm in lms))
    tables += filter(None, map(cases_table, lms)) if item.places[0] == "Table 6" else ()
    return PageSection(item.heading, item.keys[0], tables, [*_figures(item, lms)])


def compare(place: str, item: Item, lms: Sequence[LMRuns]) -> Table:
    """Lay a table of the paper, as ``Table 5`` of an item, beside the numbers of LMs.

    A row per relation (or answer) has each quantity in the paper, here, and the difference.
    """
    numbers = table_numbers(place)
    columns = ["relation", "answer", "group", "heading"]
    frame = DataFrame(_cells(item, numbers, lms), columns=[*columns, "text"]).pivot_table(
        "text", columns[:2], columns[2:], aggfunc="first", fill_value="", sort=False
    )
    has_gaps = (frame[[lm.name for lm in lms]] == "").any(axis=None)
    gaps = f"Empty cells: no label or edit is of that kind, or {_WHY}." if has_gaps else ""
    note = " ".join(filter(None, (_lm_note(numbers, lms, item.runs), item.note, gaps)))
    formats = {heading: ".2f" for _, heading in frame.columns}
    name = "answer" if numbers[0].answer else "relation"
    frame.insert(0, ("", name), frame.index.get_level_values(name))
    caption = f"{place} of the paper and the same here"
    return Table(place, frame, caption, note, headline=True, formats=formats)


def _cells(
    item: Item, numbers: Sequence[PaperNumber], lms: Sequence[LMRuns]
) -> Iterator[tuple[str, ...]]:
    """Yield relation, answer, group, heading and text of each cell of `compare`."""
    rows = [(number, (number.relation, number.answer)) for number in numbers]
    for number, row in rows:
        quantity = number.quantity
        yield *row, f"paper, {number.lm}", quantity.heading, quantity.show(number.value)
    for lm in lms:
        for number, row in rows:
            value = lm.number(number)
            quantity = number.quantity
            difference = value is not None and quantity.difference(value - number.value)
            text = difference and f"{quantity.show(value)} ({difference.removesuffix(' points')})"
            yield *row, lm.name, quantity.heading, text or ""
        for row in dict.fromkeys(row for _, row in rows):
            for heading, text in _further_cells(item, lm, row[0]):
                yield *row, lm.name, heading, text


def _further_cells(item: Item, lm: LMRuns, relation: str) -> Iterator[tuple[str, str]]:
    """Yield the headings and texts of the cells beside those that the paper has, too."""
    for name in item.further:
        if name == "random_hits":
            for way, rates in lm.random_hits(relation).items():
                yield f"random {way} @1 @3 @5", " ".join(show(rate, ".2f") for rate in rates)
        elif name == "generalized_interval":
            n = lm.find("n_edits", relation)
            share = lm.find("generalized", relation)
            if n and share is not None:
                low, high = binomtest(round(share * n), int(n)).proportion_ci(method="wilson")
                yield "generalized, 95 %", f"{low:.0%} to {high:.0%}"
        elif name == "gradient_interval":
            r, error = (lm.find(f"gradient_correlation{end}", relation) for end in ("", "_error"))
            # Edits that are trained together are no sample: they have no error.
            if r is not None and error is not None:
                low = show(r - 1.96 * error, ".2f")
                high = show(min(r + 1.96 * error, 1), ".2f")
                yield "gradient r, 95 %", f"{low} to {high}"
        elif (value := lm.find(name, relation)) is not None:
            yield quantities()[name].heading, quantities()[name].show(value)


def _lm_note(numbers: Sequence[PaperNumber], lms: Sequence[LMRuns], runs: Sequence[str]) -> str:
    """Return sentences on whether LMs and settings are the paper's."""
    is_after = any(run.startswith("after") for run in runs)
    parts = []
    for lm in lms:
        name = (is_after and lm.after) or lm.lm
        is_same = any(number.is_about(name) for number in numbers)
        parts.append(f"{lm.name}: {'' if is_same else 'another LM than '}the paper's")
    used = [run for lm in lms for name, run in lm.finished.items() if name in runs]
    for study in dict.fromkeys(number.quantity.study for number in numbers):
        of_runs = (differing_settings(run) for run in used if run.study == study)
        if differing := ", ".join(dict.fromkeys(part for differ in of_runs for part in differ)):
            parts.append(f"{study}: {differing}")
    return f"{'; '.join(parts)}. In brackets: here minus paper; of percentages, in points."


def runs_table(lms: Sequence[LMRuns]) -> Table:
    """Return all runs: what they measured, how long they took, and where they are."""
    columns = ["LM", "run", "subjects to fit", "to test", "edits", "dtype", "seconds", "folder"]
    rows = [
        [
            lm.name,
            name,
            *(run.values.get(key) for key in ("n_fit", "n_test", "n_edits")),
            run.lm.get("dtype"),
            lm.seconds.get(name),
            str(run.folder),
        ]
        for lm in lms
        for name, run in lm.finished.items()
    ]
    total = sum(seconds for lm in lms for seconds in lm.seconds.values())
    note = f"{total / 60:,.0f} minutes in all. `lincorr report` makes a page of each run."
    formats = dict.fromkeys(("subjects to fit", "to test", "edits", "seconds"), ",.0f")
    return Table.of("runs", rows, columns, "Runs", note, headline=True, formats=formats)


def cases_table(lm: LMRuns) -> Table | None:
    """Return cases as in table 6: edits that generalized, and edits that hallucinated."""
    run = lm.finished.get("edits_city->country")
    if run is None or "cases" not in {table.name for table in run.tables}:
        return None
    cases = run.table("cases").frame
    outcomes = (Outcome.GENERALIZED, Outcome.HALLUCINATED)
    shown = concat([cases[cases["outcome"] == outcome].head(_N_CASES) for outcome in outcomes])
    note = f"The first {_N_CASES} edits of each outcome, of {len(cases)}."
    headings = plan_data()["cases"]
    formats = {name: ".2f" for name in headings if name.startswith("weight")}
    return Table("cases", shown[[*headings]], f"Cases of {lm.name}", note, True, headings, formats)


def compare_influences(lm: LMRuns, printed: PaperInfluences) -> Table | None:
    """Lay the paper's labels with the highest weights beside those here (tables 3, 15 to 17).

    There is a row per label of the paper that is a label here. None if the LM lacks the relation.
    """
    weights = lm.linear_map(printed.relation)
    if weights is None or printed.relation not in weights.pairs:
        return None
    w = weights.weight(printed.relation).numpy()
    ends = printed.relation.split("->")
    labels, others = ([text.strip() for text in weights.labels(end)] for end in ends)
    if printed.direction == "influencing":
        ends, labels, others, w = ends[::-1], others, labels, w.T
    rows = []
    for label, in_paper in printed.labels.items():
        if label in labels:
            best = (-w[:, labels.index(label)]).argsort(kind="stable")[: printed.n]
            here = [others[i] for i in best]
            shared = len({*in_paper} & {*here})
            rows.append([label, ", ".join(in_paper), ", ".join(here), shared])
    note = f"{len(rows)} of the paper's {len(printed.labels)} labels are labels of {lm.name}."
    return Table.of(
        "influences",
        rows,
        [ends[0], f"paper, {printed.lm}", lm.name, "shared"],
        f"{printed.relation} in {lm.name}: the {printed.n} labels of {ends[1]} with the highest "
        "weights",
        note,
        headline=True,
        formats={"shared": "d"},
    )


def _figures(item: Item, lms: Sequence[LMRuns]) -> Iterator[Figure]:
    run, _, name = item.figure.partition("/")
    for lm in lms:
        for figure in lm.finished[run].figures if run in lm.finished else ():
            if figure.name == name:
                yield replace(figure, caption=f"{item.numbers}, {lm.name}: {figure.caption}")
    if "Figure 4" in item.places and len(probed := [lm for lm in lms if _PROBE in lm.finished]) > 1:
        yield from _precision_over_sizes(probed)
    if "Figure 20" in item.places:
        yield from _resilience_over_sizes(lms)
    if "Figure 22" in item.places:
        yield from (figure for lm in lms for figure in _languages(lm))


def _languages(lm: LMRuns) -> Iterator[Figure]:
    catalogue = Catalogue.load()
    run = lm.finished.get("probe_cross_language")
    pairs = DataFrame(run.values["pairs"] if run is not None else [])
    if pairs.empty or pairs["label_mean"].isna().all():
        return
    pairs[_ENDS] = pairs[_ENDS].map(lambda name: catalogue[name].language)
    frame = pairs.astype({"label_mean": float}).pivot_table("label_mean", *_ENDS)
    names = ["en", *sorted({*frame.index, *frame.columns} - {"en"})]
    frame = frame.reindex(names, columns=names).reset_index(names="source")
    title = f"Mean label-wise r between languages in {lm.name}"
    caption = f"Figure 22, {lm.name}: {title}."
    options = plan_data()["figures"]["languages"] | {"title": title}
    yield Figure("languages", caption, pairs_heatmap, [Table("languages", frame)], options)


def _resilience_over_sizes(lms: Sequence[LMRuns]) -> Iterator[Figure]:
    """Yield the mean r of the maps before and after post-training, by LM (figure 20)."""
    rows = []
    both = [lm for lm in lms if {_PROBE, _AFTER} <= lm.finished.keys()]
    for lm in sorted(both, key=lambda lm: lm.finished[_AFTER].n_parameters or 0):
        probe, after = (DataFrame(lm.finished[name].values["pairs"]) for name in (_PROBE, _AFTER))
        r = probe[[*_ENDS, "label_mean"]].merge(after[[*_ENDS, "after"]])
        means = r.drop(columns=_ENDS).dropna().astype(float).mean()
        if means.notna().all():
            name = f"{lm.name} ({lm.finished[_AFTER].size})"
            rows += [(name, when, value) for when, value in zip(_WHEN, means, strict=True)]
    if len(rows) >= 2 * len(_WHEN):
        caption = "Figure 20: mean label-wise r of attributes, before and after post-training."
        table = Table.of("resilience", rows, ("LM", "when", "r"))
        options = plan_data()["figures"]["resilience"] | {"colours": _WHEN}
        yield Figure("resilience", caption, curves, [table], options)


def _precision_over_sizes(lms: Sequence[LMRuns]) -> Iterator[Figure]:
    """Yield Hit@N of W by LM (figure 4)."""
    place, lines = size_figure()
    # Of W, and of weights in random order.
    paths = [(line, line.path, False) for line in lines]
    paths += [(x, x.path.replace(".precision.", ".precision.chance."), True) for x in lines]
    pairs = lms[0].finished[_PROBE].values["pairs"]
    rows = [
        (clean(pair), f"{lm.name} ({run.size})", line.heading, is_chance, value)
        for pair in (f"{pair['source']}->{pair['target']}" for pair in pairs)
        for line, path, is_chance in paths
        for lm in lms
        for run in (lm.finished[_PROBE],)
        if (value := line._replace(path=path).of(run, pair)) is not None
    ]
    frame = DataFrame(rows, columns=["pair", "LM", "line", "chance", "value"])
    counts = frame["pair"].value_counts(sort=False)
    names = list(counts[counts == len(lms) * len(paths)].index)
    if names:
        table = Table("sizes", frame[frame["pair"].isin(names[:_MAX_PANELS])])
        left_out = f"; {_MAX_PANELS} of {len(names)} pairs" if len(names) > _MAX_PANELS else ""
        caption = f"Hit@N of W by LM (paper, {place}){left_out}."
        yield Figure("sizes", caption, curves, [table], plan_data()["figures"]["sizes"])
