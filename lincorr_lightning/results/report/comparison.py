"""Several runs of one study side by side, and beside the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from pandas import DataFrame, concat

from lincorr_lightning.results.paper import paper_lm, paper_numbers, size_figure
from lincorr_lightning.results.plots import curves
from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.saved_run import SavedRun, flatten
from lincorr_lightning.results.style import legible, short_name
from lincorr_lightning.results.table import Table, clean

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


def join_tables(runs: Sequence[SavedRun]) -> list[Table]:
    """Join the headline tables that runs have in common, with a group of columns for each run."""
    by_run = [{table.name: table for table in run.tables if table.headline} for run in runs]
    common = [name for name in by_run[0] if all(name in tables for tables in by_run)]
    joined = (_join([tables[name] for tables in by_run], run_names(runs)) for name in common)
    note = _differences(runs)
    return [replace(table, note=note).first(MAX_ROWS) for table in joined if table is not None]


def _join(tables: Sequence[Table], names: Sequence[str]) -> Table | None:
    """Lay tables of the same columns side by side, by the columns that identify their rows."""
    first = tables[0]
    if any((table.keys, table.formats) != (first.keys, first.formats) for table in tables):
        return None
    n_keys = _n_key_columns([table.frame for table in tables])
    labels = first.keys[:n_keys]
    numbers = [key for key in first.keys[n_keys:] if first.formats.get(key)]
    if not numbers or not any(map(len, tables)):
        return None
    frames = [table.frame.set_index(labels)[numbers] for table in tables]
    frame = concat(frames, axis=1, keys=names, sort=False).reset_index(col_level=1)
    # A caption may name numbers of its run.
    same = len({table.caption for table in tables}) == 1
    caption = (same and first.caption) or first.name.replace("_", " ").capitalize()
    return replace(first, frame=frame, caption=f"{caption.rstrip('.')}: by run")


def _n_key_columns(frames: Sequence[DataFrame]) -> int:
    """Count the first columns that are needed to tell a table's rows apart."""
    n_columns = len(frames[0].columns)
    for n in range(1, n_columns):
        if not any(frame.iloc[:, :n].duplicated().any() for frame in frames):
            return n
    return n_columns


def _differences(runs: Sequence[SavedRun]) -> str:
    """Name the settings in which runs differ besides their LM: their numbers differ for it, too."""
    settings = [
        {key: one for key, one in flatten(run.values["settings"]) if not key.startswith("lm.")}
        for run in runs
    ]
    values = {key: [str(own.get(key)) for own in settings] for own in settings for key in own}
    differ = [f"{key} ({' / '.join(own)})" for key, own in values.items() if len(set(own)) > 1]
    named, n_more = ", ".join(differ[:_MAX_DIFFERENCES]), len(differ) - _MAX_DIFFERENCES
    more = f" and {n_more} more" if n_more > 0 else ""
    return f"The runs differ also in {named}{more}." if differ else ""


# -- the paper -----------------------------------------------------------------------------------


def beside_paper(runs: Sequence[SavedRun]) -> list[Table]:
    """Lay numbers of runs beside the paper's: for the same LM, and those it has for other LMs."""
    own: list[list[str]] = []
    others: dict[tuple[str, ...], None] = {}
    for run in runs:
        for number in paper_numbers():
            quantity, here = (
                number.quantity,
                number.quantity.of(run, number.relation, number.answer),
            )
            if here is None:
                continue
            row = [number.relation, number.heading]
            paper = quantity.show(number.value)
            if number.is_about(run.lm_name):
                difference = quantity.difference(here - number.value)
                row += [quantity.show(here), paper, difference, number.place]
                own.append([*row, short_name(run.lm_name)])
            elif not number.answer:
                others[*row, number.lm, paper, number.place] = None
    texts = dict.fromkeys(("here", "paper", "difference"), ".2f")
    tables = []
    if own:
        columns = ["relation", "quantity", *texts, "in the paper", "LM"]
        caption = "Beside the paper"
        tables.append(Table.of("paper", own, columns, caption, headline=True, formats=texts))
    if others and not any(paper_lm(run.lm_name) for run in runs):
        names = ", ".join(dict.fromkeys(short_name(run.lm_name) for run in runs))
        columns = ["relation", "quantity", "LM of the paper", "paper", "in the paper"]
        caption = "The paper’s numbers for other LMs"
        note = f"The paper has no such numbers for {names}: these are of other LMs."
        tables.append(Table.of("other_lms", others, columns, caption, note, formats=texts))
    return tables


# -- the size of the LM --------------------------------------------------------------------------


def over_sizes(runs: Sequence[SavedRun]) -> list[Figure]:
    """Return Hit@N by LM, as in the paper's figure 4; nothing for one LM or without Hit@N."""
    place, lines = size_figure()
    if len({run.lm_name for run in runs}) < 2 or runs[0].study != lines[0].study:
        return []
    pairs = [f"{pair['source']}->{pair['target']}" for pair in runs[0].values["pairs"]]
    pairs = [pair for pair in pairs if all(lines[0].of(run, pair) is not None for run in runs)]
    if not pairs:
        return []
    frame = DataFrame(
        [
            {"pair": clean(pair), "x": x, "line": line.heading, "value": line.of(run, pair)}
            for pair in pairs[:_MAX_PANELS]
            for line in lines
            for x, run in enumerate(runs)
        ]
    ).astype({"value": float})
    names = [
        f"{name} ({run.size})" if run.size else name
        for name, run in zip(run_names(runs), runs, strict=True)
    ]

    def name_lms(axes: Axes, *_: Any) -> None:
        axes.set_xticks(range(len(runs)), legible(names), fontsize=8, rotation=35, ha="right")
        axes.set_ylim(-0.03, 1.03)

    draw = partial(
        curves, frame, "x", "value", "line", "pair", title="Precision of W by LM",
        subtitle="x: the LMs in their order", labels=("", "Hit@N"), whole_x=False, each=name_lms,
    )  # fmt: skip
    left_out = f"; {_MAX_PANELS} of {len(pairs)} pairs" if len(pairs) > _MAX_PANELS else ""
    return [Figure("sizes", f"Hit@N of W by LM (paper, {place}){left_out}.", draw)]
