"""Numbers of ordered pairs as a matrix: a row per source, a column per target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lincorr_lightning.results.numbers import number
from lincorr_lightning.results.table import Table

if TYPE_CHECKING:
    from pandas import DataFrame


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


def matrix_table(matrix: DataFrame, name: str, caption: str) -> Table:
    """Return a matrix as a table with a row per source."""
    frame = matrix.rename_axis("source").reset_index()
    return Table(name, frame, caption, formats=dict.fromkeys(map(str, matrix.columns), ".2f"))
