"""The command ``lincorr report``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lincorr_lightning.results.report.page import write_report


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
