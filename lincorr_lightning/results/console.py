"""The summary that a run prints at its end: its headline tables and its files."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from lincorr_lightning.errors import ReportError
from lincorr_lightning.results.saved_run import SavedRun
from lincorr_lightning.results.table import Table

MAX_ROWS = 20
_WIDTH = 110


def describe_run(folder: Path) -> str:
    """Return the summary of a run."""
    out = io.StringIO()
    console = Console(file=out, width=_WIDTH)
    # A run that was only fitted, or predicted, has no results.
    with suppress(ReportError):
        for table in SavedRun.read(folder).tables:
            if table.headline:
                _print_table(console, table.first(MAX_ROWS))
    figures = sorted(path.name for path in (folder / "figures").glob("*.png"))
    out.write(f"Run folder:  {folder}\n")
    if figures:
        more = ", ..." if len(figures) > 4 else ""
        out.write(f"Figures:     {folder / 'figures'} ({', '.join(figures[:4])}{more})\n")
    if list(folder.glob("events.out.tfevents.*")):
        out.write(f"TensorBoard: tensorboard --logdir {folder}\n")
    return out.getvalue()


def _print_table(console: Console, table: Table) -> None:
    grid = RichTable()
    for number, (title, is_number) in enumerate(zip(table.titles, table.is_number, strict=True)):
        grid.add_column(Text(title), justify="right" if is_number else "left", no_wrap=number == 0)
    for row in table.texts():
        grid.add_row(*map(Text, row))
    # A title of the grid's own would be broken to its width.
    console.print(Text(table.caption or table.name), grid, Text(table.note), sep="\n")
    if table.note:
        console.print()
