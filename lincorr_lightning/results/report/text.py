"""Tables of a report as Markdown and as LaTeX."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from pandas import DataFrame, MultiIndex

from lincorr_lightning.results.table import Table, clean, escape_markdown

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    "[": "{[}", "→": r"$\rightarrow$", "−": r"$-$", "×": r"$\times$", "·": r"$\cdot$",
    "±": r"$\pm$", "Δ": r"$\Delta$", "≥": r"$\geq$", "✓": r"$\checkmark$", "✗": r"$\times$",
})  # fmt: skip
_LATEX_HEAD = """\
% Written by `lincorr report`. In the preamble: \\usepackage{booktabs,longtable,amssymb,graphicx}
% \\usepackage[T1]{fontenc}; labels in scripts other than Latin need XeLaTeX or LuaLaTeX and a font.
"""
# Wide tables are scaled to the page; narrow ones keep their size.
_LATEX_TABLE = r"""\begin{table}
\centering
\small
\caption{%s}
\label{%s}
\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%%
%s}
\end{table}
"""
_MAX_ROWS_PER_PAGE = 45


def to_markdown(title: str, tables: Iterable[Table]) -> str:
    """Return tables under a title as Markdown."""
    parts = [f"# {escape_markdown(title)}"]
    for table in tables:
        parts += [f"**{escape_markdown(table.caption)}**", table.markdown()]
        parts += [escape_markdown(table.note)] if table.note else []
    return "\n\n".join(parts) + "\n"


def to_latex(name: str, tables: Iterable[Table]) -> str:
    """Return tables as LaTeX, with labels made of a name."""
    stem = re.sub(r"[^a-zA-Z0-9]+", "-", name).strip("-") or "study"
    parts = [_latex_table(table, f"tab:{stem}-{i}") for i, table in enumerate(tables, start=1)]
    return "\n".join([_LATEX_HEAD, *parts])


def _latex_table(table: Table, label: str) -> str:
    titles = [
        _stacked(title) if is_number else latex(title)
        for title, is_number in zip(table.titles, table.is_number, strict=True)
    ]
    groups = [latex(name) for name, n_columns in table.groups for _ in range(n_columns)]
    cells = [[latex(cell) for cell in row] for row in table.texts()]
    columns = MultiIndex.from_arrays([groups, titles]) if groups else titles
    style = DataFrame(cells, columns=columns).style.hide(axis="index")
    align = "".join("r" if is_number else "l" for is_number in table.is_number)
    caption = latex(f"{table.caption.rstrip('.')}. {table.note}" if table.note else table.caption)
    if len(table) > _MAX_ROWS_PER_PAGE:
        body = style.to_latex(
            environment="longtable", column_format=align, hrules=True, caption=caption, label=label
        )
        return f"{{\\small\n{body}}}\n"
    body = style.to_latex(column_format=align, hrules=True, multicol_align="c")
    return _LATEX_TABLE % (caption, label, body.rstrip())


def _stacked(title: str) -> str:
    """Break the heading of numbers, which is wider than they are, into lines."""
    lines = [latex(line) for line in textwrap.wrap(title, 11, break_long_words=False)]
    broken = r"\\".join(lines)
    return rf"\shortstack[r]{{{broken}}}" if len(lines) > 1 else latex(title)


def latex(text: str) -> str:
    r"""Return text in one line with LaTeX's special characters escaped.

    Example:
        >>> latex("city->country: 86%")
        'city$\\rightarrow$country: 86\\%'
    """
    return re.sub(r"\s+", " ", clean(text)).translate(_LATEX)
