"""Tables of a report as Markdown and as LaTeX."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lincorr_lightning.results.table import Table
from lincorr_lightning.results.table import escape_markdown as escape

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    "→": r"$\rightarrow$", "−": r"$-$", "×": r"$\times$", "·": r"$\cdot$", "±": r"$\pm$",
    "Δ": r"$\Delta$", "≥": r"$\geq$", "✓": r"$\checkmark$", "✗": r"$\times$",
}  # fmt: skip
_LATEX_HEAD = """\
% Written by `lincorr report`. In the preamble: \\usepackage{booktabs,longtable,amssymb,graphicx}
% \\usepackage[T1]{fontenc}; labels in scripts other than Latin need XeLaTeX or LuaLaTeX and a font.
"""
# Rows on a page in small print, and characters per line of a heading.
_MAX_ROWS_PER_PAGE, _HEADING_WIDTH = 45, 11


@dataclass(frozen=True)
class PageTable:
    """A table as a page shows it.

    Attributes:
        caption: What the table shows.
        headings: A heading per column.
        is_number: Whether a column holds numbers.
        rows: Cells as text.
        note: How to read it, or what is left out.
        groups: Heading and number of columns of each group of columns, from the left.
    """

    caption: str
    headings: Sequence[str]
    is_number: Sequence[bool]
    rows: Sequence[Sequence[str]]
    note: str = ""
    groups: Sequence[tuple[str, int]] = ()

    @classmethod
    def of(cls, table: Table, limit: int, where: str) -> PageTable:
        """Take over a table of a run."""
        note = table.note
        if len(table) > limit:
            note += f" The first {limit} of {len(table):,} rows; all: {where}."
        is_number = [bool(table.formats.get(key)) for key in table.keys]
        texts, caption = table.texts(limit), table.caption or table.name
        return cls(caption, table.titles, is_number, texts, note.strip())

    @property
    def full_headings(self) -> list[str]:
        """Headings that name the group too."""
        names = [name for name, n_columns in self.groups for _ in range(n_columns)]
        names += [""] * (len(self.headings) - len(names))
        return [f"{name} {head}".strip() for name, head in zip(names, self.headings, strict=True)]


def to_markdown(title: str, tables: Iterable[PageTable]) -> str:
    """Return the tables of a study as Markdown."""
    parts = [f"# {_markdown(title)}"]
    for table in tables:
        parts.append(f"**{_markdown(table.caption)}**")
        head = [_markdown(heading) for heading in table.full_headings]
        rule = ["---:" if is_number else "---" for is_number in table.is_number]
        body = [[_markdown(cell) for cell in row] for row in table.rows]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body)))
        if table.note:
            parts.append(_markdown(table.note))
    return "\n\n".join(parts) + "\n"


def to_latex(name: str, tables: Iterable[PageTable]) -> str:
    """Return the tables of a study as LaTeX."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") or "study"
    parts = [_LATEX_HEAD]
    for number, table in enumerate(tables, start=1):
        parts.append("\n".join(_latex_table(table, f"tab:{stem}-{number}")) + "\n")
    return "\n".join(parts)


def _latex_table(table: PageTable, label: str) -> list[str]:
    align = "".join("r" if is_number else "l" for is_number in table.is_number)
    caption = f"{table.caption.rstrip('.')}. {table.note}" if table.note else table.caption
    top = [rf"\caption{{{latex(caption)}}}", rf"\label{{{label}}}"]
    head = [r"\toprule", _latex_head(table), r"\midrule"]
    rows = [_latex_row([latex(cell) for cell in row]) for row in table.rows]
    if len(rows) > _MAX_ROWS_PER_PAGE:
        return [
            rf"{{\small\begin{{longtable}}{{{align}}}", *top, r"\\", *head, r"\endhead", *rows,
            r"\bottomrule", r"\end{longtable}}",
        ]  # fmt: skip
    # Wide tables are scaled to the page; narrow ones keep their size.
    fit = r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%"
    return [
        r"\begin{table}", r"\centering", r"\small", *top, fit, rf"\begin{{tabular}}{{{align}}}",
        *head, *rows, r"\bottomrule", r"\end{tabular}}", r"\end{table}",
    ]  # fmt: skip


def _latex_head(table: PageTable) -> str:
    """Break headings of numbers, which are wider than the numbers below."""
    cells = []
    for heading, is_number in zip(table.full_headings, table.is_number, strict=True):
        lines = textwrap.wrap(heading, _HEADING_WIDTH, break_long_words=False) or [""]
        if not is_number or len(lines) == 1:
            cells.append(latex(heading))
        else:
            stacked = r"\\".join(map(latex, lines))
            cells.append(rf"\shortstack[r]{{{stacked}}}")
    return _latex_row(cells)


def _latex_row(cells: Sequence[str]) -> str:
    # A row that begins with a bracket would be an argument of the \\ before it.
    line = " & ".join(cells)
    return f"{'{}' if line.startswith('[') else ''}{line} \\\\"


def latex(text: str) -> str:
    r"""Return text with LaTeX's special characters escaped.

    Example:
        >>> latex("city->country: 86%")
        'city$\\rightarrow$country: 86\\%'
    """
    return "".join(_LATEX.get(sign, sign) for sign in re.sub(r"\s+", " ", clean(text)))


def _markdown(text: str) -> str:
    # An entity would be read as the character it stands for.
    return escape(clean(text)).replace("&", "&amp;").strip()


def clean(text: str) -> str:
    r"""Return text with arrows in the names of pairs, and without characters no text file can hold.

    Example:
        >>> clean("city->country\x00")
        'city→country\ufffd'
    """
    arrows = text.replace("->", "→")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", arrows)
