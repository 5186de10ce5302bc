"""The command `lincorr report`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lincorr_lightning.io import atomic_write, check_writable
from lincorr_lightning.results.report.build import build
from lincorr_lightning.results.report.checks import check_together
from lincorr_lightning.results.report.html import to_html
from lincorr_lightning.results.report.runs import read_runs
from lincorr_lightning.results.report.text import to_latex, to_markdown

PAGE = "report.html"
_WITH_VALUE = ("--output", "--config")


def write_report(runs: Sequence[str | Path], output: str | Path = "report") -> Path:
    """Write ``report.html``, and a ``.md`` and a ``.tex`` file of tables for each study.

    Args:
        runs: Folders of finished runs, of any studies and LMs.
        output: Folder to write to; what an earlier report wrote there is replaced.

    Returns:
        The page.

    Raises:
        ReportError: A folder is no run's, the run did not finish, its files are damaged, or the
            runs cannot stand on one page.
        OutputError: The folder cannot be written.
    """
    read = read_runs(runs)
    check_together(read)
    document = build(read)
    folder = Path(output)
    check_writable(folder)
    page = folder / PAGE
    _write(page, to_html(document))
    for section in document.sections:
        tables = section.tables()
        name = section.anchor.removeprefix("study-").replace("-", "_")
        _write(folder / f"{name}.md", to_markdown(section.title, tables))
        _write(folder / f"{name}.tex", to_latex(name, tables))
    return page


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def gather(args: Sequence[str]) -> list[str]:
    """Make one list of the folders on a command line, which jsonargparse takes as one word.

    Args:
        args: Behind ``lincorr report``.

    Example:
        >>> gather(["a", "b", "--output", "c", "d"])
        ['["a", "b", "d"]', '--output', 'c']
        >>> gather(["--help"])
        ['--help']
    """
    folders, options = [], []
    rest = list(args)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            folders.append(argument)
            continue
        options.append(argument)
        if argument in _WITH_VALUE and rest:
            options.append(rest.pop(0))
    one_list = len(folders) == 1 and folders[0].startswith("[")
    words = folders if one_list or not folders else [json.dumps(folders, ensure_ascii=False)]
    return [*words, *options]


def report(runs: list[str] | str, output: str = "report") -> None:
    """Write one self-contained HTML page of some runs, with LaTeX and Markdown tables.

    Args:
        runs: Folders of finished runs, such as runs/linear_probe/version_0.
        output: Folder to write to; what an earlier report wrote there is replaced.

    Raises:
        ReportError: A folder is no run's, the run did not finish, its files are damaged, or the
            runs cannot stand on one page.
        OutputError: The folder cannot be written.
    """
    page = write_report([runs] if isinstance(runs, str) else runs, output)
    tables = sorted(path.name for path in page.parent.glob("*") if path.suffix in (".md", ".tex"))
    sys.stdout.write(f"Page:   {page}\nTables: {page.parent} ({', '.join(tables)})\n")
