"""The command ``lincorr report``: one page of finished runs, and their tables as Markdown."""

import argparse
import base64
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path

import yaml
from jinja2 import Environment
from markupsafe import Markup, escape
from PIL import Image

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.results.compare import own_values
from lincorr_lightning.results.results import Figure
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table, clean, escape_markdown, short_name, study_title
from lincorr_lightning.terminal import write_out
from lincorr_lightning.version import __version__

PAGE = "report.html"
MAX_FOLDED_ROWS = 100
MAX_ROWS = 30


def report(args: Sequence[str]) -> Path:
    """Write a report page as the command line behind ``lincorr report`` says; return its path."""
    parser = argparse.ArgumentParser(
        prog="lincorr report",
        description="Write one self-contained HTML page of finished runs, with their tables as "
        "Markdown.",
    )
    runs = "folders of finished runs, such as runs/linear_probe/version_0"
    parser.add_argument("runs", nargs="+", help=runs)
    output = "folder to write to (default: %(default)s)"
    parser.add_argument("--output", default="report", help=output)
    options = parser.parse_args(args)
    page = write_report(options.runs, options.output)
    tables = sorted(path.name for path in page.parent.glob("*.md"))
    write_out(f"Page:   {page}\nTables: {page.parent} ({', '.join(tables)})\n")
    return page


def write_report(runs: Sequence[str | Path], output: str | Path = "report") -> Path:
    """Write ``report.html``, and a file of tables for each run; return the page's path.

    The folders are those of finished runs, of any studies and LMs. Raises ReportError if one is
    not, and OutputError if the page cannot be written.
    """
    if not runs:
        raise ReportError("name the folder of a run, as in: lincorr report runs/linear_probe/*")
    saved = list({run.folder.resolve(): run for run in map(SavedRun.read, runs)}.values())
    # Studies in the order in which they are named, and in each the small LMs first.
    order = list(dict.fromkeys(run.study for run in saved))
    saved.sort(key=lambda run: (order.index(run.study), run.n_parameters or math.inf, run.lm_name))
    rows = [
        (n, run.study, short_name(run.lm_name), run.size, run.version, str(run.folder))
        for n, run in enumerate(saved, start=1)
    ]
    columns = ["run", "study", "LM", "parameters", "version", "folder"]
    overview = Table.of("runs", rows, columns, "Runs", formats={"run": "d", "parameters": ".3g"})
    title = f"Linear correlation in {', '.join(dict.fromkeys(row[2] for row in rows))}"
    sections = [_run_section(n, run) for n, run in enumerate(saved, start=1)]
    page = Page(title, [overview] if len(saved) > 1 else [], sections, len(saved))
    return page.write(output)


@dataclass(frozen=True)
class PageSection:
    """A part of a page: tables and figures of one `run`, or of several."""

    title: str
    name: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    note: str = ""
    run: SavedRun | None = None


def _run_section(n: int, run: SavedRun) -> PageSection:
    """Return a run's figures that are drawn, its tables, long ones cut short, and other numbers."""
    tables = []
    for table in run.tables:
        limit = MAX_ROWS if table.headline else MAX_FOLDED_ROWS
        first = table.first(limit, f"{run.folder}/tables/{table.name}.csv")
        tables.append(replace(first, caption=table.caption or table.name))
    values = [
        [key, f"{value:.4g}" if isinstance(value, float) else str(value)]
        for key, value in own_values(run).items()
        if isinstance(value, (int, float, str))
    ]
    if values:
        tables.append(Table.of("values", values, ["key", "value"], "Numbers of results.json"))
    study = study_title(run.study) or "Study without a name"
    title = f"{study} {n}: {short_name(run.lm_name)}, {run.folder.name}"
    name = re.sub(r"[^a-z0-9_]+", "_", run.study.lower()).strip("_")[:50] or "unnamed"
    figures = [figure for figure in run.figures if figure.file is not None]
    return PageSection(title, f"{name}_{n}", tables, figures, run=run)


@dataclass(frozen=True)
class Page:
    """A page: the tables of an overview, and sections.

    In sections, tables that are no headlines are folded. `n_runs` is the number of runs that the
    page is made of.
    """

    title: str
    overview: Sequence[Table]
    sections: Sequence[PageSection]
    n_runs: int

    def html(self) -> str:
        """Return the page as HTML that needs no other file."""
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
            "base64": lambda data: base64.b64encode(data).decode("ascii"),
            "zip": zip,
            "image": lambda png: Image.open(BytesIO(png)),
        }
        template, script = (
            Path(__file__).with_suffix(end).read_text(encoding="utf-8") for end in (".html", ".js")
        )
        return environment.from_string(template).render(
            vars(self),
            version=__version__,
            script=Markup(script),
            # The page's policy lets a script with this hash run alone.
            sha256=hashlib.sha256(script.encode()).digest(),
        )

    def write(self, output: str | Path) -> Path:
        """Write the page to a folder, and the headline tables of each section as Markdown.

        Returns the path of the page; raises OutputError.
        """
        texts = {PAGE: self.html()}
        for section in self.sections:
            if headlines := [table for table in section.tables if table.headline]:
                texts[f"{section.name}.md"] = to_markdown(section.title, headlines)
        folder = Path(output)
        check_writable(folder)
        for name, text in texts.items():
            with atomic_write(folder / name) as part:
                part.write_text(text, encoding="utf-8", newline="\n")
        return folder / PAGE


def _prose(text: object) -> Markup:
    """Return text with its own writing direction and with line breaks allowed in paths."""
    escaped = str(escape(clean(str(text))))
    return Markup("<bdi>{}</bdi>").format(Markup(escaped.replace("/", "/<wbr>")))


def to_markdown(title: str, tables: Iterable[Table]) -> str:
    """Return tables under a title as Markdown."""
    parts = [f"# {escape_markdown(title)}"]
    for table in tables:
        parts += [f"**{escape_markdown(table.caption)}**", table.markdown()]
        parts += filter(None, [escape_markdown(table.note)])
    return "\n\n".join(parts) + "\n"
