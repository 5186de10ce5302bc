"""Tables as HTML, for objects that show themselves in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FIRST_ROWS = 10
"""Number of rows of a table that a notebook shows."""


def html_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    is_number: Sequence[bool],
    caption: str = "",
    limit: int = FIRST_ROWS,
    n_rows: int | None = None,
) -> str:
    """Return a table as HTML, with all texts escaped.

    Args:
        headings: Heading of each column.
        rows: Cells of each row.
        is_number: Whether a column is aligned to the right, for each column.
        caption: What the table shows.
        limit: Number of rows at most; the caption says how many there are.
        n_rows: Number of rows of the whole table, if `rows` are the first ones.

    Example:
        >>> print(html_table(["a<b"], [["1"], ["2"]], [True], "Numbers.", limit=1))
        <div style="overflow-x: auto"><table>
        <caption style="text-align: left">Numbers (first 1 of 2 rows)</caption>
        <tr><th style="text-align: right; padding: 0 .5em">a&lt;b</th></tr>
        <tr><td style="text-align: right; padding: 0 .5em; white-space: nowrap">1</td></tr>
        </table></div>
    """
    n_rows = len(rows) if n_rows is None else n_rows
    if n_rows > limit:
        caption = f"{caption.rstrip('.')} (first {limit} of {n_rows:,} rows)".strip()
    lines = ['<div style="overflow-x: auto"><table>']
    if caption:
        lines.append(f'<caption style="text-align: left">{escape(caption)}</caption>')
    lines.append(_row("th", headings, is_number))
    lines += [_row("td", row, is_number) for row in rows[:limit]]
    return "\n".join([*lines, "</table></div>"])


def _row(tag: str, cells: Sequence[str], is_number: Sequence[bool]) -> str:
    sides = ("right" if number else "left" for number in is_number)
    wrap = "; white-space: nowrap" if tag == "td" else ""
    parts = (
        f'<{tag} style="text-align: {side}; padding: 0 .5em{wrap}">{escape(cell)}</{tag}>'
        for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(parts)}</tr>"
