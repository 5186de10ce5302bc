"""Several runs of one study side by side, and beside the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lincorr_lightning.results.paper import (
    PaperNumber,
    Quantity,
    paper_lm,
    paper_numbers,
    size_figure,
)
from lincorr_lightning.results.report.text import PageTable, clean
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    finish,
    legible,
    new_figure,
    panels_of,
    plain_axes,
    short_name,
)
from lincorr_lightning.results.table import Table

MAX_ROWS = 30
_MAX_PANELS, _PANELS_PER_ROW = 6, 3
_MAX_DIFFERENCES = 6
_LINES = ("-", "--", ":", "-.")


def run_names(runs: Sequence[SavedRun]) -> list[str]:
    """Return a name for each run: its LM's, and what distinguishes runs of one LM."""
    short = [short_name(run.lm_name) for run in runs]
    names = short
    for detail in (lambda run: run.folder.name, lambda run: str(run.folder)):
        count = Counter(names)
        names = [
            f"{name}, {detail(run)}" if count[full] > 1 else full
            for full, name, run in zip(names, short, runs, strict=True)
        ]
    return names


def join_tables(runs: Sequence[SavedRun]) -> list[PageTable]:
    """Join the headline tables that runs have in common, with a group of columns for each run."""
    by_run = [{table.name: table for table in run.tables if table.headline} for run in runs]
    common = [name for name in by_run[0] if all(name in tables for tables in by_run)]
    note = _differences(runs)
    joined = (_join([tables[name] for tables in by_run], run_names(runs), note) for name in common)
    return [table for table in joined if table is not None]


def _join(tables: Sequence[Table], names: Sequence[str], note: str) -> PageTable | None:
    columns = tables[0].full_columns
    if any(table.full_columns != columns for table in tables):
        return None
    n_keys = _n_key_columns(tables)
    numbers = [i for i in range(n_keys, len(columns)) if columns[i].format]
    rows: dict[tuple[Any, ...], list[str]] = {}
    for group, table in enumerate(tables):
        start = n_keys + group * len(numbers)
        for row, cells in zip(table.rows, table.texts(), strict=True):
            empty = cells[:n_keys] + [""] * (len(numbers) * len(tables))
            line = rows.setdefault(tuple(row[:n_keys]), empty)
            line[start : start + len(numbers)] = [cells[i] for i in numbers]
    if not numbers or not rows:
        return None
    shown = list(rows.values())[:MAX_ROWS]
    if len(shown) < len(rows):
        note = f"The first {len(shown)} of {len(rows):,} rows. {note}"
    captions = {table.caption for table in tables}
    # A caption may name numbers of its run.
    caption = tables[0].caption if len(captions) == 1 else ""
    return PageTable(
        f"{(caption or tables[0].name.replace('_', ' ').capitalize()).rstrip('.')}: by run",
        [c.title for c in columns[:n_keys]] + [columns[i].title for i in numbers] * len(names),
        [bool(c.format) for c in columns[:n_keys]] + [True] * (len(numbers) * len(names)),
        shown,
        note.strip(),
        [("", n_keys), *((name, len(numbers)) for name in names)],
    )


def _n_key_columns(tables: Sequence[Table]) -> int:
    """Count the first columns that are needed to tell a table's rows apart."""
    n_columns = len(tables[0].full_columns)
    for n in range(1, n_columns + 1):
        if all(len({tuple(row[:n]) for row in t.rows}) == len(t.rows) for t in tables):
            return n
    return n_columns


def _differences(runs: Sequence[SavedRun]) -> str:
    """Name the settings in which runs differ besides their LM."""
    flat = [dict(_flatten({k: v for k, v in run.settings.items() if k != "lm"})) for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    differ = [key for key in keys if len({str(one.get(key)) for one in flat}) > 1]
    if not differ:
        return ""
    shown = [
        f"{key} ({' / '.join(str(one.get(key)) for one in flat)})"
        for key in differ[:_MAX_DIFFERENCES]
    ]
    more = len(differ) - len(shown)
    return f"The runs differ also in {', '.join(shown)}" + (f" and {more} more." if more else ".")


def _flatten(settings: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        full = f"{key}.{name}" if key else str(name)
        if isinstance(value, Mapping):
            yield from _flatten(value, full)
        else:
            yield full, value


# -- the paper -----------------------------------------------------------------------------------


def beside_paper(runs: Sequence[SavedRun]) -> list[PageTable]:
    """Lay numbers of runs beside the paper's: for the same LM, and those it has for other LMs."""
    own: list[list[str]] = []
    others: dict[PaperNumber, None] = {}
    for run in runs:
        for number in paper_numbers():
            value = number.quantity.of(run, number.relation, number.answer)
            if value is None:
                continue
            if number.is_about(run.lm_name):
                own.append([*_row(number, value), short_name(run.lm_name)])
            elif not number.answer:
                others[number] = None
    known = {(row[0], row[1]) for row in own}
    rest = [number for number in others if (number.relation, number.heading) not in known]
    tables = []
    if own:
        headings = ["relation", "quantity", "here", "paper", "difference", "in the paper", "LM"]
        is_number = [False, False, True, True, True, False, False]
        tables.append(PageTable("Beside the paper", headings, is_number, own))
    if rest and not any(paper_lm(run.lm_name) for run in runs):
        tables.append(_other_lms(rest, runs))
    return tables


def _row(number: PaperNumber, value: float) -> list[str]:
    column = number.quantity.column
    return [
        number.relation, number.heading, column.show(value), column.show(number.value),
        number.quantity.difference(value - number.value), number.place,
    ]  # fmt: skip


def _other_lms(numbers: Sequence[PaperNumber], runs: Sequence[SavedRun]) -> PageTable:
    names = ", ".join(dict.fromkeys(short_name(run.lm_name) for run in runs))
    return PageTable(
        "The paper’s numbers for other LMs",
        ["relation", "quantity", "LM of the paper", "paper", "in the paper"],
        [False, False, False, True, False],
        [[n.relation, n.heading, n.lm, n.quantity.column.show(n.value), n.place] for n in numbers],
        f"The paper has no such numbers for {names}: these are of other LMs, for orientation.",
    )


# -- the size of the LM --------------------------------------------------------------------------


def draw_over_sizes(runs: Sequence[SavedRun]) -> tuple[Figure, str] | None:
    """Draw Hit@N over the size of the LM, as in the paper's figure 4.

    Returns:
        The figure and its caption; None if there are fewer than two LMs or no such numbers.
    """
    place, lines = size_figure()
    entries = runs[0].values.get("pairs") if runs[0].study == lines[0].study else ()
    pairs = [
        f"{pair.get('source')}->{pair.get('target')}"
        for pair in (entries if isinstance(entries, list) else ())
        if isinstance(pair, Mapping)
    ]
    panels = [pair for pair in pairs if all(lines[0].of(run, pair) is not None for run in runs)]
    if len({run.lm_name for run in runs}) < 2 or not panels:
        return None
    sizes = [run.n_parameters for run in runs]
    # LMs of one size, or of an unknown one, have no place of their own on an axis of sizes.
    to_scale = None not in sizes and len(set(sizes)) == len(runs)
    xs = [float(size or 0) for size in sizes] if to_scale else list(map(float, range(len(runs))))
    shown = panels[:_MAX_PANELS]
    n_columns = min(len(shown), _PANELS_PER_ROW)
    n_rows = -(-len(shown) // n_columns)
    subtitle = "x: number of parameters" if to_scale else "x: the LMs in their order"
    figure = new_figure(
        max(4.6, 3 * n_columns + 1.8), 2.7 * n_rows, "Precision of W by LM", subtitle
    )
    grid = panels_of(figure, len(shown), n_columns)
    labels = legible([short_size(x) for x in xs] if to_scale else run_names(runs))
    for i, (axes, pair) in enumerate(zip(grid, shown, strict=True)):
        plain_axes(axes, clean(pair), "", "" if i % n_columns else "Hit@N")
        _draw_lines(axes, runs, pair, lines, xs)
        axes.set_xscale("log" if to_scale else "linear")
        axes.minorticks_off()
        rotation: dict[str, Any] = {} if to_scale else {"rotation": 35, "ha": "right"}
        axes.set_xticks(xs, labels, fontsize=8, **rotation)
        axes.margins(x=0.15)
    grid[n_columns - 1].legend(
        loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8, labelcolor=INK
    )
    left_out = f"; {len(shown)} of {len(panels)} pairs" if len(shown) < len(panels) else ""
    return finish(figure), f"Hit@N of W by LM (paper, {place}){left_out}."


def _draw_lines(
    axes: Axes, runs: Sequence[SavedRun], pair: str, lines: Sequence[Quantity], xs: list[float]
) -> None:
    # A colour for each direction, a style for each N.
    directions = list(dict.fromkeys(line.heading.split()[-1] for line in lines))
    counts = list(dict.fromkeys(line.heading.split()[0] for line in lines))
    for line in lines:
        count, direction = line.heading.split()[0], line.heading.split()[-1]
        values = [line.of(run, pair) for run in runs]
        axes.plot(
            xs, [float("nan") if value is None else value for value in values],
            _LINES[counts.index(count) % len(_LINES)], label=line.heading, marker="o",
            color=(BLUE, ORANGE, GREEN)[directions.index(direction) % 3], markersize=3.5,
            linewidth=1.4,
        )  # fmt: skip
    axes.set_ylim(-0.03, 1.03)


def short_size(n_parameters: float) -> str:
    """Return a number of parameters in three digits.

    Example:
        >>> short_size(8.03e9), short_size(1_350_000), short_size(12)
        ('8.03B', '1.35M', '12')
    """
    for letter, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n_parameters >= unit:
            return f"{n_parameters / unit:.3g}{letter}"
    return f"{n_parameters:.0f}"
