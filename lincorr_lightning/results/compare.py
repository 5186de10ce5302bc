"""The command ``lincorr compare``: two finished runs of one study side by side."""

import argparse
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml
from pandas import DataFrame, concat
from pandas.api.types import is_bool_dtype, is_float_dtype, is_numeric_dtype

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import load_yaml
from lincorr_lightning.results import report as pages
from lincorr_lightning.results.differences import difference_of_means
from lincorr_lightning.results.results import RESULTS_FILE, Figure, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun, table_text
from lincorr_lightning.results.table import Mean, Table, clean, column, show
from lincorr_lightning.terminal import write_out

_SIDES = ("first", "second")
_MAX_CONSOLE_ROWS = 5
_MAX_PAGE_ROWS = 100
_MAX_FIGURE_ROWS = 12
_MAX_PANELS = 8
_MAX_NAME = 16
_NOTE = (
    "Difference: second minus first; of percentages, in points. 95 %: its interval over n units of "
    "each run, such as edits or labels. Units that are in both runs, (n), count as pairs; where "
    "only some are, a further row has these alone. No interval: no table has a row per unit."
)
_HELP = """Show two finished runs of one study side by side: in what LM, settings and versions they
differ, and their numbers with differences, second minus first, and 95 % intervals over edits,
labels or prompts, paired where both runs have the same. For example

  lincorr compare runs/linear_probe/version_0 runs/linear_probe/version_1 --output runs/compared
"""
_Pair = tuple[Table, Table]  # of two runs
_FLOATS = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ComparedNumber:
    """A number of two runs: a row of the tables ``numbers`` and ``values``."""

    table: str
    row: str
    number: str
    first: float = column(format=".4g")
    second: float = column(format=".4g")
    difference: float = column(format=".4g")
    error: float | None = column(format=".4g", default=None)
    low: float | None = column(format=".4g", default=None)
    high: float | None = column(format=".4g", default=None)
    units: str = ""
    n_first: int | None = None
    n_second: int | None = None
    n_both: int | None = None
    heading: str = ""
    format: str = ""


def compare(args: Sequence[str]) -> Results:
    """Compare two runs as the command line behind ``lincorr compare`` says."""
    as_written: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(prog="lincorr compare", description=_HELP, **as_written)
    runs = "folders of two finished runs; differences are the second's numbers minus the first's"
    parser.add_argument("runs", nargs=2, metavar="RUN", help=runs)
    parser.add_argument("--output", help="folder to write a page, all tables and a figure to")
    options = parser.parse_args(args)
    if options.output and (Path(options.output) / RESULTS_FILE).exists():
        raise ReportError(f"--output {options.output} is the folder of a run. Name another one.")
    results = compare_runs(*map(SavedRun.read, options.runs))
    headlines = (table for table in results.tables if table.headline)
    write_out(table_text(_shown(table, _MAX_CONSOLE_ROWS) for table in headlines))
    if options.output:
        results.write_parts(Path(options.output))
        overview, *tables = map(_shown, results.tables)
        section = pages.PageSection("Comparison", "comparison", (), tables, results.figures)
        page = pages.write_page(options.output, overview.caption, [overview], [section], 2)
        write_out(f"Page:   {page}\nTables: {page.parent / 'tables'}\n")
    return results


def compare_runs(first: SavedRun, second: SavedRun) -> Results:
    """Compare two runs of one study; the figure shows the differences that have an interval.

    The table ``differing`` has what differs in LM, settings and versions, ``numbers`` the numbers
    of the headline tables, with differences, standard errors and 95 % intervals, and ``values``
    those of ``results.json``. Then comes each table that both runs have, joined by the columns that
    identify its rows; units of other relations are others. Raises ReportError if the runs are the
    same, of two studies, or have no number in common.
    """
    if first.folder.resolve() == second.folder.resolve():
        raise ReportError(f"{first.folder} is named twice. Name two runs to compare.")
    if first.study != second.study:
        studies = " and ".join(f"{run.folder} one of {run.study[:50]}" for run in (first, second))
        raise ReportError(f"the runs are of two studies, {studies}. Name two runs of one study.")
    tables, others = _tables(first), _tables(second)
    pairs = [(table, others[name]) for name, table in tables.items() if name in others]
    relations = [str(run.values.get("relation", "")) for run in (first, second)]
    note = _NOTE
    if relations[0] != relations[1]:
        note += f" The runs are of two relations, {' and '.join(relations)}: no units are pairs."
    seen: set[Hashable] = set()
    numbers = [row for pair in pairs if pair[0].headline for row in _numbers(pair, pairs, seen)]
    values = list(_numbers((_values(first), _values(second)), pairs, set()))
    joined = [table for table in map(_join, pairs) if table is not None]
    if not any((numbers, values, joined)):
        raise ReportError(f"{first.folder} and {second.folder} have no number in common.")
    names = pages.run_names([first, second])
    minus = f"{names[1]} minus {names[0]}"
    if max(map(len, names)) > _MAX_NAME:  # the first table has the folders
        names = list(_SIDES)
        minus = "the second run minus the first"
    title = f"{pages.study_title(first.study)}: {minus}"
    headings = dict(zip(_SIDES, names, strict=True))
    about = "differing", _differing(first, second), ("what", *_SIDES), title, "", True
    shown = [
        Table.of(*about, headings),
        *(
            Table.of(name, rows, ComparedNumber, caption, note, headline, headings)
            for name, rows, caption, headline in (
                ("numbers", numbers, "Numbers", bool(numbers)),
                ("values", values, "All numbers of results.json", not numbers),
            )
        ),
    ]
    drawn = shown[1 if numbers else 2].frame.dropna(subset=["low"])
    figure = Figure("comparison", f"{title}, with 95 % intervals", partial(_draw, drawn, title))
    figures = [figure] if len(drawn) else ()
    return Results("comparison", tables=[*shown, *joined], figures=figures)


def _tables(run: SavedRun) -> dict[str, Table]:
    """Return a run's tables by name; an edit of another relation is another unit."""
    tables = {}
    for table in run.tables:
        if table.unit and "relation" in run.values and "relation" not in table.keys:
            frame = table.frame.assign(relation=str(run.values["relation"]))
            table = replace(table, frame=frame, unit=(*table.unit, "relation"))
        tables[table.name] = table
    return tables


def _differing(*runs: SavedRun) -> Iterator[tuple[str, ...]]:
    """Yield what differs in folders, LM, versions, settings and config, and the texts of both."""
    flat = []
    for run in runs:
        try:
            config = dict(load_yaml(run.config) or {})
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise ReportError(f"{run.folder / CONFIG_FILE} is no valid config.") from error
        head = {"folder": str(run.folder), "lm": run.lm, "versions": run.values["versions"]}
        values = {**head, **config, "model": {}, "data": {}, "settings": run.settings}
        flat.append(pages.flatten(values))
    for key in dict.fromkeys(key for each in flat for key in each):
        texts = [str(each.get(key)) for each in flat]
        if len({*texts}) > 1:
            yield key, *texts


def _values(run: SavedRun) -> Table:
    flat = pages.flatten(pages.own_values(run))
    numbers = {key: float(value) for key, value in flat.items() if type(value) in (int, float)}
    return Table("values", DataFrame([numbers]), formats=dict.fromkeys(numbers, ".4g"))


def _side_by_side(pair: _Pair) -> tuple[list[str], DataFrame]:
    """Return the columns that identify rows of two tables, and the other columns side by side.

    The frame is indexed by the former: units, then texts, then as many numbers as it takes to tell
    the rows apart. The upper level of its columns is the side.
    """
    first, other = pair
    shared = [key for key in first.keys if key in other.keys]
    unit = [key for key in first.unit if key in shared]
    free = [key for key in shared if key not in unit and not first.formats.get(key)]
    kinds = first.frame.dtypes
    free.sort(key=lambda key: (is_numeric_dtype(kinds[key]), is_float_dtype(kinds[key])))
    candidates = [*unit, *free]
    n = max(len(unit), 1)
    while n < len(candidates) and any(t.frame.duplicated(candidates[:n]).any() for t in pair):
        n += 1
    keys = [key for key in first.keys if key in candidates[:n]]
    frames = [table.frame.drop_duplicates(keys or None) for table in pair]
    frames = [frame.set_index(keys) if keys else frame for frame in frames]
    return keys, concat(frames, axis=1, keys=_SIDES, sort=False)


def _is_number(both: DataFrame, key: str) -> bool:
    kinds = [both[side, key].dtype for side in _SIDES if (side, key) in both]
    return len(kinds) == 2 and all(is_numeric_dtype(k) and not is_bool_dtype(k) for k in kinds)


def _numbers(pair: _Pair, pairs: Sequence[_Pair], seen: set[Hashable]) -> Iterator[ComparedNumber]:
    """Yield the numbers of a table, with errors by units of all `pairs`.

    Means that are among those `seen` are left out, and the others added to them.
    """
    table = pair[0]
    keys, both = _side_by_side(pair)
    for number, heading in zip(table.keys, table.titles, strict=True):
        form = table.formats.get(number)
        if not form or number in keys or not _is_number(both, number):
            continue
        values = both[[(side, number) for side in _SIDES]].to_numpy(float, na_value=np.nan)
        for at, (first, second) in zip(both.index, values, strict=True):
            row = dict(zip(keys, at if len(keys) > 1 else (at,), strict=False))
            texts = (x if isinstance(x, str) else f"{key} {x}" for key, x in row.items())
            names = table.name, ", ".join(texts), number
            difference = second - first
            plain = ComparedNumber(*names, first, second, difference, heading=heading, format=form)
            yield from _with_errors(plain, row, pairs, seen)


def _with_errors(
    plain: ComparedNumber, row: Mapping[str, Any], pairs: Sequence[_Pair], seen: set[Hashable]
) -> Iterator[ComparedNumber]:
    """Yield a number with its error over units, by the first table that it is a mean over.

    That is over all units and, where there are others, too, over those of both runs.
    """
    # Of a row `before`, as of the key ``before.generalized`` of results.json.
    names = [f"{value}_{plain.number}" for value in row.values()]
    for name, (table, other) in product([*names, plain.number.replace(".", "_")], pairs):
        mean = table.means.get(name)
        if mean is None or (table.unit, mean) != (other.unit, other.means.get(name)):
            continue
        by = {key: row[key] for key in row if key in table.keys and key not in table.unit}
        sums, counts = _units((table, other), mean, by)
        n = (counts > 0).sum(0)
        # A number may be of more than the table holds, such as of several seeds.
        if n.min() < 2 or not np.allclose(
            sums.sum(0) / counts.sum(0), (plain.first, plain.second), 1e-6, 1e-9
        ):
            continue
        units = f"{table.name} by {mean.per}" if mean.per else table.name
        mean_of_rows = (name, units, *by.items())
        if mean_of_rows in seen:
            return
        seen.add(mean_of_rows)
        is_share = mean.equals is not None or is_bool_dtype(table.frame[mean.column])
        number = replace(plain, units=units)
        yield _over_units(number, sums, counts, is_share and not mean.per)
        in_both = (counts > 0).all(1)
        if 2 <= in_both.sum() < n.max():
            number = replace(number, row=f"{plain.row}, in both")
            yield _over_units(number, sums[in_both], counts[in_both], is_share and not mean.per)
        return
    yield plain


def _units(pair: _Pair, mean: Mean, by: Mapping[str, Any]) -> tuple[_FLOATS, _FLOATS]:
    """Return sums and counts of each unit in two runs, ``(n_units, 2)``, where columns are `by`."""
    sides = []
    for table in pair:
        frame = table.frame
        for key, value in {**by, **mean.where}.items():
            frame = frame[frame[key] == value]
        values = frame[mean.column] if mean.equals is None else frame[mean.column] == mean.equals
        names = [mean.per] if mean.per else table.unit
        units = values.astype("float64").dropna().groupby([frame[name] for name in names])
        sums = units.agg(["sum", "count"]).astype("float64")
        # Each value of `per` counts once.
        sides.append(sums.div(sums["count"], axis=0) if mean.per else sums)
    both = concat(sides, axis=1).fillna(0.0).to_numpy()
    return both[:, ::2], both[:, 1::2]


def _over_units(
    number: ComparedNumber, sums: _FLOATS, counts: _FLOATS, is_share: bool
) -> ComparedNumber:
    first, second = sums.sum(0) / counts.sum(0)
    n_first, n_second = (counts > 0).sum(0).tolist()
    return replace(
        number,
        first=first,
        second=second,
        **difference_of_means(sums, counts, is_share)._asdict(),
        n_first=n_first,
        n_second=n_second,
        n_both=int((counts > 0).all(1).sum()),
    )


def _join(pair: _Pair) -> Table | None:
    """Lay a table of two runs side by side, numbers with their difference; None without any."""
    table = pair[0]
    keys, both = _side_by_side(pair)
    rest = [key for key in table.keys if key not in keys and ("second", key) in both]
    numbers = [key for key in rest if _is_number(both, key)]
    joined = rest if table.unit else numbers
    if not joined:
        return None
    difference = both["second"][numbers] - both["first"][numbers]
    sides = {"first": both["first"], "second": both["second"], "difference": difference}
    names = {
        f"{key}_{side}": (key, side)
        for key in joined
        for side, frame in sides.items()
        if key in frame
    }
    columns = [sides[side][key].rename(name) for name, (key, side) in names.items()]
    index = [both.index.to_frame()] if keys else []
    frame = concat([*index, *columns], axis=1).reset_index(drop=True)
    titles = dict(zip(table.keys, table.titles, strict=True))
    headings = titles | {name: f"{titles[key]}, {side}" for name, (key, side) in names.items()}
    formats = {
        name: table.formats.get(key) or ".4g" for name, (key, _) in names.items() if key in numbers
    }
    return Table(table.name, frame, table.name, headings=headings, formats=formats)


def _shown(table: Table, n: int = _MAX_PAGE_ROWS) -> Table:
    """Return the first n rows of a table, or of each number, with numbers in their own formats."""
    if "format" not in table.keys:
        return table.first(max(n, _MAX_PAGE_ROWS), f"tables/{table.name}.csv")
    both = table.frame.dropna(subset=["difference"])
    both = both[(both["difference"] != 0) | ~both["format"].str.endswith("d")]  # equal counts
    first = both.groupby(["table", "number"], sort=False).head(n)
    rows = []
    for row in first.itertuples():
        numbers = [show(number, row.format) for number in (row.first, row.second)]
        difference = show(row.difference, f"+{row.format.lstrip('+')}")
        interval, units = "", ""
        if row.units:
            interval = f"{show(row.low, row.format)} to {show(row.high, row.format)}"
            units = f"{row.n_first}, {row.n_second} ({row.n_both})"
        rows.append([row.row, row.heading, *numbers, difference, interval, units])
    frame = DataFrame(rows, columns=["row", "number", *_SIDES, "difference", "95 %", "n"])
    note = f" The first {n} rows of each number." if len(first) < len(both) else ""
    return replace(table, frame=frame, note=table.note + note)


def _draw(frame: DataFrame, title: str) -> Any:  # a figure of matplotlib, which is imported here
    from lincorr_lightning.results.plots import BLUE, GREY, bare_axes, legible, new_figure

    frame = frame[~frame["row"].str.endswith(", in both")]
    by_number = list(frame.groupby(["table", "number"], sort=False))
    if all(len(rows) == 1 for _, rows in by_number):  # a panel for all of a format
        by_number = list(frame.assign(row=frame["heading"], heading="").groupby("format"))
    groups = [rows for _, rows in by_number[:_MAX_PANELS]]
    heights = [min(len(rows), _MAX_FIGURE_ROWS) for rows in groups]
    figure = new_figure(
        7,
        0.22 * sum(heights) + 0.5 * len(heights) + 0.3,
        clean(title),
        "second minus first, with 95 % interval; filled: it excludes 0; right: first → second",
    )
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, n, rows in zip(panels, heights, groups, strict=True):
        bare_axes(axes)
        axes.axvline(0, color=GREY, linewidth=0.8)
        for y, row in zip(range(n, 0, -1), rows.itertuples(), strict=False):
            axes.plot((row.low, row.high), (y, y), color=BLUE, linewidth=1.5)
            fill = BLUE if row.low > 0 or row.high < 0 else "white"
            axes.plot(row.difference, y, "o", color=BLUE, markerfacecolor=fill)
            values = " → ".join(show(value, row.format) for value in (row.first, row.second))
            axes.text(1.02, y, values, transform=axes.get_yaxis_transform(), va="center", size=8)
        axes.set_yticks(range(n, 0, -1), legible(map(clean, rows["row"][:n]), 40))
        axes.tick_params(labelsize=8)
        axes.set_title(rows["heading"].iloc[0], loc="left", fontsize=9.5)
    return figure
