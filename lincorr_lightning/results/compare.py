"""Finished runs of one study as a table: numbers by settings, or of two runs with differences."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml
from pandas import Categorical, DataFrame, Index, concat
from pandas.api.types import is_bool_dtype, is_float_dtype, is_numeric_dtype

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import load_yaml
from lincorr_lightning.results.figures import differences_figure, points_figure
from lincorr_lightning.results.results import MAX_SENTENCES, SHARED_KEYS, Figure, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun
from lincorr_lightning.results.table import Mean, Table, short_name, show, study_title

_LM = "lm.name_or_path"
_SEED = re.compile(r"(.*\.)?(\w+_)?seed(_everything)?")
# In these, runs of the same numbers may differ.
_INCIDENTAL = re.compile(
    rf"folder|name|ckpt_path|results\..*|settings\.{_LM}|"
    r"trainer\.(default_root_dir|enable_\w+|log_every_n_steps|(logger|profiler).*)"
)
_STD = "_deviation"
_MAX_PAGE_ROWS = 100
_SIDES = ("first", "second")
_COLUMNS = (
    *("table", "row", "number", *_SIDES, "difference", "error", "low", "high", "units"),
    *("n_first", "n_second", "n_both", "heading", "format"),
)
_NOTE = (
    "Difference: second minus first; of percentages, in points. 95 %: its interval over n units of "
    "each run, such as edits or labels. Units that are in both runs, (n), count as pairs. No "
    "interval: no table has a row per unit."
)
_FLOATS = npt.NDArray[np.float64]


def compare_runs(*runs: SavedRun) -> Results:
    """Compare runs of one study by the settings in which they differ.

    The table ``comparison`` has a row per run, or per runs that differ by a seed alone, with mean
    and deviation, for each row of the study's first headline table that all runs have. Two runs
    that differ by more have the table ``differing``, what differs in LM, settings and versions, and
    ``numbers``, those of the headline tables with differences, standard errors and 95 % intervals.

    Raises ReportError if one run is named twice, runs are of several studies, or they have no
    number in common.
    """
    first = runs[0]
    folders = [run.folder.resolve() for run in runs]
    for i, run in enumerate(runs):
        if folders[i] in folders[:i]:
            raise ReportError(f"{run.folder} is named twice. Name two or more different runs.")
        if run.study != first.study:
            studies = " and ".join(
                f"{each.folder} one of {each.study[:50]}" for each in (first, run)
            )
            raise ReportError(f"the runs are of two studies, {studies}. Name runs of one study.")
    settings, seeds = _settings_and_seeds(runs)
    title = study_title(first.study)
    if len(runs) == 2 and not (seeds and settings.empty):
        return _differences(runs, f"{title}: the second run minus the first")
    return runs_table(runs, f"{title}: {len(runs)} runs")


# -- what runs have in common, and in what they differ --


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested values by their keys, joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def own_values(run: SavedRun) -> dict[str, Any]:
    """Return the values of ``results.json`` that not all studies have, by keys with dots."""
    return flatten({key: value for key, value in run.values.items() if key not in SHARED_KEYS})


def _differing(runs: Sequence[SavedRun]) -> DataFrame:
    """Return in what runs differ: folder, config, LM, versions and settings, a row per run."""
    flat = []
    for run in runs:
        try:
            config = dict(load_yaml(run.config) or {})
        except (yaml.YAMLError, TypeError, ValueError) as error:
            raise ReportError(f"{run.folder / CONFIG_FILE} is no valid config.") from error
        own = {"lm": run.lm, "versions": run.values["versions"], "settings": run.settings}
        flat.append(flatten({"folder": str(run.folder), **config, "model": {}, "data": {}, **own}))
    keys = dict.fromkeys(key for each in flat for key in each)
    columns = {key: [_plain(each.get(key)) for each in flat] for key in keys}
    different = {key: cells for key, cells in columns.items() if len({*map(str, cells)}) > 1}
    return DataFrame(different, index=range(len(runs)), dtype=object)


def _plain(value: Any) -> Any:
    """Return a value, a text without halves of characters, which pandas refuses."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _settings_and_seeds(runs: Sequence[SavedRun]) -> tuple[DataFrame, list[str]]:
    """Return the settings in which runs differ, a row per run, and the names of the seeds."""
    frame = _differing(runs)
    frame = frame[[key for key in frame if not _INCIDENTAL.fullmatch(key)]]
    frame = frame.map(lambda x: x if type(x) in (int, float, str) else str(x))
    kept = [key for key in frame if key == _LM or not key.startswith("lm.")]
    for key in frame.columns.difference(kept, sort=False):
        # Another LM of the same name, such as in a folder that was written again.
        if len(frame[[*kept, key]].drop_duplicates()) > max(len(frame[kept].drop_duplicates()), 1):
            kept.append(key)
    seeds = [key for key in kept if _SEED.fullmatch(key)]
    frame = frame[[key for key in kept if key not in seeds]]
    if _LM in frame and frame[_LM].map(short_name).nunique() == frame[_LM].nunique():
        frame[_LM] = frame[_LM].map(short_name)
    return frame, seeds


class _Part(NamedTuple):
    """A table that all runs have."""

    table: Table  # of the first run
    keys: list[str]  # columns that identify a row; none if each run has one row
    numbers: list[str]
    rows: DataFrame  # of all runs; the column ``run`` numbers these


def _parts(runs: Sequence[SavedRun]) -> Iterator[_Part]:
    """Yield the headline tables with numbers, and last the numbers of ``results.json``."""
    by_name = [{table.name: table for table in run.tables} for run in runs]
    groups = [
        [tables[table.name] for tables in by_name]
        for table in runs[0].tables
        if table.headline and all(table.name in tables for tables in by_name)
    ]
    for tables in [*groups, [*map(_values_table, runs)]]:
        first = tables[0]
        keys = _row_keys(tables) if max(map(len, tables)) > 1 else []
        frames = (table.frame.drop_duplicates(keys or None) for table in tables)
        frames = (frame.assign(run=i) for i, frame in enumerate(frames))
        rows = concat(frames, join="inner", ignore_index=True)
        known = {*rows.select_dtypes("number").dropna(axis=1, how="all")} - {*keys, "run"}
        numbers = [key for key in first.keys if first.formats.get(key) and key in known]
        if numbers:
            yield _Part(first, keys, numbers, rows)


def _values_table(run: SavedRun) -> Table:
    values = own_values(run).items()
    numbers = {key: float(value) for key, value in values if type(value) in (int, float)}
    return Table("values", DataFrame([numbers]), formats=dict.fromkeys(numbers, ".4g"))


def _row_keys(tables: Sequence[Table]) -> list[str]:
    """Return texts, then as many numbers without a format as it takes to tell rows apart."""
    first = tables[0]
    shared = [key for key in first.keys if all(key in table.keys for table in tables)]
    kinds = first.frame.dtypes
    free = [key for key in shared if not first.formats.get(key)]
    free.sort(key=lambda key: (is_numeric_dtype(kinds[key]), is_float_dtype(kinds[key])))
    # A table of numbers alone, such as one by step, begins with what identifies a row.
    candidates = free or shared[:1]
    n = 1
    while n < len(candidates) and any(t.frame.duplicated(candidates[:n]).any() for t in tables):
        n += 1
    return [key for key in first.keys if key in candidates[:n]]


def _common_part(runs: Sequence[SavedRun]) -> _Part:
    """Return the first table with rows that all runs have, and these; names of rows come first."""
    parts = sorted(_parts(runs), key=lambda part: is_numeric_dtype(part.table.frame.dtypes.iloc[0]))
    for part in parts:
        rows = part.rows
        if part.keys:
            rows = rows[rows.groupby(part.keys)["run"].transform("size") == len(runs)]
        if len(rows):
            return part._replace(rows=rows)
    raise _nothing_in_common(runs)


def _nothing_in_common(runs: Sequence[SavedRun]) -> ReportError:
    names = f"{runs[0].folder} and {runs[-1].folder}"
    return ReportError(f"{names} have no number in common. Name runs of the same pairs.")


# -- two runs: differences --


def _differences(runs: Sequence[SavedRun], title: str) -> Results:
    """Return the comparison of two runs by the differences of their numbers."""
    parts = list(_parts(runs))
    rows = list(_compared_numbers(parts, list(_tables_of_units(*runs))))
    # Of results.json, those with an error that no headline table has.
    rows = [row for row in rows if row["table"] != "values" or row["units"]] or rows
    if all(np.isnan(row["difference"]) for row in rows):
        raise _nothing_in_common(runs)
    differences = [(key, *map(str, cells)) for key, cells in _differing(runs).items()]
    formats = dict.fromkeys((*_SIDES, "difference", "error", "low", "high"), ".4g")
    numbers = Table.of("numbers", rows, _COLUMNS, "Numbers", _NOTE, True, formats=formats)
    caption = f"{title}, with 95 % intervals"
    return Results(
        "comparison",
        tables=[Table.of("differing", differences, ("what", *_SIDES), title, "", True), numbers],
        figures=[Figure("comparison", caption, differences_figure, [numbers], {"title": title})],
        verdict=list(islice(_sentences_of_differences(numbers.frame), MAX_SENTENCES)),
    )


def _sentences_of_differences(frame: DataFrame) -> Iterator[str]:
    """Yield the differences that are beyond chance, or that there are none."""
    known = frame.dropna(subset=["low", "high"])
    apart = known[(known["low"] > 0) | (known["high"] < 0)]
    for row in apart.itertuples():
        cells = (row.first, row.second, row.low, row.high)
        first, second, low, high = (show(value, row.format) for value in cells)
        if first != second:
            name = " of ".join(filter(None, (row.heading or row.number, row.row)))
            interval = f"95 % of the difference: {low} to {high}"
            yield f"{name}: {first} in the first run, {second} in the second ({interval})."
    if len(known) and apart.empty:
        yield "No number differs by more than chance: every 95 % interval holds 0."


def _tables_of_units(first: SavedRun, second: SavedRun) -> Iterator[Table]:
    """Yield the tables with units, of both runs as one; an edit of another relation is another."""
    others = {table.name: table for table in second.tables}
    for table in first.tables:
        other = others.get(table.name)
        if table.unit and other is not None and other.unit == table.unit:
            frames = [
                each.frame.assign(_run=i, _relation=str(run.values.get("relation")))
                for i, (each, run) in enumerate([(table, first), (other, second)])
            ]
            yield replace(
                table,
                frame=concat(frames, ignore_index=True),
                unit=[*table.unit, "_relation"],
                means={
                    key: mean for key, mean in table.means.items() if mean == other.means.get(key)
                },
            )


def _compared_numbers(parts: Sequence[_Part], units: Sequence[Table]) -> Iterator[dict[str, Any]]:
    """Yield each number of two runs with its difference, and with its error by tables of units."""
    seen: set[tuple[Any, ...]] = set()
    for table, keys, numbers, rows in parts:
        sides = [side.drop(columns="run") for _, side in rows.groupby("run")]
        sides = [side.set_index(keys) if keys else side.reset_index(drop=True) for side in sides]
        both = concat(sides, axis=1, keys=_SIDES, sort=False)
        headings = dict(zip(table.keys, table.titles, strict=True))
        for number in numbers:
            values = both[[(side, number) for side in _SIDES]].to_numpy(float, na_value=np.nan)
            for at, (first, second) in zip(both.index, values, strict=True):
                row = dict(zip(keys, at if len(keys) > 1 else (at,), strict=False))
                texts = (x if isinstance(x, str) else f"{key} {x}" for key, x in row.items())
                plain = {
                    "table": table.name,
                    "row": ", ".join(texts),
                    "number": number,
                    "first": first,
                    "second": second,
                    "difference": second - first,
                    "units": "",
                    "heading": headings[number],
                    "format": table.formats[number],
                }
                mean_of_rows, error = _error(plain, row, units)
                if mean_of_rows not in seen:
                    yield plain | error
                seen |= {mean_of_rows} - {()}


def _error(
    plain: Mapping[str, Any], row: Mapping[str, Any], tables: Sequence[Table]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a number's error over the units of the first table that it is a mean over.

    And of which rows that is; both empty if there is no such table.
    """
    from lincorr_lightning.results.differences import difference_of_means  # and SciPy

    # Of a row `before`, as of the key ``before.generalized`` of results.json.
    names = [f"{value}_{plain['number']}" for value in row.values()]
    for name, table in product([*names, plain["number"].replace(".", "_")], tables):
        if (mean := table.means.get(name)) is None:
            continue
        by = {key: row[key] for key in row if key in table.keys and key not in table.unit}
        sums, counts = _sums_of_units(table, mean, by)
        n = (counts > 0).sum(0)
        # A number may be of more than the table holds, such as of several seeds.
        means = sums.sum(0) / np.maximum(counts.sum(0), 1)
        if n.min() < 2 or not np.allclose(means, (plain["first"], plain["second"]), 1e-6, 1e-9):
            continue
        units = f"{table.name} by {mean.per}" if mean.per else table.name
        is_share = mean.equals is not None or is_bool_dtype(table.frame[mean.column])
        return (name, units, *by.items()), {
            "units": units,
            **difference_of_means(sums, counts, is_share and not mean.per)._asdict(),
            **dict(zip(("n_first", "n_second"), map(int, n), strict=True)),
            "n_both": int((counts > 0).all(1).sum()),
        }
    return (), {}


def _sums_of_units(table: Table, mean: Mean, by: Mapping[str, Any]) -> tuple[_FLOATS, _FLOATS]:
    """Return sums and counts of each unit in two runs, ``(n_units, 2)``, where columns are `by`."""
    frame = table.frame
    for key, value in {**by, **mean.where}.items():
        frame = frame[frame[key] == value]
    values = frame[mean.column] if mean.equals is None else frame[mean.column] == mean.equals
    names = [*([mean.per] if mean.per else table.unit), "_run"]
    units = values.astype("float64").dropna().groupby([frame[name] for name in names])
    both = units.agg(["sum", "count"]).unstack("_run", fill_value=0)
    sums, counts = (both[stat].reindex(columns=(0, 1), fill_value=0) for stat in ("sum", "count"))
    if mean.per:  # each value of it counts once
        sums, counts = (sums / counts).fillna(0), counts.clip(upper=1)
    return sums.to_numpy(float), counts.to_numpy(float)


# -- more runs: a row for each setting --


def runs_table(runs: Sequence[SavedRun], title: str = "Runs") -> Results:
    """Return the comparison of runs by the settings in which they differ, see `compare_runs`."""
    settings, seeds = _settings_and_seeds(runs)
    table, keys, numbers, rows = _common_part(runs)
    by = [*keys, *settings]
    names = [_plain(run.folder.name) for run in runs]
    names = names if len({*names}) == len(runs) else [_plain(str(run.folder)) for run in runs]
    rows = rows.join(settings, on="run").assign(runs=[names[i] for i in rows["run"]])
    for key in by:  # numbers ascending, then texts in their order
        cells = sorted(rows[key], key=lambda x: (1, 0) if isinstance(x, str) else (0, x))
        order = list(dict.fromkeys(map(_text, cells)))
        rows[key] = Categorical(rows[key].map(_text), order, ordered=True)
    rows = rows.astype(dict.fromkeys(numbers, float))
    groups = rows.groupby(by or (lambda row: 0), observed=True)
    frame = groups[numbers].agg(["mean", "std"])
    frame.columns = Index([key + _STD * (stat == "std") for key, stat in frame.columns])
    frame.insert(0, "n", groups.size())
    frame = frame.assign(runs=groups["runs"].agg(", ".join)).reset_index(drop=not by)
    frame = frame.astype(dict.fromkeys(by, object))
    of_seeds = " and ".join(key.removeprefix("settings.") for key in seeds)
    note = f"Mean ± standard deviation over n runs that differ by {of_seeds} alone."
    if frame["n"].max() == 1:
        frame, note = frame.drop(columns=["n", *(key + _STD for key in numbers)]), "A row per run."
    titles = dict(zip(table.keys, table.titles, strict=True))
    headings = titles | {key: key.removeprefix("settings.") for key in settings} | {_LM: "LM"}
    formats = {key: re.sub(",?d$|^,$", ".4g", table.formats[key]) for key in numbers}
    for key in numbers:
        headings[key + _STD], formats[key + _STD] = "deviation", formats[key].lstrip("+")
    shown = Table("comparison", frame, title, note, True, headings, formats | {"n": "d"})
    # The setting, or the rows of the study's table, of most values; others make lines of their own.
    x = max(by, key=lambda key: frame[key].nunique(), default="n")
    options = {
        "title": title,
        "x": x,
        "label": headings.get(x, x),
        "lines": {key: f"{headings[key]} " * (key in settings) for key in by if key != x},
        "numbers": {key: headings[key] for key in numbers},
    }
    figure = Figure("comparison", f"{title}, by what differs", points_figure, [shown], options)
    verdict = [_sentence_of_settings(shown, keys, list(settings), numbers[0])]
    return Results("comparison", tables=[shown], figures=[figure], verdict=verdict)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _sentence_of_settings(
    table: Table, keys: Sequence[str], settings: Sequence[str], number: str
) -> str:
    """Return how far settings move a number, in the row where they do so most, beside seeds."""
    form, std_form = table.formats[number], table.formats[number + _STD]
    frame = table.frame.dropna(subset=[number])
    groups = frame.groupby([*keys] or (lambda row: 0), sort=False)[number]
    most = (groups.transform("max") - groups.transform("min")).idxmax()
    rows = frame[(frame[[*keys]] == frame.loc[most, [*keys]]).all(axis=1)].sort_values(number)
    low, high = rows.iloc[0], rows.iloc[-1]
    name = " of ".join([table.headings[number], *(str(low[key]) for key in keys)])
    std = (rows.get(number + _STD, rows[number] * np.nan) ** 2).mean() ** 0.5
    spread = "of one seed each" if np.isnan(std) else f"deviation over seeds {show(std, std_form)}"
    if not settings:
        return f"{name}: {show(low[number], form)}, {spread}."
    ends = ", ".join(
        f"{show(row[number], form)} at {', '.join(str(row[key]) for key in settings)}"
        for row in (low, high)
    )
    return f"{name} by {', '.join(table.headings[key] for key in settings)}: {ends}; {spread}."


# -- as it is read --


def readable(table: Table, n: int = _MAX_PAGE_ROWS) -> Table:
    """Return the first n rows of a table, or of each number, with numbers in their own formats."""
    if "format" not in table.keys:
        return _with_deviations(table).first(max(n, _MAX_PAGE_ROWS), f"tables/{table.name}.csv")
    both = table.frame.dropna(subset=["difference"])
    both = both[(both["difference"] != 0) | ~both["format"].str.endswith("d")]  # equal counts
    first = both.groupby(["table", "number"], sort=False).head(n)
    rows = []
    for row in first.itertuples():
        numbers = [show(number, row.format) for number in (row.first, row.second)]
        low, high = (show(end, row.format) for end in (row.low, row.high))
        units = f"{row.n_first:g}, {row.n_second:g} ({row.n_both:g})" if row.units else ""
        difference = show(row.difference, f"+{row.format.lstrip('+')}")
        interval = f"{low} to {high}" if row.units else ""
        rows.append([row.row, row.heading, *numbers, difference, interval, units])
    frame = DataFrame(rows, columns=["row", "number", *_SIDES, "difference", "95 %", "n"])
    note = f" The first {n} rows of each number." if len(first) < len(both) else ""
    return replace(table, frame=frame, note=table.note + note)


def _with_deviations(table: Table) -> Table:
    """Return a table of runs as it is read, with each deviation behind its mean."""
    frame, texts = table.frame.copy(), DataFrame(table.texts(), columns=table.frame.columns)
    for key in [key for key in frame if key + _STD in frame]:
        frame[key] = texts[key] + (" ± " + texts[key + _STD]).where(
            frame.pop(key + _STD).notna(), ""
        )
    return replace(table, frame=frame)
