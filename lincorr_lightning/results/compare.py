"""The command ``lincorr compare``: two finished runs of one study side by side."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pandas import DataFrame, concat
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import as_output_error, load_yaml
from lincorr_lightning.results import report as pages
from lincorr_lightning.results.differences import difference_of_means
from lincorr_lightning.results.results import OWN_KEYS, RESULTS_FILE, Figure, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun, table_text
from lincorr_lightning.results.table import Mean, Table, clean, show

Pair = tuple[Table, Table]  # of two runs
_NUMBERS = ("first", "second", "difference", "error", "low", "high")
_UNITS = ("n_first", "n_second", "n_both")
_COLUMNS = ("table", "row", "number", *_NUMBERS, "units", *_UNITS, "heading", "format")
_MAX_CONSOLE_ROWS, _MAX_PAGE_ROWS, _MAX_FIGURE_ROWS, _MAX_PANELS, _MAX_NAME = 5, 100, 12, 8, 16
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
    sys.stdout.write(table_text(_shown(table, _MAX_CONSOLE_ROWS) for table in headlines))
    if options.output:
        _remove_earlier(Path(options.output))
        results.write_parts(Path(options.output))
        overview, *tables = map(_shown, results.tables)
        section = pages.PageSection("Comparison", "comparison", (), tables, results.figures)
        page = pages.write_page(options.output, overview.caption, [overview], [section], 2)
        sys.stdout.write(f"Page:   {page}\nTables: {page.parent / 'tables'}\n")
    return results


def _remove_earlier(folder: Path) -> None:
    """Remove tables and figure of an earlier comparison, which would stand among the new ones."""
    for path in folder.glob("tables/*.csv") if (folder / "comparison.md").exists() else ():
        with as_output_error(path), path.open("rb") as file:
            if b"first" in file.readline():  # all of a comparison have such a column
                path.unlink()
                (folder / "figures" / "comparison.png").unlink(missing_ok=True)


@pages.any_text()
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
        studies = " and ".join(f"{x.folder} one of {x.study[:50]}" for x in (first, second))
        raise ReportError(f"the runs are of two studies, {studies}. Name two runs of one study.")
    names, note, runs = pages.run_names([first, second]), _NOTE, (first, second)
    relations = [str(run.values.get("relation", "")) for run in runs]
    if are_apart := relations[0] != relations[1]:
        note += f" The runs are of two relations, {' and '.join(relations)}: no units are pairs."
    own, theirs = (
        {table.name: _of_relation(table, name) if are_apart else table for table in run.tables}
        for run, name in zip(runs, relations, strict=True)
    )
    pairs = [(table, theirs[name]) for name, table in own.items() if name in theirs]
    seen: set[Any] = set()
    numbers = [row for pair in pairs if pair[0].headline for row in _numbers(pair, pairs, seen)]
    values = list(_numbers((_values(first), _values(second)), pairs, set()))
    joined = [table for table in map(_join, pairs) if table is not None]
    if not any((numbers, values, joined)):
        raise ReportError(f"{first.folder} and {second.folder} have no number in common.")
    minus = f"{names[1]} minus {names[0]}"
    if max(map(len, names)) > _MAX_NAME:  # the first table has the folders
        names, minus = list(_NUMBERS[:2]), "the second run minus the first"
    title = f"{pages.study_title(first.study)}: {minus}"
    heads, formats = dict(zip(_NUMBERS, names, strict=False)), dict.fromkeys(_NUMBERS, ".4g")
    tables = [
        Table.of(name, rows, columns, caption, text, is_headline, heads, formats if text else {})
        for name, rows, columns, caption, text, is_headline in (
            ("differing", _differing([first, second]), ("what", *heads), title, "", True),
            ("numbers", numbers, _COLUMNS, "Numbers", note, bool(numbers)),
            ("values", values, _COLUMNS, "All numbers of results.json", note, not numbers),
        )
    ]
    drawn = tables[1 if numbers else 2].frame.dropna(subset=["low"])
    figure = Figure("comparison", f"{title}, with 95 % intervals", partial(_draw, drawn, title))
    return Results("comparison", {}, {}, [*tables, *joined], [figure] if len(drawn) else ())


def _of_relation(table: Table, relation: str) -> Table:
    """Add the relation to what names a unit: an edit of another relation is another edit."""
    if not table.unit or "relation" in table.keys:
        return table
    frame = table.frame.assign(relation=relation)
    return replace(table, frame=frame, unit=(*table.unit, "relation"))


def _differing(runs: Sequence[SavedRun]) -> Iterator[tuple[str, ...]]:
    """Return folders, and what differs in LM, versions, settings and the rest of the config."""
    values = []
    for run in runs:
        try:
            config = dict(load_yaml(run.config) or {})
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise ReportError(f"{run.folder / CONFIG_FILE} is no valid config.") from error
        own = {"folder": str(run.folder), "lm": run.lm, "versions": run.values["versions"]}
        values.append({**own, **config, "model": {}, "data": {}, "settings": run.settings})
    return pages.differing(values)


def _values(run: SavedRun) -> Table:
    own = pages.flatten({key: value for key, value in run.values.items() if key not in OWN_KEYS})
    numbers = {key: float(x) for key, x in own.items() if type(x) in (int, float)}
    return Table("values", DataFrame([numbers]), formats=dict.fromkeys(numbers, ".4g"))


def _is_number(both: DataFrame, key: str) -> bool:
    kinds = [both[at, key].dtype for at in (0, 1) if (at, key) in both]
    return len(kinds) == 2 and all(is_numeric_dtype(k) and not is_bool_dtype(k) for k in kinds)


def _numbers(pair: Pair, pairs: Sequence[Pair], seen: set[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield rows of `_COLUMNS` for the numbers of a table, with errors by units of all `pairs`.

    Means that are among those `seen` are left out, and the others added to them.
    """
    table, (keys, both) = pair[0], pages.side_by_side(pair, (0, 1))
    sampled = cache(lambda name: list(_samples(name, keys, pairs)))
    for number, heading in zip(table.keys, table.titles, strict=True):
        form = table.formats.get(number)
        if not form or number in keys or not _is_number(both, number):
            continue
        means = both[[(0, number), (1, number)]].to_numpy(float, na_value=np.nan)
        for at, values in zip(both.index, means, strict=True):
            row = dict(zip(keys, at if len(keys) > 1 else (at,), strict=False))
            name = ", ".join(x if isinstance(x, str) else f"{k} {x}" for k, x in row.items())
            # Of a row `before`, as of the key ``before.generalized`` of results.json.
            means_of = *(f"{x}_{number}" for x in row.values()), number.replace(".", "_")
            samples = chain.from_iterable(map(sampled, means_of))
            for rest, *found in _differences(values, row, samples, seen):
                yield table.name, f"{name}{rest}", number, *found, heading, form


def _samples(number: str, keys: Sequence[str], pairs: Sequence[Pair]) -> Iterator[tuple[Any, ...]]:
    """Yield the units over which a number is a mean, for each table that has some.

    They are the columns that name a row of the number, sum and count of each unit in both runs by
    the values of these columns, whether it is a share, and the names of the number and the units.
    """
    for table, other in pairs:
        mean = table.means.get(number)
        if mean is None or (table.unit, mean) != (other.unit, other.means.get(number)):
            continue
        by = [key for key in keys if key in table.keys and key not in table.unit]
        columns = [*by, *([mean.per] if mean.per else table.unit)]
        both = concat([_sums(each.frame, mean, columns) for each in (table, other)], axis=1)
        of = dict(iter(both.groupby(level=by))) if by else {(): both}
        arrays = {at: part.fillna(0.0).to_numpy().reshape(-1, 2, 2) for at, part in of.items()}
        is_share = mean.equals is not None or is_bool_dtype(table.frame[mean.column])
        name = f"{table.name} by {mean.per}" if mean.per else table.name
        yield by, arrays, is_share and not mean.per, number, name


def _sums(frame: DataFrame, mean: Mean, by: Sequence[str]) -> DataFrame:
    for key, value in mean.where.items():
        frame = frame[frame[key] == value]
    values = frame[mean.column] if mean.equals is None else frame[mean.column] == mean.equals
    groups = values.astype("float64").dropna().groupby([frame[key] for key in by])
    sums = groups.agg(["sum", "count"]).astype("float64")
    return sums.div(sums["count"], axis=0) if mean.per else sums  # each value of `per` counts once


def _differences(
    values: Any, row: Mapping[str, Any], samples: Any, seen: set[Any]
) -> Iterator[tuple[Any, ...]]:
    """Yield an end of the row's name and the columns from first to n_both.

    These are over all units and, where there are others, too, over those of both runs.
    """
    for by, arrays, is_share, number, name in samples:
        if (units := arrays.get(at := tuple(map(row.get, by)))) is None:
            continue
        is_there = units[:, :, 1] > 0
        common, n = is_there.all(1), is_there.sum(0)
        # A number may be of more than the table holds, such as of several seeds.
        totals = units.sum(0)
        if n.min() < 2 or not np.allclose(totals[:, 0] / totals[:, 1], values, 1e-6, 1e-9):
            continue
        if (number, name, at) in seen:
            return
        seen.add((number, name, at))
        some = [(", in both", common)] if 2 <= common.sum() < n.max() else []
        for rest, chosen in ("", common | True), *some:
            sums, counts = np.moveaxis(units[chosen], 2, 0)
            found = difference_of_means(sums, counts, is_share)
            of_units = (name, *is_there[chosen].sum(0), common.sum())
            yield rest, *(sums.sum(0) / counts.sum(0)), *found, *of_units
        return
    yield "", *values, values[1] - values[0], None, None, None, "", None, None, None


def _join(pair: Pair) -> Table | None:
    """Lay a table of two runs side by side, numbers with their difference; None without any."""
    table, (keys, both) = pair[0], pages.side_by_side(pair, (0, 1))
    rest = [key for key in table.keys if key not in keys and (1, key) in both]
    numbers = [key for key in rest if _is_number(both, key)]
    if not (shown := rest if table.unit else numbers):
        return None
    sides = {"first": both[0], "second": both[1], "difference": both[1][numbers] - both[0][numbers]}
    cells = ((key, side) for key in shown for side in sides if key in sides[side])
    names = {f"{key}_{side}": (key, side) for key, side in cells}
    columns = [sides[side][key].rename(name) for name, (key, side) in names.items()]
    index = [both.index.to_frame()] if keys else []
    frame = concat([*index, *columns], axis=1).reset_index(drop=True)
    titles = dict(zip(table.keys, table.titles, strict=True))
    heads = titles | {name: f"{titles[key]}, {side}" for name, (key, side) in names.items()}
    forms = {n: table.formats.get(key) or ".4g" for n, (key, _) in names.items() if key in numbers}
    return Table(table.name, frame, table.name, "", False, heads, forms)


def _shown(table: Table, n: int = _MAX_PAGE_ROWS) -> Table:
    """Return the first n rows of a table, or of each number, with numbers in their own formats."""
    if "format" not in table.keys:
        return table.first(max(n, _MAX_PAGE_ROWS), f"tables/{table.name}.csv")
    both = table.frame.dropna(subset=["difference"])
    both = both[(both["difference"] != 0) | ~both["format"].str.endswith("d")]  # equal counts
    first = both.groupby(["table", "number"], sort=False).head(n)
    forms = {sign: [f"{sign}{form.lstrip('+')}" for form in first["format"]] for sign in ("", "+")}
    texts = {
        key: list(map(show, first[key], forms["+" if key == "difference" else ""]))
        for key in _NUMBERS
    }
    frame = first.assign(number=first["heading"], **texts)[["row", "number", *_NUMBERS[:3]]]
    low, high, units = texts["low"], texts["high"], first[[*_UNITS]].to_numpy()
    frame["95 %"] = [f"{a} to {b}" if a else "" for a, b in zip(low, high, strict=True)]
    frame["n"] = ["{}, {} ({})".format(*x) if a else "" for a, x in zip(low, units, strict=True)]
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
