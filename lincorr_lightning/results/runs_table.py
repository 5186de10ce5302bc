"""Finished runs of one study as a table: their numbers by the settings in which they differ."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import yaml
from pandas import DataFrame, Series, concat
from pandas.api.types import is_bool_dtype, is_float_dtype, is_numeric_dtype

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import load_yaml
from lincorr_lightning.results.figures import runs_figure
from lincorr_lightning.results.results import MAX_SENTENCES, SHARED_KEYS, Figure, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun
from lincorr_lightning.results.table import Table, short_name, show

_DEVIATION = "_deviation"
_ALL = "_all"
_LM = "lm.name_or_path"
_SEED = re.compile(r"(.*\.)?(\w+_)?seed(_everything)?")
# In these, runs of the same numbers may differ.
_INCIDENTAL = re.compile(
    rf"folder|name|ckpt_path|results\..*|settings\.{_LM}|"
    r"trainer\.(default_root_dir|enable_\w+|log_every_n_steps|(logger|profiler).*)"
)


def flatten(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return nested values by their keys, joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def own_values(run: SavedRun) -> dict[str, Any]:
    """Return the keys of ``results.json`` that not all studies have."""
    return {key: value for key, value in run.values.items() if key not in SHARED_KEYS}


def values_table(run: SavedRun) -> Table:
    """Return the numbers of ``results.json`` as a table of one row."""
    flat = flatten(own_values(run))
    numbers = {key: float(value) for key, value in flat.items() if type(value) in (int, float)}
    return Table("values", DataFrame([numbers]), formats=dict.fromkeys(numbers, ".4g"))


def differing(runs: Sequence[SavedRun]) -> DataFrame:
    """Return in what runs differ: folder, LM, versions, config and settings, a row per run."""
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


def is_number(both: DataFrame, key: str, sides: Sequence[Any]) -> bool:
    """Return whether a column that is `side_by_side` holds numbers in each table."""
    kinds = [both[side, key].dtype for side in sides if (side, key) in both]
    return len(kinds) == len(sides) and all(
        is_numeric_dtype(kind) and not is_bool_dtype(kind) for kind in kinds
    )


def side_by_side(tables: Sequence[Table], sides: Sequence[Any]) -> tuple[list[str], DataFrame]:
    """Return the columns that identify rows of tables, and the other columns side by side.

    The frame is indexed by the former: units, then texts, then as many numbers as it takes to tell
    the rows apart. The upper level of its columns is the side.
    """
    first = tables[0]
    shared = [key for key in first.keys if all(key in table.keys for table in tables)]
    unit = [key for key in first.unit if key in shared]
    free = [key for key in shared if key not in unit and not first.formats.get(key)]
    kinds = first.frame.dtypes
    free.sort(key=lambda key: (is_numeric_dtype(kinds[key]), is_float_dtype(kinds[key])))
    # A table of numbers alone, such as one by step, has its rows' numbers first.
    candidates = [*unit, *free] or (shared[:1] if max(map(len, tables)) > 1 else [])
    n = max(len(unit), 1)
    while n < len(candidates) and any(t.frame.duplicated(candidates[:n]).any() for t in tables):
        n += 1
    keys = [key for key in first.keys if key in candidates[:n]]
    frames = [table.frame.drop_duplicates(keys or None) for table in tables]
    frames = [frame.set_index(keys) if keys else frame for frame in frames]
    return keys, concat(frames, axis=1, keys=sides, sort=False)


def differ_by_seed_alone(runs: Sequence[SavedRun]) -> bool:
    """Return whether seeds, at least one of them, are all in which runs differ."""
    settings, seeds = _settings(runs)
    return bool(seeds) and settings.empty


def _settings(runs: Sequence[SavedRun]) -> tuple[DataFrame, list[str]]:
    """Return the settings in which runs differ, a row per run, and the names of the seeds."""
    frame = differing(runs)
    frame = frame[[key for key in frame if not _INCIDENTAL.fullmatch(key)]]
    frame = frame.map(lambda x: x if isinstance(x, (int, float, str)) else _text(x))
    of_lm = [key for key in frame if key.startswith("lm.") and key != _LM]
    kept = [key for key in frame if key not in of_lm]
    for key in of_lm:  # two LMs of one name, such as a folder that was written again
        groups = frame.groupby(kept, dropna=False)[key] if kept else [((), frame[key])]
        if any(values.nunique(dropna=False) > 1 for _, values in groups):
            kept.append(key)
    seeds = [key for key in kept if _SEED.fullmatch(key)]
    frame = frame[[key for key in kept if key not in seeds]]
    if _LM in frame and frame[_LM].map(short_name).nunique() == frame[_LM].nunique():
        frame = frame.assign(**{_LM: frame[_LM].map(short_name)})
    return frame.reset_index(drop=True), seeds


def _chosen(runs: Sequence[SavedRun]) -> tuple[Table, list[str], list[str], DataFrame]:
    """Return the table whose numbers stand for a run, its keys and numbers, and all runs' cells.

    That is the first headline table with numbers, in rows with names before those by step; where
    runs have none in common, the numbers of ``results.json``.
    """
    headlines = [table for table in runs[0].tables if table.headline and table.keys]
    headlines.sort(key=lambda table: is_numeric_dtype(table.frame.dtypes.iloc[0]))
    candidates = [[t for run in runs for t in run.tables if t.name == h.name] for h in headlines]
    sides = range(len(runs))
    for present in [*candidates, list(map(values_table, runs))]:
        if len(present) != len(runs):
            continue
        first = present[0]
        if all(len(table) == 1 for table in present):  # its name may differ as a setting does
            keys: list[str] = []
            both = concat([table.frame for table in present], axis=1, keys=sides)
        else:
            keys, both = side_by_side(present, sides)
            index = [table.frame.set_index(keys).index for table in present]
            both = both[np.logical_and.reduce([both.index.isin(each) for each in index])]
        numbers = [
            key
            for key in first.keys
            if first.formats.get(key) and key not in keys and is_number(both, key, sides)
        ]
        if numbers and len(both):
            return first, keys, numbers, both
    raise ReportError(
        f"{runs[0].folder} and {runs[-1].folder} have no number in common. Name runs of the same "
        "pairs or relations."
    )


def runs_table(runs: Sequence[SavedRun], title: str = "Runs") -> Results:
    """Return the comparison of runs of one study: a row per run, or per runs of several seeds.

    Columns are the settings in which they differ and the numbers of the study's first headline
    table, in a row for each of its rows that all runs have. Runs that differ by a seed alone are
    one row, with mean and deviation. Raises ReportError if they have no number in common.
    """
    settings, seeds = _settings(runs)
    table, keys, numbers, both = _chosen(runs)
    names = [_plain(run.folder.name) for run in runs]
    if len(set(names)) < len(names):
        names = [_plain(str(run.folder)) for run in runs]
    parts = []
    for i, name in enumerate(names):
        part = both[i][numbers].astype("float64").reset_index(drop=not keys)
        parts.append(part.assign(**{key: settings[key][i] for key in settings}, runs=name))
    every = concat(parts, ignore_index=True).assign(**{_ALL: ""})
    by = [*keys, *settings] or [_ALL]
    order = {key: {value: i for i, value in enumerate(_ordered(every[key]))} for key in by}
    every = every.sort_values(by, key=lambda cells: cells.map(order[cells.name]), kind="stable")
    groups = every.groupby(by, sort=False, dropna=False)
    frame = groups[numbers].mean()
    n = groups.size()
    has_seeds = bool((n > 1).any())
    if has_seeds:
        deviations = groups[numbers].std().add_suffix(_DEVIATION)
        frame = concat([frame, deviations], axis=1)
        frame = frame[[name for key in numbers for name in (key, key + _DEVIATION)]]
        frame.insert(0, "n", n)
    frame = frame.assign(runs=groups["runs"].agg(", ".join)).reset_index()
    frame = frame.drop(columns=_ALL, errors="ignore")
    for key in settings:
        if not is_numeric_dtype(frame[key].infer_objects()):
            frame[key] = list(map(_text, frame[key]))
    titles = dict(zip(table.keys, table.titles, strict=True))
    formats = {
        key: re.sub(",?d$|^,$", ".1f", table.formats[key]) if has_seeds else table.formats[key]
        for key in numbers
    }
    headings = {key: key.removeprefix("settings.") for key in settings} | {_LM: "LM"} | titles
    for key in numbers if has_seeds else ():
        headings[key + _DEVIATION] = f"{titles[key]}, deviation"
        formats[key + _DEVIATION] = formats[key].lstrip("+")
    names = [key.removeprefix("settings.") for key in seeds]
    note = f"Mean ± standard deviation over n runs that differ by {' and '.join(names)} alone."
    if not has_seeds:
        note = "A row for each run."
    shown = Table(
        "comparison", frame.infer_objects(), title, note, True, headings, formats | {"n": "d"}
    )
    labels = {key: headings[key] if key in settings else "" for key in by if key != _ALL}
    options = {
        "title": title,
        "labels": labels,
        "numbers": {key: [titles[key], formats[key]] for key in numbers},
    }
    figure = Figure("comparison", f"{title}, by what differs", runs_figure, [shown], options)
    verdict = islice(_verdict(shown, keys, list(settings), numbers), MAX_SENTENCES)
    return Results("comparison", tables=[shown], figures=[figure], verdict=list(verdict))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _ordered(values: "Series[Any]") -> list[Any]:
    """Return different values: numbers ascending, then texts in their order."""
    return sorted(values.drop_duplicates(), key=lambda x: (1, 0) if isinstance(x, str) else (0, x))


def with_deviations(table: Table) -> Table:
    """Return a table of runs as it is read, with each deviation behind its mean."""
    frame = table.frame.copy()
    for key in [key for key in frame if f"{key}{_DEVIATION}" in frame]:
        deviations = frame.pop(f"{key}{_DEVIATION}")
        form = table.formats[key]
        cells = zip(frame[key], deviations, strict=True)
        frame[key] = [
            show(mean, form) + (f" ± {show(std, form.lstrip('+'))}" if std == std else "")
            for mean, std in cells
        ]
    return replace(table, frame=frame)


def _verdict(
    table: Table, keys: Sequence[str], settings: Sequence[str], numbers: Sequence[str]
) -> Iterator[str]:
    """Yield how each setting moves the first number, and others by more than seeds do.

    In what is compared, the other settings and the row of the study's table are the same.
    """
    frame, titles = table.frame.assign(n=table.frame.get("n", 1)), table.headings
    moved: list[tuple[float, str]] = []
    for number in numbers:
        form = table.formats[number].lstrip("+")
        known = frame.dropna(subset=[number])
        for row in () if settings else known.to_dict("records"):
            cells = (show(row[x], form) for x in (number, number + _DEVIATION))
            name = " of ".join([titles[number], *(str(row[key]) for key in keys)])
            yield f"{name}: {' ± '.join(cells)} over {row['n']} seeds."
        for setting in settings:
            fixed = [key for key in [*keys, *settings] if key != setting]
            groups = [rows for _, rows in known.groupby(fixed, dropna=False)] if fixed else [known]
            every = [known.merge(rows[keys].head(1)) if keys else known for rows in groups]
            effects = map(partial(_effect, number), filter(len, groups), every)
            most = max(effects, key=lambda effect: effect[:2], default=None)
            if most is None or not most[1]:  # also where no two rows differ in this setting alone
                continue
            times, difference, deviation, low, high = most
            if number != numbers[0] and times <= 1:
                continue
            name = " of ".join([titles[number], *(str(low[key]) for key in keys)])
            ends = (f"{show(row[number], form)} at {row[setting]}" for row in (low, high))
            others = (f"{titles[key]} {low[key]}" for key in settings if key != setting)
            text = f"{name} by {titles[setting]}: {', '.join([*ends, *others])}"
            if times > 1:
                ratio = difference / deviation if deviation else math.inf
                text += f", {ratio:.0f} times its deviation over seeds ({show(deviation, form)})."
            elif deviation == deviation:
                text += f", no more than seeds move it, whose deviation is {show(deviation, form)}."
            else:
                text += "; with one seed each, nobody knows how far a seed moves it."
            moved.append((math.inf if number == numbers[0] else times, text))
    yield from (text for _, text in sorted(moved, key=lambda each: -each[0]))


def _effect(number: str, rows: DataFrame, every: DataFrame) -> tuple[float, float, float, Any, Any]:
    """Return the largest difference between rows: over that which chance makes, itself, and more.

    Chance is the t-test's, with the deviation over seeds of `every` row and Bonferroni's correction
    for all pairs of rows. Then come that deviation, and the rows with the least and the most.
    """
    from scipy.special import stdtrit  # here: not every report has runs of several seeds

    low, high = (rows.loc[at] for at in (rows[number].idxmin(), rows[number].idxmax()))
    difference, deviation, chance = high[number] - low[number], math.nan, math.nan
    free = every["n"] - 1
    if difference and free.sum():
        deviation = float(
            np.sqrt((free * every[number + _DEVIATION].fillna(0.0) ** 2).sum() / free.sum())
        )
        level = 1 - 0.025 / math.comb(len(rows), 2)
        chance = (
            deviation * float(stdtrit(free.sum(), level)) * (1 / low["n"] + 1 / high["n"]) ** 0.5
        )
    times = 0.0 if chance != chance else difference / chance if chance else math.inf
    return times, difference, deviation, low, high
