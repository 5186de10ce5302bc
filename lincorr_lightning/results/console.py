"""Verdicts and tables as text for a terminal."""

import io
import textwrap
from collections.abc import Iterable, Sequence
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from lincorr_lightning.results.table import Table
from lincorr_lightning.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

_CONSOLE_WIDTH = 110
_UNBROKEN = 16  # cells of a text, such as the name of a pair


def sentences_text(sentences: Iterable[str]) -> str:
    """Return a verdict as text, one paragraph for each sentence, as wide as the console."""
    width = min(get_terminal_size((_CONSOLE_WIDTH, 24)).columns, _CONSOLE_WIDTH)
    wrapped = (textwrap.fill(printable(each), width, subsequent_indent="  ") for each in sentences)
    return "".join(f"{sentence}\n" for sentence in wrapped) + ("\n" if sentences else "")


def table_text(tables: Iterable[Table]) -> str:
    """Return tables as text as wide as the console, or ``COLUMNS``; no number is cut."""
    from rich.console import Console

    out = io.StringIO()
    width = min(get_terminal_size((_CONSOLE_WIDTH, 24)).columns, _CONSOLE_WIDTH)
    console = Console(file=out, force_terminal=False, force_jupyter=False, width=width)
    for table in tables:
        _print_table(console, table)
    return out.getvalue()


def _print_table(console: "Console", table: Table) -> None:
    """Print a table; if it is too wide, with a line for each column, or with fewer columns."""
    from rich.text import Text

    rows = [[printable(cell, "") for cell in row] for row in (table.titles, *table.texts())]
    grid = _grid(console, rows, table.is_number, breaks=False)
    if not _fits(console, grid, "maximum"):
        grid = _grid(console, rows, table.is_number)
    if not _fits(console, grid):
        transposed = list(zip(*rows, strict=True))
        grid = _grid(console, transposed, [False, *[True] * len(table)])
    n = len(table.keys)
    while n > 1 and not _fits(console, grid):
        n -= 1
        grid = _grid(console, [row[:n] for row in rows], table.is_number)
    left_out = ", ".join(table.titles[n:])
    note = f"{table.note} More columns, in its CSV file: {left_out}." if left_out else table.note
    # A title of the grid's own would be broken to its width.
    console.print(Text(printable(table.caption or table.name)), end="\n\n")
    console.print(grid)
    console.print(Text(f"\n{printable(note)}\n" if note else ""))


def _fits(console: "Console", grid: "RichTable", size: str = "minimum") -> bool:
    wide = console.options.update_width(10_000)  # which a measured width would not exceed
    width: int = getattr(console.measure(grid, options=wide), size)
    return width <= console.width


def _grid(
    console: "Console",
    rows: Sequence[Sequence[str]],
    is_number: Sequence[bool],
    breaks: bool = True,
) -> "RichTable":
    """Return a table of rich; the first row has headings, which may break between words."""
    from rich import box
    from rich.cells import cell_len
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for (heading, *cells), number in zip(zip(*rows, strict=True), is_number, strict=False):
        if number or max(map(cell_len, cells), default=0) <= _UNBROKEN:
            width = max(map(cell_len, ("-", *heading.split(), *cells)))
            title = textwrap.fill(heading, width) if breaks else heading
            whole: Any = {"min_width": width, "no_wrap": True}
            whole["justify"] = "right" if number else "left"
            grid.add_column(Text(title), **whole)
        else:
            # Names of rows are cut in lines only where nothing else helps.
            flexible = {"overflow": "fold", "max_width": console.width // 2}
            grid.add_column(Text(heading), **(flexible if breaks else {"no_wrap": True}))
    for row in rows[1:]:
        grid.add_row(*map(Text, row))
    return grid
