"""Tables as Markdown and as LaTeX."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from lincorr_lightning.results.report.document import Table, arrow
from lincorr_lightning.results.tables import escape

_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "→": r"$\rightarrow$",
    "−": r"$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
    "≥": r"$\geq$",
    "✓": r"$\checkmark$",
    "✗": r"$\times$",
}
_HEAD = """\
% Written by `lincorr report`. In the preamble: \\usepackage{booktabs,longtable,amssymb,graphicx}
% \\usepackage[T1]{fontenc}; labels in scripts other than Latin need XeLaTeX or LuaLaTeX and a font.
"""
# Rows of small print, and letters of a column's heading.
_MOST_ON_A_PAGE, _HEAD_WIDTH = 45, 11


def to_markdown(title: str, tables: Iterable[Table]) -> str:
    """Tables of a study as Markdown.

    Args:
        title: The study's.
        tables: Its tables.
    """
    parts = [f"# {_markdown(title)}"]
    for table in tables:
        parts.append(f"**{_markdown(table.caption)}**")
        head = [_markdown(column.name) for column in table.columns]
        rule = ["---" if column.kind == "text" else "---:" for column in table.columns]
        body = [[_markdown(cell) for cell in row] for row in table.texts()]
        parts.append("\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body)))
        if table.note:
            parts.append(_markdown(table.note))
    return "\n\n".join(parts) + "\n"


def _markdown(text: str) -> str:
    # An entity would be read as the sign it stands for.
    return escape(_writable(arrow(text))).replace("&", "&amp;").strip()


def to_latex(name: str, tables: Iterable[Table]) -> str:
    """Tables of a study as LaTeX.

    Args:
        name: The study's, for labels.
        tables: Its tables.
    """
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") or "study"
    parts = [_HEAD]
    for i, table in enumerate(tables, start=1):
        parts.append("\n".join(_latex_table(table, f"tab:{stem}-{i}")) + "\n")
    return "\n".join(parts)


def _latex_table(table: Table, label: str) -> list[str]:
    align = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    caption = latex(f"{table.caption}. {table.note}" if table.note else table.caption)
    top = [rf"\caption{{{caption}}}", rf"\label{{{label}}}"]
    head = [r"\toprule", _latex_head(table), r"\midrule"]
    rows = [_latex_row([latex(cell) for cell in row]) for row in table.texts()]
    if len(rows) > _MOST_ON_A_PAGE:
        return [
            rf"{{\small\begin{{longtable}}{{{align}}}",
            *top,
            r"\\",
            *head,
            r"\endhead",
            *rows,
            r"\bottomrule",
            r"\end{longtable}}",
        ]
    return [
        r"\begin{table}",
        r"\centering",
        r"\small",
        *top,
        # Wide ones are made to fit the page; narrow ones keep their size.
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{align}}}",
        *head,
        *rows,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]


def _latex_head(table: Table) -> str:
    """Headings, those of numbers broken: they are wider than what stands below them."""
    cells = []
    for column in table.columns:
        lines = textwrap.wrap(column.name, _HEAD_WIDTH, break_long_words=False) or [""]
        if column.kind == "text" or len(lines) == 1:
            cells.append(latex(column.name))
        else:
            stacked = r"\\".join(map(latex, lines))
            cells.append(rf"\shortstack[r]{{{stacked}}}")
    return _latex_row(cells)


def _latex_row(cells: Sequence[str]) -> str:
    # A row that begins with a bracket would be an argument of the \\ before it.
    line = " & ".join(cells)
    return f"{'{}' if line.startswith('[') else ''}{line} \\\\"


def latex(text: str) -> str:
    r"""Text of which LaTeX makes nothing.

    Example:
        >>> latex("city->country: 86%")
        'city$\\rightarrow$country: 86\\%'
    """
    flat = re.sub(r"\s+", " ", _writable(arrow(text)))
    return "".join(_LATEX.get(sign, sign) for sign in flat)


def _writable(text: str) -> str:
    """Without controls and lone surrogates, which no file of text can hold."""
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text)
