"""Building a report page."""

from __future__ import annotations

import base64
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment
from markupsafe import Markup, escape

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.results.report.comparison import (
    beside_paper,
    draw_over_sizes,
    join_tables,
    run_names,
    short_size,
)
from lincorr_lightning.results.report.text import PageTable, clean, to_latex, to_markdown
from lincorr_lightning.results.results import OWN_KEYS
from lincorr_lightning.results.saved_run import PACKAGE, SavedRun
from lincorr_lightning.results.style import DPI, short_name, to_picture
from lincorr_lightning.version import __version__

PAGE = "report.html"
MAX_ROWS, MAX_FOLDED_ROWS = 30, 100
_CSS_DPI = 96


@dataclass(frozen=True)
class PageFigure:
    """A figure as a page shows it: PNG in base64, and its size in CSS pixels."""

    data: str
    width: int
    height: int
    caption: str

    @classmethod
    def of(cls, png: bytes, width: int, height: int, caption: str) -> PageFigure:
        """Take over a PNG of a width and height in pixels."""
        data = base64.b64encode(png).decode("ascii")
        scale = _CSS_DPI / DPI
        return cls(data, round(width * scale), round(height * scale), caption)


@dataclass(frozen=True)
class PageRun:
    """A run as a page shows it."""

    title: str
    anchor: str
    facts: Mapping[str, str]
    tables: Sequence[PageTable]
    figures: Sequence[PageFigure]
    folded: Sequence[PageTable]
    command: str | None
    settings: str


@dataclass(frozen=True)
class PageSection:
    """A study as a page shows it: its runs, and before them what compares them."""

    title: str
    name: str
    runs: Sequence[PageRun]
    tables: Sequence[PageTable]
    figures: Sequence[PageFigure]
    folded: Sequence[PageTable]
    note: str = ""

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return f"study-{self.name}"


def write_report(runs: Sequence[str | Path], output: str | Path = "report") -> Path:
    """Write ``report.html``, and a ``.md`` and a ``.tex`` file of tables for each study.

    Args:
        runs: Folders of finished runs, of any studies and LMs.
        output: Folder to write to; files of an earlier report are replaced.

    Returns:
        The page.

    Raises:
        ReportError: A folder is not a run's, the run did not finish, its files are damaged, or the
            runs do not belong on one page.
        OutputError: The folder cannot be written.
    """
    read = _read_runs(runs)
    _check_together(read)
    # Studies in the order in which they are named, and in each the small LMs first.
    studies = list(dict.fromkeys(run.study for run in read))
    ordered = sorted(
        read,
        key=lambda run: (studies.index(run.study), run.n_parameters or math.inf, run.lm_name),
    )
    sections, numbered = [], iter(range(1, len(ordered) + 1))
    for study, own in groupby(ordered, key=lambda run: run.study):
        members = list(own)
        sections.append(_section(study, members, [next(numbered) for _ in members]))
    names = ", ".join(dict.fromkeys(short_name(run.lm_name) for run in ordered))
    title = f"Linear correlation in {names}"
    return write_page(output, title, [_overview(ordered)], sections, len(ordered))


def write_page(
    output: str | Path,
    title: str,
    overview: Sequence[PageTable],
    sections: Sequence[PageSection],
    n_runs: int,
) -> Path:
    """Write a page, and a ``.md`` and a ``.tex`` file of the tables of each section.

    Args:
        output: Folder to write to.
        title: Title of the page.
        overview: Tables before the first section.
        sections: The sections.
        n_runs: Number of runs that the page is made of.

    Returns:
        The page.

    Raises:
        OutputError: The folder cannot be written.
    """
    html = _render(title, overview, sections, n_runs)
    folder = Path(output)
    check_writable(folder)
    page = folder / PAGE
    _write(page, html)
    for section in sections:
        tables = [*section.tables, *(table for run in section.runs for table in run.tables)]
        if tables:
            _write(folder / f"{section.name}.md", to_markdown(section.title, tables))
            _write(folder / f"{section.name}.tex", to_latex(section.name, tables))
    return page


def _read_runs(folders: Sequence[str | Path]) -> list[SavedRun]:
    if not folders:
        raise ReportError("name the folder of a run, as in: lincorr report runs/linear_probe/*")
    runs = [SavedRun.read(folder) for folder in folders]
    return list({run.folder.resolve(): run for run in reversed(runs)}.values())[::-1]


def _check_together(runs: Sequence[SavedRun]) -> None:
    """Refuse runs of different versions of this package, or of two LMs under one name."""
    first: dict[str, SavedRun] = {}
    for run in runs:
        first.setdefault(run.versions.get(PACKAGE, "an unknown version"), run)
    if len(first) > 1:
        listed = ", ".join(f"{run.folder} ({version})" for version, run in first.items())
        raise ReportError(
            f"these runs are of different versions of {PACKAGE}: {listed}. Their numbers may have "
            "come about in different ways. Run the older ones again, or write a page for each "
            "version."
        )
    for one, other in combinations(runs, 2):
        if one.lm and one.lm_name == other.lm_name:
            _check_fingerprints(one, other)


def _check_fingerprints(one: SavedRun, other: SavedRun) -> None:
    ours, theirs = one.fingerprint, other.fingerprint
    # Weights in another dtype have other bits.
    same_dtype = ours.get("dtype") == theirs.get("dtype")
    compared = ("tokenizer", "config", "weights") if same_dtype else ("tokenizer", "config")
    differ = [key for key in compared if key in ours and key in theirs and ours[key] != theirs[key]]
    if differ:
        raise ReportError(
            f"{one.folder} and {other.folder} are of two LMs under one name, {one.lm_name!r}: "
            f"their {' and '.join(differ)} differ (lm.fingerprint in results.json). Give each LM a "
            "folder of its own and run one of them again, or write a page for each: lincorr report "
            f"{shlex.quote(str(one.folder))}; lincorr report {shlex.quote(str(other.folder))}"
        )


def _section(study: str, runs: Sequence[SavedRun], numbers: Sequence[int]) -> PageSection:
    joined = join_tables(runs) if len(runs) > 1 else []
    paper = beside_paper(runs)
    drawn = draw_over_sizes(runs)
    figures = [] if drawn is None else [PageFigure.of(*to_picture(drawn[0]), drawn[1])]
    pages = [
        _page_run(run, f"Run {number}: {name}", f"run-{number}")
        for run, number, name in zip(runs, numbers, run_names(runs), strict=True)
    ]
    return PageSection(
        title=study.replace("_", " ").capitalize() or "Study without a name",
        name=re.sub(r"[^a-z0-9_]+", "_", study.lower()).strip("_") or "unnamed",
        runs=pages,
        tables=joined + [table for table in paper if table.caption == "Beside the paper"],
        figures=figures,
        folded=[table for table in paper if table.caption != "Beside the paper"],
    )


def _page_run(run: SavedRun, title: str, anchor: str) -> PageRun:
    shown: list[PageTable] = []
    folded: list[PageTable] = []
    for table in run.tables:
        limit = MAX_ROWS if table.headline else MAX_FOLDED_ROWS
        entry = PageTable.of(table, limit, str(run.table_path(table.name)))
        (shown if table.headline else folded).append(entry)
    values = PageTable(
        "Numbers of results.json", ["key", "value"], [False, False],
        [[key, value] for key, value in _scalars(run.values) if key not in OWN_KEYS],
    )  # fmt: skip
    figures = [PageFigure.of(*figure.read(), figure.caption) for figure in run.figures]
    return PageRun(
        title=title,
        anchor=anchor,
        facts=_facts(run),
        tables=shown,
        figures=figures,
        folded=[*folded, values] if values.rows else folded,
        command=run.command,
        settings=run.config_text or yaml.safe_dump(dict(run.settings), allow_unicode=True),
    )


def _facts(run: SavedRun) -> dict[str, str]:
    size, seconds = run.n_parameters, run.values.get("seconds")
    facts = {
        "LM": short_name(run.lm_name),
        "parameters": short_size(size) if size is not None else "",
        "dtype": str(run.lm.get("dtype") or ""),
        "relation": str(run.values.get("relation") or ""),
        "seeds": ", ".join(f"{key} {value}" for key, value in run.seeds.items()),
        "versions": ", ".join(f"{key} {value}" for key, value in run.versions.items()),
        "duration": f"{seconds:,.0f} s" if isinstance(seconds, (int, float)) else "",
        "folder": str(run.folder),
    }
    return {key: value for key, value in facts.items() if value}


def _scalars(values: Mapping[str, Any], key: str = "") -> Iterable[tuple[str, str]]:
    """Yield the numbers and texts that stand in no list, by their keys."""
    for name, value in values.items():
        full = f"{key}.{name}" if key else str(name)
        if isinstance(value, Mapping) and full not in OWN_KEYS:
            yield from _scalars(value, full)
        elif isinstance(value, float):
            yield full, f"{value:.4g}"
        elif isinstance(value, (int, str)):
            yield full, str(value)


def _overview(runs: Sequence[SavedRun]) -> PageTable:
    return PageTable(
        "Runs",
        ["run", "study", "LM", "parameters", "version", "folder"],
        [True, False, False, True, False, False],
        [
            [str(number), run.study, short_name(run.lm_name),
             "" if run.n_parameters is None else short_size(run.n_parameters),
             run.versions.get(PACKAGE, ""), str(run.folder)]
            for number, run in enumerate(runs, start=1)
        ],
    )  # fmt: skip


def _render(
    title: str, overview: Sequence[PageTable], sections: Sequence[PageSection], n_runs: int
) -> str:
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters["prose"] = _prose
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        title=title, version=__version__, overview=overview, sections=sections, n_runs=n_runs
    )


def _prose(text: str) -> Markup:
    """Return text with its own writing direction and with line breaks allowed in paths."""
    return Markup("<bdi>{}</bdi>").format(Markup(str(escape(clean(text))).replace("/", "/<wbr>")))


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")
