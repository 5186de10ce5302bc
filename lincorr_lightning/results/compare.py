"""Two finished runs of one study side by side, with errors; more of them as a table."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import numpy as np
import numpy.typing as npt
from pandas import DataFrame, concat
from pandas.api.types import is_bool_dtype

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results import report as pages
from lincorr_lightning.results.differences import difference_of_means
from lincorr_lightning.results.figures import differences_figure
from lincorr_lightning.results.results import MAX_SENTENCES, Figure, Results
from lincorr_lightning.results.runs_table import (
    are_numbers,
    differing,
    row_keys,
    runs_table,
    settings_and_seeds,
    values_table,
    with_deviations,
)
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Mean, Table, column, show

_SIDES = ("first", "second")
_MAX_PAGE_ROWS = 100
_MAX_NAME = 16
_NOTE = (
    "Difference: second minus first; of percentages, in points. 95 %: its interval over n units of "
    "each run, such as edits or labels. Units that are in both runs, (n), count as pairs; where "
    "only some are, a further row has these alone. No interval: no table has a row per unit."
)
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


def compare_runs(*runs: SavedRun) -> Results:
    """Compare runs of one study, as `runs_table` does, or two by the differences of all numbers.

    These are two that do not differ by a seed alone. The table ``differing`` then has what differs
    in LM, settings and versions, ``numbers`` the numbers of the headline tables, with differences,
    standard errors and 95 % intervals, and ``values`` those of ``results.json``. Then comes each
    table that both runs have, joined by the columns that identify its rows; units of other
    relations are others. The figure shows the differences that have an interval.

    Raises ReportError if one run is named twice, runs are of several studies, or they have no
    number in common.
    """
    first, *_, last = runs
    folders = [run.folder.resolve() for run in runs]
    for i, run in enumerate(runs):
        if folders[i] in folders[:i]:
            raise ReportError(f"{run.folder} is named twice. Name two or more different runs.")
        if run.study != first.study:
            studies = " and ".join(
                f"{each.folder} one of {each.study[:50]}" for each in (first, run)
            )
            raise ReportError(f"the runs are of two studies, {studies}. Name runs of one study.")
    settings, seeds = settings_and_seeds(runs)
    if len(runs) != 2 or (seeds and settings.empty):
        return runs_table(runs, f"{pages.study_title(first.study)}: {len(runs)} runs")
    tables, others = _tables(first), _tables(last)
    pairs = [(table, others[name]) for name, table in tables.items() if name in others]
    relations = [str(run.values.get("relation", "")) for run in runs]
    note = _NOTE
    if relations[0] != relations[1]:
        note += f" The runs are of two relations, {' and '.join(relations)}: no units are pairs."
    seen: set[Hashable] = set()
    numbers = [row for pair in pairs if pair[0].headline for row in _numbers(pair, pairs, seen)]
    values = list(_numbers((values_table(first), values_table(last)), pairs, set()))
    joined = [table for table in map(_join, pairs) if table is not None]
    if not any((numbers, values, joined)):
        raise ReportError(f"{first.folder} and {last.folder} have no number in common.")
    names = pages.run_names(runs)
    minus = f"{names[1]} minus {names[0]}"
    if max(map(len, names)) > _MAX_NAME:  # the first table has the folders
        names = list(_SIDES)
        minus = "the second run minus the first"
    title = f"{pages.study_title(first.study)}: {minus}"
    headings = dict(zip(_SIDES, names, strict=True))
    differences = ((key, *map(str, cells)) for key, cells in differing(runs).items())
    about = "differing", differences, ("what", *_SIDES), title, "", True
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
    drawn = shown[1 if numbers else 2]
    caption, options = f"{title}, with 95 % intervals", {"title": title}
    figure = Figure("comparison", caption, differences_figure, [drawn], options)
    return Results(
        "comparison",
        tables=[*shown, *joined],
        figures=[figure] if drawn.frame["low"].notna().any() else (),
        verdict=list(islice(_verdict(numbers or values), MAX_SENTENCES)),
    )


def _verdict(numbers: Sequence[ComparedNumber]) -> Iterator[str]:
    """Yield the differences that are beyond chance, or that there are none."""
    known = [row for row in numbers if row.low is not None and row.high is not None]
    apart = [row for row in known if (row.low or 0.0) > 0 or (row.high or 0.0) < 0]
    for row in apart:
        cells = (row.first, row.second, row.low, row.high)
        first, second, low, high = (show(value, row.format) for value in cells)
        if first != second:
            name = " of ".join(filter(None, (row.heading or row.number, row.row)))
            interval = f"95 % of the difference: {low} to {high}"
            yield f"{name}: {first} in the first run, {second} in the second ({interval})."
    if known and not apart:
        yield "No number differs by more than chance: every 95 % interval holds 0."


def _tables(run: SavedRun) -> dict[str, Table]:
    """Return a run's tables by name; an edit of another relation is another unit."""
    tables = {}
    for table in run.tables:
        if table.unit and "relation" in run.values and "relation" not in table.keys:
            frame = table.frame.assign(relation=str(run.values["relation"]))
            table = replace(table, frame=frame, unit=(*table.unit, "relation"))
        tables[table.name] = table
    return tables


def _side_by_side(pair: _Pair) -> tuple[list[str], DataFrame]:
    """Return the columns that identify rows, by which the frame is indexed, and the others."""
    keys = row_keys(pair)
    frames = [table.frame.drop_duplicates(keys or None) for table in pair]
    frames = [frame.set_index(keys) if keys else frame for frame in frames]
    return keys, concat(frames, axis=1, keys=_SIDES, sort=False)


def _numbers(pair: _Pair, pairs: Sequence[_Pair], seen: set[Hashable]) -> Iterator[ComparedNumber]:
    """Yield the numbers of a table, with errors by units of all `pairs`.

    Means that are among those `seen` are left out, and the others added to them.
    """
    table = pair[0]
    keys, both = _side_by_side(pair)
    for number, heading in zip(table.keys, table.titles, strict=True):
        form = table.formats.get(number)
        if not form or number in keys or not are_numbers([both[side] for side in _SIDES], number):
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
    numbers = [key for key in rest if are_numbers([both[side] for side in _SIDES], key)]
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


def readable(table: Table, n: int = _MAX_PAGE_ROWS) -> Table:
    """Return the first n rows of a table, or of each number, with numbers in their own formats."""
    if "format" not in table.keys:
        return with_deviations(table).first(max(n, _MAX_PAGE_ROWS), f"tables/{table.name}.csv")
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
