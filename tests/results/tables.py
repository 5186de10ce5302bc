"""Tables of plain rows, for tests."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from lincorr_lightning.results.table import Table


class Column(NamedTuple):
    key: str
    heading: str = ""
    format: str = ""


def make_table(
    name: str, columns: Iterable[Column | str], rows: Iterable[Any], *args: Any, **options: Any
) -> Table:
    full = [Column(one) if isinstance(one, str) else one for one in columns]
    headings = {one.key: one.heading for one in full if one.heading}
    formats = {one.key: one.format for one in full if one.format}
    keys = [one.key for one in full]
    return Table.of(name, rows, keys, *args, headings=headings, formats=formats, **options)
