"""The page of a reproduction: a section for each table and figure of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lincorr_lightning.io import write_csv
from lincorr_lightning.reproduce.agreement import Agreement, SharedLabels, agreement_tables
from lincorr_lightning.reproduce.figures import (
    figures_of_runs,
    languages_figures,
    resilience_over_sizes,
)
from lincorr_lightning.reproduce.items import (
    CITY,
    PROBED_FAMILIES,
    Item,
    after_run,
    edit_run,
    probe_run,
)
from lincorr_lightning.reproduce.lm_runs import LMRuns
from lincorr_lightning.reproduce.settings import Settings
from lincorr_lightning.reproduce.tables import (
    cases_table,
    compare,
    compare_influences,
    correlation_cells,
    edit_cells,
    gradient_cells,
    influence_rows,
    precision_cells,
    runs_table,
)
from lincorr_lightning.results.paper import paper_influences, paper_numbers
from lincorr_lightning.results.report.comparison import over_sizes
from lincorr_lightning.results.report.page import PageSection, write_page
from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.saved_run import SavedFigure
from lincorr_lightning.results.table import Table

_ATTRIBUTE, _MATH = (probe_run(family) for family in PROBED_FAMILIES[:2])
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
_COMPARED = {
    "Table 2": precision_cells, "Table 4": gradient_cells, "Table 5": edit_cells,
    "Table 8": correlation_cells, "Table 14": correlation_cells,
}  # fmt: skip


def write_reproduction(
    items: Sequence[Item], lms: Sequence[LMRuns], settings: Settings, folder: Path
) -> Path:
    """Write ``report.html``, its tables as ``.md`` and ``.tex``, and the influences of all pairs.

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
    shared: list[SharedLabels] = []
    sections = [_section(item, lms, agreements, shared) for item in items]
    overview = agreement_tables(agreements, shared, settings.size)
    sections.append(PageSection("Runs", "runs", tables=[runs_table(lms)]))
    names = ", ".join(lm.name for lm in lms)
    runs = [run for lm in lms for run in lm.runs.values()]
    for lm in lms:
        for name in filter(lm.runs.__contains__, map(probe_run, PROBED_FAMILIES)):
            write_csv(
                folder / f"influences_{lm.name}_{name.removeprefix('probe_')}.csv",
                ("pair", "direction", "label", "tokens"),
                influence_rows(lm, name, settings.top),
            )
    return write_page(
        folder,
        f"The paper on {names}",
        overview,
        sections,
        len(runs),
    )


def _section(
    item: Item,
    lms: Sequence[LMRuns],
    agreements: list[Agreement],
    shared: list[SharedLabels],
) -> PageSection:
    reason = missing_reason(item, lms)
    if reason:
        return PageSection(item.heading, item.keys[0], note=reason)
    tables: list[Table] = []
    for place in item.places:
        if any(number.place == place for number in paper_numbers()):
            table, found = compare(place, lms, item.runs, _COMPARED.get(place))
            tables.append(table)
            agreements += found
    place = item.places[0]
    printed = [one for one in paper_influences() if one.place == place]
    for compared in (compare_influences(lm, one) for lm in lms for one in printed):
        if compared is not None:
            tables.append(compared[0])
            shared += [compared[1]] if compared[1] is not None else []
    if place == "Table 6":
        tables += [table for table in map(cases_table, lms) if table is not None]
    figures = _figures(item, lms)
    if place in _RUN_FIGURES and len(figures) < len(lms):
        run, _ = _RUN_FIGURES[place]
        reason = _reasons([run], [lm for lm in lms if run not in lm.runs])
    return PageSection(item.heading, item.keys[0], (), tables, figures, reason)


def _figures(item: Item, lms: Sequence[LMRuns]) -> Sequence[Figure | SavedFigure]:
    """Return the figures of a section: those of runs, or one of all LMs."""
    place = item.places[0]
    if place in _RUN_FIGURES:
        return figures_of_runs(lms, *_RUN_FIGURES[place], item.numbers)
    if place == "Figure 4":
        return over_sizes([lm.runs[_ATTRIBUTE] for lm in lms if _ATTRIBUTE in lm.runs])
    if place == "Figure 20":
        return resilience_over_sizes(lms)
    return list(languages_figures(lms)) if place == "Figure 22" else []


def missing_reason(item: Item, lms: Sequence[LMRuns]) -> str:
    """Return why there is nothing for a table or figure; empty if there is something."""
    if item.needs_after and not any(lm.plan.after for lm in lms):
        return "Not measured: it needs the LM after post-training (--after)."
    if len(lms) < item.n_lms:
        return f"Not measured: it needs {item.n_lms} LMs."
    if any(name in lm.runs for lm in lms for name in item.runs):
        return ""
    return _reasons(item.runs, lms)


def _reasons(runs: Sequence[str], lms: Sequence[LMRuns]) -> str:
    """Return why LMs lack runs."""
    found = []
    for lm in lms:
        lacking = {**lm.plan.left_out, **lm.errors}
        found += [f"{lm.name}: {lacking[name].rstrip('.')}" for name in runs if name in lacking]
    return f"Not measured: {'; '.join(dict.fromkeys(found)) or 'runs are not finished'}."
