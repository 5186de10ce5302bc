"""The command ``lincorr report``: one page of finished runs, and their tables as Markdown."""

import argparse
import base64
import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from io import BytesIO
from itertools import groupby
from pathlib import Path

import yaml
from jinja2 import Environment
from markupsafe import Markup, escape
from PIL import Image

from lincorr_lightning.errors import ReportError
from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.results.compare import own_values, runs_table, with_deviations
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
    """Write ``report.html``, and files of tables for each study; return the page's path.

    The folders are those of finished runs, of any studies and LMs. Raises ReportError if one is
    not, and OutputError if the page cannot be written.
    """
    if not runs:
        raise ReportError("name the folder of a run, as in: lincorr report runs/linear_probe/*")
    saved = list({run.folder.resolve(): run for run in map(SavedRun.read, runs)}.values())
    # Studies in the order in which they are named, and in each the small LMs first.
    order = list(dict.fromkeys(run.study for run in saved))
    saved.sort(key=lambda run: (order.index(run.study), run.n_parameters or math.inf, run.lm_name))
    numbered = list(enumerate(saved, start=1))
    lms = [short_name(run.lm_name) for run in saved]
    overview = _overview(saved, lms)
    sections = []
    for study, members in groupby(numbered, key=lambda pair: pair[1].study):
        numbers, of_study = zip(*members, strict=True)
        sections.append(_section(study, numbers, of_study))
    title = f"Linear correlation in {', '.join(dict.fromkeys(lms))}"
    return write_page(output, title, [overview] if len(saved) > 1 else [], sections, len(saved))


def _overview(runs: Sequence[SavedRun], lms: Sequence[str]) -> Table:
    """Return the runs by what differs, if they are of one study and have numbers in common."""
    if len(runs) > 1 and len({run.study for run in runs}) == 1:
        with suppress(ReportError):
            return with_deviations(runs_table(runs).tables[0])
    rows = [
        (n, run.study, lm, run.size, run.version, str(run.folder))
        for n, (run, lm) in enumerate(zip(runs, lms, strict=True), start=1)
    ]
    columns = ["run", "study", "LM", "parameters", "version", "folder"]
    return Table.of("runs", rows, columns, "Runs", formats={"run": "d", "parameters": ".3g"})


@dataclass(frozen=True)
class PageRun:
    """A run on a page, with its number there and a title."""

    saved: SavedRun
    number: int
    title: str

    @property
    def figures(self) -> list[Figure]:
        """The figures that the run drew."""
        return [figure for figure in self.saved.figures if figure.file is not None]

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
            for key, value in own_values(self.saved).items()
            if isinstance(value, (int, float, str))
        ]
        if values:
            columns = ["key", "value"]
            tables.append(Table.of("values", values, columns, "Numbers of results.json"))
        return tables


@dataclass(frozen=True)
class PageSection:
    """A study on a page: its runs, or tables and figures of several runs."""

    title: str
    name: str
    runs: Sequence[PageRun] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    note: str = ""


def _section(study: str, numbers: Sequence[int], runs: Sequence[SavedRun]) -> PageSection:
    title = study_title(study) or "Study without a name"
    name = re.sub(r"[^a-z0-9_]+", "_", study.lower()).strip("_")[:50] or "unnamed"
    lms = Counter(short_name(run.lm_name) for run in runs)
    folders = Counter((short_name(run.lm_name), run.folder.name) for run in runs)
    titles = []
    for n, run in zip(numbers, runs, strict=True):
        lm = short_name(run.lm_name)
        folder = run.folder.name if folders[lm, run.folder.name] == 1 else run.folder
        titles.append(f"Run {n}: {lm}" if lms[lm] == 1 else f"Run {n}: {lm}, {folder}")
    return PageSection(title, name, list(map(PageRun, runs, numbers, titles)))


def page_text(
    title: str, overview: Sequence[Table], sections: Sequence[PageSection], n_runs: int
) -> str:
    """Return a page of HTML.

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
        "base64": lambda data: base64.b64encode(data).decode("ascii"),
        "zip": zip,
        "image": lambda png: Image.open(BytesIO(png)),
    }
    template, script = (
        Path(__file__).with_suffix(end).read_text(encoding="utf-8") for end in (".html", ".js")
    )
    parts = {"title": title, "overview": overview, "sections": sections, "n_runs": n_runs}
    # The page's policy lets a script with this hash run alone.
    parts |= {"script": Markup(script), "sha256": hashlib.sha256(script.encode()).digest()}
    return environment.from_string(template).render(parts, version=__version__)


def write_page(
    output: str | Path,
    title: str,
    overview: Sequence[Table],
    sections: Sequence[PageSection],
    n_runs: int,
) -> Path:
    """Write a `page_text`, and the headline tables of each section as Markdown.

    Returns the path of the page; raises OutputError.
    """
    texts = {PAGE: page_text(title, overview, sections, n_runs)}
    for section in sections:
        tables = [*section.tables, *(table for run in section.runs for table in run.tables)]
        if headlines := [table for table in tables if table.headline]:
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
