"""Finished runs of one study as a table: their numbers by the settings in which they differ."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np
import yaml
from pandas import Categorical, DataFrame, Index, concat
from pandas.api.types import is_bool_dtype, is_float_dtype, is_numeric_dtype

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import load_yaml
from lincorr_lightning.results.figures import points_figure
from lincorr_lightning.results.results import MAX_SENTENCES, SHARED_KEYS, Figure, Results
from lincorr_lightning.results.saved_run import CONFIG_FILE, SavedRun
from lincorr_lightning.results.table import Table, short_name, show

_LM = "lm.name_or_path"
_SEED = re.compile(r"(.*\.)?(\w+_)?seed(_everything)?")
# In these, runs of the same numbers may differ.
_INCIDENTAL = re.compile(
    rf"folder|name|ckpt_path|results\..*|settings\.{_LM}|"
    r"trainer\.(default_root_dir|enable_\w+|log_every_n_steps|(logger|profiler).*)"
)
_STD = "_deviation"


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


def row_keys(tables: Sequence[Table]) -> list[str]:
    """Return the columns that identify a row of tables.

    These are units, then texts, then as many numbers as it takes to tell the rows apart.
    """
    first = tables[0]
    shared = [key for key in first.keys if all(key in table.keys for table in tables)]
    unit = [key for key in first.unit if key in shared]
    free = [key for key in shared if key not in unit and not first.formats.get(key)]
    kinds = first.frame.dtypes
    free.sort(key=lambda key: (is_numeric_dtype(kinds[key]), is_float_dtype(kinds[key])))
    # A table of numbers alone, such as one by step, begins with what identifies a row.
    candidates = [*unit, *free] or (shared[:1] if max(map(len, tables)) > 1 else [])
    n = max(len(unit), 1)
    while n < len(candidates) and any(t.frame.duplicated(candidates[:n]).any() for t in tables):
        n += 1
    return [key for key in first.keys if key in candidates[:n]]


def are_numbers(frames: Sequence[DataFrame], key: str) -> bool:
    """Return whether a column of all frames holds numbers."""
    kinds = [frame[key].dtype for frame in frames if key in frame]
    numbers = [kind for kind in kinds if is_numeric_dtype(kind) and not is_bool_dtype(kind)]
    return len(numbers) == len(frames)


def settings_and_seeds(runs: Sequence[SavedRun]) -> tuple[DataFrame, list[str]]:
    """Return the settings in which runs differ, a row per run, and the names of the seeds."""
    frame = differing(runs)
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


def _numbers(runs: Sequence[SavedRun]) -> tuple[Table, list[str], list[str], DataFrame]:
    """Return the table that stands for a run, the names of its keys and numbers, and all rows.

    That is the first headline table with numbers, those with names of rows first; where runs have
    no numbers in common, those of ``results.json``. Rows are those of all runs.
    """
    headlines = [table for table in runs[0].tables if table.headline and table.keys]
    headlines.sort(key=lambda table: is_numeric_dtype(table.frame.dtypes.iloc[0]))
    for headline in [*headlines, None]:
        name = headline and headline.name
        tables = [table for run in runs for table in run.tables if table.name == name]
        tables = tables if headline else list(map(values_table, runs))
        if len(tables) < len(runs):
            continue
        # The only row of each may have another name, which is then that of a setting.
        keys = row_keys(tables) if max(map(len, tables)) > 1 else []
        frames = [table.frame for table in tables]
        numbers = [key for key in tables[0].keys if tables[0].formats.get(key) and key not in keys]
        numbers = [key for key in numbers if are_numbers(frames, key)]
        parts = (frame[[*keys, *numbers]].drop_duplicates(keys or None) for frame in frames)
        rows = concat([part.assign(run=i) for i, part in enumerate(parts)], ignore_index=True)
        if keys:
            rows = rows[rows.groupby(keys)["run"].transform("size") == len(runs)]
        if numbers and len(rows):
            return tables[0], keys, numbers, rows
    folders = " and ".join(str(run.folder) for run in (runs[0], runs[-1]))
    raise ReportError(f"{folders} have no number in common. Name runs of the same pairs.")


def runs_table(runs: Sequence[SavedRun], title: str = "Runs") -> Results:
    """Return the comparison of runs of one study: a row per run, or per runs of several seeds.

    Columns are the settings in which they differ and the numbers of the study's first headline
    table, in a row for each of its rows that all runs have. Runs that differ by a seed alone are
    one row, with mean and deviation. Raises ReportError if they have no number in common.
    """
    settings, seeds = settings_and_seeds(runs)
    table, keys, numbers, rows = _numbers(runs)
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
    x = max([*settings, *keys], key=lambda key: frame[key].nunique(), default="n")
    lines = [key for key in by if key != x]
    points = [
        (
            str(row[x]),
            ", ".join(f"{headings[k]} {row[k]}" if k in settings else row[k] for k in lines),
            headings[key],
            *(row[key] + side * np.nan_to_num(row.get(key + _STD, 0.0)) for side in (0, -1, 1)),
        )
        for key, row in product(numbers, frame.to_dict("records"))
    ]
    drawn = Table.of("points", points, ("x", "line", "number", "value", "low", "high"), "Points")
    options = {"title": title, "x": headings.get(x, x)}
    figure = Figure("comparison", f"{title}, by what differs", points_figure, [drawn], options)
    verdict = list(islice(_verdict(shown, keys, list(settings), numbers), MAX_SENTENCES))
    return Results("comparison", tables=[shown, drawn], figures=[figure], verdict=verdict)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def with_deviations(table: Table) -> Table:
    """Return a table of runs as it is read, with each deviation behind its mean."""
    frame, texts = table.frame.copy(), DataFrame(table.texts(), columns=table.frame.columns)
    for key in [key for key in frame if key + _STD in frame]:
        frame[key] = texts[key] + (" ± " + texts[key + _STD]).where(
            frame.pop(key + _STD).notna(), ""
        )
    return replace(table, frame=frame)


def _verdict(
    table: Table, keys: Sequence[str], settings: Sequence[str], numbers: Sequence[str]
) -> Iterator[str]:
    """Yield how each setting moves the first number, and others by more than seeds do.

    In what is compared, all else is the same. Seeds may do as much as a t-test allows by their
    deviation, with Bonferroni's correction for all pairs of rows.
    """
    from scipy.special import stdtrit  # here: a report of single runs needs none

    titles, forms = table.headings, table.formats
    frame = table.frame.assign(n=table.frame.get("n", 1))
    moved: list[tuple[float, str]] = []
    for number, setting in product(numbers, settings or [""]):
        fixed = [key for key in [*keys, *settings] if key != setting]
        known, most = frame.dropna(subset=[number]), (0.0, "")
        for _, rows in known.groupby(fixed or (lambda row: 0), sort=False):
            low, high = (rows.loc[at] for at in (rows[number].idxmin(), rows[number].idxmax()))
            difference, free = high[number] - low[number], rows["n"] - 1
            text = " of ".join([titles[number], *(str(low[key]) for key in keys)])
            std = chance = math.nan
            if free.sum():
                std = math.sqrt((free * rows[number + _STD] ** 2).sum() / free.sum())
                level = 1 - 0.025 / max(math.comb(len(rows), 2), 1)
                chance = std * stdtrit(free.sum(), level) * (1 / low["n"] + 1 / high["n"]) ** 0.5
            spread = show(std, forms[number].lstrip("+"))
            if not settings:
                mean = show(low[number], forms[number])
                yield f"{text}: {mean} ± {spread} over {low['n']} seeds."
            elif difference:
                ends = (
                    f"{show(row[number], forms[number])} at {row[setting]}" for row in (low, high)
                )
                others = (f"{titles[key]} {low[key]}" for key in settings if key != setting)
                text += f" by {titles[setting]}: {', '.join([*ends, *others])}"
                if not free.sum():
                    text += "; of one seed each, which may do as much."
                elif difference > chance:
                    ratio = difference / std if std else math.inf
                    text += f", {ratio:.0f} times the deviation over seeds, {spread}."
                else:
                    text += f", no more than seeds do, whose deviation is {spread}."
                most = max(most, (difference / chance if chance > 0 else float(chance == 0), text))
        if most[1] and (number == numbers[0] or most[0] >= 1):
            moved.append((math.inf if number == numbers[0] else most[0], most[1]))
    yield from (text for _, text in sorted(moved, key=lambda each: -each[0]))
