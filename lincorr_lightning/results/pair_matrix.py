"""Numbers of ordered pairs as a matrix: a row per source, a column per target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.table import Column, Table


class PairMatrix(NamedTuple):
    """A number of each ordered pair: ``(n_source, n_target)`` cells, NaN where there is none."""

    sources: list[str]
    targets: list[str]
    cells: npt.NDArray[np.floating[Any]]

    @classmethod
    def of(
        cls, values: Mapping[tuple[str, str], float | None], names: Iterable[str] = ()
    ) -> PairMatrix:
        """Make a matrix of numbers by source and target, those of `names` first."""
        sources, targets = (dict.fromkeys(side) for side in zip(*values, strict=True))
        order = list(dict.fromkeys([*names, *sources, *targets]))
        rows = [name for name in order if name in sources]
        columns = [name for name in order if name in targets]
        cells = [[number(values.get((source, target))) for target in columns] for source in rows]
        return cls(rows, columns, np.array(cells, dtype=float))

    @property
    def is_empty(self) -> bool:
        """Whether no pair has a number."""
        return bool(np.isnan(self.cells).all())

    def table(self, name: str, caption: str) -> Table:
        """Return the matrix as a table with a row per source."""
        columns = [Column("source"), *(Column(target, format=".2f") for target in self.targets)]
        rows = [
            [source, *map(number, row)]
            for source, row in zip(self.sources, self.cells.tolist(), strict=True)
        ]
        return Table.from_rows(name, columns, rows, caption)
