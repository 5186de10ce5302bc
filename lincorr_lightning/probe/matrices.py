"""Numbers of pairs as matrices over sources and targets: tables and heat maps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lincorr_lightning.results.table import Table, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


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
        from lincorr_lightning.results.plots import correlation_heatmap

        highest = max(float(np.abs(np.nan_to_num(self.frame.to_numpy())).max()), 0.01)
        least = -highest if self.is_signed else 0.0
        limits = (-1.0, 1.0) if self.unit == "r" else (least, highest)
        return correlation_heatmap(self.frame, title, note, self.unit, limits)


def pair_matrices(scores: Sequence[Any]) -> Iterator[PairMatrix]:
    """Yield the matrix of each `pair_number` that has one and is known for some pair.

    `scores` are records of one class with ``source``, ``target`` and the numbers.
    """
    from pandas import Series

    names = dict.fromkeys(name for score in scores for name in (score.source, score.target))
    sources, targets = {score.source for score in scores}, {score.target for score in scores}
    rows, columns = ([name for name in names if name in side] for side in (sources, targets))
    for one in fields(scores[0]):
        about = one.metadata
        if about.get("matrix"):
            values = {(s.source, s.target): number(getattr(s, one.name)) for s in scores}
            frame = Series(values, dtype="float64").unstack().reindex(index=rows, columns=columns)
            if frame.notna().any(axis=None):
                name = f"{about['matrix']}_matrix"
                yield PairMatrix(name, about["caption"], about["unit"], about["is_signed"], frame)
