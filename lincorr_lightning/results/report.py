"""The command ``lincorr report``: one page of finished runs, and their tables for papers."""

import argparse
import base64
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import combinations, groupby, product
from operator import add
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup, escape
from pandas import DataFrame, MultiIndex, concat, json_normalize, option_context
from pandas.api.types import is_float_dtype, is_numeric_dtype

from lincorr_lightning.errors import ReportError, listed
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.results.paper import paper_numbers, size_figure
from lincorr_lightning.results.results import OWN_KEYS, Figure
from lincorr_lightning.results.saved_run import PACKAGE, SavedRun
from lincorr_lightning.results.table import Table, clean, escape_markdown, short_name
from lincorr_lightning.version import __version__

PAGE = "report.html"
MAX_FOLDED_ROWS = 100
MAX_ROWS = 30
_MAX_PANELS = 6
_CSS_PIXELS_PER_METER = 96 / 0.0254
_MAX_LATEX_ROWS = 45  # on a page
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "[": "{[}",
        "→": r"$\rightarrow$",
        "−": r"$-$",
        "×": r"$\times$",
        "·": r"$\cdot$",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "≥": r"$\geq$",
        "✓": r"$\checkmark$",
        "✗": r"$\times$",
    }
)
# Where pyarrow is installed, pandas hands it all texts, and it refuses paths that are not UTF-8.
any_text: Callable[[], ContextDecorator] = partial(option_context, "mode.string_storage", "python")


def report(args: Sequence[str]) -> Path:
    """Write a report page as the command line behind ``lincorr report`` says; return its path."""
    parser = argparse.ArgumentParser(
        prog="lincorr report",
        description="Write one self-contained HTML page of finished runs, with their tables as "
        "Markdown and LaTeX.",
    )
    runs = "folders of finished runs, such as runs/linear_probe/version_0"
    parser.add_argument("runs", nargs="+", help=runs)
    output = "folder to write to (default: %(default)s)"
    parser.add_argument("--output", default="report", help=output)
    options = parser.parse_args(args)
    page = write_report(options.runs, options.output)
    tables = sorted(path.name for path in page.parent.glob("*") if path.suffix in (".md", ".tex"))
    sys.stdout.write(f"Page:   {page}\nTables: {page.parent} ({', '.join(tables)})\n")
    return page


@any_text()
def write_report(runs: Sequence[str | Path], output: str | Path = "report") -> Path:
    """Write ``report.html``, and files of tables for each study; return the page's path.

    The folders are those of finished runs, of any studies and LMs. Raises ReportError if one is
    not, or they do not belong on one page, and OutputError if the page cannot be written.
    """
    if not runs:
        raise ReportError("name the folder of a run, as in: lincorr report runs/linear_probe/*")
    saved = list({run.folder.resolve(): run for run in map(SavedRun.read, runs)}.values())
    _check_together(saved)
    # Studies in the order in which they are named, and in each the small LMs first.
    order = list(dict.fromkeys(run.study for run in saved))
    saved.sort(key=lambda run: (order.index(run.study), run.n_parameters or math.inf, run.lm_name))
    numbered = list(enumerate(saved, start=1))
    rows = [
        {
            "run": number,
            "study": run.study,
            "LM": short_name(run.lm_name),
            "parameters": run.size,
            "version": run.version,
            "folder": str(run.folder),
        }
        for number, run in numbered
    ]
    overview = Table.of("runs", rows, (), "Runs", formats={"run": "d", "parameters": ".3g"})
    of_study = groupby(numbered, key=lambda pair: pair[1].study)
    sections = [_section(study, *zip(*runs, strict=True)) for study, runs in of_study]
    title = f"Linear correlation in {', '.join(dict.fromkeys(overview.frame['LM']))}"
    return write_page(output, title, [overview], sections, len(saved))


def _check_together(runs: Sequence[SavedRun]) -> None:
    """Refuse runs of different versions of this package, or of two LMs under one name."""
    first = {run.version: run for run in reversed(runs)}
    if len(first) > 1:
        listed = ", ".join(f"{run.folder} ({version})" for version, run in first.items())
        raise ReportError(
            f"these runs are of different versions of {PACKAGE}: {listed}. Run the older ones "
            "again, or write a page for each version."
        )
    for one, other in combinations(runs, 2):
        a, b = (run.lm.get("fingerprint") or {} for run in (one, other))
        # Weights in another dtype have other bits.
        parts = ["tokenizer", "config", *(["weights"] if a.get("dtype") == b.get("dtype") else ())]
        differ = [part for part in parts if part in a.keys() & b.keys() and a[part] != b[part]]
        if differ and one.lm_name == other.lm_name:
            raise ReportError(
                f"{one.folder} and {other.folder} are of two LMs under one name, {one.lm_name!r}: "
                f"their {' and '.join(differ)} differ (lm.fingerprint in results.json). Give each "
                "LM a folder of its own and run one of them again, or write a page for each."
            )


@dataclass(frozen=True)
class PageRun:
    """A run on a page, with its number there and a title."""

    saved: SavedRun
    number: int
    title: str

    @cached_property
    def tables(self) -> list[Table]:
        """The run's tables, long ones cut short, and its other numbers."""
        tables = []
        for table in self.saved.tables:
            limit = MAX_ROWS if table.headline else MAX_FOLDED_ROWS
            first = table.first(limit, f"{self.saved.folder}/tables/{table.name}.csv")
            tables.append(replace(first, caption=table.caption or table.name))
        values = [
            [key, f"{value:.4g}" if isinstance(value, float) else str(value)]
            for key, value in flatten(self.saved.values).items()
            if isinstance(value, (int, float, str)) and key.split(".")[0] not in OWN_KEYS
        ]
        numbers = Table.of("values", values, ["key", "value"], "Numbers of results.json")
        return [*tables, numbers] if values else tables


@dataclass(frozen=True)
class PageSection:
    """A study on a page: its runs, and tables and figures that compare them."""

    title: str
    name: str
    runs: Sequence[PageRun] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    note: str = ""


def study_title(study: str) -> str:
    """Return the name of a study as a heading."""
    return re.sub(r"\blm\b", "LM", study.replace("_", " ").capitalize())


def _section(study: str, numbers: Sequence[int], runs: Sequence[SavedRun]) -> PageSection:
    title = study_title(study) or "Study without a name"
    name = re.sub(r"[^a-z0-9_]+", "_", study.lower()).strip("_")[:50] or "unnamed"
    titles = (f"Run {n}: {name}" for n, name in zip(numbers, run_names(runs), strict=True))
    tables = [*(join_tables(runs) if len(runs) > 1 else ()), *beside_paper(runs)]
    runs_here = [*map(PageRun, runs, numbers, titles)]
    return PageSection(title, name, runs_here, tables, over_sizes(runs))


@any_text()
def write_page(
    output: str | Path,
    title: str,
    overview: Sequence[Table],
    sections: Sequence[PageSection],
    n_runs: int,
) -> Path:
    """Write a page, and the headline tables of each section as Markdown and LaTeX; return its path.

    It begins with the tables of the `overview`; in sections, tables that are no headlines are
    folded. `n_runs` is the number of runs that it is made of.
    """
    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )
    environment.filters |= {
        "prose": _prose,
        "short_name": short_name,
        "yaml": partial(yaml.safe_dump, allow_unicode=True),
        "base64": lambda png: base64.b64encode(png).decode("ascii"),
        # A PNG has its width at byte 16, and in a chunk its pixels per meter, if it says them.
        "css_width": lambda png: round(
            int.from_bytes(png[16:20])
            * _CSS_PIXELS_PER_METER
            / (int.from_bytes(png.partition(b"pHYs")[2][:4]) or _CSS_PIXELS_PER_METER)
        ),
    }
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    parts = {"title": title, "overview": overview, "sections": sections, "n_runs": n_runs}
    html = environment.from_string(template).render(parts, version=__version__)
    folder, texts = Path(output), {PAGE: html}
    check_writable(folder)
    for section in sections:
        tables = [*section.tables, *(table for run in section.runs for table in run.tables)]
        if headlines := [table for table in tables if table.headline]:
            texts[f"{section.name}.md"] = to_markdown(section.title, headlines)
            texts[f"{section.name}.tex"] = to_latex(section.name, headlines)
    for name, text in texts.items():
        with atomic_write(folder / name) as part:
            part.write_text(text, encoding="utf-8", newline="\n")
    return folder / PAGE


def _prose(text: object) -> Markup:
    """Return text with its own writing direction and with line breaks allowed in paths."""
    escaped = str(escape(clean(str(text))))
    return Markup("<bdi>{}</bdi>").format(Markup(escaped.replace("/", "/<wbr>")))


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by their keys, joined by dots."""
    return dict(json_normalize([values]).astype(object).iloc[0])


def to_markdown(title: str, tables: Iterable[Table]) -> str:
    """Return tables under a title as Markdown."""
    parts = [f"# {escape_markdown(title)}"]
    for table in tables:
        parts += [f"**{escape_markdown(table.caption)}**", table.markdown()]
        parts += filter(None, [escape_markdown(table.note)])
    return "\n\n".join(parts) + "\n"


def to_latex(name: str, tables: Iterable[Table]) -> str:
    """Return tables as LaTeX, with labels made of a name."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") or "study"
    head, frame = Path(__file__).with_suffix(".tex").read_text(encoding="utf-8").split("\n\n")
    parts = [_latex_table(t, f"tab:{stem}-{i}", frame) for i, t in enumerate(tables, start=1)]
    return "\n".join([f"{head}\n", *parts])


def _latex_table(table: Table, label: str, frame: str) -> str:
    headed = zip(table.titles, table.is_number, strict=True)
    titles = [_stacked(title) if is_number else latex(title) for title, is_number in headed]
    groups = [latex(name) for name, n_columns in table.groups for _ in range(n_columns)]
    cells = [[latex(cell) for cell in row] for row in table.texts()]
    columns = MultiIndex.from_arrays([groups, titles]) if groups else titles
    style = DataFrame(cells, columns=columns).style.hide(axis="index")
    align = "".join("lr"[is_number] for is_number in table.is_number)
    caption = latex(f"{table.caption.rstrip('.')}. {table.note}" if table.note else table.caption)
    draw = partial(style.to_latex, column_format=align, hrules=True)
    if len(table) > _MAX_LATEX_ROWS:
        body = draw(environment="longtable", caption=caption, label=label)
        return f"{{\\small\n{body}}}\n"
    return frame % (caption, label, draw(multicol_align="c").rstrip())


def _stacked(title: str) -> str:
    """Break the heading of numbers, which is wider than they are, into lines."""
    lines = [latex(line) for line in textwrap.wrap(title, 11, break_long_words=False)]
    broken = r"\\".join(lines)
    return rf"\shortstack[r]{{{broken}}}" if len(lines) > 1 else latex(title)


def latex(text: str) -> str:
    """Return text in one line with LaTeX's special characters escaped."""
    return re.sub(r"\s+", " ", clean(text)).translate(_LATEX)


def run_names(runs: Sequence[SavedRun]) -> list[str]:
    """Return a name for each run: its LM's, and what distinguishes runs of one LM; in UTF-8."""
    names = short = [short_name(run.lm_name) for run in runs]
    for details in [run.folder.name for run in runs], [run.folder for run in runs]:
        count, both = Counter(names), [f"{x}, {y}" for x, y in zip(short, details, strict=True)]
        names = [full if count[full] == 1 else x for full, x in zip(names, both, strict=True)]
    return [name.encode("utf-8", "backslashreplace").decode() for name in names]


def join_tables(runs: Sequence[SavedRun]) -> list[Table]:
    """Join the headline tables that runs have in common, with a group of columns for each run."""
    by_run = [{table.name: table for table in run.tables if table.headline} for run in runs]
    common = [name for name in by_run[0] if all(name in tables for tables in by_run)]
    joined = (_join([tables[name] for tables in by_run], run_names(runs)) for name in common)
    note = _differences(runs)
    return [replace(table, note=note).first(MAX_ROWS) for table in joined if table is not None]


def side_by_side(tables: Sequence[Table], names: Sequence[Any]) -> tuple[list[str], DataFrame]:
    """Return the columns that identify rows in some tables, and the other columns side by side.

    The frame is indexed by the former: units, then texts, then as many numbers as it takes to tell
    the rows apart. The upper level of its columns is the table's name.
    """
    first, others = tables[0], tables[1:]
    kinds = {key: first.frame[key].dtype for key in first.keys if not first.formats.get(key)}
    free = [key for key in kinds if key not in first.unit and all(key in t.keys for t in others)]
    free.sort(key=lambda key: (is_numeric_dtype(kinds[key]), is_float_dtype(kinds[key])))
    free, n = [*first.unit, *free], max(len(first.unit), 1)
    while n < len(free) and any(table.frame.duplicated(free[:n]).any() for table in tables):
        n += 1
    keys = [key for key in first.keys if key in free[:n]]
    frames = [table.frame.drop_duplicates(keys or None) for table in tables]
    frames = [frame.set_index(keys) if keys else frame for frame in frames]
    return keys, concat(frames, axis=1, keys=names, sort=False)


def _join(tables: Sequence[Table], names: Sequence[str]) -> Table | None:
    """Lay tables of the same columns side by side, by the columns that identify their rows."""
    first = tables[0]
    if any((table.keys, table.formats) != (first.keys, first.formats) for table in tables):
        return None
    keys, frame = side_by_side(tables, names)
    numbers = [key for key in first.keys if first.formats.get(key) and key not in keys]
    if not numbers or not any(map(len, tables)):
        return None
    frame = frame[[(name, key) for name in names for key in numbers]].reset_index(col_level=1)
    same = len({table.caption for table in tables}) == 1  # a caption may name numbers of its run
    caption = (same and first.caption) or first.name.replace("_", " ").capitalize()
    return replace(first, frame=frame, caption=f"{caption.rstrip('.')}: by run")


def _differences(runs: Sequence[SavedRun]) -> str:
    """Name the settings besides the LM in which runs differ, which also change their numbers."""
    differ = [
        f"{key} ({' / '.join(texts)})"
        for key, *texts in differing([run.settings for run in runs])
        if key[:3] != "lm."
    ]
    return f"The runs differ also in {listed(differ, most=6)}." if differ else ""


def differing(values: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the keys by which nested values differ, joined by dots, and the texts of the values."""
    flat = [flatten(each) for each in values]
    for key in dict.fromkeys(key for each in flat for key in each):
        texts = [str(each.get(key)) for each in flat]
        if len({*texts}) > 1:
            yield key, *texts


def beside_paper(runs: Sequence[SavedRun]) -> list[Table]:
    """Lay numbers of runs beside those of the paper, of the same LM or else of others."""
    rows = []
    for run in runs:
        all_of_run = ((n, n.quantity.of(run, n.relation, n.answer)) for n in paper_numbers())
        measured = [(number, value) for number, value in all_of_run if value is not None]
        same = [pair for pair in measured if pair[0].is_about(run.lm_name)]
        for number, value in same or [pair for pair in measured if not pair[0].answer]:
            quantity = number.quantity
            difference = quantity.difference(value - number.value) if same else ""
            numbers = [quantity.show(value), quantity.show(number.value), difference]
            lms = short_name(run.lm_name), number.lm
            rows.append([number.relation, number.heading, *lms, *numbers, number.place])
    formats = dict.fromkeys(("here", "paper", "difference"), ".2f")
    columns = ["relation", "quantity", "LM", "LM of the paper", *formats, "in the paper"]
    note = "Numbers of other LMs than the paper's have no difference."
    headline = any(difference for *_, difference, _ in rows)
    table = Table.of("paper", rows, columns, "Beside the paper", note, headline, formats=formats)
    return [table] if rows else []


def over_sizes(runs: Sequence[SavedRun]) -> list[Figure]:
    """Return Hit@N by LM, as in the paper's figure 4; nothing for one LM or without Hit@N."""
    place, lines = size_figure()
    if len({run.lm_name for run in runs}) < 2 or runs[0].study != lines[0].study:
        return []
    pairs = [f"{pair['source']}->{pair['target']}" for pair in runs[0].values["pairs"]]
    pairs = [pair for pair in pairs if all(lines[0].of(run, pair) is not None for run in runs)]
    if not pairs:
        return []
    sizes = [f" ({run.size})" if run.size else "" for run in runs]
    named = list(zip(runs, map(add, run_names(runs), sizes), strict=True))
    paths = ".precision.", ".precision.chance."
    rows = [
        (
            clean(pair),
            name,
            line.heading,
            path is paths[1],
            line._replace(path=line.path.replace(paths[0], path)).of(run, pair),
        )
        for pair, line, (run, name), path in product(pairs[:_MAX_PANELS], lines, named, paths)
    ]
    frame = DataFrame(rows, columns=["pair", "LM", "line", "chance", "value"])
    from lincorr_lightning.results.plots import curves  # late: most pages draw nothing

    draw = partial(
        curves,
        frame.astype({"value": float}),
        "LM",
        "value",
        "line",
        "pair",
        "chance",
        title="Precision of W by LM",
        subtitle="LMs in their order; dotted: weights in random order",
        labels=("LM", "Hit@N"),
        each=lambda axes, *_: axes.set_ylim(-0.03, 1.03),
    )
    left_out = f"; {_MAX_PANELS} of {len(pairs)} pairs" if len(pairs) > _MAX_PANELS else ""
    return [Figure("sizes", f"Hit@N of W by LM (paper, {place}){left_out}.", draw)]
