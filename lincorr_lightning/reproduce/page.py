"""The page of a reproduction: a section for each table and figure of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lincorr_lightning.reproduce.figures import (
    figures_of_runs,
    languages_figures,
    resilience_over_sizes,
)
from lincorr_lightning.reproduce.items import (
    CITY,
    FAMILIES,
    Item,
    after_run,
    edit_run,
    probe_run,
)
from lincorr_lightning.reproduce.settings import Settings
from lincorr_lightning.reproduce.tables import (
    Agreement,
    LMRuns,
    agreement_table,
    cases_table,
    compare,
    completeness_table,
    edit_cells,
    gradient_cells,
    influenced_labels,
    influencing_labels,
)
from lincorr_lightning.results.report.comparison import draw_over_sizes
from lincorr_lightning.results.report.page import PageFigure, PageSection, write_page
from lincorr_lightning.results.report.text import PageTable
from lincorr_lightning.results.style import to_picture

_ATTRIBUTE, _MATH, _SIMILE = (probe_run(family) for family in FAMILIES[:3])
# Item (by its first place) -> run and figure of it.
_RUN_FIGURES = {
    "Figure 3": (_ATTRIBUTE, "correlation_matrix"),
    "Figure 5": (edit_run(CITY), "reference_weights"),
    "Figure 7": (_MATH, "correlation_matrix"),
    "Figure 8": (after_run("attribute"), "after_matrix"),
    "Figure 9": (after_run("math"), "after_matrix"),
    "Figure 10": (_ATTRIBUTE, "instance_matrix"),
    "Figure 23": (_ATTRIBUTE, "std_matrix"),
    "Figure 24": (after_run("attribute"), "after_std_matrix"),
    "Table 9": (after_run("simile"), "after_matrix"),
}
_COMPARED = {"Table 4": gradient_cells, "Table 5": edit_cells}
_OF_ONE_LM = {"Table 6": cases_table, "Table 18": completeness_table}
_INFLUENCES = {
    "Table 15": (_ATTRIBUTE, (CITY,)),
    "Table 16": (_ATTRIBUTE, ("mother->father",)),
    "Table 17": (
        _SIMILE,
        tuple(f"object_{kind}->simile_{kind}"
              for kind in ("genre", "heat", "size", "color", "price")),
    ),
}  # fmt: skip


def write_reproduction(
    items: Sequence[Item], lms: Sequence[LMRuns], settings: Settings, folder: Path
) -> Path:
    """Write ``report.html``, and a ``.md`` and a ``.tex`` file of its tables.

    Args:
        items: The tables and figures.
        lms: The LMs with their runs.
        settings: The settings.
        folder: Folder of the page.

    Returns:
        The page.

    Raises:
        OutputError: A file cannot be written.
    """
    agreements: list[Agreement] = []
    sections = [_section(item, lms, settings, agreements) for item in items]
    overview = agreement_table(agreements, settings.size != "paper")
    names = ", ".join(lm.name for lm in lms)
    runs = [run for lm in lms for run in lm.runs.values()]
    return write_page(
        folder, f"The paper on {names}", [overview] if agreements else [], sections, len(runs)
    )


def _section(
    item: Item, lms: Sequence[LMRuns], settings: Settings, agreements: list[Agreement]
) -> PageSection:
    tables: list[PageTable] = []
    figures: list[PageFigure] = []
    for place in item.places:
        if place.startswith("Table") and place not in (*_INFLUENCES, "Table 3", "Table 18"):
            table, found = compare(place, lms, _COMPARED.get(place))
            tables.append(table)
            agreements += found
    place = item.places[0]
    if place in _RUN_FIGURES:
        figures += figures_of_runs(lms, *_RUN_FIGURES[place], place)
    for lm in lms:
        if place == "Table 3":
            tables += influenced_labels(lm, {CITY: _ATTRIBUTE, "X+1->X+2": _MATH})
        elif place in _OF_ONE_LM:
            tables += [table for table in [_OF_ONE_LM[place](lm)] if table is not None]
        elif place in _INFLUENCES:
            run, relations = _INFLUENCES[place]
            found_tables = (influencing_labels(lm, run, r, settings.top) for r in relations)
            tables += [table for table in found_tables if table is not None]
    if place == "Figure 4":
        drawn = draw_over_sizes([lm.runs[_ATTRIBUTE] for lm in lms if _ATTRIBUTE in lm.runs])
        if drawn is not None:
            figures.append(PageFigure.of(*to_picture(drawn[0]), drawn[1]))
    elif place == "Figure 20":
        over_sizes = resilience_over_sizes(lms)
        figures += [] if over_sizes is None else [over_sizes]
    elif place == "Figure 22":
        figures += languages_figures(lms)
    if not tables and not figures:
        tables = [PageTable(why_empty(item, lms), [], [], [])]
    name = item.keys[0]
    return PageSection(item.heading, name, [], tables, figures, [])


def why_empty(item: Item, lms: Sequence[LMRuns]) -> str:
    """Return why there is nothing for a table or figure."""
    if item.needs_after and not any(lm.plan.after for lm in lms):
        return "Not measured: it needs the LM after post-training (--after)."
    if len(lms) < item.n_lms:
        return f"Not measured: it needs {item.n_lms} LMs."
    reasons = []
    for lm in lms:
        lacking = {**lm.plan.left_out, **lm.errors}
        reasons += [f"{lm.name}: {name}: {lacking[name]}" for name in item.runs if name in lacking]
    why = "; ".join(reason.rstrip(".") for reason in reasons)
    return f"Not measured: {why or 'its runs are not finished'}."
