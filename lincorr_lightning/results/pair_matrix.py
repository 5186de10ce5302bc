"""Numbers of ordered pairs as a matrix: a row per source, a column per target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


def pair_number(
    heading: str = "",
    format: str = "",
    matrix: str = "",
    shows: str = "",
    unit: str = "Pearson r",
    is_signed: bool = True,
    logged: bool = False,
) -> Any:
    """Declare a number of a pair, None by default: a field of a record, in all of its forms.

    Args:
        heading: See `table.column`, and so is `format`.
        format: A field with a format is a column of the headline table.
        matrix: Name of a matrix over all pairs, the table and figure ``<matrix>_matrix``.
        shows: Caption of the matrix.
        unit: Meaning of the matrix's colours.
        is_signed: Whether colours are for -1 to 1, not for 0 to the highest value.
        logged: Whether loggers get the number.
    """
    metadata = {
        "heading": heading, "format": format, "matrix": matrix, "caption": shows, "unit": unit,
        "is_signed": is_signed, "logged": logged,
    }  # fmt: skip
    return dataclasses.field(default=None, metadata=metadata)


class PairMatrix(NamedTuple):
    """A `pair_number` of all pairs, a row per source, a column per target; NaN for None."""

    name: str
    caption: str
    unit: str
    is_signed: bool
    frame: DataFrame

    @property
    def table(self) -> Table:
        """The matrix as a table."""
        rows = self.frame.rename_axis("source").reset_index()
        formats = dict.fromkeys(map(str, self.frame.columns), ".2f")
        return Table(self.name, rows, self.caption, formats=formats)

    def draw(self, title: str, note: str) -> Figure:
        """Draw the matrix as a heat map."""
        # matplotlib takes long to import, and not every run draws.
        from lincorr_lightning.results.heat_maps import correlation_heatmap

        highest = max(float(np.nan_to_num(self.frame.to_numpy()).max()), 0.01)
        limits = (-1.0, 1.0) if self.is_signed else (0.0, highest)
        return correlation_heatmap(self.frame, title, note, self.unit, limits)


def pair_matrices(scores: Sequence[Any], names: Iterable[str] = ()) -> Iterator[PairMatrix]:
    """Yield the matrix of each `pair_number` that has one and is known for some pair.

    Args:
        scores: Records of one class with ``source``, ``target`` and the numbers.
        names: Names that come first as rows and columns, in this order.
    """
    for one in dataclasses.fields(scores[0]):
        about = one.metadata
        if about.get("matrix"):
            values = {(s.source, s.target): getattr(s, one.name) for s in scores}
            frame = pair_matrix(values, names)
            if frame.notna().any(axis=None):
                name = f"{about['matrix']}_matrix"
                yield PairMatrix(name, about["caption"], about["unit"], about["is_signed"], frame)


def pair_matrix(
    values: Mapping[tuple[str, str], float | None], names: Iterable[str] = ()
) -> DataFrame:
    """Return a matrix of numbers by source and target, those of `names` first; NaN for None."""
    from pandas import DataFrame

    sources, targets = (dict.fromkeys(side) for side in zip(*values, strict=True))
    order = list(dict.fromkeys([*names, *sources, *targets]))
    rows = [name for name in order if name in sources]
    columns = [name for name in order if name in targets]
    cells = [[number(values.get((source, target))) for target in columns] for source in rows]
    return DataFrame(cells, index=rows, columns=columns, dtype="float64")
