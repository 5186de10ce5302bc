"""A document as one HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Callable, Iterator
from typing import Any

from lincorr_lightning.results.report.document import (
    Command,
    Document,
    Facts,
    Listing,
    Paragraph,
    Part,
    Picture,
    Pictures,
    Section,
    Table,
    arrow,
)
from lincorr_lightning.results.report.style import CSS

# No source but the page itself: whatever slipped in could fetch nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_FIGURE_DPI, _CSS_DPI = 150, 96
_SHORT = 28


def to_html(document: Document) -> str:
    """A document as HTML.

    Args:
        document: What to show.
    """
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{_escape(document.title)}</title>",
        f"<style>{CSS}</style>",
        "</head>",
        "<body>",
        '<a class="skip" href="#content">To the content</a>',
        "<header>",
        f"<h1>{_isolate(document.title)}</h1>",
        "</header>",
        *_contents(document),
        '<main id="content">',
        '<section aria-label="Runs">',
        *(line for part in document.parts for line in _part(part)),
        "</section>",
        *(line for section in document.sections for line in _section(section, 2)),
        "</main>",
        "</body>",
        "</html>",
    ]
    return "\n".join(lines) + "\n"


def _escape(text: str) -> str:
    """Text of which a browser makes nothing, and which any encoding of Unicode can write."""
    # Controls and lone halves of surrogate pairs are not allowed in HTML.
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]", "\ufffd", text)
    return html.escape(text, quote=True)


def _isolate(text: str) -> str:
    """Text whose direction leaves that of what stands beside it alone; paths may be broken."""
    return f"<bdi>{_escape(arrow(text)).replace('/', '/<wbr>')}</bdi>"


def _contents(document: Document) -> Iterator[str]:
    yield '<nav aria-label="Contents">'
    yield "<h2>Contents</h2>"
    yield "<ul>"
    for section in document.sections:
        yield f'<li><a href="#{_escape(section.anchor)}">{_isolate(section.title)}</a>'
        if section.sections:
            yield "<ul>"
            for below in section.sections:
                link = f'<a href="#{_escape(below.anchor)}">{_isolate(below.title)}</a>'
                yield f"<li>{link}</li>"
            yield "</ul>"
        yield "</li>"
    yield "</ul>"
    yield "</nav>"


def _section(section: Section, level: int) -> Iterator[str]:
    anchor = _escape(section.anchor)
    yield f'<section id="{anchor}" aria-labelledby="{anchor}-title">'
    yield f'<h{level} id="{anchor}-title">{_isolate(section.title)}</h{level}>'
    for part in section.parts:
        yield from _part(part)
    for below in section.sections:
        yield from _section(below, level + 1)
    yield "</section>"


def _part(part: Part) -> Iterator[str]:
    return _RENDERERS[type(part)](part)


def _paragraph(part: Paragraph) -> Iterator[str]:
    yield f"<p>{_isolate(part.text)}</p>"


def _facts(part: Facts) -> Iterator[str]:
    yield '<dl class="facts">'
    for name, value in part.pairs:
        yield f"<div><dt>{_escape(name)}</dt><dd>{_isolate(value)}</dd></div>"
    yield "</dl>"


def _command(part: Command) -> Iterator[str]:
    yield f"<p>{_escape(part.told)}</p>"
    yield f'<pre class="command"><code>{_escape(part.text)}</code></pre>'


def _listing(part: Listing) -> Iterator[str]:
    yield f"<details><summary>{_escape(part.title)}</summary>"
    yield f"<pre><code>{_escape(part.text)}</code></pre></details>"


def _pictures(part: Pictures) -> Iterator[str]:
    yield '<div class="pictures">'
    for picture in part.pictures:
        yield from _picture(picture)
    yield "</div>"


def _picture(picture: Picture) -> Iterator[str]:
    width, height = (
        round(size * _CSS_DPI / _FIGURE_DPI) for size in (picture.width, picture.height)
    )
    data = base64.b64encode(picture.png).decode("ascii")
    yield "<figure>"
    # Wider than a phone, it is scrolled there: shrunk, its labels could not be read.
    label = _escape(f"Figure: {arrow(picture.caption)}")
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
    yield (
        f'<img alt="{_escape(arrow(picture.alt))}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{data}">'
    )
    yield "</div>"
    yield f"<figcaption>{_isolate(picture.caption)}</figcaption>"
    yield "</figure>"


def _table(table: Table) -> Iterator[str]:
    caption = _isolate(table.caption)
    if table.folded:
        yield f"<details><summary>{caption}</summary>"
    label = _escape(f"Table: {arrow(table.caption)}")
    yield f'<div class="scroll" tabindex="0" role="region" aria-label="{label}">'
    yield "<table>"
    hidden = ' class="hidden"' if table.folded else ""
    yield f"<caption{hidden}>{caption}</caption>"
    marks = ["" if column.kind == "text" else ' class="number"' for column in table.columns]
    heads = (
        f'<th scope="col"{mark}>{_isolate(column.name)}</th>'
        for column, mark in zip(table.columns, marks, strict=True)
    )
    yield f"<thead><tr>{''.join(heads)}</tr></thead>"
    yield "<tbody>"
    for row in table.texts():
        # Broken at every blank and hyphen, a name makes a row many times too high on a phone.
        kinds = [
            mark or (' class="short"' if len(cell) <= _SHORT else "")
            for cell, mark in zip(row, marks, strict=True)
        ]
        cells = (
            f"<td{kind}>{_isolate(cell) if cell else ''}</td>"
            for cell, kind in zip(row[1:], kinds[1:], strict=True)
        )
        yield f'<tr><th scope="row"{kinds[0]}>{_isolate(row[0])}</th>{"".join(cells)}</tr>'
    yield "</tbody>"
    yield "</table>"
    yield "</div>"
    if table.note:
        yield f'<p class="note">{_isolate(table.note)}</p>'
    if table.folded:
        yield "</details>"


_RENDERERS: dict[type[Any], Callable[[Any], Iterator[str]]] = {
    Paragraph: _paragraph,
    Facts: _facts,
    Command: _command,
    Listing: _listing,
    Pictures: _pictures,
    Table: _table,
}
