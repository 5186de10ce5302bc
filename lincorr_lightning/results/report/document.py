"""What a page is made of, before it is HTML, Markdown or LaTeX."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lincorr_lightning.errors import ReportError

Kind = Literal["text", "count", "r", "share", "points", "signed", "number"]
"""How a column's numbers are told; texts in it are left as they are."""


@dataclass(frozen=True)
class Column:
    """A table's column.

    Attributes:
        name: Its heading.
        kind: How its numbers are told.
    """

    name: str
    kind: Kind = "text"


@dataclass(frozen=True)
class Table:
    """A table; None is an empty cell.

    Attributes:
        caption: What it shows.
        columns: Its columns; the first one's cells head their rows.
        rows: Cells of each row.
        note: Below it: what is left out, or how to read it.
        exported: Whether it is also handed over as Markdown and LaTeX.
        folded: Whether it is shown only when asked for.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    exported: bool = True
    folded: bool = False

    def texts(self) -> list[list[str]]:
        """The cells as they are told."""
        return [
            [tell(cell, column.kind) for cell, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]


@dataclass(frozen=True)
class Picture:
    """A figure.

    Attributes:
        png: The file's bytes.
        width: In pixels.
        height: In pixels.
        caption: Below it.
        alt: What it shows, for who cannot see it.
    """

    png: bytes
    width: int
    height: int
    caption: str
    alt: str

    @classmethod
    def read(cls, path: Path, caption: str, alt: str) -> Picture:
        """Read a PNG.

        Args:
            path: The file.
            caption: Below it.
            alt: What it shows.

        Raises:
            ReportError: It is no PNG, or cut short.
        """
        try:
            png = path.read_bytes()
        except OSError as error:
            raise ReportError(f"cannot read {path}: {error.strerror}.") from error
        if png[:8] != b"\x89PNG\r\n\x1a\n" or png[12:16] != b"IHDR" or b"IEND" not in png[-12:]:
            raise ReportError(
                f"{path} is no PNG, or was cut short. Run the study again, or delete the file to "
                "have the page without it."
            )
        width, height = struct.unpack(">II", png[16:24])
        return cls(png, width, height, caption, alt)


@dataclass(frozen=True)
class Pictures:
    """Figures that stand beside one another where there is room."""

    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Paragraph:
    """A text."""

    text: str


@dataclass(frozen=True)
class Command:
    """What to type, and what it does."""

    text: str
    told: str


@dataclass(frozen=True)
class Listing:
    """A file's text, shown only when asked for."""

    title: str
    text: str


Part = Table | Pictures | Facts | Paragraph | Command | Listing


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it.

    Attributes:
        title: Its heading.
        anchor: Its id in the page.
        parts: In their order.
        sections: Below them.
        told: Beside the heading in the table of contents.
    """

    title: str
    anchor: str
    parts: Sequence[Part] = ()
    sections: Sequence[Section] = field(default=())
    told: str = ""

    def tables(self) -> list[Table]:
        """All tables that are handed over, also those of the sections below."""
        own = [part for part in self.parts if isinstance(part, Table) and part.exported]
        return own + [table for section in self.sections for table in section.tables()]


@dataclass(frozen=True)
class Document:
    """A page."""

    title: str
    parts: Sequence[Part]
    sections: Sequence[Section]


def tell(value: Any, kind: Kind) -> str:
    """A cell's text.

    Args:
        value: A text, number, truth or None.
        kind: How numbers are told.

    Example:
        >>> tell(0.86, "share"), tell(-0.001, "r"), tell(1650, "count"), tell(None, "r")
        ('86.0%', '0.00', '1,650', '')
        >>> tell("city->country", "text"), tell(-0.031, "points"), tell(True, "text")
        ('city→country', '−3.1', '✓')
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "✓" if value else "✗"
    if isinstance(value, (int, float)):
        text = {
            "count": f"{value:,.0f}",
            "r": f"{value:.2f}",
            "share": f"{value:.1%}",
            "points": f"{100 * value:+.1f}",
            "signed": f"{value:+.2f}",
            "number": f"{value:,}" if isinstance(value, int) else f"{value:.4g}",
            "text": f"{value:g}" if isinstance(value, float) else str(value),
        }[kind]
        # What rounds to nothing has no sign.
        if kind != "text" and not text.strip("+-0.%,"):
            text = text.lstrip("+-")
        return text.replace("-", "−") if kind != "text" else text
    return arrow(str(value))


def arrow(text: str) -> str:
    """A pair's name with an arrow."""
    return text.replace("->", "→")
