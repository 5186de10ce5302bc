"""The command ``lincorr report``: one page of finished runs."""

from __future__ import annotations

import argparse
import base64
import math
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, groupby
from pathlib import Path

import yaml
from jinja2 import Environment
from markupsafe import Markup, escape

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.results.report.comparison import (
    MAX_ROWS,
    beside_paper,
    join_tables,
    over_sizes,
    run_names,
    short_size,
)
from lincorr_lightning.results.report.text import to_latex, to_markdown
from lincorr_lightning.results.results import OWN_KEYS, Figure
from lincorr_lightning.results.saved_run import PACKAGE, SavedFigure, SavedRun, flatten
from lincorr_lightning.results.style import DPI, short_name
from lincorr_lightning.results.table import Table, clean
from lincorr_lightning.version import __version__

PAGE = "report.html"
MAX_FOLDED_ROWS = 100
_CSS_DPI = 96


def report(args: Sequence[str]) -> Path:
    """Write a report page as the command line behind ``lincorr report`` says; return its path."""
    parser = argparse.ArgumentParser(
        prog="lincorr report",
        description="Write one self-contained HTML page of finished runs, with their tables as "
        "Markdown and LaTeX.",
    )
    parser.add_argument(
        "runs", nargs="+", help="folders of finished runs, such as runs/linear_probe/version_0"
    )
    parser.add_argument(
        "--output", default="report", help="folder to write to (default: %(default)s)"
    )
    options = parser.parse_args(args)
    page = write_report(options.runs, options.output)
    tables = sorted(path.name for path in page.parent.glob("*") if path.suffix in (".md", ".tex"))
    sys.stdout.write(f"Page:   {page}\nTables: {page.parent} ({', '.join(tables)})\n")
    return page


@dataclass(frozen=True)
class PageRun:
    """A run as a page shows it, under the page's number of it."""

    saved: SavedRun
    number: int
    name: str

    @property
    def title(self) -> str:
        """Heading of the run."""
        return f"Run {self.number}: {self.name}"

    @property
    def facts(self) -> dict[str, str]:
        """What was run, by name."""
        run, values = self.saved, self.saved.values
        seconds = values.get("seconds")
        facts = {
            "LM": short_name(run.lm_name),
            "parameters": _size(run),
            "dtype": str(run.lm.get("dtype") or ""),
            "relation": str(values.get("relation") or ""),
            "seeds": ", ".join(f"{key} {value}" for key, value in run.seeds.items()),
            "versions": ", ".join(f"{key} {value}" for key, value in values["versions"].items()),
            "duration": f"{seconds:,.0f} s" if isinstance(seconds, (int, float)) else "",
            "folder": str(run.folder),
        }
        return {key: value for key, value in facts.items() if value}

    @cached_property
    def tables(self) -> list[Table]:
        """The run's tables, long ones cut short, and its other numbers."""
        tables = [
            replace(table, caption=table.caption or table.name).first(
                MAX_ROWS if table.headline else MAX_FOLDED_ROWS,
                str(self.saved.folder / "tables" / f"{table.name}.csv"),
            )
            for table in self.saved.tables
        ]
        own = {key: one for key, one in self.saved.values.items() if key not in OWN_KEYS}
        values = [
            [key, f"{value:.4g}" if isinstance(value, float) else str(value)]
            for key, value in flatten(own)
            if isinstance(value, (int, float, str))
        ]
        numbers = Table.of("values", values, ["key", "value"], "Numbers of results.json")
        return [*tables, numbers] if values else tables

    @property
    def settings(self) -> str:
        """All settings as YAML."""
        settings = self.saved.values["settings"]
        return self.saved.config or yaml.safe_dump(settings, allow_unicode=True)


@dataclass(frozen=True)
class PageSection:
    """A study as a page shows it: what compares its runs, and the runs."""

    title: str
    name: str
    runs: Sequence[PageRun] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure | SavedFigure] = ()
    note: str = ""


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
    if not runs:
        raise ReportError("name the folder of a run, as in: lincorr report runs/linear_probe/*")
    by_path = {run.folder.resolve(): run for run in map(SavedRun.read, runs)}
    read = list(by_path.values())
    _check_together(read)
    # Studies in the order in which they are named, and in each the small LMs first.
    studies = list(dict.fromkeys(run.study for run in read))
    read.sort(key=lambda run: (studies.index(run.study), run.n_parameters or math.inf, run.lm_name))
    sections = [
        _section(study, list(numbered))
        for study, numbered in groupby(enumerate(read, start=1), key=lambda one: one[1].study)
    ]
    names = ", ".join(dict.fromkeys(short_name(run.lm_name) for run in read))
    rows = [
        [number, run.study, short_name(run.lm_name), _size(run), _version(run), str(run.folder)]
        for number, run in enumerate(read, start=1)
    ]
    columns = ["run", "study", "LM", "parameters", "version", "folder"]
    overview = Table.of("runs", rows, columns, "Runs", formats={"run": "d", "parameters": ".3g"})
    return write_page(output, f"Linear correlation in {names}", [overview], sections, len(read))


def write_page(
    output: str | Path,
    title: str,
    overview: Sequence[Table],
    sections: Sequence[PageSection],
    n_runs: int,
) -> Path:
    """Write a page, and a ``.md`` and a ``.tex`` file of the headline tables of each section.

    Args:
        output: Folder to write to.
        title: Title of the page.
        overview: Tables before the first section.
        sections: The sections; tables that are no headlines are folded.
        n_runs: Number of runs that the page is made of.

    Returns:
        The page.

    Raises:
        OutputError: The folder cannot be written.
    """
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: clean(value) if type(value) is str else value,
    )  # fmt: skip
    environment.filters["prose"] = _prose
    environment.filters["base64"] = lambda png: base64.b64encode(png).decode("ascii")
    # The header of a PNG has its width at byte 16.
    environment.filters["css_width"] = lambda png: int.from_bytes(png[16:20]) * _CSS_DPI // DPI
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    html = environment.from_string(template).render(
        title=title, version=__version__, overview=overview, sections=sections, n_runs=n_runs
    )
    folder = Path(output)
    check_writable(folder)
    _write(folder / PAGE, html)
    for section in sections:
        every = [*section.tables, *(table for run in section.runs for table in run.tables)]
        tables = [table for table in every if table.headline]
        if tables:
            _write(folder / f"{section.name}.md", to_markdown(section.title, tables))
            _write(folder / f"{section.name}.tex", to_latex(section.name, tables))
    return folder / PAGE


def _prose(text: str) -> Markup:
    """Return text with its own writing direction and with line breaks allowed in paths."""
    return Markup("<bdi>{}</bdi>").format(Markup(str(escape(clean(text))).replace("/", "/<wbr>")))


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def _check_together(runs: Sequence[SavedRun]) -> None:
    """Refuse runs of different versions of this package, or of two LMs under one name."""
    first: dict[str, SavedRun] = {}
    for run in runs:
        first.setdefault(_version(run), run)
    if len(first) > 1:
        listed = ", ".join(f"{run.folder} ({version})" for version, run in first.items())
        raise ReportError(
            f"these runs are of different versions of {PACKAGE}: {listed}. Their numbers may have "
            "come about in different ways. Run the older ones again, or write a page for each "
            "version."
        )
    for one, other in combinations(runs, 2):
        differ = _differing(one, other)
        if differ and one.lm_name == other.lm_name:
            raise ReportError(
                f"{one.folder} and {other.folder} are of two LMs under one name, {one.lm_name!r}: "
                f"their {' and '.join(differ)} differ (lm.fingerprint in results.json). Give each "
                "LM a folder of its own and run one of them again, or write a page for each: "
                f"lincorr report {shlex.quote(str(one.folder))}; "
                f"lincorr report {shlex.quote(str(other.folder))}"
            )


def _differing(one: SavedRun, other: SavedRun) -> list[str]:
    """Return the parts in which LMs differ; weights in another dtype have other bits."""
    own, others = (run.lm.get("fingerprint") or {} for run in (one, other))
    parts = ["tokenizer", "config"]
    parts += ["weights"] if own.get("dtype") == others.get("dtype") else []
    return [part for part in parts if part in own and own[part] != others.get(part, own[part])]


def _section(study: str, numbered: Sequence[tuple[int, SavedRun]]) -> PageSection:
    runs = [run for _, run in numbered]
    return PageSection(
        study.replace("_", " ").capitalize() or "Study without a name",
        re.sub(r"[^a-z0-9_]+", "_", study.lower()).strip("_")[:50] or "unnamed",
        [
            PageRun(run, number, name)
            for (number, run), name in zip(numbered, run_names(runs), strict=True)
        ],
        [*(join_tables(runs) if len(runs) > 1 else ()), *beside_paper(runs)],
        over_sizes(runs),
    )


def _size(run: SavedRun) -> str:
    return "" if run.n_parameters is None else short_size(run.n_parameters)


def _version(run: SavedRun) -> str:
    return str(run.values["versions"].get(PACKAGE, "an unknown version"))
