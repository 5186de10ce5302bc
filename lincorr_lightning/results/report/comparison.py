"""Several runs of one study side by side, and beside the paper."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, json_normalize

from lincorr_lightning.results.paper import (
    PaperNumber,
    paper_lm,
    paper_numbers,
    size_figure,
)
from lincorr_lightning.results.plots import curves
from lincorr_lightning.results.report.text import PageTable, clean
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.style import legible, short_name
from lincorr_lightning.results.table import Table

MAX_ROWS = 30
_MAX_PANELS, _MAX_DIFFERENCES = 6, 6


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
    """Lay tables of the same columns side by side, by the columns that identify their rows."""
    keys, formats = tables[0].keys, tables[0].formats
    if any((table.keys, table.formats) != (keys, formats) for table in tables):
        return None
    n_keys = _n_key_columns([table.frame for table in tables])
    numbers = [i for i in range(n_keys, len(keys)) if formats.get(keys[i])]
    rows: dict[tuple[Any, ...], list[str]] = {}
    for group, table in enumerate(tables):
        start = n_keys + group * len(numbers)
        labels = table.frame.iloc[:, :n_keys].itertuples(index=False, name=None)
        for label, cells in zip(labels, table.texts(), strict=True):
            empty = cells[:n_keys] + [""] * (len(numbers) * len(tables))
            rows.setdefault(label, empty)[start : start + len(numbers)] = [
                cells[i] for i in numbers
            ]
    if not numbers or not rows:
        return None
    shown = list(rows.values())[:MAX_ROWS]
    if len(shown) < len(rows):
        note = f"The first {len(shown)} of {len(rows):,} rows. {note}".strip()
    captions = {table.caption for table in tables}
    # A caption may name numbers of its run.
    caption = tables[0].caption if len(captions) == 1 else ""
    titles = tables[0].titles
    return PageTable(
        f"{(caption or tables[0].name.replace('_', ' ').capitalize()).rstrip('.')}: by run",
        titles[:n_keys] + [titles[i] for i in numbers] * len(names),
        [bool(formats.get(key)) for key in keys[:n_keys]] + [True] * (len(numbers) * len(names)),
        shown, note, [("", n_keys), *((name, len(numbers)) for name in names)],
    )  # fmt: skip


def _n_key_columns(frames: Sequence[DataFrame]) -> int:
    """Count the first columns that are needed to tell a table's rows apart."""
    n_columns = len(frames[0].columns)
    for n in range(1, n_columns):
        if not any(frame.iloc[:, :n].duplicated().any() for frame in frames):
            return n
    return n_columns


def _differences(runs: Sequence[SavedRun]) -> str:
    """Name the settings in which runs differ besides their LM: their numbers differ for it, too."""
    settings = [{key: value for key, value in run.settings.items() if key != "lm"} for run in runs]
    flat = json_normalize(settings).astype(str)
    differ = [key for key in flat if flat[key].nunique() > 1]
    named = ", ".join(f"{key} ({' / '.join(flat[key])})" for key in differ[:_MAX_DIFFERENCES])
    more = f" and {len(differ) - _MAX_DIFFERENCES} more" if len(differ) > _MAX_DIFFERENCES else ""
    return f"The runs differ also in {named}{more}." if differ else ""


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
    quantity = number.quantity
    return [
        number.relation, number.heading, quantity.show(value), quantity.show(number.value),
        quantity.difference(value - number.value), number.place,
    ]  # fmt: skip


def _other_lms(numbers: Sequence[PaperNumber], runs: Sequence[SavedRun]) -> PageTable:
    names = ", ".join(dict.fromkeys(short_name(run.lm_name) for run in runs))
    return PageTable(
        "The paper’s numbers for other LMs",
        ["relation", "quantity", "LM of the paper", "paper", "in the paper"],
        [False, False, False, True, False],
        [[n.relation, n.heading, n.lm, n.quantity.show(n.value), n.place] for n in numbers],
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
    pairs = [pair for pair in pairs if all(lines[0].of(run, pair) is not None for run in runs)]
    if len({run.lm_name for run in runs}) < 2 or not pairs:
        return None
    sizes = [run.n_parameters for run in runs]
    # LMs of one size, or of an unknown one, have no place of their own on an axis of sizes.
    to_scale = None not in sizes and len(set(sizes)) == len(runs)
    names = [short_size(size or 0) for size in sizes] if to_scale else run_names(runs)
    xs = [math.log10(size or 1) if to_scale else i for i, size in enumerate(sizes)]
    frame = DataFrame(
        [
            {"pair": clean(pair), "x": x, "line": line.heading, "value": line.of(run, pair)}
            for pair in pairs[:_MAX_PANELS]
            for line in lines
            for x, run in zip(xs, runs, strict=True)
        ]
    ).astype({"value": float})

    def name_lms(axes: Axes, pair: str, rows: DataFrame) -> None:
        del pair, rows
        rotation: dict[str, Any] = {} if to_scale else {"rotation": 35, "ha": "right"}
        axes.set_xticks(xs, legible(names), fontsize=8, **rotation)
        axes.set_ylim(-0.03, 1.03)

    figure = curves(
        frame, "x", "value", "line", "pair", title="Precision of W by LM",
        subtitle="x: number of parameters" if to_scale else "x: the LMs in their order",
        labels=("", "Hit@N"), whole_x=False, each=name_lms,
    )  # fmt: skip
    left_out = f"; {_MAX_PANELS} of {len(pairs)} pairs" if len(pairs) > _MAX_PANELS else ""
    return figure, f"Hit@N of W by LM (paper, {place}){left_out}."


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
